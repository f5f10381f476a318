//! NVRTC, NVIDIA's run-time compiler, found at run time.
//!
//! Declares the handful of functions that are called, which are the same in every supported version.
#![expect(unsafe_code, reason = "a C library that is looked up at run time")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs, mem,
    path::{Path, PathBuf},
    ptr,
};

use libloading::Library;

use crate::{device::library::Wanted, error::CudaError};

type Program = *mut c_void;
/// 0 is success.
type Status = c_int;

/// The functions of the library that we call.
pub(crate) struct Nvrtc {
    pub(crate) version: (i32, i32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    image_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    image: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    arch_count: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    message: unsafe extern "C" fn(Status) -> *const c_char,
}

/// Result of a compilation: the image and remarks, or a problem and the compiler's log.
pub(crate) type Compiled = Result<(Vec<u8>, String), (String, String)>;

impl Nvrtc {
    /// Looks in the given folders, then by name in the loader's path, then in the usual folders.
    pub(crate) fn find(folders: &[PathBuf]) -> Result<Nvrtc, CudaError> {
        let wanted = Wanted {
            names: if cfg!(windows) {
                &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
            } else {
                &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
            },
            wheel: "cuda_nvrtc",
        };
        wanted
            .find(folders, Nvrtc::load)
            .map_err(|looked| CudaError::NoNvrtc { looked })
    }

    fn load(folder: Option<&Path>, file: &Path) -> Option<Nvrtc> {
        let mut libraries: Vec<Library> = folder.into_iter().flat_map(load_builtins).collect();
        // SAFETY: loading runs the library's initialisers; its name says it is NVRTC.
        let library = unsafe { Library::new(file) }.ok()?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is the one nvrtc.h declares for this name, unchanged since CUDA 11.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.ok()?
            };
        }
        let ask_version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            function!("nvrtcVersion");
        let mut version = (0, 0);
        // SAFETY: writes two integers.
        unsafe { ask_version(&raw mut version.0, &raw mut version.1) };
        let found = Nvrtc {
            version,
            create: function!("nvrtcCreateProgram"),
            destroy: function!("nvrtcDestroyProgram"),
            compile: function!("nvrtcCompileProgram"),
            image_size: function!("nvrtcGetCUBINSize"),
            image: function!("nvrtcGetCUBIN"),
            log_size: function!("nvrtcGetProgramLogSize"),
            log: function!("nvrtcGetProgramLog"),
            arch_count: function!("nvrtcGetNumSupportedArchs"),
            archs: function!("nvrtcGetSupportedArchs"),
            message: function!("nvrtcGetErrorString"),
        };
        // Never unloaded: threads that compiled end later, and their clean-up is code of the library.
        libraries.push(library);
        libraries.into_iter().for_each(mem::forget);
        Some(found)
    }

    /// The architectures it compiles for, as numbers such as 90.
    pub(crate) fn architectures(&self) -> Vec<i32> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { (self.arch_count)(&raw mut count) };
        let mut numbers = vec![0; count.max(0) as usize];
        // SAFETY: writes as many integers as it said there are.
        unsafe { (self.archs)(numbers.as_mut_ptr()) };
        numbers
    }

    /// Compiles a program to machine code. Threads may do so side by side.
    pub(crate) fn compile(&self, name: &str, source: &str, options: &[String]) -> Compiled {
        let text = |s: &str| CString::new(s).expect("kernel text has no zero bytes");
        let (name, source) = (text(name), text(source));
        let options: Vec<CString> = options.iter().map(|o| text(o)).collect();
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = ptr::null_mut();
        // SAFETY: texts end in zero and outlive the program, which is destroyed below.
        let status = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                name.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if status != 0 {
            return Err((self.say(status), String::new()));
        }
        // SAFETY: a live program and as many options as are said to be.
        let status = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = read(program, self.log_size, self.log);
        let log = String::from_utf8_lossy(&log)
            .trim_end_matches(['\0', '\n'])
            .to_owned();
        let result = if status == 0 {
            Ok((read(program, self.image_size, self.image), log))
        } else {
            Err((self.say(status), log))
        };
        // SAFETY: created above, destroyed once.
        unsafe { (self.destroy)(&raw mut program) };
        result
    }

    fn say(&self, status: Status) -> String {
        // SAFETY: returns a text that is never freed.
        let text = unsafe { CStr::from_ptr((self.message)(status)) };
        text.to_string_lossy().into_owned()
    }
}

/// Reads a getter's bytes.
fn read(
    program: Program,
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
) -> Vec<u8> {
    let mut length = 0;
    // SAFETY: a live program; writes one length.
    unsafe { size(program, &raw mut length) };
    let mut bytes = vec![0u8; length];
    // SAFETY: as many bytes as were asked for.
    unsafe { get(program, bytes.as_mut_ptr().cast()) };
    bytes
}

/// The compiler opens its builtins by name. Beside a library found by path they are not in the loader's path, but once
/// loaded a name is found.
fn load_builtins(folder: &Path) -> Vec<Library> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let builtins = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.contains("nvrtc-builtins") && !name.contains(".alt.")
    });
    // SAFETY: a data library of NVRTC's, loaded as NVRTC itself would.
    builtins
        .filter_map(|entry| unsafe { Library::new(entry.path()) }.ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_folder_is_looked_in_first() {
        let folder = tempfile::tempdir().unwrap();
        let Err(CudaError::NoNvrtc { looked }) = Nvrtc::find(&[folder.path().to_owned()]) else {
            return; // there is one on this machine
        };
        assert_eq!(looked[0], folder.path().display().to_string());
        assert!(looked[1].contains("libnvrtc.so.13") || cfg!(windows));
    }
}
