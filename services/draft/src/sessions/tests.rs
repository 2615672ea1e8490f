use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use tonic::Code;

use super::*;

const LINK: LinkId = LinkId(0);

fn key(id: u64, epoch: u32) -> SequenceKey {
    SequenceKey { id, epoch }
}

/// One link with sequence 7 open at epoch 2, context 70.
fn one_sequence() -> Sessions<u32> {
    let mut sessions = Sessions::new(2);
    assert_eq!(sessions.attach(LINK, "v".into()), None);
    assert_eq!(open(&mut sessions, LINK, key(7, 2), 70), Ok(None));
    sessions
}

/// Opens a sequence with `context` and returns the context of its former epoch.
fn open(
    sessions: &mut Sessions<u32>,
    link: LinkId,
    key: SequenceKey,
    context: u32,
) -> Result<Option<u32>, ServiceError> {
    let mut freed = None;
    sessions.open(link, key, |former| {
        freed = former;
        Ok(context)
    })?;
    Ok(freed)
}

fn assert_refused(refusal: &Refusal<u32>, code: Code, parts: &[&str]) {
    assert_eq!(refusal.error.code(), code);
    let text = refusal.error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn a_context_starts_anywhere_and_then_grows_without_gaps() {
    let mut sessions = one_sequence();
    assert_eq!(sessions.append(LINK, key(7, 2), 100, 104), Ok(70));
    assert_eq!(sessions.append(LINK, key(7, 2), 104, 104), Ok(70));
    assert_eq!(sessions.append(LINK, key(7, 2), 104, 105), Ok(70));
    assert_eq!(sessions.propose(LINK, key(7, 2), 105), Ok(70));
}

#[test]
fn a_gap_ends_the_sequence_and_names_both_positions() {
    for start in [103, 105] {
        let mut sessions = one_sequence();
        sessions.append(LINK, key(7, 2), 100, 104).unwrap();
        let refusal = sessions.append(LINK, key(7, 2), start, 106).unwrap_err();
        assert_refused(
            &refusal,
            Code::FailedPrecondition,
            &[&start.to_string(), "104", "7"],
        );
        assert_eq!(refusal.freed, Some(70));
        let unknown = sessions.propose(LINK, key(7, 2), 104).unwrap_err();
        assert_refused(&unknown, Code::NotFound, &["sequence 7"]);
    }
}

#[test]
fn a_proposal_elsewhere_ends_the_sequence() {
    let mut sessions = one_sequence();
    sessions.append(LINK, key(7, 2), 0, 4).unwrap();
    let refusal = sessions.propose(LINK, key(7, 2), 5).unwrap_err();
    assert_refused(&refusal, Code::FailedPrecondition, &["ctx_end", "5", "4"]);
    assert_eq!(refusal.freed, Some(70));
    assert_eq!(sessions.open_sequences(), 0);
}

#[test]
fn other_epochs_change_nothing() {
    let mut sessions = one_sequence();
    sessions.append(LINK, key(7, 2), 0, 4).unwrap();
    for epoch in [1, 3] {
        let refusal = sessions.append(LINK, key(7, epoch), 4, 5).unwrap_err();
        assert_refused(
            &refusal,
            Code::FailedPrecondition,
            &["epoch 2", &format!("epoch {epoch}")],
        );
        assert_eq!(refusal.freed, None);
        let refusal = sessions.propose(LINK, key(7, epoch), 4).unwrap_err();
        assert_refused(&refusal, Code::FailedPrecondition, &["epoch"]);
        let refusal = sessions.end(LINK, key(7, epoch), ServiceError::internal("engine"));
        assert_eq!(refusal.freed, None);
    }
    assert_eq!(sessions.propose(LINK, key(7, 2), 4), Ok(70));
}

#[test]
fn opening_again_needs_a_higher_epoch_and_starts_empty() {
    let mut sessions = one_sequence();
    sessions.append(LINK, key(7, 2), 0, 4).unwrap();
    for epoch in [1, 2] {
        let error = open(&mut sessions, LINK, key(7, epoch), 71).unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
    }
    assert_eq!(open(&mut sessions, LINK, key(7, 3), 71), Ok(Some(70)));
    assert_eq!(sessions.append(LINK, key(7, 3), 9, 10), Ok(71));
}

#[test]
fn the_limit_counts_all_links_and_spares_reopening() {
    let mut sessions = one_sequence();
    sessions.attach(LinkId(1), "w".into());
    open(&mut sessions, LinkId(1), key(7, 0), 80).unwrap();
    let error = open(&mut sessions, LINK, key(8, 0), 81).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("all 2"), "{error}");
    assert_eq!(open(&mut sessions, LINK, key(7, 3), 71), Ok(Some(70)));
    assert_eq!(sessions.close(LinkId(1), 7), Some(80));
    assert_eq!(open(&mut sessions, LINK, key(8, 0), 82), Ok(None));
}

#[test]
fn a_context_that_cannot_be_made_leaves_the_sequence_closed() {
    let mut sessions = one_sequence();
    let error = ServiceError::internal("no memory");
    let failed = sessions.open(LINK, key(7, 3), |_| Err(error.clone()));
    assert_eq!(failed, Err(error));
    assert_eq!(sessions.open_sequences(), 0);
    assert_eq!(open(&mut sessions, LINK, key(7, 0), 72), Ok(None));
}

#[test]
fn a_second_link_of_a_verifier_replaces_the_first() {
    let mut sessions = one_sequence();
    let replaced = sessions.attach(LinkId(1), "v".into()).unwrap();
    assert_eq!(replaced.link, LINK);
    assert_eq!(replaced.freed, [70]);
    assert_eq!(sessions.link_of("v"), Ok(LinkId(1)));
    let late = open(&mut sessions, LINK, key(1, 0), 90).unwrap_err();
    assert_eq!(late.code(), Code::Aborted);
    // The first link's own end comes later and must not take the second with it.
    assert!(sessions.detach(LINK).is_empty());
    assert_eq!(sessions.link_of("v"), Ok(LinkId(1)));
    assert!(sessions.detach(LinkId(1)).is_empty());
    assert_eq!(sessions.link_of("v").unwrap_err().code(), Code::NotFound);
}

#[derive(Debug, Clone)]
enum Step {
    Attach(u8),
    Detach(u8),
    Open(u8, u64, u32),
    Append(u8, u64, u32, u32, u32),
    Propose(u8, u64, u32, u32),
    Close(u8, u64),
    Fail(u8, u64, u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (verifier, id, epoch, position) = (0u8..3, 0u64..4, 0u32..3, 0u32..4);
    let named = (verifier.clone(), id, epoch);
    let step = prop_oneof![
        1 => verifier.clone().prop_map(Step::Attach),
        1 => verifier.clone().prop_map(Step::Detach),
        4 => named.clone().prop_map(|(v, s, e)| Step::Open(v, s, e)),
        6 => (named.clone(), position.clone(), 0u32..3)
            .prop_map(|((v, s, e), start, rows)| Step::Append(v, s, e, start, start + rows)),
        4 => (named.clone(), position).prop_map(|((v, s, e), at)| Step::Propose(v, s, e, at)),
        1 => (verifier, 0u64..4).prop_map(|(v, s)| Step::Close(v, s)),
        1 => named.prop_map(|(v, s, e)| Step::Fail(v, s, e)),
    ];
    prop::collection::vec(step, 0..120)
}

/// Drives [`Sessions`] and a plain model side by side.
struct Model {
    sessions: Sessions<u32>,
    next: u32,
    links: HashMap<u8, LinkId>,
    /// (verifier, sequence) -> (epoch, context, end)
    open: HashMap<(u8, u64), (u32, u32, Option<u32>)>,
    freed: HashSet<u32>,
}

impl Model {
    fn free(&mut self, contexts: impl IntoIterator<Item = u32>) {
        for context in contexts {
            assert!(self.freed.insert(context), "context {context} freed twice");
        }
    }

    fn forget_verifier(&mut self, verifier: u8) {
        self.open.retain(|&(v, _), _| v != verifier);
    }

    fn apply(&mut self, step: &Step) {
        let link_of = |v: &u8| self.links.get(v).copied().unwrap_or(LinkId(u64::MAX));
        match *step {
            Step::Attach(v) => {
                let link = LinkId(u64::from(self.next) + 1000);
                self.next += 1;
                if let Some(replaced) = self.sessions.attach(link, v.to_string()) {
                    assert_eq!(self.links.get(&v), Some(&replaced.link));
                    self.free(replaced.freed);
                }
                self.links.insert(v, link);
                self.forget_verifier(v);
            }
            Step::Detach(v) => {
                let freed = self.sessions.detach(link_of(&v));
                self.free(freed);
                self.links.remove(&v);
                self.forget_verifier(v);
            }
            Step::Open(v, s, epoch) => {
                let link = link_of(&v);
                let context = self.next;
                self.next += 1;
                match open(&mut self.sessions, link, key(s, epoch), context) {
                    Ok(former) => self.free(former),
                    Err(_) => return,
                }
                if let Some((former, ..)) = self.open.insert((v, s), (epoch, context, None)) {
                    assert!(former < epoch);
                }
            }
            Step::Append(v, s, epoch, start, end) => {
                let result = self.sessions.append(link_of(&v), key(s, epoch), start, end);
                let fits = |held: Option<u32>| held.is_none_or(|held| held == start);
                self.check(v, s, epoch, result, fits, Some(end));
            }
            Step::Propose(v, s, epoch, at) => {
                let result = self.sessions.propose(link_of(&v), key(s, epoch), at);
                let fits = |held: Option<u32>| held.unwrap_or(0) == at;
                self.check(v, s, epoch, result, fits, None);
            }
            Step::Close(v, s) => {
                let freed = self.sessions.close(link_of(&v), s);
                assert_eq!(
                    freed,
                    self.open.remove(&(v, s)).map(|(_, context, _)| context)
                );
                self.free(freed);
            }
            Step::Fail(v, s, epoch) => {
                let error = ServiceError::internal("engine");
                let refusal = self.sessions.end(link_of(&v), key(s, epoch), error);
                let current = self.open.get(&(v, s)).is_some_and(|open| open.0 == epoch);
                assert_eq!(refusal.freed.is_some(), current);
                if current {
                    self.open.remove(&(v, s));
                }
                self.free(refusal.freed);
            }
        }
    }

    fn check(
        &mut self,
        v: u8,
        s: u64,
        epoch: u32,
        result: Result<u32, Refusal<u32>>,
        fits: impl Fn(Option<u32>) -> bool,
        new_end: Option<u32>,
    ) {
        let current = self
            .open
            .get(&(v, s))
            .copied()
            .filter(|open| open.0 == epoch);
        match (current, result) {
            (Some((_, context, end)), Ok(used)) => {
                assert!(fits(end));
                assert_eq!(used, context);
                self.open.insert((v, s), (epoch, context, new_end.or(end)));
            }
            (Some((_, context, end)), Err(refusal)) => {
                assert!(!fits(end));
                assert_eq!(refusal.freed, Some(context));
                self.open.remove(&(v, s));
                self.free(refusal.freed);
            }
            (None, result) => assert_eq!(result.unwrap_err().freed, None),
        }
    }
}

proptest! {
    #[test]
    fn every_context_is_freed_exactly_once(steps in steps(), limit in 0usize..5) {
        let mut model = Model {
            sessions: Sessions::new(limit),
            next: 0,
            links: HashMap::new(),
            open: HashMap::new(),
            freed: HashSet::new(),
        };
        for step in &steps {
            model.apply(step);
            prop_assert_eq!(model.sessions.open_sequences(), model.open.len());
            prop_assert!(model.open.len() <= limit);
            prop_assert!(model.open.values().all(|(_, context, _)| !model.freed.contains(context)));
        }
        let held: HashSet<u32> = model.open.values().map(|open| open.1).collect();
        let mut returned = HashSet::new();
        for link in model.links.values() {
            returned.extend(model.sessions.detach(*link));
        }
        prop_assert_eq!(returned, held);
    }
}
