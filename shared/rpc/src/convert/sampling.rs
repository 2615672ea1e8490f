use treespec_sampling::SamplingParams;

use crate::{ServiceError, proto::verify::v1 as pb};

/// Reads and validates sampling parameters; an absent scalar takes its default, an absent message is greedy.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] naming `sampling.<field>` and the value.
pub fn sampling_from_proto(
    message: Option<&pb::SamplingParams>,
) -> Result<SamplingParams, ServiceError> {
    let defaults = SamplingParams::default();
    let params = match message {
        None => defaults,
        Some(message) => SamplingParams {
            temperature: message.temperature.unwrap_or(defaults.temperature),
            top_p: message.top_p.unwrap_or(defaults.top_p),
            top_k: message.top_k.or(defaults.top_k),
            min_p: message.min_p.unwrap_or(defaults.min_p),
            seed: message.seed,
            repetition_penalty: message
                .repetition_penalty
                .unwrap_or(defaults.repetition_penalty),
            presence_penalty: message
                .presence_penalty
                .unwrap_or(defaults.presence_penalty),
            frequency_penalty: message
                .frequency_penalty
                .unwrap_or(defaults.frequency_penalty),
        },
    };
    params.validate().map_err(|error| {
        ServiceError::invalid(format!("sampling.{}", error.field()), error.to_string())
    })?;
    Ok(params)
}

/// Every parameter explicit, so that the receiver's defaults do not matter.
pub fn sampling_to_proto(params: &SamplingParams) -> pb::SamplingParams {
    pb::SamplingParams {
        temperature: Some(params.temperature),
        top_p: Some(params.top_p),
        top_k: params.top_k,
        min_p: Some(params.min_p),
        seed: params.seed,
        repetition_penalty: Some(params.repetition_penalty),
        presence_penalty: Some(params.presence_penalty),
        frequency_penalty: Some(params.frequency_penalty),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_means_default_and_values_survive_the_wire() {
        assert_eq!(sampling_from_proto(None), Ok(SamplingParams::default()));
        let empty = pb::SamplingParams::default();
        assert_eq!(
            sampling_from_proto(Some(&empty)),
            Ok(SamplingParams::default())
        );
        let params = SamplingParams {
            top_p: 0.5,
            top_k: Some(3),
            seed: Some(u64::MAX),
            ..SamplingParams::default()
        };
        assert_eq!(
            sampling_from_proto(Some(&sampling_to_proto(&params))),
            Ok(params)
        );
    }

    #[test]
    fn refused_values_name_the_field_of_the_request() {
        let message = pb::SamplingParams {
            top_p: Some(f32::NAN),
            ..Default::default()
        };
        let error = sampling_from_proto(Some(&message)).unwrap_err();
        assert!(
            matches!(&error, ServiceError::InvalidArgument { field, .. } if field == "sampling.top_p")
        );
    }
}
