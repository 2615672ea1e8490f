//! The draft of a sequence's next step, wherever it comes from.

use std::sync::Arc;
use std::time::Instant;

use treespec_engine::{CoupledRanking, DraftShape, build_draft};
use treespec_tree::TokenTree;

use super::{Drafts, Sequence, Stop};
use crate::drafting::{DraftBody, DraftCost, DraftWish};
use crate::forward::{Draft, DrafterContext};

impl Sequence<'_> {
    /// The draft of the next step, cut to the context length, or the root alone.
    pub(super) async fn draft(&mut self, root: u32) -> Result<TokenTree, Stop> {
        let plain = TokenTree::root_only(root);
        let (Some(shape), 1..) = (self.shape, self.room()) else {
            return Ok(plain);
        };
        let drafted = match &self.drafts {
            Drafts::None => return Ok(plain),
            Drafts::Remote(_) => self.remote_draft(root, shape).await?,
            Drafts::Hosted(context) => {
                let context = Arc::clone(context);
                self.hosted_draft(root, shape, context).await?
            }
        };
        let Some((mut tree, cost)) = drafted else {
            self.statistics.add_fallback();
            return Ok(plain);
        };
        self.statistics.add_draft(cost);
        // A drafter elsewhere is a peer, not a part of this process: a tree beyond what was reserved, or deeper than a
        // block, is cut.
        tree.truncate(self.engine.most_nodes(shape));
        let deepest = self.engine.block_size().saturating_sub(1);
        tree.truncate_depth(self.room().min(deepest) as u32);
        Ok(tree)
    }

    /// A draft of the hosted drafter that is verified in a step of its own.
    async fn hosted_draft(
        &self,
        root: u32,
        shape: DraftShape,
        context: Arc<DrafterContext>,
    ) -> Result<Option<(TokenTree, DraftCost)>, Stop> {
        let draft = Draft {
            committed: self.place.committed,
            root,
            context,
            shape,
            max_depth: self.room(),
            coupling: self.choice.coupling(),
        };
        let drafted = self.engine.queue.draft(draft).await?;
        Ok(drafted.map(|drafted| {
            let cost = DraftCost {
                forward: drafted.forward,
                head: drafted.head,
                tree: drafted.build,
                ..DraftCost::default()
            };
            (drafted.tree, cost)
        }))
    }

    /// A draft of the drafter that the lease names.
    async fn remote_draft(
        &mut self,
        root: u32,
        shape: DraftShape,
    ) -> Result<Option<(TokenTree, DraftCost)>, Stop> {
        let wish = DraftWish {
            root,
            ctx_end: self.place.committed as u32,
            shape,
            placement: self.engine.topk_placement,
            coupling: self.choice.coupling(),
        };
        let Drafts::Remote(drafting) = &mut self.drafts else {
            return Ok(None);
        };
        let Some(draft) = drafting.propose(wish).await else {
            return Ok(None);
        };
        let mut cost = draft.cost;
        let tree = match draft.body {
            DraftBody::Tree(tree) => tree,
            DraftBody::Hidden(hidden) => self.build_draft(wish, hidden, &mut cost).await?,
        };
        Ok(Some((tree, cost)))
    }

    /// The tree from a block's hidden rows, whose top-k pass runs here.
    async fn build_draft(
        &self,
        wish: DraftWish,
        mut hidden: Vec<f32>,
        cost: &mut DraftCost,
    ) -> Result<TokenTree, Stop> {
        let started = Instant::now();
        let shape = wish.shape;
        let block_size = self.engine.block_size();
        let row = hidden.len() / block_size.saturating_sub(1).max(1);
        hidden.truncate(shape.depths(block_size) * row);
        let profile = self.engine.coupling.as_ref();
        let ranking = wish
            .coupling
            .and_then(|coupling| CoupledRanking::new(coupling, profile, wish.ctx_end));
        let k = match ranking {
            None => shape.candidates_per_depth(self.engine.vocab_size),
            Some(_) => shape.coupled_candidates_per_depth(self.engine.vocab_size),
        };
        let rows = self.engine.queue.head_topk(hidden, k).await?;
        cost.head += started.elapsed();
        let started = Instant::now();
        let tree = build_draft(wish.root, &rows, shape, ranking.as_ref());
        cost.tree += started.elapsed();
        Ok(tree)
    }
}
