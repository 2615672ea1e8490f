//! A fault that the driver calls sticky. It takes the process's context with it, so this runs alone:
//! `make test-gpu` starts it by itself.

use treespec_cuda::{CudaError, DeviceBuffer, KernelSource, Launch};
use treespec_engine::EngineError;

const WILD: KernelSource = KernelSource {
    name: "wild.cu",
    text: r#"extern "C" __global__ void wild(u32* at) { pdl_wait(); at[(u64)1 << 40] = 1; }"#,
};

#[test]
#[ignore = "ends the device for its process; run it alone"]
fn a_wild_store_loses_the_device_with_a_reason() {
    let Some(device) = crate::device() else {
        return;
    };
    let memory = DeviceBuffer::<u32>::zeroed(&device, 4).unwrap();
    let wild = device.module(&WILD, &[]).unwrap().function("wild").unwrap();
    Launch::new(&wild).arg(memory.ptr()).run(&device).unwrap();
    let error = device.synchronize().unwrap_err();
    assert!(error.is_sticky(), "{error}");
    let told = EngineError::from(error);
    assert!(told.is_fatal(), "{told}");
    assert!(
        told.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{told}"
    );
    // Nothing works any more, and says so without a panic or a wait.
    let next = DeviceBuffer::<u32>::zeroed(&device, 4).map(|_| ());
    assert!(matches!(next, Err(CudaError::Driver { .. })));
}
