//! Times the linear layers of a small and an 8B model: microseconds a launch, weight bytes per second, and their share of
//! what a device-to-device copy moves on the same machine.
//!
//! Every figure is the median of graph replays; a graph goes through copies of the weights that do not fit the L2 cache.
//!
//! ```sh
//! cargo run --release -p treespec-cuda --example linear_speed -- --rows 8,16,64 --json linear.json
//! cargo run --release -p treespec-cuda --example linear_speed -- --shape 8b-o --sweep
//! ```

use std::collections::HashSet;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;
use half::bf16;
use serde_json::{Value, json};
use treespec_cuda::{
    CudaError, Device, DeviceBuffer, DevicePtr, Epilogue, Event, Graph, Layout, LinearKernels,
    LinearShape, LinearTuning, PackedLinear, PackedRows, RowScale,
};

const HELP: &str = "\
--rows 8,16,64,512     row buckets
--shape NAME           only shapes whose name contains NAME
--panels N --split S   instead of the shape's own order of sums: panels 1, 4, 8, 16; split 1 to 8
--depth-warps 2,4      with each of these numbers of warps over the depth, where tiles have 4 or 8 panels
--sweep                all panels and splits that fit; the fastest last for each row bucket
--tiles                all tiles of the chosen order of sums; the fastest last for each row bucket
--stage-depth A,B,C,D  blocks of 32 per stage for 4, 8, 16 panels, and with 4 warps over the depth
--ring-kib N           most KiB of a ring
--wide-from N          row bucket from which tiles have 128 columns
--height N             panels of tiles of matrices for 4 or 8
--direct P,T           panels and tiles of 8 rows of the direct kernel
--replays N            graph replays per figure (default 9)
--json FILE            also as JSON";

/// Weight bytes that a graph goes through at least: several times any L2 cache.
const ROTATED_BYTES: u64 = 384 << 20;
const MOST_COPIES: u64 = 256;
/// Launches of a graph: enough to hide the start of its replay, see [`Bench::launches`].
const LEAST_LAUNCHES: u64 = 20;
const MOST_LAUNCHES: u64 = 200;
const BYTES_PER_REPLAY: u64 = 8_000_000_000;

/// What a layer's sums become.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Store,
    Residual,
    SwiGlu,
    Head,
}

const LAYERS: [(&str, usize, usize, End); 12] = [
    ("small-qkv", 960, 576, End::Store),
    ("small-o", 576, 576, End::Residual),
    ("small-gate_up", 3072, 576, End::SwiGlu),
    ("small-down", 576, 1536, End::Residual),
    ("small-head", 49_152, 576, End::Head),
    ("small-fc", 576, 2880, End::Store),
    ("small-context_kv", 1536, 576, End::Store),
    ("8b-qkv", 6144, 4096, End::Store),
    ("8b-o", 4096, 4096, End::Residual),
    ("8b-gate_up", 24_576, 4096, End::SwiGlu),
    ("8b-down", 4096, 12_288, End::Residual),
    ("8b-head", 151_936, 4096, End::Head),
];

struct Options {
    rows: Vec<usize>,
    shape: String,
    order: Option<(usize, usize)>,
    depth_warps: Vec<usize>,
    sweep: bool,
    tiles: bool,
    tuning: LinearTuning,
    replays: usize,
    json: Option<String>,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let Some(options) = Options::parse()? else {
        println!("{HELP}");
        return Ok(());
    };
    let device = Device::open(0)?;
    let copy = copy_bandwidth(&device)?;
    println!("{}: device copy {:.0} GB/s", device.name(), copy / 1e9);
    let compiling = Instant::now();
    LinearKernels::load_tuned(&device, options.tuning)?; // the others find it compiled
    println!(
        "kernels ready after {:.1} s; {:?}",
        compiling.elapsed().as_secs_f32(),
        options.tuning
    );
    println!(
        "{:16} {:>5} {:>10} {:>8} {:>7} {:>8}  kernel",
        "layer", "rows", "us", "GB/s", "copy %", "TFLOP/s"
    );
    let mut figures = Vec::new();
    for (name, rows, depth, end) in LAYERS
        .iter()
        .copied()
        .filter(|l| l.0.contains(&options.shape))
    {
        for order in options.orders(&device, rows, depth, end) {
            let bench = match Bench::new(&device, rows, depth, end, order) {
                Err(CudaError::Unsupported(_)) if options.order.is_some() => continue,
                bench => bench?,
            };
            for &batch in &options.rows {
                let mut seen = HashSet::new();
                for tuning in options.tunings(order) {
                    let kernels = LinearKernels::load_tuned(&device, tuning)?;
                    let Ok(kernel) = kernels.describe(&bench.copies[0], batch) else {
                        continue;
                    };
                    if !seen.insert(kernel.clone()) {
                        continue;
                    }
                    let [seconds, fastest, slowest] =
                        bench.time(&kernels, batch, options.replays)?;
                    let bytes = (rows * depth * 2) as f64;
                    let flops = 2.0 * (rows * depth * batch) as f64;
                    println!(
                        "{name:16} {batch:5} {:10.2} {:8.0} {:7.1} {:8.1}  {kernel}",
                        seconds * 1e6,
                        bytes / seconds / 1e9,
                        bytes / seconds / copy * 100.0,
                        flops / seconds / 1e12
                    );
                    figures.push(json!({
                        "layer": name, "rows": rows, "depth": depth, "batch": batch,
                        "panels": order.panels, "depth_warps": order.depth_warps,
                        "split": order.split, "kernel": kernel,
                        "microseconds": seconds * 1e6, "fastest": fastest * 1e6,
                        "slowest": slowest * 1e6, "share_of_copy": bytes / seconds / copy,
                    }));
                }
            }
        }
        if options.sweep || options.tiles {
            print_fastest(name, &options.rows, &figures);
        }
    }
    if let Some(path) = &options.json {
        let report =
            json!({ "device": device.name(), "copy_bytes_per_second": copy, "figures": figures });
        std::fs::write(path, serde_json::to_string_pretty(&report)?)?;
    }
    Ok(())
}

impl Options {
    fn parse() -> Result<Option<Self>, Box<dyn Error>> {
        let mut options = Self {
            rows: vec![8, 16, 64, 512],
            shape: String::new(),
            order: None,
            depth_warps: Vec::new(),
            sweep: false,
            tiles: false,
            tuning: LinearTuning::default(),
            replays: 9,
            json: None,
        };
        let (mut panels, mut split) = (None, 1);
        let mut arguments = std::env::args().skip(1);
        while let Some(flag) = arguments.next() {
            match flag.as_str() {
                "--sweep" => options.sweep = true,
                "--tiles" => options.tiles = true,
                _ => {}
            }
            if flag == "--sweep" || flag == "--tiles" {
                continue;
            }
            let Some(value) = arguments.next() else {
                return Ok(None);
            };
            let numbers = || -> Result<Vec<usize>, std::num::ParseIntError> {
                value.split(',').map(str::parse).collect()
            };
            match flag.as_str() {
                "--rows" => options.rows = numbers()?,
                "--shape" => options.shape = value,
                "--panels" => panels = Some(value.parse()?),
                "--split" => split = value.parse()?,
                "--stage-depth" => {
                    options.tuning.stage_depth =
                        numbers()?.try_into().map_err(|_| "four depths")?;
                }
                "--ring-kib" => options.tuning.ring_bytes = Some(value.parse::<usize>()? << 10),
                "--wide-from" => options.tuning.wide_from = value.parse()?,
                "--height" => options.tuning.panels = Some(value.parse()?),
                "--depth-warps" => options.depth_warps = numbers()?,
                "--direct" => match numbers()?[..] {
                    [panels, tiles] => options.tuning.direct = Some((panels, tiles)),
                    _ => return Err("--direct wants panels,tiles".into()),
                },
                "--replays" => options.replays = value.parse()?,
                "--json" => options.json = Some(value),
                _ => return Ok(None),
            }
        }
        options.order = panels.map(|panels| (panels, split));
        Ok(Some(options))
    }

    /// The orders of sums to time.
    fn orders(&self, device: &Device, rows: usize, depth: usize, end: End) -> Vec<LinearShape> {
        let sms = device.sm_count() as usize;
        let orders = if self.sweep {
            sweep(sms, rows, depth, end)
        } else if let Some((panels, split)) = self.order {
            vec![LinearShape::new(panels, split)]
        } else {
            vec![LinearShape::choose(rows, depth, layout(end), sms)]
        };
        let with_warps = |order: LinearShape| match order.panels {
            4 | 8 if !self.depth_warps.is_empty() => self
                .depth_warps
                .iter()
                .map(|&depth_warps| LinearShape {
                    depth_warps,
                    ..order
                })
                .collect(),
            _ => vec![order],
        };
        orders.into_iter().flat_map(with_warps).collect()
    }

    /// The settings to time an order of sums with.
    fn tunings(&self, order: LinearShape) -> Vec<LinearTuning> {
        let tuning = self.tuning;
        if !self.tiles {
            return vec![tuning];
        }
        match order.panels {
            1 => [1, 2, 4]
                .into_iter()
                .flat_map(|panels| [1, 2, 4, 8].map(|tiles| (panels, tiles)))
                .map(|direct| LinearTuning {
                    direct: Some(direct),
                    ..tuning
                })
                .collect(),
            4 | 8 => [4, 8]
                .map(|panels| LinearTuning {
                    panels: Some(panels),
                    ..tuning
                })
                .to_vec(),
            _ => vec![tuning],
        }
    }
}

fn sweep(sms: usize, rows: usize, depth: usize, end: End) -> Vec<LinearShape> {
    let small = rows * depth <= 8 << 20 && end != End::Head;
    let streamed = [4, 8, 16].into_iter().flat_map(|panels| {
        [1, 2, 3, 4, 6, 8]
            .into_iter()
            .map(move |split| LinearShape::new(panels, split))
    });
    small
        .then_some(LinearShape::new(1, 1))
        .into_iter()
        .chain(streamed.filter(|order| {
            let blocks = rows.div_ceil(order.panels * 16) * order.split;
            let useful = (sms / 3..=sms * 6).contains(&blocks) || order.split == 1;
            useful && depth.div_ceil(32) >= 4 * order.split
        }))
        .collect()
}

fn print_fastest(name: &str, batches: &[usize], figures: &[Value]) {
    for &batch in batches {
        let time = |figure: &&Value| figure["microseconds"].as_f64().unwrap_or(f64::INFINITY);
        let fastest = figures
            .iter()
            .filter(|figure| figure["layer"] == name && figure["batch"] == batch)
            .min_by(|a, b| time(a).total_cmp(&time(b)));
        if let Some(fastest) = fastest {
            println!(
                "fastest {name} {batch}: {:.2} us, {}",
                time(&fastest),
                fastest["kernel"]
            );
        }
    }
}

fn layout(end: End) -> Layout {
    match end {
        End::Store | End::Residual => Layout::Plain,
        End::SwiGlu => Layout::GateUp,
        End::Head => Layout::Head,
    }
}

/// A layer with enough copies of its weights that the L2 cache does not help.
struct Bench {
    device: Arc<Device>,
    copies: Vec<PackedLinear>,
    end: End,
}

impl Bench {
    fn new(
        device: &Arc<Device>,
        rows: usize,
        depth: usize,
        end: End,
        order: LinearShape,
    ) -> Result<Self, CudaError> {
        let bytes = (rows * depth * 2) as u64;
        let copies = ROTATED_BYTES.div_ceil(bytes).clamp(2, MOST_COPIES);
        let scale = 1.0 / (depth as f32).sqrt();
        let copies = (0..copies)
            .map(|seed| {
                PackedLinear::random_with(device, rows, depth, layout(end), order, seed, scale)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            device: device.clone(),
            copies,
            end,
        })
    }

    fn launches(&self) -> usize {
        let wanted =
            (BYTES_PER_REPLAY / self.copies[0].bytes()).clamp(LEAST_LAUNCHES, MOST_LAUNCHES);
        self.copies.len().max(wanted as usize)
    }

    /// Seconds of one launch for `batch` rows: median, fastest, slowest replay.
    fn time(
        &self,
        kernels: &LinearKernels,
        batch: usize,
        replays: usize,
    ) -> Result<[f64; 3], CudaError> {
        let device = &self.device;
        let linear = &self.copies[0];
        let (rows, depth) = (linear.rows(), linear.depth());
        let input: Vec<bf16> = (0..PackedRows::len(batch, depth) as u64)
            .map(|i| {
                bf16::from_f32(((i + 1).wrapping_mul(2_654_435_761) % 4001) as f32 / 2000.0 - 1.0)
            })
            .collect();
        let input = DeviceBuffer::from_slice(device, &input)?;
        let x = PackedRows::new(input.ptr(), depth, batch);
        let values = DeviceBuffer::<f32>::zeroed(device, batch * rows.next_multiple_of(64))?;
        let packed = DeviceBuffer::<bf16>::zeroed(device, PackedRows::len(batch, rows))?;
        let parts =
            DeviceBuffer::<f32>::zeroed(device, batch * linear.groups().max(linear.parts()))?;
        let sums = DeviceBuffer::<f32>::zeroed(device, batch * linear.groups())?;
        let count = depth.div_ceil(64);
        let squares = DeviceBuffer::from_slice(device, &vec![21.0f32; batch * count])?;
        let scale = RowScale {
            parts: squares.ptr(),
            count: count as u32,
            eps: 1e-5,
            width: depth as u32,
        };
        let (scale, epilogue) = match self.end {
            End::Store => (
                Some(scale),
                Epilogue::Store {
                    out: values.ptr(),
                    ld: rows,
                },
            ),
            End::Residual => (
                None,
                Epilogue::Residual {
                    x: values.ptr(),
                    next_weight: DevicePtr::NULL,
                    next: PackedRows::new(packed.ptr(), rows, batch),
                    parts: parts.ptr(),
                    tap: None,
                },
            ),
            End::SwiGlu => {
                let out = PackedRows::new(packed.ptr(), rows / 2, batch);
                (Some(scale), Epilogue::SwiGlu { out })
            }
            End::Head => (
                Some(scale),
                Epilogue::Head {
                    logits: values.ptr(),
                    ld: rows.next_multiple_of(64),
                    group_max: parts.ptr(),
                    group_sum: sums.ptr(),
                },
            ),
        };
        let launches = self.launches();
        let graph = Graph::capture(device, || {
            (0..launches).try_for_each(|i| {
                kernels.launch(&self.copies[i % self.copies.len()], x, scale, epilogue)
            })
        })?;
        graph.launch()?;
        let (start, end) = (Event::new(device)?, Event::new(device)?);
        let mut times = Vec::new();
        for _ in 0..replays.max(1) {
            start.record(device.stream())?;
            graph.launch()?;
            end.record(device.stream())?;
            end.synchronize()?;
            times.push(f64::from(Event::elapsed_ms(&start, &end)?) / 1e3);
        }
        times.sort_by(f64::total_cmp);
        Ok([times.len() / 2, 0, times.len() - 1].map(|index| times[index] / launches as f64))
    }
}

/// Bytes read plus bytes written per second by large copies on the device.
fn copy_bandwidth(device: &Arc<Device>) -> Result<f64, CudaError> {
    const BYTES: usize = 2 << 30;
    const COPIES: u32 = 8;
    let (from, to) = (
        DeviceBuffer::<u8>::uninit(device, BYTES)?,
        DeviceBuffer::<u8>::uninit(device, BYTES)?,
    );
    from.fill_bytes(0x5A)?;
    let run = |count: u32| {
        for _ in 0..count {
            // SAFETY: both buffers have this many bytes and outlive the wait below.
            let code = unsafe {
                sys::cuMemcpyDtoDAsync_v2(to.ptr().0, from.ptr().0, BYTES, std::ptr::null_mut())
            };
            assert_eq!(
                code,
                sys::CUresult::CUDA_SUCCESS,
                "a copy between live buffers"
            );
        }
        // SAFETY: the context is current on this thread.
        let code = unsafe { sys::cuCtxSynchronize() };
        assert_eq!(
            code,
            sys::CUresult::CUDA_SUCCESS,
            "copies between live buffers"
        );
    };
    run(1);
    let started = Instant::now();
    run(COPIES);
    Ok(f64::from(COPIES) * 2.0 * BYTES as f64 / started.elapsed().as_secs_f64())
}
