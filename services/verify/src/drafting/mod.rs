//! A sequence's drafter, seen from the sequence: features go in, drafts come out, and every failure is no draft.

mod feature_history;
mod link;
mod links;
mod session;

use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use treespec_engine::DraftShape;
use treespec_rpc::ServiceError;
use treespec_sampling::Coupling;
use treespec_tree::TokenTree;

use crate::config::TopkPlacement;
use feature_history::FeatureHistory;
pub(crate) use links::{DrafterIdentity, Links};
use session::Session;

/// How often a sequence opens a session before it goes on without a drafter.
const MAX_SESSIONS: u32 = 5;

/// A drafter's answer.
pub(crate) struct Draft {
    pub(crate) body: DraftBody,
    pub(crate) cost: DraftCost,
}

/// What was drafted.
pub(crate) enum DraftBody {
    /// A tree below the root, ready to verify.
    Tree(TokenTree),
    /// Hidden rows of the block's slots, `[block_size - 1, hidden]`: the top-k pass is still to do.
    Hidden(Vec<f32>),
}

/// Where the time of a draft went.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DraftCost {
    pub(crate) forward: Duration,
    pub(crate) head: Duration,
    pub(crate) tree: Duration,
    /// Round trip less the drafter's own work.
    pub(crate) wire: Duration,
}

impl AddAssign for DraftCost {
    fn add_assign(&mut self, other: Self) {
        self.forward += other.forward;
        self.head += other.head;
        self.tree += other.tree;
        self.wire += other.wire;
    }
}

/// The draft wanted for a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftWish {
    /// Decided token at position `ctx_end`.
    pub(crate) root: u32,
    /// Committed length.
    pub(crate) ctx_end: u32,
    pub(crate) shape: DraftShape,
    pub(crate) placement: TopkPlacement,
    /// How the draft takes part in the draw of the tokens.
    pub(crate) coupling: Option<Coupling>,
}

/// The drafter of one sequence.
pub(crate) struct Drafting {
    links: Arc<Links>,
    endpoint: String,
    history: FeatureHistory,
    session: Option<Session>,
    /// Whether a step has waited for the link already: only the first is worth it.
    waited_for_link: bool,
    sessions_opened: u32,
    stale_drafts: u32,
}

impl Drafting {
    /// A drafter at `endpoint`; connecting goes on in the background while the prompt is prefilled.
    pub(crate) fn new(links: Arc<Links>, endpoint: String, window: usize) -> Self {
        links.connect_in_background(&endpoint);
        Self {
            history: FeatureHistory::new(links.hidden_size(), window),
            links,
            endpoint,
            session: None,
            waited_for_link: false,
            sessions_opened: 0,
            stale_drafts: 0,
        }
    }

    /// Takes the features of newly committed rows, `[n, hidden]`, for the positions from `start`.
    pub(crate) async fn commit(&mut self, start: u32, rows: &[f32]) {
        self.history.push(start, rows);
        if let Some(session) = &mut self.session
            && let Err(error) = session.commit(start, rows).await
        {
            self.lose_session(&error);
        }
    }

    /// Asks for a draft. `None` when there is no drafter now or it does not answer in time: decode plainly then.
    pub(crate) async fn propose(&mut self, wish: DraftWish) -> Option<Draft> {
        if self.session.is_none() {
            self.open_session().await;
        }
        let session = self.session.as_mut()?;
        let outcome = session.propose(wish).await;
        self.stale_drafts += session.take_stale_drafts();
        outcome.unwrap_or_else(|error| {
            self.lose_session(&error);
            None
        })
    }

    /// Proposals that came too late.
    pub(crate) fn stale_drafts(&self) -> u32 {
        self.stale_drafts
    }

    async fn open_session(&mut self) {
        if self.sessions_opened >= MAX_SESSIONS {
            return;
        }
        let link = if self.waited_for_link {
            self.links.connect_in_background(&self.endpoint);
            self.links.connected(&self.endpoint)
        } else {
            self.waited_for_link = true;
            self.links.connect(&self.endpoint).await
        };
        let Some(link) = link else { return };
        self.sessions_opened += 1;
        let opened = async {
            let mut session = Session::open(link.clone(), self.links.next_sequence_id()).await?;
            session.prime(&self.history).await?;
            Ok(session)
        };
        match opened.await {
            Ok(session) => {
                self.links.trust(&self.endpoint).await;
                self.session = Some(session);
            }
            Err(error) => {
                // A drafter that is there but does not answer would cost the same wait again, here and elsewhere.
                if link.is_alive() && matches!(error, ServiceError::Unavailable { .. }) {
                    self.sessions_opened = MAX_SESSIONS;
                    self.links.distrust(&self.endpoint, &link).await;
                }
                self.lose_session(&error);
            }
        }
    }

    fn lose_session(&mut self, error: &ServiceError) {
        tracing::warn!(endpoint = %self.endpoint, %error, "drafter lost, decoding plainly");
        self.session = None;
    }
}
