//! Figures of processes: memory, open files, panics.

use std::{
    panic,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Marks a panic that a scenario has asked for.
pub(super) const WANTED: &str = "injected fault";

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Counts panics of every thread from now on, but for those that are wanted.
pub(super) fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            if text.is_some_and(|text| text.contains(WANTED)) {
                return;
            }
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
}

pub(super) fn panics() -> usize {
    PANICS.load(Ordering::Relaxed)
}

/// Resident memory of a process in KiB; `None` where the system does not tell.
pub(super) fn resident_kib(process: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The most files that may be open, sockets included.
pub(super) fn open_files_limit() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok())
        .unwrap_or(1024)
}
