//! How long something worked, whatever else the machine did meanwhile.

use std::{
    fs,
    sync::LazyLock,
    time::{Duration, Instant},
};

/// Time that this thread has worked. Where the system does not tell, time that has passed.
#[must_use]
pub fn worked() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    let nanoseconds = || -> Option<u64> {
        let schedule = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        schedule.split(' ').next()?.parse().ok()
    };
    nanoseconds().map_or_else(|| START.elapsed(), Duration::from_nanos)
}
