use std::path::PathBuf;

use cudarc::driver::sys::CUresult;
use treespec_engine::EngineError;

/// What can go wrong between this process and a GPU. Messages are one line.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The driver or the kernel compiler is not installed.
    #[error("no {what}: looked for {} {place}; {fix}", names.join(", "))]
    MissingLibrary {
        /// What the library is.
        what: &'static str,
        /// File names that were tried.
        names: Vec<String>,
        /// Where they were looked for.
        place: String,
        /// What the operator can do.
        fix: &'static str,
    },
    /// The driver is there but this device is not.
    #[error("no device cuda:{ordinal}: the driver sees {count} device(s)")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// Devices that the driver sees.
        count: usize,
    },
    /// The device is too old for the kernels.
    #[error(
        "cuda:{ordinal} ({name}) has compute capability {major}.{minor}; the kernels need 9.0 or later"
    )]
    TooOld {
        /// The device asked for.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Major compute capability.
        major: u32,
        /// Minor compute capability.
        minor: u32,
    },
    /// A kernel file does not compile for this device.
    #[error("kernel file {name} does not compile: {log}")]
    Compile {
        /// The file.
        name: &'static str,
        /// First line of the compiler's complaint.
        log: String,
    },
    /// The device has less free memory than is needed.
    #[error("{what} needs {wanted_bytes} bytes of device memory and {free_bytes} are free")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes free at that time.
        free_bytes: u64,
    },
    /// A call of the driver failed. Sticky errors end the context: nothing works after them.
    #[error("{call} failed: {}", name_of(*code))]
    Driver {
        /// The call.
        call: &'static str,
        /// What the driver answered.
        code: CUresult,
    },
    /// A shape that the kernels do not cover.
    #[error("{0}")]
    Unsupported(String),
    /// The kernel cache cannot be written; only a warning where it happens.
    #[error("cannot write the kernel cache {path}: {source}", path = path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl CudaError {
    /// True when the context is lost and the process must end.
    pub fn is_sticky(&self) -> bool {
        use CUresult as Code;
        match self {
            Self::Driver { code, .. } => !matches!(
                code,
                Code::CUDA_ERROR_INVALID_VALUE
                    | Code::CUDA_ERROR_OUT_OF_MEMORY
                    | Code::CUDA_ERROR_NOT_FOUND
                    | Code::CUDA_ERROR_INVALID_IMAGE
                    | Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
            ),
            _ => false,
        }
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory {
                what,
                wanted_bytes,
                free_bytes,
            } => Self::OutOfDeviceMemory {
                wanted_bytes,
                free_bytes,
                what,
            },
            CudaError::Driver {
                call,
                code: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            } => Self::OutOfDeviceMemory {
                wanted_bytes: 0,
                free_bytes: 0,
                what: format!("{call} (the driver does not say how much)"),
            },
            error if error.is_sticky() => Self::DeviceLost(error.to_string()),
            error => Self::Device(error.to_string()),
        }
    }
}

/// The driver's own name of a result, for example `CUDA_ERROR_ILLEGAL_ADDRESS`.
fn name_of(code: CUresult) -> String {
    format!("{code:?}")
}

/// Turns a driver result into an error that names the call.
pub(crate) fn check(code: CUresult, call: &'static str) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Driver { call, code }),
    }
}
