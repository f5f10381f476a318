//! What of a card is in use, as the driver's management library (NVML) counts it: the one that can be asked before there is a context,
//! whose own memory is in no other figure. Four calls, for which a crate would bring a dozen others.
#![expect(unsafe_code, reason = "functions of a library that is loaded by name")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
};

use libloading::Library;

const LIBRARY: &str = if cfg!(windows) {
    "nvml.dll"
} else {
    "libnvidia-ml.so.1"
};

type Status = c_int;
type Handle = *mut c_void;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// One card, as the library knows it.
pub(crate) struct ManagedCard {
    library: Library,
    handle: Handle,
}

impl ManagedCard {
    /// `None` where the library is not there, or does not know the card.
    pub(crate) fn find(pci_bus_id: &CStr) -> Option<ManagedCard> {
        // SAFETY: loading runs the library's initialisers; its name says it is NVML.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        // SAFETY: the type is that of nvml.h.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> Status>(b"nvmlInit_v2\0") };
        // SAFETY: may be called at any time; `Drop` has its counterpart.
        if unsafe { (*init.ok()?)() } != 0 {
            return None;
        }
        let mut card = ManagedCard {
            library,
            handle: ptr::null_mut(),
        };
        // SAFETY: the type is that of nvml.h.
        let by_bus_id = unsafe {
            card.library
                .get::<unsafe extern "C" fn(*const c_char, *mut Handle) -> Status>(
                    b"nvmlDeviceGetHandleByPciBusId_v2\0",
                )
        };
        let mut handle = ptr::null_mut();
        // SAFETY: reads a text that ends in 0 and writes one handle.
        let found = unsafe { (*by_bus_id.ok()?)(pci_bus_id.as_ptr(), &raw mut handle) };
        card.handle = handle;
        (found == 0).then_some(card)
    }

    /// Bytes that are in use by anybody.
    pub(crate) fn used_bytes(&self) -> Option<u64> {
        // SAFETY: the type is that of nvml.h.
        let memory_info = unsafe {
            self.library
                .get::<unsafe extern "C" fn(Handle, *mut MemoryInfo) -> Status>(
                    b"nvmlDeviceGetMemoryInfo\0",
                )
        };
        let mut memory = MemoryInfo::default();
        // SAFETY: the handle is the library's own; writes one struct of its layout.
        let asked = unsafe { (*memory_info.ok()?)(self.handle, &raw mut memory) };
        (asked == 0).then_some(memory.used)
    }
}

impl Drop for ManagedCard {
    fn drop(&mut self) {
        // SAFETY: the type is that of nvml.h.
        let shutdown = unsafe {
            self.library
                .get::<unsafe extern "C" fn() -> Status>(b"nvmlShutdown\0")
        };
        if let Ok(shutdown) = shutdown {
            // SAFETY: there was one successful nvmlInit_v2 for it. A failure leaves the library as it is.
            let _ = unsafe { shutdown() };
        }
    }
}
