//! Captured graphs by what they were captured for. Requests choose the keys, so their number is bounded.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use treespec_engine::EngineError;

use crate::{CudaError, Device};

/// Graphs that are kept. A server uses a few; one that is asked for all budgets in turn captures again now and then.
const MOST_GRAPHS: usize = 64;

/// Up to [`MOST_GRAPHS`] graphs.
pub(crate) struct GraphCache<K, G> {
    device: Arc<Device>,
    graphs: HashMap<K, G>,
}

impl<K: Eq + Hash, G> GraphCache<K, G> {
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        Self {
            device: device.clone(),
            graphs: HashMap::new(),
        }
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.graphs.contains_key(key)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut G> {
        self.graphs.get_mut(key)
    }

    /// Keeps a graph.
    pub(crate) fn insert(&mut self, key: K, graph: G) {
        self.graphs.insert(key, graph);
    }

    /// Forgets a graph: after an error the device may be a step ahead of what its owner counted.
    pub(crate) fn remove(&mut self, key: &K) {
        // A graph's memory must outlive its kernels; a lost device has none that run.
        let _ = self.device.synchronize();
        self.graphs.remove(key);
    }

    /// Forgets all graphs when there is no room for one more.
    pub(crate) fn make_room(&mut self) -> Result<(), CudaError> {
        if self.graphs.len() < MOST_GRAPHS {
            return Ok(());
        }
        self.clear()
    }

    /// Forgets all graphs when `error` says that the device has no memory for another one; any other error is returned.
    pub(crate) fn free_memory(&mut self, error: EngineError) -> Result<(), EngineError> {
        if !matches!(error, EngineError::OutOfDeviceMemory { .. }) || self.graphs.is_empty() {
            return Err(error);
        }
        Ok(self.clear()?)
    }

    fn clear(&mut self) -> Result<(), CudaError> {
        self.device.synchronize()?;
        self.graphs.clear();
        Ok(())
    }
}
