//! The card: driver, context, streams, memory and modules. Absence is an error that says what to do, never a panic.
//!
//! Memory is plain: allocated once, at addresses that stay, freed when dropped. All work goes through one stream, in order,
//! so nothing here tracks which buffer is in use; whoever frees one waits first. Three more streams have copies, moves of pages, and
//! weights on their way from host memory, that may overlap with that work; whoever uses them makes the streams wait for each other.
#![expect(
    unsafe_code,
    reason = "the driver's interface: raw addresses and handles end here"
)]

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_void},
    fmt,
    ops::{Range, RangeInclusive},
    slice,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::{management::ManagedCard, registered::Registered};
use crate::{config::MemoryLimit, error::CudaError};

/// The oldest driver whose interface we call, in the driver's own numbering.
const OLDEST_DRIVER: i32 = 12000;
/// Bytes that an allocation takes at least.
pub(crate) const MIN_ALLOCATION: usize = 256;

/// Left to the driver, which takes memory for captured graphs and for code that is loaded when it first runs.
const HEADROOM_BYTES: u64 = 256 << 20;
/// The most of a card that is left so: a sixteenth.
const HEADROOM_SHARE: u64 = 16;
/// What a context takes where nobody tells, about (260 MiB on an H200); and what is believed.
const ASSUMED_CONTEXT_BYTES: u64 = 384 << 20;
const BELIEVED_CONTEXT_BYTES: RangeInclusive<u64> = 16 << 20..=2 << 30;
/// Under this name the ledger has it.
const CONTEXT: &str = "driver";

/// What is kept back of so many bytes.
fn headroom(bytes: u64) -> u64 {
    HEADROOM_BYTES.min(bytes / HEADROOM_SHARE)
}

/// What is left of a card that is not there, before anything is allocated.
pub(crate) fn assumed_free(total_bytes: u64) -> u64 {
    total_bytes.saturating_sub(ASSUMED_CONTEXT_BYTES + headroom(total_bytes))
}

/// Host memory from this size on is taken from the system in large pages and then locked, which takes a fraction of the driver's time.
const LARGE_HOST_BYTES: usize = 256 << 20;

/// An address in device memory, or in host memory that the device can read. 0 is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Address(pub(crate) u64);

impl Address {
    pub(crate) const NULL: Address = Address(0);

    pub(crate) fn offset(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// Compute capability: 9.0 is Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Capability {
    pub(crate) major: i32,
    pub(crate) minor: i32,
}

/// An open card.
pub(crate) struct Device {
    pub(crate) name: String,
    /// The newest CUDA that the driver supports, in its own number: 12080 is 12.8.
    pub(crate) driver_version: i32,
    pub(crate) capability: Capability,
    /// Multiprocessors, by which grids are sized.
    pub(crate) multiprocessors: usize,
    /// The most shared memory a block may have.
    pub(crate) shared_bytes: usize,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// For copies that need not wait for the work before them.
    side: Arc<CudaStream>,
    /// For pages on their way to host memory and back.
    moving: Arc<CudaStream>,
    /// For weights on their way from host memory.
    streaming: Arc<CudaStream>,
    /// Bytes to hold at the most.
    limit: Option<MemoryLimit>,
    /// Bytes held, by purpose.
    ledger: Mutex<BTreeMap<&'static str, u64>>,
    /// The most bytes held at a time.
    peak: AtomicU64,
}

impl Device {
    pub(crate) fn open(index: usize, limit: Option<MemoryLimit>) -> Result<Arc<Device>, CudaError> {
        let driver_version = require_driver()?;
        let count = result::device::get_count().map_err(CudaError::DriverFailed)? as usize;
        if index >= count {
            return Err(CudaError::NoDevice { index, count });
        }
        // Asked only where it matters: the library takes its time to start.
        let managed = match limit {
            Some(MemoryLimit::Process(_)) => managed_card(index),
            Some(MemoryLimit::Buffers(_)) | None => None,
        };
        let before = managed.as_ref().and_then(ManagedCard::used_bytes);
        let context = CudaContext::new(index).map_err(CudaError::driver("opening the device"))?;
        // SAFETY: no slice of cudarc's is ever made, so there is nothing its events would protect.
        unsafe { context.disable_event_tracking() };
        // The driver keeps 1,024 bytes of stack for every thread that a card can hold: 264 MiB of an H200. Our kernels need none, and
        // for one that does the driver makes room when it is launched. Where it keeps them all the same, there is less memory.
        let _ = context.set_limit(sys::CUlimit_enum::CU_LIMIT_STACK_SIZE, 0);
        let facts = || -> Result<_, result::DriverError> {
            use sys::CUdevice_attribute_enum as Attribute;
            Ok((
                context.name()?,
                context.compute_capability()?,
                context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                context
                    .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            ))
        };
        let (name, (major, minor), multiprocessors, shared_bytes) =
            facts().map_err(CudaError::driver("asking for the card"))?;
        if major < 8 {
            return Err(CudaError::TooOldCard { name, major, minor });
        }
        let new_stream = || {
            let stream = context.new_stream();
            stream.map_err(CudaError::driver("making a stream"))
        };
        let (stream, side) = (new_stream()?, new_stream()?);
        let (moving, streaming) = (new_stream()?, new_stream()?);
        let context_bytes = || {
            let taken = managed?.used_bytes()?.checked_sub(before?)?;
            BELIEVED_CONTEXT_BYTES.contains(&taken).then_some(taken)
        };
        let device = Arc::new(Device {
            name,
            driver_version,
            capability: Capability { major, minor },
            multiprocessors: multiprocessors as usize,
            shared_bytes: shared_bytes as usize,
            context,
            stream,
            side,
            moving,
            streaming,
            limit,
            ledger: Mutex::default(),
            peak: AtomicU64::new(0),
        });
        if let Some(MemoryLimit::Process(limit_bytes)) = limit {
            let driver_bytes = context_bytes().unwrap_or(ASSUMED_CONTEXT_BYTES);
            let kept_back_bytes = headroom(limit_bytes);
            if driver_bytes + kept_back_bytes >= limit_bytes {
                return Err(CudaError::LimitTooLow {
                    limit_bytes,
                    driver_bytes,
                    kept_back_bytes,
                });
            }
            device.record(CONTEXT, |_| driver_bytes);
        }
        Ok(device)
    }

    /// Makes this device the calling thread's. Every function below does so itself; launches rely on it.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.context
            .bind_to_thread()
            .map_err(CudaError::driver("binding the device to a thread"))
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    pub(crate) fn moving_stream(&self) -> sys::CUstream {
        self.moving.cu_stream()
    }

    /// Makes what is queued for moving from now on wait for all work so far.
    pub(crate) fn moves_follow_work(&self) -> Result<(), CudaError> {
        self.bind()?;
        let joined = self.moving.join(&self.stream);
        joined.map_err(CudaError::driver("waiting with a move"))
    }

    /// Work queued from now on waits for all moves so far.
    pub(crate) fn work_follows_moves(&self) -> Result<(), CudaError> {
        self.bind()?;
        let joined = self.stream.join(&self.moving);
        joined.map_err(CudaError::driver("waiting for a move"))
    }

    /// Waits until all moves so far are over.
    pub(crate) fn wait_for_moves(&self) -> Result<(), CudaError> {
        self.bind()?;
        let waited = self.moving.synchronize();
        waited.map_err(CudaError::driver("waiting for moves"))
    }

    /// A mark that is not set yet.
    pub(crate) fn mark(&self) -> Result<Mark, CudaError> {
        let event = self.context.new_event(None);
        Ok(Mark(event.map_err(CudaError::driver("making an event"))?))
    }

    /// Makes weights that are streamed from now on wait for all work so far.
    pub(crate) fn streaming_follows_work(&self, reached: &Mark) -> Result<(), CudaError> {
        let set = reached.0.record(&self.stream);
        let waits = set.and_then(|()| self.streaming.wait(&reached.0));
        waits.map_err(CudaError::driver("waiting with streamed weights"))
    }

    /// Starts a copy from page-locked host memory to the card, and sets a mark behind it. Both places are those of buffers that
    /// outlive the work that is queued, as a launch's are.
    pub(crate) fn stream_weights(
        &self,
        (from, to): (Address, Address),
        bytes: usize,
        copied: &Mark,
    ) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: whoever queues programs holds the buffers that their addresses are in, and lays both out with room for `bytes`.
        let queued = unsafe { sys::cuMemcpyAsync(to.0, from.0, bytes, self.streaming.cu_stream()) };
        let set = queued
            .result()
            .and_then(|()| copied.0.record(&self.streaming));
        set.map_err(CudaError::driver("streaming weights"))
    }

    /// Work queued from now on waits for a copy of [`Device::stream_weights`].
    pub(crate) fn work_follows_streaming(&self, copied: &Mark) -> Result<(), CudaError> {
        let waits = self.stream.wait(&copied.0);
        waits.map_err(CudaError::driver("waiting for streamed weights"))
    }

    /// The stream, to capture what goes through it.
    pub(crate) fn captured_stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Free and total bytes; with a limit, what is left below it. What the driver takes as it goes is not counted as free.
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self
            .context
            .mem_get_info()
            .map_err(CudaError::driver("asking for free memory"))?;
        let (free, total) = (free as u64, total as u64);
        let free = free.saturating_sub(headroom(total));
        let (limit, kept_back) = match self.limit {
            None => return Ok((free, total)),
            Some(MemoryLimit::Buffers(limit)) => (limit, 0),
            Some(MemoryLimit::Process(limit)) => (limit, headroom(limit)),
        };
        let held: u64 = self.held().values().sum();
        let left = limit.saturating_sub(held + kept_back);
        Ok((free.min(left), total.min(limit)))
    }

    /// Waits until all work given to the device is done.
    pub(crate) fn wait(&self, what: &str) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(CudaError::driver(what))
    }

    /// Device memory, zeroed. More than is free is refused with both numbers, before the driver is asked.
    pub(crate) fn allocate(
        self: &Arc<Device>,
        purpose: &'static str,
        bytes: usize,
    ) -> Result<Buffer, CudaError> {
        // An allocation of nothing is an error to the driver, and null is what "absent" looks like to kernels.
        let bytes = bytes.max(MIN_ALLOCATION);
        let (free_bytes, _) = self.memory()?;
        let out_of_memory = || CudaError::OutOfMemory {
            purpose: purpose.to_owned(),
            needed_bytes: bytes as u64,
            free_bytes,
        };
        if bytes as u64 > free_bytes {
            return Err(out_of_memory());
        }
        // SAFETY: the context is current (`memory` bound it); the address goes into a `Buffer`, which frees it once.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|_| out_of_memory())?;
        let buffer = Buffer {
            address: Address(address),
            bytes,
            purpose,
            device: Arc::clone(self),
        };
        self.record(purpose, |held| held + bytes as u64);
        // SAFETY: the buffer was just allocated with this many bytes.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream()) }
            .map_err(CudaError::driver(format!("clearing {purpose}")))?;
        // A copy through another stream might come before that.
        self.wait(&format!("clearing {purpose}"))?;
        Ok(buffer)
    }

    /// Page-locked host memory, zeroed: copies from and to it do not block, and the device can read it in place.
    pub(crate) fn allocate_host(
        self: &Arc<Device>,
        purpose: &'static str,
        bytes: usize,
    ) -> Result<HostBuffer, CudaError> {
        self.bind()?;
        let bytes = bytes.max(MIN_ALLOCATION);
        if bytes >= LARGE_HOST_BYTES
            && let Some(registered) = Registered::new(bytes)
        {
            return Ok(HostBuffer {
                start: registered.start(),
                bytes,
                memory: HostMemory::Registered(registered),
                device: Arc::clone(self),
            });
        }
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the pointer goes into a `HostBuffer`, which frees it once.
        let start = unsafe { result::malloc_host(bytes, flags) }.map_err(|problem| {
            CudaError::HostMemory {
                purpose,
                bytes,
                problem,
            }
        })?;
        // SAFETY: `start` points to `bytes` fresh bytes.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(HostBuffer {
            start: start.cast(),
            bytes,
            memory: HostMemory::Driver,
            device: Arc::clone(self),
        })
    }

    /// Starts a copy of the first `bytes` of `from` into `to`. Not to be written to before the device is waited for.
    pub(crate) fn copy_in(
        &self,
        from: &HostBuffer,
        to: &Buffer,
        offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.copy_part(from, 0..bytes, to, offset)
    }

    /// The same for some of the bytes.
    pub(crate) fn copy_part(
        &self,
        from: &HostBuffer,
        part: Range<usize>,
        to: &Buffer,
        offset: usize,
    ) -> Result<(), CudaError> {
        self.copy_through(self.stream(), from, part, to, offset)
    }

    /// The same at once, beside the work under way. What comes later in the main stream waits for it.
    pub(crate) fn copy_ahead(
        &self,
        from: &HostBuffer,
        part: Range<usize>,
        to: &Buffer,
        offset: usize,
    ) -> Result<(), CudaError> {
        self.copy_through(self.side.cu_stream(), from, part, to, offset)?;
        let joined = self.stream.join(&self.side);
        joined.map_err(CudaError::driver("waiting for a copy"))
    }

    fn copy_through(
        &self,
        stream: sys::CUstream,
        from: &HostBuffer,
        part: Range<usize>,
        to: &Buffer,
        offset: usize,
    ) -> Result<(), CudaError> {
        assert!(
            part.end <= from.bytes && offset + part.len() <= to.bytes,
            "copy past the end"
        );
        self.bind()?;
        // SAFETY: both ends are long enough, asserted above; the caller keeps `from` as it is until it has waited.
        unsafe {
            let source = slice::from_raw_parts(from.start.add(part.start), part.len());
            result::memcpy_htod_async(to.address.offset(offset).0, source, stream)
        }
        .map_err(CudaError::driver(format!("copying to {}", to.purpose)))
    }

    /// Copies from the device and waits for it.
    pub(crate) fn copy_out(
        &self,
        from: &Buffer,
        offset: usize,
        to: &mut HostBuffer,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(
            bytes <= to.bytes && offset + bytes <= from.bytes,
            "copy past the end"
        );
        self.bind()?;
        // SAFETY: both ends are long enough, asserted above; the wait ends before `to` can be used again.
        unsafe {
            let target = slice::from_raw_parts_mut(to.start, bytes);
            result::memcpy_dtoh_async(target, from.address.offset(offset).0, self.stream())
        }
        .map_err(CudaError::driver(format!("copying from {}", from.purpose)))?;
        self.wait("running a batch")
    }

    /// Loads a compiled kernel and looks its entry points up.
    pub(crate) fn load(
        self: &Arc<Device>,
        kernel: &str,
        image: &[u8],
        entries: &[&str],
    ) -> Result<Module, CudaError> {
        self.bind()?;
        let failed = |problem| CudaError::Load {
            kernel: kernel.to_owned(),
            problem,
        };
        // SAFETY: the image is what NVRTC made, whole: its length and digest were checked when it was read.
        let handle = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed)?;
        let mut module = Module {
            handle,
            functions: Vec::new(),
            device: Arc::clone(self),
        };
        for entry in entries {
            let name = CString::new(*entry).expect("entry points are plain names");
            // SAFETY: the module was loaded above and is unloaded only when `module` is dropped.
            let function = unsafe { result::module::get_function(handle, name) }.map_err(failed)?;
            self.allow_shared(function).map_err(failed)?;
            module.functions.push(function);
        }
        Ok(module)
    }

    /// Lets a kernel ask for all the shared memory there is beside what it declares; unasked, it may have 48 KiB.
    fn allow_shared(&self, function: sys::CUfunction) -> Result<(), result::DriverError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let mut declared = 0;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: writes one integer; the function belongs to a loaded module.
        unsafe { sys::cuFuncGetAttribute(&raw mut declared, attribute, function) }.result()?;
        let dynamic = self.shared_bytes as i32 - declared;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above.
        unsafe { result::function::set_function_attribute(function, attribute, dynamic) }
    }

    /// An event, to wait for what came before it without waiting for what comes after.
    pub(crate) fn event(&self) -> Result<Event, CudaError> {
        let event = self.stream.record_event(None);
        Ok(Event(
            event.map_err(CudaError::driver("recording an event"))?,
        ))
    }

    /// An event that also tells the time.
    pub(crate) fn moment(&self) -> Result<Event, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.stream.record_event(Some(flags));
        Ok(Event(
            event.map_err(CudaError::driver("recording an event"))?,
        ))
    }

    /// A moment that a graph being captured will mark each time it runs.
    pub(crate) fn captured_moment(&self) -> Result<Event, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = self.context.new_event(Some(flags));
        let event = event.map_err(CudaError::driver("making an event"))?;
        let outside = sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream are alive; the graph holds on to the event for itself.
        unsafe { sys::cuEventRecordWithFlags(event.cu_event(), self.stream(), outside) }
            .result()
            .map_err(CudaError::driver("recording an event in a graph"))?;
        Ok(Event(event))
    }

    /// Bytes held, by purpose.
    pub(crate) fn held(&self) -> BTreeMap<&'static str, u64> {
        let ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.clone()
    }

    /// The most bytes held at a time.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    fn record(&self, purpose: &'static str, change: impl FnOnce(u64) -> u64) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let held = ledger.entry(purpose).or_default();
        *held = change(*held);
        let bytes = *held;
        let all: u64 = ledger.values().sum();
        self.peak.fetch_max(all, Ordering::Relaxed);
        tracing::debug!(purpose, bytes, "device memory");
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What the driver's management library knows as the card of this number.
fn managed_card(index: usize) -> Option<ManagedCard> {
    let device = result::device::get(i32::try_from(index).ok()?).ok()?;
    let mut bus_id = [0; 32];
    // SAFETY: writes a text that ends in 0, of at most as many bytes as it is told.
    unsafe { sys::cuDeviceGetPCIBusId(bus_id.as_mut_ptr().cast(), bus_id.len() as i32, device) }
        .result()
        .ok()?;
    ManagedCard::find(CStr::from_bytes_until_nul(&bus_id).ok()?)
}

/// Finds and starts the driver, and tells its version; cudarc would panic where it is missing.
fn require_driver() -> Result<i32, CudaError> {
    // SAFETY: loading the driver's library runs its initialisers, which is what it is for.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver {
            library: if cfg!(windows) {
                "nvcuda.dll"
            } else {
                "libcuda.so.1"
            },
        });
    }
    let mut found = 0;
    // SAFETY: writes one integer; the one call that is allowed before initialisation.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut found) };
    asked.result().map_err(CudaError::DriverFailed)?;
    if found < OLDEST_DRIVER {
        return Err(CudaError::DriverTooOld {
            found,
            needed: OLDEST_DRIVER,
        });
    }
    match result::init() {
        Err(result::DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            Err(CudaError::NoDevice { index: 0, count: 0 })
        }
        other => other.map_err(CudaError::DriverFailed).map(|()| found),
    }
}

/// A piece of device memory.
pub(crate) struct Buffer {
    address: Address,
    bytes: usize,
    purpose: &'static str,
    device: Arc<Device>,
}

impl Buffer {
    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = self.bytes as u64;
        self.device.record(self.purpose, |held| held - bytes);
        // A device that failed reports it again on its next use; there is nobody to tell here.
        let _ = self.device.bind();
        let _ = self.device.stream.synchronize();
        // SAFETY: allocated by `Device::allocate`, freed here alone, and the device is done with it.
        let _ = unsafe { result::free_sync(self.address.0) };
    }
}

/// A piece of page-locked host memory.
pub(crate) struct HostBuffer {
    start: *mut u8,
    bytes: usize,
    memory: HostMemory,
    device: Arc<Device>,
}

/// Owner of page-locked memory.
enum HostMemory {
    Driver,
    #[expect(dead_code, reason = "held until it is dropped")]
    Registered(Registered),
}

impl HostBuffer {
    /// The address that the device sees: with unified addressing, which every 64-bit platform has, the same.
    pub(crate) fn address(&self) -> Address {
        Address(self.start as u64)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes. Device writes end before `copy_out` returns, or before the event that whoever lets
        // kernels write here has waited for.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only way here.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.stream.synchronize();
        if let HostMemory::Driver = self.memory {
            // SAFETY: allocated by `Device::allocate_host`, freed here alone, and no copy is in flight.
            let _ = unsafe { result::free_host(self.start.cast::<c_void>()) };
        }
    }
}

/// A loaded kernel and its entry points.
pub(crate) struct Module {
    handle: sys::CUmodule,
    functions: Vec<sys::CUfunction>,
    device: Arc<Device>,
}

// SAFETY: module and function handles are names the driver looks up; it locks for itself.
unsafe impl Send for Module {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Module {}

impl Module {
    pub(crate) fn function(&self, entry: usize) -> sys::CUfunction {
        self.functions[entry]
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.stream.synchronize();
        // SAFETY: loaded by `Device::load`, unloaded here alone, and no kernel of it is running.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// A place in one stream that another waits for. It may be set again once the wait is queued, and also while a graph is captured.
pub(crate) struct Mark(cudarc::driver::CudaEvent);

/// A moment in the stream of work.
pub(crate) struct Event(cudarc::driver::CudaEvent);

impl Event {
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.0
            .synchronize()
            .map_err(CudaError::driver("waiting for the device"))
    }

    /// From this moment to a later one, both of [`Device::moment`].
    pub(crate) fn until(&self, later: &Event) -> Result<Duration, CudaError> {
        let milliseconds = self.0.elapsed_ms(&later.0);
        let milliseconds = milliseconds.map_err(CudaError::driver("reading the time"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}
