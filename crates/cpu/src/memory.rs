//! Free memory: the machine's, or the share its control group allows.

use std::fs;

use carat_model::backend::Memory;

/// Memory that this process may use, as far as the system tells.
pub(crate) fn available() -> Option<Memory> {
    let machine = parse_meminfo(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let group = |name: &str| -> Option<u64> {
        fs::read_to_string(format!("/sys/fs/cgroup/{name}"))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    // `memory.max` says "max" where there is no limit, which does not parse.
    let Some(limit) = group("memory.max") else {
        return Some(machine);
    };
    let used = group("memory.current").unwrap_or(0);
    Some(Memory {
        total_bytes: machine.total_bytes.min(limit),
        free_bytes: machine.free_bytes.min(limit.saturating_sub(used)),
    })
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let bytes = |key: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes * 1024)
    };
    Some(Memory {
        total_bytes: bytes("MemTotal:")?,
        free_bytes: bytes("MemAvailable:")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_kilobytes() {
        let text = "MemTotal:       24682740 kB\nMemFree:  5 kB\nMemAvailable:   100 kB\n";
        let expected = Memory {
            total_bytes: 24_682_740 * 1024,
            free_bytes: 100 * 1024,
        };
        assert_eq!(parse_meminfo(text), Some(expected));
        assert_eq!(parse_meminfo("MemTotal: 5 kB"), None);
    }
}
