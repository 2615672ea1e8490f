//! Log-probabilities from head rows.

use treespec_engine::{HeadRequest, HeadRow};
use treespec_rpc::proto::verify::v1 as pb;

/// What the head must return for a token whose log-probability is wanted with `top` alternatives.
pub(crate) fn head_request(top: Option<u8>) -> HeadRequest {
    match top {
        None => HeadRequest::ARGMAX,
        Some(top) => HeadRequest {
            top_k: usize::from(top).max(1),
            normaliser: true,
            gather: None,
        },
    }
}

/// The head request of a prompt row whose next token is `next`.
pub(crate) fn prompt_request(next: u32) -> HeadRequest {
    HeadRequest {
        top_k: 0,
        normaliser: true,
        gather: Some(next),
    }
}

/// Log-probability of the token that a prompt row was asked to gather.
pub(crate) fn prompt_logprob(row: &HeadRow) -> f32 {
    row.gathered.unwrap_or(f32::NAN) - row.log_normaliser
}

/// Log-probability of the greedy choice of `row` with its `top` alternatives.
pub(crate) fn token_logprob(row: &HeadRow, top: u8) -> pb::TokenLogprob {
    let logprob = |scored: &treespec_engine::ScoredToken| scored.score - row.log_normaliser;
    let chosen = row.top.first();
    pb::TokenLogprob {
        token_id: chosen.map_or(0, |scored| scored.token),
        logprob: chosen.map_or(f32::NAN, logprob),
        top: row
            .top
            .iter()
            .take(usize::from(top))
            .map(|scored| pb::CandidateLogprob {
                token_id: scored.token,
                logprob: logprob(scored),
            })
            .collect(),
    }
}
