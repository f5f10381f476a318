//! Cores that this process may run on, and pinning a worker to one.
#![cfg_attr(
    target_os = "linux",
    expect(unsafe_code, reason = "the system's sets of cores are C structures")
)]

/// The cores this process may run on, or none where that cannot be told.
#[cfg(target_os = "linux")]
pub(super) fn allowed_cores() -> Vec<usize> {
    // SAFETY: An all-zero `cpu_set_t` is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: The call fills the set, whose size it is given.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if failed != 0 {
        return Vec::new();
    }
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: `core` is below CPU_SETSIZE.
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

#[cfg(target_os = "linux")]
pub(super) fn pin_to(core: usize) {
    // SAFETY: An all-zero `cpu_set_t` is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `core` came from `allowed_cores`, so it is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: The set is initialised and its size is given; 0 means this thread. Failure leaves the thread free to
    // move, which is only slower.
    let failed =
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    if failed != 0 {
        tracing::debug!(core, "could not pin a worker");
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn pin_to(_: usize) {}
