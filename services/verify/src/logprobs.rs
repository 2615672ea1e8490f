//! Log-probabilities from head rows.

use treespec_engine::{HeadRequest, HeadRow, ScoredToken};
use treespec_rpc::convert::OutputOptions;
use treespec_rpc::proto::verify::v1 as pb;

/// What the head must return for a token that is output as `output` says.
pub(crate) fn head_request(output: &OutputOptions) -> HeadRequest {
    match output.top_logprobs {
        None => HeadRequest::ARGMAX,
        Some(top) => HeadRequest {
            top_k: usize::from(top).max(1),
            normaliser: true,
            rank: true,
            processed: output.processed_logprobs,
            ..HeadRequest::ARGMAX
        },
    }
}

/// The head request of a prompt row whose next token is `next`.
pub(crate) fn prompt_request(next: u32) -> HeadRequest {
    HeadRequest {
        top_k: 0,
        normaliser: true,
        gather: Some(next),
        ..HeadRequest::ARGMAX
    }
}

/// Log-probability of the token that a prompt row was asked to gather.
pub(crate) fn prompt_logprob(row: &HeadRow) -> f32 {
    row.gathered.unwrap_or(f32::NAN) - row.log_normaliser
}

/// Log-probability of the token that `row` chose with its `top` alternatives.
pub(crate) fn token_logprob(row: &HeadRow, top: u8) -> pb::TokenLogprob {
    let logprob = |scored: &ScoredToken| scored.score - row.log_normaliser;
    let chosen = row.chosen.as_ref().or(row.top.first());
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
        // A row that is not sampled takes the best.
        rank: row.rank.unwrap_or(1),
    }
}
