//! How fast this device's memory is: the ceiling that forwards are measured against.

use std::sync::Arc;

use cudarc::driver::sys;

use crate::error::check;
use crate::{CudaError, Device, DeviceBuffer, Event};

/// Bytes of the copied buffer, many times the L2 cache.
const BYTES: usize = 2 << 30;

/// Bytes per second of a device-to-device copy, bytes read plus bytes written: the median of nine.
///
/// # Errors
/// When the memory for it is not there, or the device is lost.
pub fn copy_bandwidth(device: &Arc<Device>) -> Result<f64, CudaError> {
    let source = DeviceBuffer::<u32>::zeroed(device, BYTES / 4)?;
    let target = DeviceBuffer::<u32>::zeroed(device, BYTES / 4)?;
    let mut seconds = Vec::new();
    for _ in 0..10 {
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        start.record(device.stream())?;
        // SAFETY: both buffers have this many bytes and live until the copy has ended.
        check(
            unsafe {
                sys::cuMemcpyDtoDAsync_v2(target.ptr().0, source.ptr().0, BYTES, device.stream().0)
            },
            "cuMemcpyDtoDAsync",
        )?;
        end.record(device.stream())?;
        end.synchronize()?;
        seconds.push(f64::from(Event::elapsed_ms(&start, &end)?) / 1e3);
    }
    // The first one warms up.
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    Ok(2.0 * BYTES as f64 / seconds[seconds.len() / 2])
}
