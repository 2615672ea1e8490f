use crate::{ServiceError, proto::verify::v1 as pb};

/// Most alternatives per token that a request may ask for.
const MAX_TOP_LOGPROBS: u32 = 20;

/// What a request wants to see besides its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OutputOptions {
    /// Log-probability of every token with this many alternatives, 0..=20; `None`: none at all.
    pub top_logprobs: Option<u8>,
    /// Log-probabilities of the prompt.
    pub prompt_logprobs: bool,
    /// The verified tree of every step.
    pub include_trees: bool,
    /// Log-probabilities of generated tokens are those of the distribution that they were drawn from.
    pub processed_logprobs: bool,
}

impl OutputOptions {
    /// Reads the options; an absent message asks for nothing.
    ///
    /// # Errors
    /// [`ServiceError::InvalidArgument`] naming `output.top_logprobs` or `output.logprob_kind`.
    pub fn from_proto(message: Option<&pb::OutputOptions>) -> Result<Self, ServiceError> {
        let Some(message) = message else {
            return Ok(Self::default());
        };
        let top_logprobs = message
            .top_logprobs
            .map(|count| {
                u8::try_from(count)
                    .ok()
                    .filter(|_| count <= MAX_TOP_LOGPROBS)
                    .ok_or_else(|| {
                        ServiceError::invalid(
                            "output.top_logprobs",
                            format!("{count} is outside 0..={MAX_TOP_LOGPROBS}"),
                        )
                    })
            })
            .transpose()?;
        let number = message.logprob_kind.unwrap_or_default();
        let kind = pb::LogprobKind::try_from(number).map_err(|_| {
            ServiceError::invalid(
                "output.logprob_kind",
                format!("{number} is not a known kind"),
            )
        })?;
        Ok(Self {
            top_logprobs,
            processed_logprobs: kind == pb::LogprobKind::Processed,
            prompt_logprobs: message.prompt_logprobs.unwrap_or_default(),
            include_trees: message.include_trees.unwrap_or_default(),
        })
    }
}

impl From<OutputOptions> for pb::OutputOptions {
    fn from(options: OutputOptions) -> Self {
        Self {
            top_logprobs: options.top_logprobs.map(u32::from),
            prompt_logprobs: Some(options.prompt_logprobs),
            include_trees: Some(options.include_trees),
            logprob_kind: Some(i32::from(match options.processed_logprobs {
                true => pb::LogprobKind::Processed,
                false => pb::LogprobKind::Raw,
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_alternatives_differ_from_no_logprobs() {
        let read = |top_logprobs| {
            OutputOptions::from_proto(Some(&pb::OutputOptions {
                top_logprobs,
                ..Default::default()
            }))
        };
        assert_eq!(
            OutputOptions::from_proto(None),
            Ok(OutputOptions::default())
        );
        assert_eq!(read(None).unwrap().top_logprobs, None);
        assert_eq!(read(Some(0)).unwrap().top_logprobs, Some(0));
        assert_eq!(read(Some(20)).unwrap().top_logprobs, Some(20));
        for count in [21, 256, u32::MAX] {
            let text = read(Some(count)).unwrap_err().to_string();
            assert!(text.contains("output.top_logprobs") && text.contains(&count.to_string()));
        }
    }

    #[test]
    fn options_survive_the_wire() {
        let options = OutputOptions {
            top_logprobs: Some(5),
            prompt_logprobs: true,
            include_trees: true,
            processed_logprobs: true,
        };
        assert_eq!(
            OutputOptions::from_proto(Some(&options.into())),
            Ok(options)
        );
    }
}
