//! From CUDA C++ to machine code: NVRTC for the device at hand, once, with a cache on disk.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;
use std::sync::Mutex;
use std::{env, fs, ptr};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};
use cudarc::nvrtc::sys as nvrtc;
use sha2::{Digest, Sha256};

use crate::CudaError;
use crate::device::library_path;
use crate::error::check;

/// In scope of every kernel file.
const PRELUDE: &str = include_str!("kernels/prelude.cuh");

/// A kernel file that is built into the program.
#[derive(Debug, Clone, Copy)]
pub struct KernelSource {
    /// File name, for messages.
    pub name: &'static str,
    /// CUDA C++ without includes.
    pub text: &'static str,
}

/// Loaded machine code of one kernel file.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    name: &'static str,
    handle: CUmodule,
}

// SAFETY: an opaque handle that the driver resolves.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    pub(crate) handle: CUfunction,
    pub(crate) name: &'static str,
}

// SAFETY: an opaque handle that the driver resolves.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// The kernel `name`.
    ///
    /// # Errors
    /// When the file has no such kernel.
    pub fn function(&self, name: &'static str) -> Result<Function, CudaError> {
        let symbol = CString::new(name)
            .map_err(|_| CudaError::Unsupported(format!("kernel name {name:?}")))?;
        let mut handle: CUfunction = ptr::null_mut();
        // SAFETY: the module is loaded and the name ends with a zero.
        let code =
            unsafe { sys::cuModuleGetFunction(&raw mut handle, self.handle, symbol.as_ptr()) };
        if code == sys::CUresult::CUDA_ERROR_NOT_FOUND {
            let file = self.name;
            return Err(CudaError::Unsupported(format!(
                "kernel file {file} has no kernel {name}"
            )));
        }
        check(code, "cuModuleGetFunction")?;
        // One division of the first-level cache for all kernels: those that differ cannot share a multiprocessor, so a
        // kernel could not start before its predecessor ends.
        // SAFETY: the function belongs to a loaded module.
        check(
            unsafe {
                sys::cuFuncSetAttribute(
                    handle,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    100,
                )
            },
            "cuFuncSetAttribute",
        )?;
        Ok(Function { handle, name })
    }
}

impl Function {
    /// Lets the kernel be launched with up to `bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// When the device has less.
    pub fn allow_shared_memory(&self, bytes: u32) -> Result<(), CudaError> {
        // SAFETY: the function belongs to a loaded module.
        check(
            unsafe {
                sys::cuFuncSetAttribute(
                    self.handle,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    bytes as i32,
                )
            },
            "cuFuncSetAttribute",
        )
    }
}

/// Modules of this process by file and definitions.
#[derive(Default)]
pub(crate) struct ModuleCache(Mutex<HashMap<String, Module>>);

impl ModuleCache {
    pub(crate) fn get(
        &self,
        (major, minor): (u32, u32),
        source: &KernelSource,
        defines: &[(&str, String)],
    ) -> Result<Module, CudaError> {
        let options = options(&format!("sm_{major}{minor}"), defines);
        let text = with_prelude(source);
        let key = key(&text, &options);
        let mut modules = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(module) = modules.get(&key) {
            return Ok(*module);
        }
        let image = match read_cached(&key) {
            Some(image) => image,
            None => {
                let image = compile(source.name, &text, &options)?;
                if let Err(error) = write_cached(&key, &image) {
                    tracing::warn!(%error, "kernels are compiled again at the next start");
                }
                image
            }
        };
        let mut handle: CUmodule = ptr::null_mut();
        // SAFETY: the image is a whole cubin: it was just compiled, or read from a file with its checksum.
        check(
            unsafe { sys::cuModuleLoadData(&raw mut handle, image.as_ptr().cast::<c_void>()) },
            "cuModuleLoadData",
        )?;
        let module = Module {
            name: source.name,
            handle,
        };
        modules.insert(key, module);
        Ok(module)
    }

    pub(crate) fn unload(&self) {
        let mut modules = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        for (_, module) in modules.drain() {
            // SAFETY: no kernel of a device that is dropped can run any more.
            let _ = unsafe { sys::cuModuleUnload(module.handle) };
        }
    }
}

fn options(architecture: &str, defines: &[(&str, String)]) -> Vec<String> {
    let fixed = ["--std=c++17", "-default-device", "-lineinfo"].map(str::to_owned);
    let defines = defines
        .iter()
        .map(|(name, value)| format!("-D{name}={value}"));
    [format!("--gpu-architecture={architecture}")]
        .into_iter()
        .chain(fixed)
        .chain(defines)
        .collect()
}

fn with_prelude(source: &KernelSource) -> String {
    format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text)
}

/// Compiles a kernel file for an architecture, for example `sm_120`, whether or not such a device is there. Needs the
/// compiler library only.
///
/// # Errors
/// [`CudaError::Compile`] or [`CudaError::MissingLibrary`].
pub fn compile_for(
    architecture: &str,
    source: &KernelSource,
    defines: &[(&str, String)],
) -> Result<(), CudaError> {
    let options = options(architecture, defines);
    compile(source.name, &with_prelude(source), &options).map(|_| ())
}

fn key(text: &str, options: &[String]) -> String {
    let mut hash = Sha256::new();
    hash.update(text);
    for option in options {
        hash.update([0]);
        hash.update(option);
    }
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `TREESPEC_KERNEL_CACHE`, or the user's cache folder. `None` where there is neither: every start compiles then.
fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    variable("TREESPEC_KERNEL_CACHE")
        .map(PathBuf::from)
        .or_else(|| {
            variable("XDG_CACHE_HOME").map(|folder| PathBuf::from(folder).join("treespec/kernels"))
        })
        .or_else(|| {
            variable("HOME").map(|folder| PathBuf::from(folder).join(".cache/treespec/kernels"))
        })
}

/// A cached file is the image behind its SHA-256, so that a file cut short by a crash is compiled again.
fn read_cached(key: &str) -> Option<Vec<u8>> {
    let bytes = fs::read(cache_folder()?.join(format!("{key}.cubin"))).ok()?;
    let (checksum, image) = bytes.split_at_checked(32)?;
    (Sha256::digest(image).as_slice() == checksum).then(|| image.to_vec())
}

fn write_cached(key: &str, image: &[u8]) -> Result<(), CudaError> {
    let Some(folder) = cache_folder() else {
        return Ok(());
    };
    let path = folder.join(format!("{key}.cubin"));
    let mut bytes = Sha256::digest(image).to_vec();
    bytes.extend_from_slice(image);
    // Written beside and renamed: services that start together must not read half a file.
    let part = folder.join(format!("{key}.{}.part", std::process::id()));
    fs::create_dir_all(&folder)
        .and_then(|()| fs::write(&part, bytes))
        .and_then(|()| fs::rename(&part, &path))
        .map_err(|source| CudaError::Cache { path, source })
}

fn compile(name: &'static str, text: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    // SAFETY: loading the compiler library runs its initialisers, nothing of ours.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(CudaError::MissingLibrary {
            what: "kernel compiler (NVRTC)",
            names: vec!["libnvrtc.so.13".to_owned()],
            place: library_path(),
            fix: "install the CUDA runtime libraries, or the Python wheel nvidia-cuda-nvrtc",
        });
    }
    let fail = |log: String| CudaError::Compile { name, log };
    let text = CString::new(text).map_err(|_| fail("a zero byte in the source".to_owned()))?;
    let file = CString::new(name).map_err(|_| fail("a zero byte in the name".to_owned()))?;
    let options: Vec<CString> = options
        .iter()
        .filter_map(|option| CString::new(option.as_str()).ok())
        .collect();
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: all strings end with a zero and outlive the calls; buffers have the sizes that NVRTC names.
    unsafe {
        let mut program: nvrtc::nvrtcProgram = ptr::null_mut();
        let created = nvrtc::nvrtcCreateProgram(
            &raw mut program,
            text.as_ptr(),
            file.as_ptr(),
            0,
            ptr::null(),
            ptr::null(),
        );
        if created != nvrtc::nvrtcResult::NVRTC_SUCCESS {
            return Err(fail(format!("{created:?}")));
        }
        let compiled =
            nvrtc::nvrtcCompileProgram(program, pointers.len() as i32, pointers.as_ptr());
        let outcome = if compiled == nvrtc::nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            nvrtc::nvrtcGetCUBINSize(program, &raw mut size);
            let mut image = vec![0u8; size];
            nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast());
            Ok(image)
        } else {
            Err(fail(first_error(&log_of(program))))
        };
        nvrtc::nvrtcDestroyProgram(&raw mut program);
        outcome
    }
}

/// # Safety
/// `program` must be live.
unsafe fn log_of(program: nvrtc::nvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: the buffer has the size that NVRTC names, the final zero included.
    unsafe {
        nvrtc::nvrtcGetProgramLogSize(program, &raw mut size);
        let mut log = vec![0u8; size.max(1)];
        nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        CStr::from_bytes_until_nul(&log).map_or_else(
            |_| String::new(),
            |text| text.to_string_lossy().into_owned(),
        )
    }
}

fn first_error(log: &str) -> String {
    log.lines()
        .find(|line| line.contains("error"))
        .or_else(|| log.lines().next())
        .unwrap_or("no message")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_depends_on_text_and_definitions() {
        let options = |define: &str| vec!["--gpu-architecture=sm_90".to_owned(), define.to_owned()];
        let one = key("a", &options("-DX=1"));
        assert_eq!(one, key("a", &options("-DX=1")));
        assert_ne!(one, key("b", &options("-DX=1")));
        assert_ne!(one, key("a", &options("-DX=2")));
    }

    #[test]
    fn the_first_error_is_told() {
        assert_eq!(
            first_error("k.cu(3): warning: x\nk.cu(4): error: y\nz"),
            "k.cu(4): error: y"
        );
        assert_eq!(first_error(""), "no message");
    }
}
