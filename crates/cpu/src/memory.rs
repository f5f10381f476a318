//! Free memory: the least of what the machine, the process's control groups and its own limits leave.
//!
//! A control group limits everything below it, so every level from the process's own group to the root counts, in both
//! versions of the interface. A limit on address space counts too: mapped files take of it, so what is left is what the
//! process has not mapped yet.

use std::fs;

use carat_model::backend::Memory;

/// Memory that this process may use, as far as the system tells.
pub(crate) fn available() -> Option<Memory> {
    read_from(&|path| fs::read_to_string(path).ok())
}

/// The same, from a system whose files `read` returns.
fn read_from(read: &dyn Fn(&str) -> Option<String>) -> Option<Memory> {
    let machine = parse_meminfo(&read("/proc/meminfo")?)?;
    let limits = group_limits(read).into_iter().chain(process_limits(read));
    Some(limits.fold(machine, |memory, limit| Memory {
        total_bytes: memory.total_bytes.min(limit.total_bytes),
        free_bytes: memory.free_bytes.min(limit.free_bytes),
    }))
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    Some(Memory {
        total_bytes: kilobytes(text, "MemTotal:")?,
        free_bytes: kilobytes(text, "MemAvailable:")?,
    })
}

/// Bytes of a line such as `MemTotal:  24682740 kB`.
fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// File names of one version of the interface.
struct Interface {
    limit: &'static str,
    used: &'static str,
    /// Keys of `memory.stat` whose bytes are file pages that leave when memory is short.
    files: [&'static str; 2],
}

const V1: Interface = Interface {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_inactive_file", "total_active_file"],
};
const V2: Interface = Interface {
    limit: "memory.max",
    used: "memory.current",
    files: ["inactive_file", "active_file"],
};

/// Of every group that this process is in, and of those around them.
fn group_limits(read: &dyn Fn(&str) -> Option<String>) -> Vec<Memory> {
    let mut limits = Vec::new();
    for line in read("/proc/self/cgroup").unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else {
            continue;
        };
        let mounts: &[(&str, &Interface)] = match controllers {
            // Alone, or beside the first version.
            "" => &[("/sys/fs/cgroup", &V2), ("/sys/fs/cgroup/unified", &V2)],
            _ if controllers.split(',').any(|name| name == "memory") => {
                &[("/sys/fs/cgroup/memory", &V1)]
            }
            _ => &[],
        };
        for (mount, interface) in mounts {
            let mut group = group.trim_end_matches('/');
            loop {
                limits.extend(group_limit(&format!("{mount}{group}"), interface, read));
                match group.rfind('/') {
                    Some(parent) => group = &group[..parent],
                    None => break,
                }
            }
        }
    }
    limits
}

fn group_limit(
    folder: &str,
    interface: &Interface,
    read: &dyn Fn(&str) -> Option<String>,
) -> Option<Memory> {
    let number =
        |name: &str| -> Option<u64> { read(&format!("{folder}/{name}"))?.trim().parse().ok() };
    // "max", where there is no limit, does not parse; the first version writes a number that no machine has.
    let limit = number(interface.limit)?;
    let used = number(interface.used).unwrap_or(0);
    let stat = read(&format!("{folder}/memory.stat")).unwrap_or_default();
    let files = stat.lines().filter_map(|line| {
        let (key, bytes) = line.split_once(' ')?;
        interface
            .files
            .contains(&key)
            .then(|| bytes.parse::<u64>().ok())?
    });
    let used = used.saturating_sub(files.sum::<u64>());
    Some(Memory {
        total_bytes: limit,
        free_bytes: limit.saturating_sub(used),
    })
}

/// Limits on the address space and on the data of the process (`ulimit -v`, `ulimit -d`).
fn process_limits(read: &dyn Fn(&str) -> Option<String>) -> impl Iterator<Item = Memory> {
    let limits = read("/proc/self/limits").unwrap_or_default();
    let status = read("/proc/self/status").unwrap_or_default();
    let kinds = [
        ("Max address space", "VmSize:"),
        ("Max data size", "VmData:"),
    ];
    kinds.into_iter().filter_map(move |(name, used)| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        // "unlimited" does not parse.
        let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
        let used = kilobytes(&status, used).unwrap_or(0);
        Some(Memory {
            total_bytes: limit,
            free_bytes: limit.saturating_sub(used),
        })
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

    /// Total and free bytes where the machine has 1000 kB, 900 of them free, and these files.
    fn with_files(files: &[(&str, &str)]) -> (u64, u64) {
        let memory = read_from(&|path| {
            if path == "/proc/meminfo" {
                return Some("MemTotal: 1000 kB\nMemAvailable: 900 kB\n".to_owned());
            }
            let found = files.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| (*text).to_owned())
        });
        let memory = memory.unwrap();
        (memory.total_bytes, memory.free_bytes)
    }

    #[test]
    fn every_level_of_a_group_counts_in_both_versions() {
        assert_eq!(with_files(&[]), (1000 * 1024, 900 * 1024));
        let unlimited = [
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
        ];
        assert_eq!(with_files(&unlimited), (1000 * 1024, 900 * 1024));
        let above = [
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/sys/fs/cgroup/a/memory.max", "5000\n"),
            ("/sys/fs/cgroup/a/memory.current", "3000\n"),
            (
                "/sys/fs/cgroup/a/memory.stat",
                "anon 100\ninactive_file 500\nactive_file 250\n",
            ),
        ];
        assert_eq!(with_files(&above), (5000, 2750));
        let first = [
            (
                "/proc/self/cgroup",
                "5:cpu,cpuacct:/x\n4:memory:/box/1\n0::/\n",
            ),
            (
                "/sys/fs/cgroup/memory/box/1/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "7000\n"),
            ("/sys/fs/cgroup/memory/box/memory.usage_in_bytes", "6000\n"),
        ];
        assert_eq!(with_files(&first), (7000, 1000));
    }

    #[test]
    fn address_space_and_data_of_the_process_count() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             unlimited            unlimited            bytes     \n\
                      Max address space         600000               unlimited            bytes     \n";
        let status = "Name: carat\nVmSize:\t     500 kB\nVmData:\t 7 kB\n";
        let files = [("/proc/self/limits", limits), ("/proc/self/status", status)];
        assert_eq!(with_files(&files), (600_000, 600_000 - 500 * 1024));
    }
}
