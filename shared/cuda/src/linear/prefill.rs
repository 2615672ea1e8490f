//! Linear layers for the many rows of a prompt by a library's matrix product: faster than ours, and a row's bits depend
//! on the rows beside it.
//!
//! The weights stay packed. Each launch unpacks them and its rows to plain matrices, has cuBLASLt multiply them, and
//! ends with the same epilogues as `linear.cu`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self as cublas, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t,
    cudaDataType_t,
};
use half::bf16;

use super::shape::{BLOCK_DEPTH, PANEL_ROWS};
use super::{Epilogue, Output, PackedLinear, RowScale, THREADS, check_input, output, wrong};
use crate::device::library_path;
use crate::{CudaError, Device, DeviceBuffer, DevicePtr, Function, KernelSource, Launch};
use crate::{PackedRows, row_bucket};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "prefill.cu",
    text: concat!(
        "#line 1 \"linear_copies.cuh\"\n",
        include_str!("../kernels/linear_copies.cuh"),
        "\n#line 1 \"linear_epilogue.cuh\"\n",
        include_str!("../kernels/linear_epilogue.cuh"),
        "\n#line 1 \"prefill.cu\"\n",
        include_str!("../kernels/prefill.cu")
    ),
};

/// Blocks of the packed layouts that a block of threads unpacks, as in the kernel file.
const UNPACKED_BLOCKS: usize = THREADS / 32 * 4;

/// Rows of the matrix and of the batch that a block of threads finishes, as in the kernel file.
const FINISHED: [usize; 2] = [128, 32];

/// What NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Makes cuBLASLt transpose the first matrix: `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// Linear layers over row buckets that are multiples of 64.
pub(crate) struct PrefillLinear {
    device: Arc<Device>,
    library: Library,
    unpack_weights: Function,
    unpack_rows: Function,
    finish: Function,
    /// Products by rows of the matrix, depth and row bucket.
    products: Mutex<HashMap<[usize; 3], Product>>,
    weights: DeviceBuffer<bf16>,
    input: DeviceBuffer<bf16>,
    sums: DeviceBuffer<f32>,
    workspace: DeviceBuffer<u8>,
}

impl PrefillLinear {
    /// Compiles the kernels, opens the library and allocates for the largest of `matrices` and up to `rows` rows.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`], [`CudaError::OutOfMemory`], or as [`Device::module`].
    pub(crate) fn new<'a>(
        device: &Arc<Device>,
        matrices: impl Iterator<Item = &'a PackedLinear>,
        rows: usize,
    ) -> Result<Self, CudaError> {
        let rows = row_bucket(rows);
        let (mut values, mut most_depth, mut most_rows) = (0, 0, 0);
        for matrix in matrices {
            let [height, depth] = plain(matrix);
            values = values.max(height * depth);
            most_depth = most_depth.max(depth);
            most_rows = most_rows.max(height);
        }
        let library = Library::open(device)?;
        let module = device.module(&SOURCE, &[])?;
        Ok(Self {
            library,
            unpack_weights: module.function("unpack_weights")?,
            unpack_rows: module.function("unpack_rows")?,
            finish: module.function("finish_sums")?,
            products: Mutex::default(),
            weights: DeviceBuffer::uninit(device, values)?,
            input: DeviceBuffer::uninit(device, rows * most_depth)?,
            sums: DeviceBuffer::uninit(device, rows * most_rows)?,
            workspace: DeviceBuffer::uninit(device, WORKSPACE_BYTES)?,
            device: device.clone(),
        })
    }

    /// What [`super::LinearKernels::launch`] does, not for heads.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for what does not go together or the library refuses, or when a launch is refused.
    pub(crate) fn launch(
        &self,
        linear: &PackedLinear,
        x: PackedRows,
        scale: Option<RowScale>,
        epilogue: Epilogue,
    ) -> Result<(), CudaError> {
        check_input(linear, x)?;
        let [height, depth] = plain(linear);
        let fits = height * depth <= self.weights.len()
            && x.rows * depth <= self.input.len()
            && x.rows * height <= self.sums.len();
        let is_head = matches!(epilogue, Epilogue::Head { .. });
        if !x.rows.is_multiple_of(64) || !fits || is_head {
            return wrong(linear, &format!("no prompt's product of {} rows", x.rows));
        }
        let output = output(linear, x, epilogue)?;
        let group = linear.shape().group();
        let stored_panels = linear.panels().next_multiple_of(group);
        Launch::new(&self.unpack_weights)
            .grid(unpacking(stored_panels * linear.blocks()), 1, 1)
            .block(THREADS)
            .arg(linear.ptr())
            .arg(self.weights.ptr())
            .arg(linear.panels() as u32)
            .arg(x.k32)
            .arg(group as u32)
            .run(&self.device)?;
        Launch::new(&self.unpack_rows)
            .grid(unpacking(x.rows / 8 * linear.blocks()), 1, 1)
            .block(THREADS)
            .arg(x.ptr)
            .arg(self.input.ptr())
            .arg(x.rows as u32)
            .arg(x.k32)
            .run(&self.device)?;
        self.multiply([height, depth, x.rows])?;
        self.finish(linear, x.rows, scale, &output)
    }

    /// `sums[n][r] = sum over k of weights[r][k] * input[n][k]`.
    fn multiply(&self, sizes: [usize; 3]) -> Result<(), CudaError> {
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        let product = match products.entry(sizes) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Product::plan(&self.library, sizes).map_err(refused)?)
            }
        };
        let (one, zero) = (1f32, 0f32);
        let at = |pointer: DevicePtr| pointer.0 as *mut c_void;
        // SAFETY: the descriptors are live and the matrices that they describe lie in the buffers, as the caller has
        // checked; the factors are f32, as the descriptor says. The library's opaque stream is the driver's.
        unsafe {
            cublas::matmul(
                self.library.handle,
                product.operation,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                at(self.weights.ptr()),
                product.weights,
                at(self.input.ptr()),
                product.input,
                at(self.sums.ptr()),
                product.sums,
                at(self.sums.ptr()),
                product.sums,
                &raw const product.algorithm,
                at(self.workspace.ptr()),
                WORKSPACE_BYTES,
                self.device.stream().0.cast(),
            )
        }
        .map_err(refused)
    }

    fn finish(
        &self,
        linear: &PackedLinear,
        rows: usize,
        scale: Option<RowScale>,
        output: &Output,
    ) -> Result<(), CudaError> {
        let [height, _] = plain(linear);
        let scale = scale.unwrap_or(RowScale {
            parts: DevicePtr::NULL,
            count: 0,
            eps: 0.0,
            width: 1,
        });
        Launch::new(&self.finish)
            .grid(height.div_ceil(FINISHED[0]), rows / FINISHED[1], 1)
            .block(THREADS)
            .arg(self.sums.ptr())
            .arg(height as u32)
            .arg(linear.rows() as u32)
            .arg(scale.parts)
            .arg(scale.count)
            .arg(1.0 / scale.width as f32)
            .arg(scale.eps)
            .arg(output.kind)
            .arg(output.out)
            .arg(output.ld)
            .arg(output.gain)
            .arg(output.packed)
            .arg(output.parts)
            .arg(output.extra)
            .arg(output.extra_k32)
            .arg(output.extra_offset)
            .arg(linear.shape().part_rows() as u32)
            .run(&self.device)
    }
}

impl Drop for PrefillLinear {
    fn drop(&mut self) {
        // The library's handle must outlive the work that it was asked for.
        let _ = self.device.synchronize();
    }
}

/// Rows and depth of the unpacked matrix: whole panels and whole blocks of 32.
fn plain(linear: &PackedLinear) -> [usize; 2] {
    [linear.panels() * PANEL_ROWS, linear.blocks() * BLOCK_DEPTH]
}

fn unpacking(blocks: usize) -> usize {
    blocks.div_ceil(UNPACKED_BLOCKS)
}

fn refused(error: CublasError) -> CudaError {
    CudaError::Unsupported(format!(
        "the matrix product of --prefill fast: cuBLASLt answers {:?}",
        error.0
    ))
}

/// A handle of cuBLASLt.
struct Library {
    handle: cublasLtHandle_t,
}

// SAFETY: the library allows its handle on any thread.
unsafe impl Send for Library {}
// SAFETY: as above; cuBLASLt's handles are made to be shared.
unsafe impl Sync for Library {}

impl Library {
    fn open(device: &Device) -> Result<Self, CudaError> {
        // SAFETY: loading the library runs its initialisers, nothing of ours.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::MissingLibrary {
                what: "cuBLASLt for --prefill fast",
                names: vec!["libcublasLt.so.13".to_owned(), "libcublasLt.so".to_owned()],
                place: library_path(),
                fix: "install the CUDA runtime libraries, or the Python wheel nvidia-cublas",
            });
        }
        // The handle belongs to the context that is current.
        device.bind()?;
        let handle = cublas::create_handle().map_err(refused)?;
        Ok(Self { handle })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: created above and destroyed once.
        let _ = unsafe { cublas::destroy_handle(self.handle) };
    }
}

/// A planned product: descriptions of the matrices and the algorithm that the library would take.
struct Product {
    operation: cublasLtMatmulDesc_t,
    weights: cublasLtMatrixLayout_t,
    input: cublasLtMatrixLayout_t,
    sums: cublasLtMatrixLayout_t,
    algorithm: cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions in host memory that no thread owns.
unsafe impl Send for Product {}

impl Product {
    /// For a matrix of `height` rows of `depth` values and `rows` rows of input. The library counts by columns: a plain
    /// matrix of ours is its own transposed.
    fn plan(library: &Library, [height, depth, rows]: [usize; 3]) -> Result<Self, CublasError> {
        // Each is destroyed with the product, also when a later one cannot be made.
        let mut product = Self {
            operation: ptr::null_mut(),
            weights: ptr::null_mut(),
            input: ptr::null_mut(),
            sums: ptr::null_mut(),
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let layout = |kind, rows: usize, columns: usize| {
            cublas::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
        };
        let (narrow, wide) = (cudaDataType_t::CUDA_R_16BF, cudaDataType_t::CUDA_R_32F);
        product.operation =
            cublas::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, wide)?;
        product.weights = layout(narrow, depth, height)?;
        product.input = layout(narrow, depth, rows)?;
        product.sums = layout(wide, height, rows)?;
        let preference = Preference(cublas::create_matmul_pref()?);
        let (transposed, most_workspace) = (TRANSPOSED, WORKSPACE_BYTES);
        // SAFETY: all descriptions are live, and the values have the types that the attributes want.
        unsafe {
            cublas::set_matmul_desc_attribute(
                product.operation,
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            )?;
            cublas::set_matmul_pref_attribute(
                preference.0,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const most_workspace).cast(),
                size_of::<usize>(),
            )?;
            let found = cublas::get_matmul_algo_heuristic(
                library.handle,
                product.operation,
                product.weights,
                product.input,
                product.sums,
                product.sums,
                preference.0,
            )?;
            product.algorithm = found.algo;
        }
        Ok(product)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: each was created once or is null.
        unsafe {
            if !self.operation.is_null() {
                let _ = cublas::destroy_matmul_desc(self.operation);
            }
            for layout in [self.weights, self.input, self.sums] {
                if !layout.is_null() {
                    let _ = cublas::destroy_matrix_layout(layout);
                }
            }
        }
    }
}

/// What the library is asked to heed.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once.
        let _ = unsafe { cublas::destroy_matmul_pref(self.0) };
    }
}
