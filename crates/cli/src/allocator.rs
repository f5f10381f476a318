//! Memory that was freed, back to the system.
//!
//! The C library keeps what a program frees, in the hope that it is wanted again. After a model has gone that is hundreds of megabytes
//! which the next one may not find whole, so that the process grows with every swap.
#![cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator is the C library's")
)]

#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> i32;
    }
    // SAFETY: The function has this signature in every glibc, may be called from any thread at any time, and touches free memory only.
    unsafe {
        malloc_trim(0);
    }
}

/// Other allocators have no such call, or need none.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back() {}
