//! Launches that overlap must not tear what they hand to each other.

use std::sync::Arc;

use half::bf16;
use treespec_cuda::{
    CudaError, Device, DeviceBuffer, DevicePtr, Epilogue, Graph, Layout, LinearKernels,
    LinearShape, PackedLinear, PackedRows, RowScale,
};

use super::case::{EPS, Numbers, place};

/// One round of an MLP on the residual stream.
struct Mlp {
    kernels: LinearKernels,
    gate_up: PackedLinear,
    down: PackedLinear,
    stream: DeviceBuffer<f32>,
    input: DeviceBuffer<bf16>,
    inner: DeviceBuffer<bf16>,
    parts: DeviceBuffer<f32>,
}

impl Mlp {
    fn new(
        device: &Arc<Device>,
        hidden: usize,
        width: usize,
        rows: usize,
        shapes: [(usize, usize); 2],
    ) -> Self {
        let random = |rows, depth, layout, (panels, split), seed| {
            let shape = LinearShape::new(panels, split);
            PackedLinear::random_with(device, rows, depth, layout, shape, seed, 0.02).unwrap()
        };
        let down = random(hidden, width, Layout::Plain, shapes[1], 2);
        Self {
            kernels: LinearKernels::load(device).unwrap(),
            gate_up: random(2 * width, hidden, Layout::GateUp, shapes[0], 1),
            stream: DeviceBuffer::zeroed(device, rows * hidden).unwrap(),
            input: DeviceBuffer::zeroed(device, PackedRows::len(rows, hidden)).unwrap(),
            inner: DeviceBuffer::zeroed(device, PackedRows::len(rows, width)).unwrap(),
            parts: DeviceBuffer::zeroed(device, rows * down.parts()).unwrap(),
            down,
        }
    }

    fn reset(&self, rows: usize) {
        let hidden = self.down.rows();
        let values = Numbers(5).values(rows * hidden);
        let mut packed = vec![bf16::ZERO; PackedRows::len(rows, hidden)];
        for n in 0..rows {
            for k in 0..hidden {
                packed[place(n, k, hidden.div_ceil(32), rows)] =
                    bf16::from_f32(values[n * hidden + k]);
            }
        }
        self.stream.write(&values).unwrap();
        self.input.write(&packed).unwrap();
        self.parts.write(&vec![1.0; self.parts.len()]).unwrap();
    }

    fn round(&self, rows: usize) -> Result<(), CudaError> {
        let (hidden, width) = (self.down.rows(), self.down.depth());
        let input = PackedRows::new(self.input.ptr(), hidden, rows);
        let inner = PackedRows::new(self.inner.ptr(), width, rows);
        let scale = RowScale {
            parts: self.parts.ptr(),
            count: self.down.parts() as u32,
            eps: EPS,
            width: hidden as u32,
        };
        self.kernels.launch(
            &self.gate_up,
            input,
            Some(scale),
            Epilogue::SwiGlu { out: inner },
        )?;
        let epilogue = Epilogue::Residual {
            x: self.stream.ptr(),
            next_weight: DevicePtr::NULL,
            next: input,
            parts: self.parts.ptr(),
            tap: None,
        };
        self.kernels.launch(&self.down, inner, None, epilogue)
    }
}

#[test]
fn overlapping_launches_give_what_separate_ones_give() {
    let Some(device) = crate::device() else {
        return;
    };
    const ROUNDS: usize = 40;
    for shapes in [
        [(1, 1), (1, 1)],
        [(8, 1), (4, 8)],
        [(4, 3), (8, 4)],
        [(16, 2), (1, 1)],
    ] {
        for rows in [8, 16, 64, 128] {
            let mlp = Mlp::new(&device, 576, 1536, rows, shapes);
            mlp.reset(rows);
            for _ in 0..ROUNDS {
                mlp.round(rows).unwrap();
                device.synchronize().unwrap();
            }
            let expected = mlp.stream.read().unwrap();
            assert!(expected.iter().all(|v| v.is_finite()));
            let graph =
                Graph::capture(&device, || (0..ROUNDS).try_for_each(|_| mlp.round(rows))).unwrap();
            for _ in 0..3 {
                mlp.reset(rows);
                graph.launch().unwrap();
                let got = mlp.stream.read().unwrap();
                let first = got
                    .iter()
                    .zip(&expected)
                    .position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(first, None, "{shapes:?} with {rows} rows");
            }
        }
    }
}
