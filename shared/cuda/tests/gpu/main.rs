//! Tests that need a GPU. Where there is none each says so and passes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::{Arc, OnceLock};

use treespec_cuda::Device;

/// The first GPU; prints why there is none, once.
fn device() -> Option<Arc<Device>> {
    static DEVICE: OnceLock<Option<Arc<Device>>> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            Device::open(0)
                .inspect_err(|error| eprintln!("skipped: {error}"))
                .ok()
        })
        .clone()
}

mod acceptance;
mod attention;
mod candidate_ranking;
mod draft_tree;
mod head_select;
mod infrastructure;
mod kv_cache;
mod linear;
mod lost_device;
mod models;
mod prefill;
mod rotary;
mod sampling;
