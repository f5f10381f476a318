//! GEMM by cuBLASLt, found at run time: `out = alpha * x . weights^T`, f16 operands, sums in f32.
//!
//! A [`Gemm`] is one shape with an algorithm chosen once, so that a launch is one call that allocates nothing and can be
//! captured. Only algorithms that sum in a fixed order are taken: those that add up in place, first come first served, are
//! excluded. The scratch memory is the caller's.
//!
//! The library's matrices are column-major. Rows of `x`, of the weights and of `out` are its columns, so `out` seen from
//! there is `outputs` by `rows`: the weights (`columns` by `outputs`) transposed, times `x` (`columns` by `rows`).
#![expect(unsafe_code, reason = "a C library that is looked up at run time")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem,
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::CUstream;

use crate::{
    device::{Address, Device, library::Wanted},
    error::CudaError,
};

/// Alignment of matrices, which the library takes for granted when it chooses an algorithm.
pub(crate) const ALIGN: usize = 256;
/// Scratch memory that products may use.
pub(crate) const WORKSPACE_BYTES: usize = 64 << 20;

/// 0 is success.
type Status = c_int;
type Raw = *mut c_void;
type Destroy = unsafe extern "C" fn(Raw) -> Status;
type SetAttribute = unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> Status;

// Numbers of cublasLt.h and its companions, the same in versions 12 and 13.
const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_F16: c_int = 2;
const DESC_TRANSPOSE_A: c_int = 3;
const TRANSPOSED: i32 = 1;
const PREFERENCE_WORKSPACE_BYTES: c_int = 1;
const PREFERENCE_REDUCTIONS: c_int = 3;
/// Parts of a sum go to scratch memory in the type they are computed in, and are added in order.
const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// An algorithm with what the library says about it.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// The functions of the library that we call.
struct Functions {
    create: unsafe extern "C" fn(*mut Raw) -> Status,
    destroy: Destroy,
    message: unsafe extern "C" fn(Status) -> *const c_char,
    create_desc: unsafe extern "C" fn(*mut Raw, c_int, c_int) -> Status,
    set_desc: SetAttribute,
    destroy_desc: Destroy,
    create_layout: unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> Status,
    destroy_layout: Destroy,
    create_preference: unsafe extern "C" fn(*mut Raw) -> Status,
    set_preference: SetAttribute,
    destroy_preference: Destroy,
    heuristics: unsafe extern "C" fn(
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        Raw,
        c_int,
        *mut Heuristic,
        *mut c_int,
    ) -> Status,
    matmul: unsafe extern "C" fn(
        Raw,
        Raw,
        *const f32,
        u64,
        Raw,
        u64,
        Raw,
        *const f32,
        u64,
        Raw,
        u64,
        Raw,
        *const u64,
        u64,
        usize,
        CUstream,
    ) -> Status,
}

impl Functions {
    fn load(file: &Path) -> Option<Functions> {
        // SAFETY: loading runs the library's initialisers; its name says it is cuBLASLt.
        let library = unsafe { libloading::Library::new(file) }.ok()?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is the one cublasLt.h declares for this name, unchanged since CUDA 11; addresses of
                // device memory are integers here.
                *unsafe { library.get(concat!("cublasLt", $name, "\0").as_bytes()) }.ok()?
            };
        }
        let found = Functions {
            create: function!("Create"),
            destroy: function!("Destroy"),
            message: function!("GetStatusString"),
            create_desc: function!("MatmulDescCreate"),
            set_desc: function!("MatmulDescSetAttribute"),
            destroy_desc: function!("MatmulDescDestroy"),
            create_layout: function!("MatrixLayoutCreate"),
            destroy_layout: function!("MatrixLayoutDestroy"),
            create_preference: function!("MatmulPreferenceCreate"),
            set_preference: function!("MatmulPreferenceSetAttribute"),
            destroy_preference: function!("MatmulPreferenceDestroy"),
            heuristics: function!("MatmulAlgoGetHeuristic"),
            matmul: function!("Matmul"),
        };
        // Never unloaded: it registers clean-up that runs when the process ends.
        mem::forget(library);
        Some(found)
    }

    fn check(&self, what: &str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: returns a text that is never freed.
        let text = unsafe { CStr::from_ptr((self.message)(status)) };
        Err(CudaError::CublasLt {
            what: what.to_owned(),
            problem: text.to_string_lossy().into_owned(),
        })
    }
}

/// Something of the library's that must be given back.
struct Owned {
    raw: Raw,
    destroy: Destroy,
}

impl Owned {
    fn new(
        functions: &Functions,
        destroy: Destroy,
        create: impl FnOnce(*mut Raw) -> Status,
    ) -> Result<Owned, CudaError> {
        let mut raw = ptr::null_mut();
        functions.check("describing a product", create(&raw mut raw))?;
        Ok(Owned { raw, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created by the library, destroyed once, by the function that belongs to it.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

// SAFETY: the library's objects belong to no thread. They are not changed after they were made, and the handle may be used
// by several threads at once.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

struct Opened {
    // Destroyed before the device is let go.
    handle: Owned,
    functions: Functions,
    device: Arc<Device>,
}

/// The library, opened for one device.
#[derive(Clone)]
pub(crate) struct Library(Arc<Opened>);

impl Library {
    /// Looks in the given folders, then by name in the loader's path, then in the usual folders.
    pub(crate) fn find(folders: &[PathBuf], device: &Arc<Device>) -> Result<Library, CudaError> {
        let wanted = Wanted {
            names: if cfg!(windows) {
                &["cublasLt64_13.dll", "cublasLt64_12.dll"]
            } else {
                &["libcublasLt.so.13", "libcublasLt.so.12"]
            },
            wheel: "cublas",
        };
        let functions = wanted
            .find(folders, |_, file| Functions::load(file))
            .map_err(|looked| CudaError::NoCublasLt { looked })?;
        device.bind()?;
        // SAFETY: writes one handle, for the device that is current.
        let handle = Owned::new(&functions, functions.destroy, |out| unsafe {
            (functions.create)(out)
        })?;
        Ok(Library(Arc::new(Opened {
            handle,
            functions,
            device: Arc::clone(device),
        })))
    }
}

/// MatmulShape of a product: `[rows, columns]` by `[outputs, columns]`, transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatmulShape {
    pub(crate) rows: usize,
    pub(crate) outputs: usize,
    pub(crate) columns: usize,
    /// From one row of the result to the next, in elements; at least `outputs`.
    pub(crate) stride: usize,
}

/// Type of a result's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Out {
    F32,
    F16,
}

/// Addresses of a product's operands, each aligned to [`ALIGN`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    /// F16 `[outputs, columns]`.
    pub(crate) weights: Address,
    /// F16 `[rows, columns]`.
    pub(crate) x: Address,
    /// `[rows, stride]`, of which the first `outputs` columns are written.
    pub(crate) out: Address,
    /// As many bytes as the product was made with; shared by all products of a stream.
    pub(crate) workspace: Address,
}

/// A product of one shape.
pub(crate) struct Gemm {
    desc: Owned,
    weights: Owned,
    x: Owned,
    out: Owned,
    alpha: f32,
    chosen: Heuristic,
    library: Library,
}

impl Gemm {
    /// Chooses the algorithm that the library ranks first, of those that need at most `workspace_bytes`.
    ///
    /// The first launch of an algorithm loads its code, which a capture does not allow: run it once before.
    pub(crate) fn new(
        library: &Library,
        shape: MatmulShape,
        out: Out,
        alpha: f32,
        workspace_bytes: usize,
    ) -> Result<Gemm, CudaError> {
        library.0.device.bind()?;
        let functions = &library.0.functions;
        let MatmulShape {
            rows,
            outputs,
            columns,
            stride,
        } = shape;
        // SAFETY: writes one pointer, to an object that `Owned` destroys.
        let desc = Owned::new(functions, functions.destroy_desc, |to| unsafe {
            (functions.create_desc)(to, COMPUTE_F32, TYPE_F32)
        })?;
        set(
            functions,
            functions.set_desc,
            &desc,
            DESC_TRANSPOSE_A,
            &TRANSPOSED,
        )?;
        let layout = |kind, rows: usize, columns: usize, stride: usize| {
            // SAFETY: as above.
            Owned::new(functions, functions.destroy_layout, |to| unsafe {
                (functions.create_layout)(to, kind, rows as u64, columns as u64, stride as i64)
            })
        };
        let out = match out {
            Out::F32 => TYPE_F32,
            Out::F16 => TYPE_F16,
        };
        let weights = layout(TYPE_F16, columns, outputs, columns)?;
        let x = layout(TYPE_F16, columns, rows, columns)?;
        let out = layout(out, outputs, rows, stride)?;
        // SAFETY: as above.
        let preference = Owned::new(functions, functions.destroy_preference, |to| unsafe {
            (functions.create_preference)(to)
        })?;
        let prefer = functions.set_preference;
        set(
            functions,
            prefer,
            &preference,
            PREFERENCE_WORKSPACE_BYTES,
            &workspace_bytes,
        )?;
        let reductions = &REDUCTION_COMPUTE_TYPE;
        set(
            functions,
            prefer,
            &preference,
            PREFERENCE_REDUCTIONS,
            reductions,
        )?;

        let mut chosen = Heuristic::default();
        let mut returned = 0;
        // SAFETY: live objects of the library; writes at most one result and their number.
        let status = unsafe {
            (functions.heuristics)(
                library.0.handle.raw,
                desc.raw,
                weights.raw,
                x.raw,
                out.raw,
                out.raw,
                preference.raw,
                1,
                &raw mut chosen,
                &raw mut returned,
            )
        };
        let what = format!("choosing an algorithm for {shape:?}");
        functions.check(&what, status)?;
        let usable = chosen.status == 0 && chosen.workspace_bytes <= workspace_bytes;
        if returned != 1 || !usable {
            let problem = "there is none".to_owned();
            return Err(CudaError::CublasLt { what, problem });
        }
        Ok(Gemm {
            desc,
            weights,
            x,
            out,
            alpha,
            chosen,
            library: library.clone(),
        })
    }

    /// Queues the product behind all earlier work of the device's stream. The addresses stay allocated until the device has
    /// been waited for, with the sizes that the shape gives.
    pub(crate) fn launch(&self, operands: Operands) -> Result<(), CudaError> {
        let Operands {
            weights,
            x,
            out,
            workspace,
        } = operands;
        debug_assert!(
            [weights, x, out, workspace]
                .iter()
                .all(|a| a.0.is_multiple_of(ALIGN as u64)),
            "{operands:?}"
        );
        let Opened {
            handle,
            functions,
            device,
        } = &*self.library.0;
        let zero = 0.0;
        // SAFETY: live objects of the library, which reads the factors before it returns. The memory is as large as the
        // layouts say, which the caller establishes; `workspace` has the bytes the algorithm was chosen for.
        let status = unsafe {
            (functions.matmul)(
                handle.raw,
                self.desc.raw,
                &raw const self.alpha,
                weights.0,
                self.weights.raw,
                x.0,
                self.x.raw,
                &raw const zero,
                out.0,
                self.out.raw,
                out.0,
                self.out.raw,
                self.chosen.algorithm.as_ptr(),
                workspace.0,
                self.chosen.workspace_bytes,
                device.stream(),
            )
        };
        functions.check("launching a product", status)
    }
}

/// Sets one attribute, of a type as wide as the library declares.
fn set<T>(
    functions: &Functions,
    set: SetAttribute,
    object: &Owned,
    attribute: c_int,
    value: &T,
) -> Result<(), CudaError> {
    // SAFETY: reads as many bytes as the value has.
    let status = unsafe {
        set(
            object.raw,
            attribute,
            ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    };
    functions.check("describing a product", status)
}

#[cfg(test)]
pub(crate) mod tests;
