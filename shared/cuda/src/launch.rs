//! Launching a kernel.

use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID_enum as AttributeId, CUlaunchAttributeValue,
    CUlaunchConfig,
};

use crate::error::check;
use crate::{CudaError, Device, DevicePtr, Event, Function};

/// A value that can be an argument of a kernel.
pub trait Argument: Copy {
    /// Its bits, in the low bytes.
    fn bits(self) -> u64;
}

impl Argument for DevicePtr {
    fn bits(self) -> u64 {
        self.0
    }
}

impl Argument for u32 {
    fn bits(self) -> u64 {
        u64::from(self)
    }
}

impl Argument for u64 {
    fn bits(self) -> u64 {
        self
    }
}

impl Argument for f32 {
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }
}

const MOST_ARGUMENTS: usize = 40;

/// A kernel with its grid and arguments, ready to run.
pub struct Launch<'a> {
    function: &'a Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    cluster: u32,
    dependent: bool,
    arguments: [u64; MOST_ARGUMENTS],
    count: usize,
}

impl<'a> Launch<'a> {
    /// One block of 32 threads until told otherwise.
    pub fn new(function: &'a Function) -> Self {
        Self {
            function,
            grid: [1, 1, 1],
            block: 32,
            shared: 0,
            cluster: 1,
            dependent: true,
            arguments: [0; MOST_ARGUMENTS],
            count: 0,
        }
    }

    /// Blocks.
    #[must_use]
    pub fn grid(mut self, x: usize, y: usize, z: usize) -> Self {
        self.grid = [x as u32, y as u32, z as u32];
        self
    }

    /// Threads of a block.
    #[must_use]
    pub fn block(mut self, threads: usize) -> Self {
        self.block = threads as u32;
        self
    }

    /// Bytes of dynamic shared memory.
    #[must_use]
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    /// Blocks of a cluster along x.
    #[must_use]
    pub fn cluster(mut self, x: u32) -> Self {
        self.cluster = x;
        self
    }

    /// Whether it may start before its predecessor ends (the default). Then every thread must wait for it.
    #[must_use]
    pub fn pdl(mut self, dependent: bool) -> Self {
        self.dependent = dependent;
        self
    }

    /// The next argument.
    ///
    /// # Panics
    /// With more arguments than any kernel here has.
    #[must_use]
    pub fn arg(mut self, value: impl Argument) -> Self {
        self.arguments[self.count] = value.bits();
        self.count += 1;
        self
    }

    /// Puts it into the device's stream.
    ///
    /// # Errors
    /// When the driver refuses the launch; faults of the kernel itself come with a later call.
    pub fn run(mut self, device: &Arc<Device>) -> Result<(), CudaError> {
        let mut profile = device
            .profile
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let started = match &mut *profile {
            Some(profile) => Some(profile.start(device)?),
            None => None,
        };
        // Timed kernels run one after the other: an overlap has no owner.
        let dependent = self.dependent && device.dependent_launch() && started.is_none();
        self.submit(device, dependent)?;
        if let (Some(profile), Some(started)) = (&mut *profile, started) {
            profile.end(device, self.function.name, started)?;
        }
        Ok(())
    }

    fn submit(&mut self, device: &Arc<Device>, dependent: bool) -> Result<(), CudaError> {
        let mut attributes = [attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE); 2];
        let mut attribute_count = 0;
        if dependent {
            let which = AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[attribute_count] = attribute(which);
            attributes[attribute_count]
                .value
                .programmaticStreamSerializationAllowed = 1;
            attribute_count += 1;
        }
        if self.cluster > 1 {
            attributes[attribute_count] =
                attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            // SAFETY: writing a field of a union of plain numbers.
            unsafe {
                let cluster = &mut attributes[attribute_count].value.clusterDim;
                cluster.x = self.cluster;
                cluster.y = 1;
                cluster.z = 1;
            }
            attribute_count += 1;
        }
        let config = CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: device.stream().0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attribute_count as u32,
        };
        let mut parameters = [ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        for (parameter, argument) in parameters.iter_mut().zip(&mut self.arguments) {
            *parameter = ptr::from_mut(argument).cast();
        }
        // SAFETY: the arguments are those that the kernel's wrapper lists; the driver copies them during the call.
        check(
            unsafe {
                sys::cuLaunchKernelEx(
                    &raw const config,
                    self.function.handle,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            },
            "cuLaunchKernelEx",
        )
    }
}

fn attribute(id: AttributeId) -> CUlaunchAttribute {
    CUlaunchAttribute {
        id,
        pad: [0; 4],
        value: CUlaunchAttributeValue {
            pad: [0; size_of::<CUlaunchAttributeValue>()],
        },
    }
}

/// Times of single kernels, while it is switched on.
pub(crate) struct Profile {
    spans: Vec<(&'static str, Event, Event)>,
}

impl Profile {
    fn start(&mut self, device: &Arc<Device>) -> Result<Event, CudaError> {
        let event = Event::new(device)?;
        event.record(device.stream())?;
        Ok(event)
    }

    fn end(
        &mut self,
        device: &Arc<Device>,
        name: &'static str,
        started: Event,
    ) -> Result<(), CudaError> {
        let ended = self.start(device)?;
        self.spans.push((name, started, ended));
        Ok(())
    }
}

/// Runs `work` and returns the milliseconds of each of its kernels, in order of their launch.
///
/// # Errors
/// What `work` returns, or a fault of the device.
pub fn profile_kernels<E: From<CudaError>>(
    device: &Arc<Device>,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<Vec<(&'static str, f32)>, E> {
    let slot = || {
        device
            .profile
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    };
    *slot() = Some(Profile { spans: Vec::new() });
    let outcome = work();
    let profile = slot().take();
    outcome?;
    device.stream().synchronize()?;
    let spans = profile.map(|profile| profile.spans).unwrap_or_default();
    spans
        .iter()
        .map(|(name, started, ended)| Ok((*name, Event::elapsed_ms(started, ended)?)))
        .collect()
}
