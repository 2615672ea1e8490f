//! Read-only memory maps of checkpoint files: weights are paged in by the kernel when a tensor is converted.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::CheckpointError;

/// The bytes of a whole file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`, which has to be a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).map_err(|source| CheckpointError::io(path, source))?;
        let metadata = file
            .metadata()
            .map_err(|source| CheckpointError::io(path, source))?;
        if !metadata.is_file() {
            return Err(CheckpointError::malformed(path, "not a regular file"));
        }
        // SAFETY: the map is private to this type, read-only, and handed out only as `&[u8]` that borrows from it. What
        // cannot be enforced from here is that no other process changes or shortens the file while it is mapped: a
        // checkpoint is immutable while a service uses it (replace the file by rename, never in place). Every length
        // read from the file is checked against the map's own length, so stale contents are never out of bounds.
        let map =
            unsafe { Mmap::map(&file) }.map_err(|source| CheckpointError::io(path, source))?;
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    /// The path as it was given to [`MappedFile::open`].
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
