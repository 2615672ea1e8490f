//! Memory: on the device, and on the host where kernels can reach it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;
use std::{ptr, slice};

use cudarc::driver::sys::{self, CUdeviceptr};

use crate::error::check;
use crate::{CudaError, Device};

/// Values that may be copied to and from a device as bytes.
///
/// # Safety
/// Every bit pattern must be a value, and there must be no padding.
pub unsafe trait DeviceValue: Copy + Default + Send + Sync + 'static {}

macro_rules! device_values {
    ($($value:ty),*) => { $(
        // SAFETY: plain numbers.
        unsafe impl DeviceValue for $value {}
    )* };
}
device_values!(u8, u16, u32, u64, i32, f32, f64, half::bf16);

/// Address in device memory, or of host memory that the device reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Says "not there" to a kernel.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further on.
    #[must_use]
    pub fn add_bytes(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// `len` values in device memory.
pub struct DeviceBuffer<T> {
    device: Arc<Device>,
    pointer: CUdeviceptr,
    len: usize,
    values: PhantomData<T>,
}

impl<T: DeviceValue> DeviceBuffer<T> {
    /// Memory with unknown contents.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn uninit(device: &Arc<Device>, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(16);
        let mut pointer: CUdeviceptr = 0;
        // SAFETY: a valid out-pointer.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (free_bytes, _) = device.memory()?;
            return Err(CudaError::OutOfMemory {
                what: "a device buffer".to_owned(),
                wanted_bytes: bytes as u64,
                free_bytes,
            });
        }
        check(code, "cuMemAlloc")?;
        Ok(Self {
            device: device.clone(),
            pointer,
            len,
            values: PhantomData,
        })
    }

    /// Memory with all bits zero.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn zeroed(device: &Arc<Device>, len: usize) -> Result<Self, CudaError> {
        let buffer = Self::uninit(device, len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn from_slice(device: &Arc<Device>, values: &[T]) -> Result<Self, CudaError> {
        let buffer = Self::uninit(device, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Sets every byte, after all work in the stream; waits until it is done.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn fill_bytes(&self, byte: u8) -> Result<(), CudaError> {
        self.device.bind()?;
        let stream = self.device.stream();
        // SAFETY: the range is this buffer.
        check(
            unsafe {
                sys::cuMemsetD8Async(self.pointer, byte, self.len * size_of::<T>(), stream.0)
            },
            "cuMemsetD8Async",
        )?;
        stream.synchronize()
    }

    /// Values.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where it begins.
    pub fn ptr(&self) -> DevicePtr {
        DevicePtr(self.pointer)
    }

    /// Where value `index` is.
    pub fn offset(&self, index: usize) -> DevicePtr {
        DevicePtr(self.pointer + (index * size_of::<T>()) as u64)
    }

    /// Overwrites the first values, after all work in the stream; waits until it is done.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when they do not fit, or when the device is lost.
    pub fn write(&self, values: &[T]) -> Result<(), CudaError> {
        self.write_at(0, values)
    }

    /// Overwrites the values from `index`, see [`DeviceBuffer::write`].
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn write_at(&self, index: usize, values: &[T]) -> Result<(), CudaError> {
        if index + values.len() > self.len {
            return Err(CudaError::Unsupported(format!(
                "{} values at {index} in a device buffer of {}",
                values.len(),
                self.len
            )));
        }
        self.device.bind()?;
        let stream = self.device.stream();
        // SAFETY: the range was checked; the copy is done before `values` can go.
        check(
            unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    self.offset(index).0,
                    values.as_ptr().cast::<c_void>(),
                    size_of_val(values),
                    stream.0,
                )
            },
            "cuMemcpyHtoDAsync",
        )?;
        stream.synchronize()
    }

    /// Copies a range of `source` to the values from `index`, behind all work in the stream, and does not wait for it:
    /// until then `source` must neither change nor go.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn copy_from(
        &self,
        index: usize,
        source: &PinnedBuffer<T>,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        if index + range.len() > self.len || range.end > source.len {
            return Err(CudaError::Unsupported(format!(
                "a copy of values {range:?} of {} to {index} in a device buffer of {}",
                source.len, self.len
            )));
        }
        self.device.bind()?;
        // SAFETY: both ranges were checked; a pinned buffer waits for the stream before its memory goes.
        check(
            unsafe {
                sys::cuMemcpyHtoDAsync_v2(
                    self.offset(index).0,
                    source.host.add(range.start).cast::<c_void>(),
                    range.len() * size_of::<T>(),
                    self.device.stream().0,
                )
            },
            "cuMemcpyHtoDAsync",
        )
    }

    /// All values, after all work in the stream.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn read(&self) -> Result<Vec<T>, CudaError> {
        self.read_range(0, self.len)
    }

    /// `len` values from `index`, after all work in the stream.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn read_range(&self, index: usize, len: usize) -> Result<Vec<T>, CudaError> {
        if index + len > self.len {
            return Err(CudaError::Unsupported(format!(
                "{len} values at {index} of a device buffer of {}",
                self.len
            )));
        }
        self.device.bind()?;
        let mut values = vec![T::default(); len];
        let stream = self.device.stream();
        // SAFETY: the range was checked; the copy is done before `values` is used.
        check(
            unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    values.as_mut_ptr().cast::<c_void>(),
                    self.offset(index).0,
                    size_of_val(values.as_slice()),
                    stream.0,
                )
            },
            "cuMemcpyDtoHAsync",
        )?;
        stream.synchronize()?;
        Ok(values)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by cuMemAlloc and freed once. cuMemFree waits for work that still uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.pointer) };
        }
    }
}

/// `len` values in host memory that kernels read and write in place.
pub struct PinnedBuffer<T> {
    device: Arc<Device>,
    host: *mut T,
    pointer: CUdeviceptr,
    len: usize,
}

// SAFETY: the buffer owns its memory.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: shared access only reads.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: DeviceValue> PinnedBuffer<T> {
    /// Memory with all bits zero.
    ///
    /// # Errors
    /// When the host has no more memory to pin.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let bytes = (len * size_of::<T>()).max(16);
        let mut host: *mut c_void = ptr::null_mut();
        let mut pointer: CUdeviceptr = 0;
        // SAFETY: valid out-pointers; the memory has `bytes` bytes.
        unsafe {
            check(
                sys::cuMemHostAlloc(
                    &raw mut host,
                    bytes,
                    sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE,
                ),
                "cuMemHostAlloc",
            )?;
            ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            check(
                sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, host, 0),
                "cuMemHostGetDevicePointer",
            )?;
        }
        Ok(Self {
            device: device.clone(),
            host: host.cast(),
            pointer,
            len,
        })
    }

    /// Where kernels find it.
    pub fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.pointer)
    }

    /// Where kernels find value `index`.
    pub fn device_offset(&self, index: usize) -> DevicePtr {
        DevicePtr(self.pointer + (index * size_of::<T>()) as u64)
    }

    /// The values. What a kernel writes is there once the stream was synchronised or a flag of it was seen.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: allocated with this length and initialised.
        unsafe { slice::from_raw_parts(self.host, self.len) }
    }

    /// The values, to be read by kernels that are launched later.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive on the host.
        unsafe { slice::from_raw_parts_mut(self.host, self.len) }
    }

    /// One value that a running kernel may be writing.
    ///
    /// # Panics
    /// When `index` is outside the buffer.
    pub fn read_volatile(&self, index: usize) -> T {
        assert!(index < self.len, "index {index} of {}", self.len);
        // SAFETY: inside the buffer.
        unsafe { ptr::read_volatile(self.host.add(index)) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated by cuMemHostAlloc and freed once, after the work that may still use it.
            unsafe {
                let _ = self.device.stream().synchronize();
                let _ = sys::cuMemFreeHost(self.host.cast());
            }
        }
    }
}
