use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

use proptest::prelude::*;
use treespec_checkpoint::TextTokenizer;
use treespec_rpc::proto::verify::v1::{CommittedTokens, TokenLogprob};

use super::*;

fn tokenizer() -> &'static Arc<TextTokenizer> {
    static TOKENIZER: OnceLock<Arc<TextTokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/cases");
        let model = cases.join("01_llama_gqa_tied/model");
        Arc::new(TextTokenizer::open(&model).unwrap())
    })
}

fn transcript(stops: &[String], include: bool, min_tokens: usize) -> Transcript {
    let decoder = IncrementalDecoder::new(Arc::clone(tokenizer()), true);
    let ending = Ending {
        stops: StopStrings::new(stops.to_vec(), include),
        min_tokens,
    };
    Transcript::new(decoder, ending, 0, 3)
}

fn step(ids: &[u32]) -> VerifyEvent {
    let logprob = |&token_id: &u32| TokenLogprob {
        token_id,
        ..TokenLogprob::default()
    };
    VerifyEvent::Tokens(CommittedTokens {
        token_ids: ids.to_vec(),
        logprobs: ids.iter().map(logprob).collect(),
        tree: None,
    })
}

fn finished() -> VerifyEvent {
    VerifyEvent::Finished(verify::GenerateFinished {
        finish_reason: FinishReason::Length.into(),
        ..verify::GenerateFinished::default()
    })
}

/// What a client gets.
#[derive(Debug, Clone, Default, PartialEq)]
struct Received {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<u32>,
    stop: Option<Stop>,
    completion_tokens: u32,
}

/// Plays an answer in steps that end at `cuts`.
fn play(mut transcript: Transcript, ids: &[u32], cuts: &[usize]) -> Received {
    let mut events = Vec::new();
    let mut start = 0;
    for &cut in cuts.iter().chain([&ids.len()]) {
        let end = cut.clamp(start, ids.len());
        if end > start && !transcript.is_finished() {
            events.extend(transcript.record(step(&ids[start..end])).unwrap());
        }
        start = end;
    }
    if !transcript.is_finished() {
        events.extend(transcript.record(finished()).unwrap());
    }
    assert!(transcript.is_finished());
    let mut received = Received::default();
    let last = events.pop();
    for event in events {
        let Event::Delta(delta) = event else {
            panic!("{event:?}");
        };
        received.text += &delta.text;
        received.ids.extend(delta.token_ids);
        received
            .logprobs
            .extend(delta.logprobs.iter().map(|entry| entry.token_id));
    }
    let Some(Event::Finished(finished)) = last else {
        panic!("{last:?}");
    };
    received.stop = finished.stop;
    received.completion_tokens = finished.usage.unwrap().completion_tokens;
    received
}

/// The shortest beginning of the tokens whose text has a stop string, and that text up to the string. Without one all of it.
fn by_definition(stops: &[String], include: bool, min_tokens: usize, ids: &[u32]) -> Received {
    let of = |ids: &[u32], text: String, stop: Option<Stop>| Received {
        text,
        ids: ids.to_vec(),
        logprobs: ids.to_vec(),
        stop,
        completion_tokens: ids.len() as u32,
    };
    let whole = tokenizer().decode(ids, true).unwrap();
    let mut complete = String::new();
    for count in 1..=ids.len() {
        let text = tokenizer().decode(&ids[..count], true).unwrap();
        // Text that a later token may change is not there yet, unless this is the end.
        let certain = match count == ids.len() {
            true => whole.clone(),
            false => text
                .trim_end_matches(char::REPLACEMENT_CHARACTER)
                .to_owned(),
        };
        let before = std::mem::replace(&mut complete, certain).len();
        if count < min_tokens {
            continue;
        }
        let ends = before + 1..=complete.len();
        for end in ends.filter(|&end| complete.is_char_boundary(end)) {
            let longest = stops
                .iter()
                .filter(|stop| complete[..end].ends_with(stop.as_str()))
                .max_by_key(|stop| stop.len());
            if let Some(stop) = longest {
                let kept = if include { end } else { end - stop.len() };
                let stop = Some(Stop::StopString(stop.clone()));
                return of(&ids[..count], complete[..kept].to_owned(), stop);
            }
        }
    }
    of(ids, whole, None)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Random tokens are random bytes: characters, and stop strings, are split and broken everywhere.
    #[test]
    fn steps_make_no_difference(
        raw in prop::collection::vec(any::<u32>(), 1..40),
        cuts in prop::collection::vec(0usize..40, 0..12),
        stops in prop::collection::vec("[a-e ]{1,2}|é|\u{fffd}", 0..3),
        include: bool,
        min_tokens in 0usize..12,
    ) {
        let vocabulary = tokenizer().vocab_size() as u32;
        let ids: Vec<u32> = raw.iter().map(|id| id % vocabulary).collect();
        let mut cuts = cuts;
        cuts.sort_unstable();
        let expected = play(transcript(&stops, include, min_tokens), &ids, &[ids.len()]);
        let received = play(transcript(&stops, include, min_tokens), &ids, &cuts);
        prop_assert_eq!(&received, &expected);
        prop_assert_eq!(&received.ids, &received.logprobs);
        prop_assert_eq!(received.completion_tokens as usize, received.ids.len());
    }

    #[test]
    fn answers_end_where_the_definition_says(
        text in "[a-e é😀]{1,30}",
        stops in prop::collection::vec("[a-e ]{1,3}|é|😀a", 0..3),
        include: bool,
        min_tokens in 0usize..8,
    ) {
        let ids = tokenizer().encode(&text, false).unwrap();
        let received = play(transcript(&stops, include, min_tokens), &ids, &[1, 2, 5, 6]);
        prop_assert_eq!(received, by_definition(&stops, include, min_tokens, &ids));
    }
}

#[test]
fn a_stop_token_is_named_at_the_end() {
    let mut transcript = transcript(&[], false, 0);
    transcript.record(step(&[40, 41])).unwrap();
    let events = transcript.finish(FinishReason::Stop, 0, None).unwrap();
    let Some(Event::Finished(finished)) = events.last() else {
        panic!("{events:?}");
    };
    assert_eq!(finished.stop, Some(Stop::StopTokenId(41)));
}
