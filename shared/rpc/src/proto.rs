//! Generated messages, clients and servers, in the module tree of the proto packages.

/// The encoded `google.protobuf.FileDescriptorSet` of all treespec packages, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// `treespec.coordinator`: the public API.
pub mod coordinator {
    /// Version 1.
    #[allow(missing_docs, unreachable_pub, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("treespec.coordinator.v1");
    }
}

/// `treespec.draft`: between verify and draft.
pub mod draft {
    /// Version 1.
    #[allow(missing_docs, unreachable_pub, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("treespec.draft.v1");
    }
}

/// `treespec.verify`: between coordinator and verify.
pub mod verify {
    /// Version 1.
    #[allow(missing_docs, unreachable_pub, clippy::all)]
    pub mod v1 {
        tonic::include_proto!("treespec.verify.v1");
    }
}
