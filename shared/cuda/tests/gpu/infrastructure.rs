//! Memory, compilation, launches, graphs.

use treespec_cuda::{
    CudaError, DeviceBuffer, Graph, KernelSource, Launch, PinnedBuffer, profile_kernels,
};

const ADD: KernelSource = KernelSource {
    name: "add.cu",
    text: r#"
extern "C" __global__ void add_to(float* values, float amount, u32 count, u32* seen) {
    pdl_launch();
    pdl_wait();
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] += amount * SCALE;
    if (index == 0) { __threadfence_system(); *seen += 1; }
}
"#,
};

#[test]
fn a_graph_runs_its_launches_in_order() {
    let Some(device) = crate::device() else {
        return;
    };
    let module = device
        .module(&ADD, &[("SCALE", "2.0f".to_owned())])
        .unwrap();
    let function = module.function("add_to").unwrap();
    let values = DeviceBuffer::from_slice(&device, &vec![1.0f32; 1000]).unwrap();
    let seen = PinnedBuffer::<u32>::new(&device, 1).unwrap();
    let launches = || -> Result<(), CudaError> {
        for step in 0..50u32 {
            Launch::new(&function)
                .grid(8, 1, 1)
                .block(128)
                .arg(values.ptr())
                .arg(step as f32)
                .arg(1000u32)
                .arg(seen.device_ptr())
                .run(&device)?;
        }
        Ok(())
    };
    let graph = Graph::capture(&device, launches).unwrap();
    graph.launch().unwrap();
    graph.launch().unwrap();
    device.synchronize().unwrap();
    let expected = 1.0 + 2.0 * 2.0 * (49.0 * 50.0 / 2.0);
    assert!(values.read().unwrap().iter().all(|v| *v == expected));
    assert_eq!(seen.read_volatile(0), 100);
    let spans = profile_kernels(&device, launches).unwrap();
    assert_eq!(spans.len(), 50);
    assert!(
        spans
            .iter()
            .all(|(name, ms)| *name == "add_to" && *ms > 0.0)
    );
}

#[test]
fn a_broken_kernel_is_an_error_in_one_line() {
    let Some(device) = crate::device() else {
        return;
    };
    let source = KernelSource {
        name: "broken.cu",
        text: "extern \"C\" __global__ void broken() { not_a_name(); }",
    };
    let error = device.module(&source, &[]).unwrap_err().to_string();
    assert!(
        error.contains("broken.cu") && error.contains("not_a_name"),
        "{error}"
    );
    assert!(!error.contains('\n'));
}

#[test]
fn too_much_memory_is_an_error_and_not_the_end() {
    let Some(device) = crate::device() else {
        return;
    };
    let error = DeviceBuffer::<u8>::uninit(&device, 1 << 42)
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, CudaError::OutOfMemory { .. }), "{error}");
    assert!(device.preflight("a test", 1 << 42).is_err());
    assert!(DeviceBuffer::<u8>::zeroed(&device, 64).is_ok());
}
