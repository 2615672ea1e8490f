//! Linear layers with what follows them: `y[n][r] = scale[n] * sum over k of W[r][k] * x[n][k]` in bf16 with f32 sums.

mod pack;
mod prefill;
mod shape;
mod tile;

use std::sync::Arc;

pub use pack::PackedLinear;
pub(crate) use pack::RANDOM_SOURCE;
pub(crate) use prefill::{PrefillLinear, SOURCE as PREFILL_SOURCE};
pub use shape::{Layout, LinearShape};
pub use tile::LinearTuning;
use tile::{Plan, Problem, TILES};

use crate::{CudaError, Device, DevicePtr, Function, KernelSource, Launch, PackedRows, row_bucket};

pub(crate) const SOURCE: KernelSource = KernelSource {
    name: "linear.cu",
    text: concat!(
        "#line 1 \"linear_copies.cuh\"\n",
        include_str!("kernels/linear_copies.cuh"),
        "\n#line 1 \"linear_epilogue.cuh\"\n",
        include_str!("kernels/linear_epilogue.cuh"),
        "\n#line 1 \"linear.cu\"\n",
        include_str!("kernels/linear.cu")
    ),
};

/// Threads of a block, as in the kernel file.
const THREADS: usize = 256;

/// The scale of each row that stands for an RMS norm: `1 / sqrt(sum(parts) / width + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct RowScale {
    /// Parts of the row's sum of squares, f32 `[rows][count]`. Not the buffer that the same launch writes parts to.
    pub parts: DevicePtr,
    /// Parts of a row.
    pub count: u32,
    /// The norm's epsilon.
    pub eps: f32,
    /// Values that were squared.
    pub width: u32,
}

/// A second copy of the residual stream, packed, among the columns of other layers.
#[derive(Debug, Clone, Copy)]
pub struct Tap {
    /// Packed bf16 rows in the row bucket of the launch.
    pub out: DevicePtr,
    /// Their depth in blocks of 32.
    pub k32: u32,
    /// Where this layer's values begin, a multiple of 8.
    pub offset: u32,
}

/// What becomes of the sums. All f32 matrices have 16-byte aligned rows unless said otherwise.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue {
    /// f32 `out[n][ld]`, only 4-byte aligned.
    Store {
        /// The result.
        out: DevicePtr,
        /// Values from row to row.
        ld: usize,
    },
    /// Adds to the residual stream and prepares the next norm: the next linear layer gets `bf16(x * next_weight)` and
    /// the parts of the sum of squares. The matrix has a multiple of 8 rows.
    Residual {
        /// The residual stream, f32 `[rows][matrix rows]`.
        x: DevicePtr,
        /// Weight of the next norm, f32; null for all ones.
        next_weight: DevicePtr,
        /// Packed input of the next layer; may be null.
        next: PackedRows,
        /// f32 `[rows][`[`PackedLinear::parts`]`]`; may be null.
        parts: DevicePtr,
        /// `bf16(x)` for a drafter.
        tap: Option<Tap>,
    },
    /// `bf16(silu(gate) * up)`, packed; for [`Layout::GateUp`].
    SwiGlu {
        /// Packed rows as deep as the gate has rows.
        out: PackedRows,
    },
    /// Logits and, per group of 64, their maximum and the sum of `exp(logit - maximum)`; for [`Layout::Head`]. Logits
    /// behind the last row up to the end of its group are negative infinity, and no part of the sums.
    Head {
        /// f32 `[rows][ld]`.
        logits: DevicePtr,
        /// Values from row to row: a multiple of 4, at least 64 for every group.
        ld: usize,
        /// f32 `[rows][`[`PackedLinear::groups`]`]`; NaN does not count.
        group_max: DevicePtr,
        /// f32 `[rows][`[`PackedLinear::groups`]`]`; 0 where the maximum is negative infinity.
        group_sum: DevicePtr,
    },
}

/// The kernels of `linear.cu`.
pub struct LinearKernels {
    device: Arc<Device>,
    functions: Vec<Function>,
    tuning: LinearTuning,
}

/// The epilogue's arguments of a kernel.
#[derive(Default)]
struct Output {
    kind: u32,
    out: DevicePtr,
    ld: u32,
    gain: DevicePtr,
    packed: DevicePtr,
    parts: DevicePtr,
    extra: DevicePtr,
    extra_k32: u32,
    extra_offset: u32,
}

impl LinearKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::load_tuned(device, LinearTuning::default())
    }

    /// Compiles them with other settings, for measurements.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn load_tuned(device: &Arc<Device>, tuning: LinearTuning) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &tuning.defines())?;
        let functions = TILES
            .iter()
            .map(|tile| {
                let function = module.function(tile.name)?;
                function.allow_shared_memory(device.shared_memory_per_block())?;
                Ok(function)
            })
            .collect::<Result<_, CudaError>>()?;
        Ok(Self {
            device: device.clone(),
            functions,
            tuning,
        })
    }

    /// Multiplies all rows of the bucket of `x`.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for what does not go together, or when the launch is refused.
    pub fn launch(
        &self,
        linear: &PackedLinear,
        x: PackedRows,
        scale: Option<RowScale>,
        epilogue: Epilogue,
    ) -> Result<(), CudaError> {
        check_input(linear, x)?;
        let output = output(linear, x, epilogue)?;
        let plan = self.plan(linear, x.rows)?;
        let split = linear.shape().split as u32;
        let scale = scale.unwrap_or(RowScale {
            parts: DevicePtr::NULL,
            count: 0,
            eps: 0.0,
            width: 1,
        });
        Launch::new(&self.functions[plan.tile])
            .grid(plan.grid[0], plan.grid[1], 1)
            .block(THREADS)
            .shared(plan.shared)
            .cluster(split)
            .arg(linear.ptr())
            .arg(x.ptr)
            .arg(linear.rows() as u32)
            .arg(x.k32)
            .arg(x.rows as u32)
            .arg(split)
            .arg(plan.stages as u32)
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
            .run(&self.device)
    }

    /// The kernel, blocks and bytes of shared memory of a launch in one line, for reports.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] when there is no kernel for it.
    pub fn describe(&self, linear: &PackedLinear, rows: usize) -> Result<String, CudaError> {
        let plan = self.plan(linear, rows)?;
        let [x, y] = plan.grid;
        Ok(format!(
            "{} {x}x{y} split {} stages {} {} KiB",
            TILES[plan.tile].name,
            linear.shape().split,
            plan.stages,
            plan.shared >> 10
        ))
    }

    fn plan(&self, linear: &PackedLinear, rows: usize) -> Result<Plan, CudaError> {
        Problem {
            panels: linear.panels(),
            blocks: linear.blocks(),
            shape: linear.shape(),
            rows,
            sm_count: self.device.sm_count() as usize,
            shared: self.device.shared_memory_per_block() as usize,
        }
        .plan(&self.tuning)
    }
}

fn wrong<T>(linear: &PackedLinear, what: &str) -> Result<T, CudaError> {
    let (rows, depth, layout) = (linear.rows(), linear.depth(), linear.layout());
    Err(CudaError::Unsupported(format!(
        "linear layer of {rows} by {depth} packed as {layout:?}: {what}"
    )))
}

fn check_input(linear: &PackedLinear, x: PackedRows) -> Result<(), CudaError> {
    if x.k32 as usize != linear.blocks() {
        return wrong(linear, &format!("the input has {} blocks of 32", x.k32));
    }
    if x.rows == 0 || row_bucket(x.rows) != x.rows {
        return wrong(linear, &format!("{} rows are no row bucket", x.rows));
    }
    Ok(())
}

fn output(linear: &PackedLinear, x: PackedRows, epilogue: Epilogue) -> Result<Output, CudaError> {
    let packed = |rows: PackedRows, width: usize| {
        if rows.k32 as usize != width.div_ceil(32) || rows.rows != x.rows {
            return wrong(linear, &format!("its output goes to {rows:?}"));
        }
        Ok(rows.ptr)
    };
    let is_gate_up = linear.layout() == Layout::GateUp;
    match epilogue {
        _ if is_gate_up != matches!(epilogue, Epilogue::SwiGlu { .. }) => wrong(
            linear,
            "gate and up go with the SwiGLU epilogue, and only they",
        ),
        Epilogue::Store { out, ld } if ld >= linear.rows() => Ok(Output {
            kind: 0,
            out,
            ld: ld as u32,
            ..Output::default()
        }),
        Epilogue::Residual {
            x,
            next_weight,
            next,
            parts,
            tap,
        } if linear.rows().is_multiple_of(8) => {
            let tap = tap.unwrap_or(Tap {
                out: DevicePtr::NULL,
                k32: 0,
                offset: 0,
            });
            let tap_end = tap.offset as usize + linear.rows();
            if tap.out != DevicePtr::NULL
                && (tap.offset % 8 != 0 || tap_end > tap.k32 as usize * 32)
            {
                return wrong(linear, &format!("its output is tapped to {tap:?}"));
            }
            Ok(Output {
                kind: 1,
                out: x,
                ld: linear.rows() as u32,
                gain: next_weight,
                packed: if next.ptr == DevicePtr::NULL {
                    DevicePtr::NULL
                } else {
                    packed(next, linear.rows())?
                },
                parts,
                extra: tap.out,
                extra_k32: tap.k32,
                extra_offset: tap.offset,
            })
        }
        Epilogue::SwiGlu { out } => Ok(Output {
            kind: 2,
            packed: packed(out, linear.rows() / 2)?,
            ..Output::default()
        }),
        Epilogue::Head {
            logits,
            ld,
            group_max,
            group_sum,
        } if linear.layout() == Layout::Head && ld % 4 == 0 && ld >= linear.groups() * 64 => {
            Ok(Output {
                kind: 3,
                out: logits,
                ld: ld as u32,
                parts: group_max,
                extra: group_sum,
                ..Output::default()
            })
        }
        epilogue => wrong(linear, &format!("it cannot end in {epilogue:?}")),
    }
}
