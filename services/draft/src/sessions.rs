//! Which verifier has which sequences open, and how far the context of each reaches. Pure bookkeeping.
//!
//! A sequence is named by (link, sequence id, epoch). The rule for errors: a message that contradicts the state of a
//! sequence at its current epoch ends the sequence; a message for another epoch or for an unknown sequence changes
//! nothing. Neither touches other sequences or the link.

use std::collections::HashMap;

use treespec_rpc::ServiceError;

/// One Link stream. Ids are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LinkId(pub(crate) u64);

/// A sequence of a link as a message names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SequenceKey {
    pub(crate) id: u64,
    pub(crate) epoch: u32,
}

/// Why a message was refused, and the context to free because its sequence ended with it.
#[derive(Debug, PartialEq)]
pub(crate) struct Refusal<C> {
    pub(crate) error: ServiceError,
    pub(crate) freed: Option<C>,
}

impl<C> From<ServiceError> for Refusal<C> {
    fn from(error: ServiceError) -> Self {
        Self { error, freed: None }
    }
}

/// All open sequences. `C` is the drafter's handle of a context; whoever takes one out has to free it.
#[derive(Debug)]
pub(crate) struct Sessions<C> {
    links: HashMap<LinkId, Link<C>>,
    by_verifier: HashMap<String, LinkId>,
    max_sequences: usize,
    open_sequences: usize,
}

#[derive(Debug)]
struct Link<C> {
    verifier: String,
    sequences: HashMap<u64, Sequence<C>>,
}

#[derive(Debug)]
struct Sequence<C> {
    epoch: u32,
    context: C,
    /// First position after the context; `None` while it is empty and may begin anywhere.
    end: Option<u32>,
}

/// What [`Sessions::attach`] pushed out.
#[derive(Debug, PartialEq)]
pub(crate) struct Replaced<C> {
    pub(crate) link: LinkId,
    pub(crate) freed: Vec<C>,
}

impl<C: Copy> Sessions<C> {
    /// `max_sequences` counts over all links.
    pub(crate) fn new(max_sequences: usize) -> Self {
        Self {
            links: HashMap::new(),
            by_verifier: HashMap::new(),
            max_sequences,
            open_sequences: 0,
        }
    }

    /// Registers a link. A verifier has one: an older link of the same instance ends.
    pub(crate) fn attach(&mut self, link: LinkId, verifier: String) -> Option<Replaced<C>> {
        let replaced = self
            .by_verifier
            .get(&verifier)
            .copied()
            .map(|old| Replaced {
                link: old,
                freed: self.detach(old),
            });
        self.by_verifier.insert(verifier.clone(), link);
        self.links.insert(
            link,
            Link {
                verifier,
                sequences: HashMap::new(),
            },
        );
        replaced
    }

    /// Forgets a link and returns its contexts. Nothing happens when it was replaced before.
    pub(crate) fn detach(&mut self, link: LinkId) -> Vec<C> {
        let Some(ended) = self.links.remove(&link) else {
            return Vec::new();
        };
        self.by_verifier.remove(&ended.verifier);
        self.open_sequences -= ended.sequences.len();
        ended
            .sequences
            .into_values()
            .map(|sequence| sequence.context)
            .collect()
    }

    /// The link of a verifier instance.
    ///
    /// # Errors
    /// [`ServiceError::NotFound`] naming the instance.
    pub(crate) fn link_of(&self, verifier: &str) -> Result<LinkId, ServiceError> {
        self.by_verifier
            .get(verifier)
            .copied()
            .ok_or_else(|| ServiceError::NotFound {
                resource: "link of verifier".to_owned(),
                name: format!("{verifier:?}"),
            })
    }

    /// Opens a sequence with an empty context, or opens it again under a higher epoch. `make` gets the context of the
    /// former epoch to free, and makes the new one.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for an epoch that is not higher, RESOURCE_EXHAUSTED when all sequences are in use, and what
    /// `make` fails with.
    pub(crate) fn open(
        &mut self,
        link: LinkId,
        key: SequenceKey,
        make: impl FnOnce(Option<C>) -> Result<C, ServiceError>,
    ) -> Result<(), ServiceError> {
        let sequences = &self.link(link)?.sequences;
        match sequences.get(&key.id).map(|sequence| sequence.epoch) {
            Some(open) if key.epoch <= open => {
                return Err(ServiceError::precondition(
                    "epoch",
                    format!(
                        "sequence {} is open at epoch {open}; epoch {} is not higher",
                        key.id, key.epoch
                    ),
                ));
            }
            None if self.open_sequences >= self.max_sequences => {
                return Err(ServiceError::ResourceExhausted {
                    what: format!("sequences (all {} in use)", self.max_sequences),
                    retry_after: None,
                });
            }
            Some(_) | None => {}
        }
        let sequence = Sequence {
            epoch: key.epoch,
            context: make(self.remove(link, key.id))?,
            end: None,
        };
        self.link(link)?.sequences.insert(key.id, sequence);
        self.open_sequences += 1;
        Ok(())
    }

    /// Records that the rows `[start, end)` continue the context.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for a gap or overlap, and the errors of an unknown sequence or epoch.
    pub(crate) fn append(
        &mut self,
        link: LinkId,
        key: SequenceKey,
        start: u32,
        end: u32,
    ) -> Result<C, Refusal<C>> {
        let sequence = self.sequence(link, key)?;
        if let Some(held) = sequence.end
            && held != start
        {
            let error = ServiceError::precondition(
                "rows.ctx_start",
                format!(
                    "sequence {}: rows start at {start}, but the context ends at {held}",
                    key.id
                ),
            );
            return Err(self.end(link, key, error));
        }
        sequence.end = Some(end);
        Ok(sequence.context)
    }

    /// The context to propose from at `ctx_end`.
    ///
    /// # Errors
    /// FAILED_PRECONDITION when the context ends elsewhere, and the errors of an unknown sequence or epoch.
    pub(crate) fn propose(
        &mut self,
        link: LinkId,
        key: SequenceKey,
        ctx_end: u32,
    ) -> Result<C, Refusal<C>> {
        let sequence = self.sequence(link, key)?;
        let held = sequence.end.unwrap_or_default();
        if held != ctx_end {
            let error = ServiceError::precondition(
                "ctx_end",
                format!(
                    "sequence {}: a proposal was asked at {ctx_end}, but the context ends at {held}",
                    key.id
                ),
            );
            return Err(self.end(link, key, error));
        }
        Ok(sequence.context)
    }

    /// Ends a sequence because of `error`, if it is still at this epoch.
    pub(crate) fn end(
        &mut self,
        link: LinkId,
        key: SequenceKey,
        error: ServiceError,
    ) -> Refusal<C> {
        let freed = match self.sequence(link, key) {
            Ok(_) => self.remove(link, key.id),
            Err(_) => None,
        };
        Refusal { error, freed }
    }

    /// Closes a sequence, whatever its epoch. Closing one that is not open is no error: it may just have failed.
    pub(crate) fn close(&mut self, link: LinkId, id: u64) -> Option<C> {
        self.remove(link, id)
    }

    /// Sequences open on all links.
    pub(crate) fn open_sequences(&self) -> usize {
        self.open_sequences
    }

    fn remove(&mut self, link: LinkId, id: u64) -> Option<C> {
        let removed = self.links.get_mut(&link)?.sequences.remove(&id)?;
        self.open_sequences -= 1;
        Some(removed.context)
    }

    fn link(&mut self, link: LinkId) -> Result<&mut Link<C>, ServiceError> {
        self.links
            .get_mut(&link)
            .ok_or_else(|| ServiceError::Aborted {
                description: "the link has ended".to_owned(),
            })
    }

    fn sequence(
        &mut self,
        link: LinkId,
        key: SequenceKey,
    ) -> Result<&mut Sequence<C>, ServiceError> {
        let sequence =
            self.link(link)?
                .sequences
                .get_mut(&key.id)
                .ok_or_else(|| ServiceError::NotFound {
                    resource: "sequence".to_owned(),
                    name: key.id.to_string(),
                })?;
        if sequence.epoch != key.epoch {
            return Err(ServiceError::precondition(
                "epoch",
                format!(
                    "sequence {} is open at epoch {}, the message has epoch {}",
                    key.id, sequence.epoch, key.epoch
                ),
            ));
        }
        Ok(sequence)
    }
}

#[cfg(test)]
mod tests;
