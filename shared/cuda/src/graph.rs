//! CUDA graphs and events.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::error::check;
use crate::{CudaError, Device, Stream};

/// A captured sequence of launches that one call starts.
pub struct Graph {
    device: Arc<Device>,
    executable: CUgraphExec,
}

// SAFETY: an opaque handle that the driver resolves; launches take `&self` and go into one stream.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures what `launches` puts into the device's stream. Nothing runs until [`Graph::launch`]. `launches` must not
    /// allocate, copy to or from pageable memory, or synchronise.
    ///
    /// # Errors
    /// What `launches` returns, or when the capture is not a graph.
    pub fn capture<E: From<CudaError>>(
        device: &Arc<Device>,
        launches: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        device.bind()?;
        let stream = device.stream();
        // SAFETY: the stream lives as long as the device.
        check(
            unsafe {
                sys::cuStreamBeginCapture_v2(
                    stream.0,
                    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                )
            },
            "cuStreamBeginCapture",
        )?;
        let outcome = launches();
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: valid out-pointer. The capture ends also when a launch failed.
        let ended = check(
            unsafe { sys::cuStreamEndCapture(stream.0, &raw mut graph) },
            "cuStreamEndCapture",
        );
        outcome?;
        ended?;
        let mut executable: CUgraphExec = ptr::null_mut();
        // SAFETY: the graph was just captured; the executable does not need it any more afterwards.
        let instantiated = unsafe {
            let code = sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0);
            let _ = sys::cuGraphDestroy(graph);
            check(code, "cuGraphInstantiate")
        };
        instantiated?;
        Ok(Self {
            device: device.clone(),
            executable,
        })
    }

    /// Puts all of it into the device's stream.
    ///
    /// # Errors
    /// When the driver refuses it.
    pub fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: handles of a live device.
        check(
            unsafe { sys::cuGraphLaunch(self.executable, self.device.stream().0) },
            "cuGraphLaunch",
        )
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: destroyed once; the driver keeps what still runs.
            let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

/// A point in a stream whose time can be read.
pub struct Event {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: an opaque handle.
unsafe impl Send for Event {}

impl Event {
    /// An event that was not recorded yet.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        device.bind()?;
        let mut event: CUevent = ptr::null_mut();
        // SAFETY: valid out-pointer.
        check(
            unsafe { sys::cuEventCreate(&raw mut event, 0) },
            "cuEventCreate",
        )?;
        Ok(Self {
            device: device.clone(),
            event,
        })
    }

    /// Marks the present end of `stream`.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: live handles.
        check(
            unsafe { sys::cuEventRecord(self.event, stream.0) },
            "cuEventRecord",
        )
    }

    /// Waits until the stream has come here.
    ///
    /// # Errors
    /// What the work before it ran into.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: live handle.
        check(
            unsafe { sys::cuEventSynchronize(self.event) },
            "cuEventSynchronize",
        )
    }

    /// Milliseconds between two events that the stream has passed.
    ///
    /// # Errors
    /// When it has not passed them.
    pub fn elapsed_ms(start: &Self, end: &Self) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: live handles and a valid out-pointer.
        check(
            unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.event, end.event) },
            "cuEventElapsedTime",
        )?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
