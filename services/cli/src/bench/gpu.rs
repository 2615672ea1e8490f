//! The GPU of a measurement. Without the feature `cuda` there is none, and asking for one is an error.

#[cfg(not(feature = "cuda"))]
pub(super) use absent::Gpu;
#[cfg(feature = "cuda")]
pub(super) use cuda::Gpu;

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::Arc;

    use anyhow::Result;
    use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TargetConfig};
    use treespec_cuda::{CudaTarget, Device};
    use treespec_engine::{Backend, DeviceChoice, EngineError};

    /// An open device.
    #[derive(Clone)]
    pub(in crate::bench) struct Gpu(pub(in crate::bench) Arc<Device>);

    impl Gpu {
        /// Opens the GPU of `device`; `None` for the CPU.
        ///
        /// # Errors
        /// When there is no such GPU.
        pub(in crate::bench) fn open(device: DeviceChoice) -> Result<Option<Self>> {
            match device {
                DeviceChoice::Cpu => Ok(None),
                DeviceChoice::Cuda(ordinal) => Ok(Some(Self(
                    Device::open(ordinal).map_err(EngineError::from)?,
                ))),
            }
        }

        /// For example `NVIDIA H200`.
        pub(in crate::bench) fn name(&self) -> String {
            self.0.name().to_owned()
        }

        /// Bytes a second that a copy inside the device's memory reads and writes.
        ///
        /// # Errors
        /// When the device is lost.
        pub(in crate::bench) fn copy_bandwidth(&self) -> Result<f64> {
            Ok(treespec_cuda::copy_bandwidth(&self.0)?)
        }

        /// The kernels of `work` with their milliseconds, in order of their launch.
        ///
        /// # Errors
        /// What `work` returns.
        pub(in crate::bench) fn profile(
            &self,
            work: impl FnOnce() -> Result<()>,
        ) -> Result<Vec<(&'static str, f32)>> {
            treespec_cuda::profile_kernels(&self.0, work)
        }

        /// A target on this device. Unlike a service's, it can be profiled.
        ///
        /// # Errors
        /// What is wrong with the checkpoints, or no memory.
        pub(in crate::bench) fn load_target(
            &self,
            target: &TargetCheckpoint,
            drafter: Option<&DrafterCheckpoint>,
            kv_tokens: usize,
        ) -> Result<Box<dyn Backend>> {
            let target = CudaTarget::load(&self.0, target, drafter, kv_tokens, &mut |_| {})?;
            Ok(Box::new(target))
        }

        /// A target of these sizes with random weights.
        ///
        /// # Errors
        /// No memory.
        pub(in crate::bench) fn random_target(
            &self,
            config: &TargetConfig,
            kv_tokens: usize,
        ) -> Result<Box<dyn Backend>> {
            Ok(Box::new(CudaTarget::random(&self.0, config, kv_tokens)?))
        }
    }
}

#[cfg(not(feature = "cuda"))]
mod absent {
    use anyhow::Result;
    use treespec_checkpoint::{DrafterCheckpoint, TargetCheckpoint, TargetConfig};
    use treespec_engine::{Backend, DeviceChoice, EngineError};

    /// There is none.
    #[derive(Clone)]
    pub(in crate::bench) enum Gpu {}

    impl Gpu {
        /// `None` for the CPU.
        ///
        /// # Errors
        /// [`EngineError::DeviceNotBuilt`] for a GPU.
        pub(in crate::bench) fn open(device: DeviceChoice) -> Result<Option<Self>> {
            match device {
                DeviceChoice::Cpu => Ok(None),
                DeviceChoice::Cuda(_) => Err(EngineError::DeviceNotBuilt(device).into()),
            }
        }

        pub(in crate::bench) fn name(&self) -> String {
            match *self {}
        }

        pub(in crate::bench) fn copy_bandwidth(&self) -> Result<f64> {
            match *self {}
        }

        pub(in crate::bench) fn profile(
            &self,
            _: impl FnOnce() -> Result<()>,
        ) -> Result<Vec<(&'static str, f32)>> {
            match *self {}
        }

        pub(in crate::bench) fn load_target(
            &self,
            _: &TargetCheckpoint,
            _: Option<&DrafterCheckpoint>,
            _: usize,
        ) -> Result<Box<dyn Backend>> {
            match *self {}
        }

        pub(in crate::bench) fn random_target(
            &self,
            _: &TargetConfig,
            _: usize,
        ) -> Result<Box<dyn Backend>> {
            match *self {}
        }
    }
}
