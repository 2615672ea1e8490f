//! A GPU: its context, its stream and what it can do.

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUstream};

use crate::compile::ModuleCache;
use crate::error::check;
use crate::launch::Profile;
use crate::{CudaError, KernelSource, Module};

/// A GPU that this process uses: one context, one stream that all work of the engine goes through.
pub struct Device {
    ordinal: usize,
    name: String,
    context: CUcontext,
    device: CUdevice,
    stream: Stream,
    capability: (u32, u32),
    sm_count: u32,
    shared_memory: u32,
    l2_bytes: usize,
    dependent_launch: bool,
    modules: ModuleCache,
    pub(crate) profile: Mutex<Option<Profile>>,
}

// SAFETY: contexts, streams and modules may be used from any thread that makes the context current first, which every
// entry point of this crate does.
unsafe impl Send for Device {}
// SAFETY: as above; the driver serialises its own calls.
unsafe impl Sync for Device {}

/// Handle of the stream of a [`Device`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub(crate) CUstream);

// SAFETY: a stream handle is an opaque pointer that the driver resolves.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Device {
    /// Opens `cuda:ordinal` and makes its context current on this thread.
    ///
    /// # Errors
    /// Without a driver, without such a device, or with one that is too old.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        require_driver()?;
        // SAFETY: plain driver calls with valid out-pointers.
        unsafe {
            check(sys::cuInit(0), "cuInit")?;
            let mut count: c_int = 0;
            check(sys::cuDeviceGetCount(&raw mut count), "cuDeviceGetCount")?;
            if ordinal >= count as usize {
                let count = count as usize;
                return Err(CudaError::NoDevice { ordinal, count });
            }
            let mut device: CUdevice = 0;
            check(
                sys::cuDeviceGet(&raw mut device, ordinal as c_int),
                "cuDeviceGet",
            )?;
            let name = device_name(device)?;
            let attribute = |which| attribute(device, which);
            let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            if major < 9 {
                return Err(CudaError::TooOld {
                    ordinal,
                    name,
                    major,
                    minor,
                });
            }
            let mut context: CUcontext = ptr::null_mut();
            check(
                sys::cuDevicePrimaryCtxRetain(&raw mut context, device),
                "cuDevicePrimaryCtxRetain",
            )?;
            check(sys::cuCtxSetCurrent(context), "cuCtxSetCurrent")?;
            let mut stream: CUstream = ptr::null_mut();
            check(
                sys::cuStreamCreate(
                    &raw mut stream,
                    sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32,
                ),
                "cuStreamCreate",
            )?;
            Ok(Arc::new(Self {
                ordinal,
                name,
                context,
                device,
                stream: Stream(stream),
                capability: (major, minor),
                sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                shared_memory: attribute(
                    Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                )?,
                l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
                // Sanitizers and debuggers want kernels one after the other.
                dependent_launch: std::env::var("TREESPEC_CUDA_DEPENDENT_LAUNCH").as_deref()
                    != Ok("0"),
                modules: ModuleCache::default(),
                profile: Mutex::new(None),
            }))
        }
    }

    /// Makes the context current on the calling thread. Entry points that a new thread may call do this first.
    ///
    /// # Errors
    /// When the context is lost.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as the device.
        check(
            unsafe { sys::cuCtxSetCurrent(self.context) },
            "cuCtxSetCurrent",
        )
    }

    /// The stream of all work.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Index among the devices that the driver sees.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// For example `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability, major and minor.
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// Multiprocessors.
    pub fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// Most bytes of shared memory that a block may ask for.
    pub fn shared_memory_per_block(&self) -> u32 {
        self.shared_memory
    }

    /// Bytes of the L2 cache.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Whether kernels may start before their predecessor ends.
    pub fn dependent_launch(&self) -> bool {
        self.dependent_launch
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// When the context is lost.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: valid out-pointers.
        check(
            unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) },
            "cuMemGetInfo",
        )?;
        Ok((free as u64, total as u64))
    }

    /// Whether single kernels are being timed: then they are launched one by one, outside of graphs.
    pub fn is_profiled(&self) -> bool {
        self.profile
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .is_some()
    }

    /// Says whether `bytes` fit before anything is allocated.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn preflight(&self, what: &str, bytes: u64) -> Result<(), CudaError> {
        let (free, _) = self.memory()?;
        if bytes > free {
            return Err(CudaError::OutOfMemory {
                what: what.to_owned(),
                wanted_bytes: bytes,
                free_bytes: free,
            });
        }
        Ok(())
    }

    /// The compiled kernels of a file with the given macro definitions; compiled once per process and cached on disk.
    ///
    /// # Errors
    /// [`CudaError::Compile`], or a missing compiler library.
    pub fn module(
        self: &Arc<Self>,
        source: &KernelSource,
        defines: &[(&str, String)],
    ) -> Result<Module, CudaError> {
        self.bind()?;
        self.modules.get(self.capability, source, defines)
    }

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// What the work ran into.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.stream.synchronize()
    }
}

impl Stream {
    /// Waits for all work in it.
    ///
    /// # Errors
    /// What the work ran into.
    pub fn synchronize(self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as its device.
        check(
            unsafe { sys::cuStreamSynchronize(self.0) },
            "cuStreamSynchronize",
        )
    }

    /// Whether all work in it is done.
    ///
    /// # Errors
    /// What the work ran into.
    pub fn is_idle(self) -> Result<bool, CudaError> {
        // SAFETY: as above.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuStreamQuery").map(|()| true),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nothing else holds the handles any more; errors at the end of a context have no reader.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamDestroy_v2(self.stream.0);
            self.modules.unload();
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

fn require_driver() -> Result<(), CudaError> {
    // SAFETY: loading the driver library runs its initialisers, nothing of ours.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(CudaError::MissingLibrary {
        what: "NVIDIA driver",
        names: vec!["libcuda.so.1".to_owned(), "libcuda.so".to_owned()],
        place: library_path(),
        fix: "install the driver, or pass its folder into the container",
    })
}

/// Where the loader looks, in words.
pub(crate) fn library_path() -> String {
    match std::env::var("LD_LIBRARY_PATH") {
        Ok(path) if !path.is_empty() => {
            format!("in LD_LIBRARY_PATH={path} and the system's library folders")
        }
        _ => "in the system's library folders (LD_LIBRARY_PATH is not set)".to_owned(),
    }
}

/// # Safety
/// `device` must come from `cuDeviceGet`.
unsafe fn attribute(device: CUdevice, which: Attribute) -> Result<u32, CudaError> {
    let mut value: c_int = 0;
    // SAFETY: a valid out-pointer.
    check(
        unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) },
        "cuDeviceGetAttribute",
    )?;
    Ok(value.max(0) as u32)
}

/// # Safety
/// `device` must come from `cuDeviceGet`.
unsafe fn device_name(device: CUdevice) -> Result<String, CudaError> {
    let mut buffer = [0; 128];
    // SAFETY: the length is the buffer's; the driver ends the name with a zero.
    unsafe {
        check(
            sys::cuDeviceGetName(buffer.as_mut_ptr(), buffer.len() as c_int, device),
            "cuDeviceGetName",
        )?;
        Ok(CStr::from_ptr(buffer.as_ptr())
            .to_string_lossy()
            .into_owned())
    }
}
