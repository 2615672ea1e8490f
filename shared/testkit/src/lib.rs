//! Tests over gRPC: the real services in this process, on loopback ports that the operating system chooses, with one
//! engine thread each.
//!
//! ```no_run
//! # async fn example() {
//! use treespec_testkit::{Ask, Cluster, Mode};
//!
//! let cluster = Cluster::builder("model").drafter("drafter").start().await;
//! let ask = Ask::tokens(&[1, 2, 3]).mode(Mode::Tree(8)).max_tokens(16);
//! let answer = cluster.client().generate(ask).await.unwrap();
//! assert_eq!(answer.token_ids.len(), 16);
//! # }
//! ```
//!
//! Everything panics with the reason when a service does not do what a test relies on, and nothing waits longer than
//! [`PATIENCE`].

mod answer;
mod ask;
mod client;
mod cluster;
mod logs;
mod models;
mod raw;
mod roles;
mod service;
mod unreliable_drafter;

use std::time::Duration;

pub use answer::{Answer, AnswerStream};
pub use ask::{Ask, Mode};
pub use client::Client;
pub use cluster::{Cluster, ClusterBuilder};
pub use logs::Logs;
pub use models::{default_drafter, default_target, is_there};
pub use raw::{Path, call_with_bytes};
pub use service::{Launched, Service};
pub use treespec_verify::TopkPlacement;
pub use unreliable_drafter::{Lie, Silence};

/// Longest wait for anything: far more than a loaded machine needs, far less than a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);
