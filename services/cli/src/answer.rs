//! One finished generation, and its shape as JSON.

use serde::{Serialize, Serializer};
use treespec_rpc::proto::{
    coordinator::v1::finished::Stop,
    verify::v1::{self as proto, FinishReason},
};

/// Everything that the stream of one request delivered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answer {
    /// The seed that the coordinator used.
    pub seed: u64,
    /// Generated text.
    pub text: String,
    /// Generated ids, a final stop token included.
    pub token_ids: Vec<u32>,
    /// Why the generation ended.
    pub finish_reason: FinishReason,
    /// The token or string that ended it.
    pub stop: Option<Stop>,
    /// Token counts.
    pub usage: proto::Usage,
    /// Steps, acceptance and times.
    pub stats: proto::SpeculationStats,
    /// One entry per generated token when log-probs were asked for.
    pub logprobs: Vec<proto::TokenLogprob>,
    /// Log-probs of the prompt tokens from the second on.
    pub prompt_logprobs: Vec<f32>,
    /// The verified tree of every step when trees were asked for.
    pub trees: Vec<proto::StepTree>,
}

impl Answer {
    /// Generated tokens a second of decoding: the first token belongs to the prefill. 0 when there was no decoding.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        if self.stats.decode_seconds > 0.0 {
            f64::from(self.usage.completion_tokens.saturating_sub(1)) / self.stats.decode_seconds
        } else {
            0.0
        }
    }

    /// The object that `--json` prints. The log-prob fields are there only when they were asked for.
    pub(crate) fn to_json(
        &self,
        with_logprobs: bool,
        with_prompt_logprobs: bool,
    ) -> AnswerJson<'_> {
        AnswerJson {
            text: &self.text,
            token_ids: &self.token_ids,
            finish_reason: finish_reason_name(self.finish_reason),
            stop_string: match &self.stop {
                Some(Stop::StopString(string)) => Some(string),
                Some(Stop::StopTokenId(_)) | None => None,
            },
            stop_token_id: match self.stop {
                Some(Stop::StopTokenId(token)) => Some(token),
                Some(Stop::StopString(_)) | None => None,
            },
            seed: self.seed,
            usage: UsageJson {
                prompt_tokens: self.usage.prompt_tokens,
                completion_tokens: self.usage.completion_tokens,
                cached_tokens: self.usage.cached_tokens,
            },
            stats: StatsJson::from(&self.stats),
            logprobs: with_logprobs.then(|| self.logprobs.iter().map(LogprobJson::from).collect()),
            prompt_logprobs: with_prompt_logprobs.then(|| {
                // The first prompt token has nothing before it.
                std::iter::once(None)
                    .chain(self.prompt_logprobs.iter().copied().map(Some))
                    .collect()
            }),
        }
    }
}

/// `stop` or `length`, the words of other completion APIs.
pub(crate) fn finish_reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Unspecified => "unspecified",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// What `treespec generate --json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct AnswerJson<'a> {
    text: &'a str,
    token_ids: &'a [u32],
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_string: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_token_id: Option<u32>,
    seed: u64,
    usage: UsageJson,
    stats: StatsJson<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<LogprobJson>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Vec<Option<f32>>>,
}

#[derive(Debug, Serialize)]
struct UsageJson {
    prompt_tokens: u32,
    completion_tokens: u32,
    cached_tokens: u32,
}

#[derive(Debug, Serialize)]
struct StatsJson<'a> {
    steps: u32,
    tokens_per_step: f64,
    drafted_nodes: u64,
    accepted_by_depth: &'a [u32],
    rounds: &'a [u32],
    decode_seconds: f64,
    time_to_first_token_seconds: f64,
    stage_seconds: StageSecondsJson,
    fallback_steps: u32,
    stale_drafts: u32,
}

impl<'a> From<&'a proto::SpeculationStats> for StatsJson<'a> {
    fn from(stats: &'a proto::SpeculationStats) -> Self {
        Self {
            steps: stats.steps,
            tokens_per_step: stats.tokens_per_step,
            drafted_nodes: stats.drafted_nodes,
            accepted_by_depth: &stats.accepted_by_depth,
            rounds: &stats.rounds,
            decode_seconds: stats.decode_seconds,
            time_to_first_token_seconds: stats.time_to_first_token_seconds,
            stage_seconds: StageSecondsJson::from(stats.stage_seconds.unwrap_or_default()),
            fallback_steps: stats.fallback_steps,
            stale_drafts: stats.stale_drafts,
        }
    }
}

/// Wall-clock seconds by stage.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct StageSecondsJson {
    draft: f64,
    head: f64,
    tree: f64,
    wire: f64,
    verify: f64,
    accept: f64,
}

impl From<proto::StageSeconds> for StageSecondsJson {
    fn from(stages: proto::StageSeconds) -> Self {
        let proto::StageSeconds {
            draft,
            head,
            tree,
            wire,
            verify,
            accept,
        } = stages;
        Self {
            draft,
            head,
            tree,
            wire,
            verify,
            accept,
        }
    }
}

#[derive(Debug, Serialize)]
struct LogprobJson {
    id: u32,
    logprob: f32,
    rank: u32,
    top: Vec<TopEntry>,
}

impl From<&proto::TokenLogprob> for LogprobJson {
    fn from(entry: &proto::TokenLogprob) -> Self {
        Self {
            id: entry.token_id,
            logprob: entry.logprob,
            rank: entry.rank,
            top: entry
                .top
                .iter()
                .map(|candidate| TopEntry {
                    id: candidate.token_id,
                    logprob: candidate.logprob,
                })
                .collect(),
        }
    }
}

/// A candidate token, written as the pair `[id, logprob]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TopEntry {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

impl Serialize for TopEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.id, self.logprob).serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn answer() -> Answer {
        Answer {
            seed: 7,
            text: "blue".into(),
            token_ids: vec![5, 2],
            finish_reason: FinishReason::Stop,
            usage: proto::Usage {
                prompt_tokens: 3,
                completion_tokens: 2,
                cached_tokens: 0,
            },
            stats: proto::SpeculationStats {
                steps: 1,
                tokens_per_step: 1.0,
                drafted_nodes: 8,
                accepted_by_depth: vec![1, 0],
                rounds: vec![1],
                decode_seconds: 0.5,
                time_to_first_token_seconds: 0.25,
                stage_seconds: Some(proto::StageSeconds {
                    verify: 0.5,
                    ..Default::default()
                }),
                ..Default::default()
            },
            logprobs: vec![proto::TokenLogprob {
                token_id: 5,
                logprob: -0.1,
                rank: 1,
                top: vec![proto::CandidateLogprob {
                    token_id: 5,
                    logprob: -0.1,
                }],
            }],
            prompt_logprobs: vec![-1.5, -2.5],
            ..Default::default()
        }
    }

    #[test]
    fn the_object_has_the_documented_fields_in_order() {
        let json = serde_json::to_value(answer().to_json(false, false)).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            keys,
            [
                "text",
                "token_ids",
                "finish_reason",
                "seed",
                "usage",
                "stats"
            ]
        );
        assert_eq!(
            json["usage"],
            json!({"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0})
        );
        assert_eq!(json["finish_reason"], "stop");
        let stats = &json["stats"];
        for field in [
            "steps",
            "tokens_per_step",
            "drafted_nodes",
            "accepted_by_depth",
            "rounds",
            "decode_seconds",
            "time_to_first_token_seconds",
            "stage_seconds",
        ] {
            assert!(stats.get(field).is_some(), "{field}");
        }
        let stages: Vec<_> = stats["stage_seconds"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        assert_eq!(
            stages,
            ["draft", "head", "tree", "wire", "verify", "accept"]
        );
    }

    #[test]
    fn log_probs_appear_only_when_asked_and_the_prompt_starts_with_null() {
        let json = serde_json::to_string(&answer().to_json(true, true)).unwrap();
        let expected = r#""logprobs":[{"id":5,"logprob":-0.1,"rank":1,"top":[[5,-0.1]]}],"prompt_logprobs":[null,-1.5,-2.5]}"#;
        assert!(json.ends_with(expected), "{json}");
    }

    #[test]
    fn a_prompt_of_one_token_has_one_null() {
        let mut answer = answer();
        answer.prompt_logprobs.clear();
        let json = serde_json::to_value(answer.to_json(false, true)).unwrap();
        assert_eq!(json["prompt_logprobs"], json!([null]));
    }

    #[test]
    fn the_rate_leaves_the_first_token_out() {
        assert_eq!(answer().tokens_per_second(), 2.0);
        assert_eq!(Answer::default().tokens_per_second(), 0.0);
    }
}
