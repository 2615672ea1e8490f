//! Compiles the protos of `proto/` with protox (pure Rust, no protoc) into `OUT_DIR`, and writes the encoded
//! descriptor set that server reflection serves.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

use prost::Message;

const PROTO_ROOT: &str = "../../proto";
const PROTOS: [&str; 4] = [
    "treespec/coordinator/v1/coordinator.proto",
    "treespec/draft/v1/draft.proto",
    "treespec/verify/v1/generation.proto",
    "treespec/verify/v1/verify.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={PROTO_ROOT}");

    let root = Path::new(PROTO_ROOT);
    let descriptors = protox::compile(PROTOS.map(|proto| root.join(proto)), [root])?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR for build scripts")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
