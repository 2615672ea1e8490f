use treespec_sampling::{Coupling, Ranking};

use crate::{ServiceError, proto::draft::v1 as pb};

/// What a drafter is told; nothing when it ranks by probability alone.
pub fn coupling_to_proto(coupling: Coupling) -> Option<pb::Coupling> {
    let fitted = match coupling.ranking {
        Ranking::Plain => return None,
        Ranking::Full => false,
        Ranking::Fitted => true,
    };
    Some(pb::Coupling {
        seed: coupling.seed,
        temperature: coupling.temperature,
        fitted,
    })
}

/// Reads a coupling.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] naming `coupling.temperature` when it is not above 0.
pub fn coupling_from_proto(
    message: Option<&pb::Coupling>,
) -> Result<Option<Coupling>, ServiceError> {
    let Some(message) = message else {
        return Ok(None);
    };
    if !(message.temperature.is_finite() && message.temperature > 0.0) {
        return Err(ServiceError::invalid(
            "coupling.temperature",
            format!("{} is not a finite number above 0", message.temperature),
        ));
    }
    Ok(Some(Coupling {
        seed: message.seed,
        temperature: message.temperature,
        ranking: match message.fitted {
            true => Ranking::Fitted,
            false => Ranking::Full,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn couplings_survive_the_wire() {
        for ranking in [Ranking::Full, Ranking::Fitted] {
            let coupling = Coupling {
                seed: u64::MAX,
                temperature: 0.3,
                ranking,
            };
            let wire = coupling_to_proto(coupling);
            assert_eq!(coupling_from_proto(wire.as_ref()), Ok(Some(coupling)));
        }
        assert_eq!(coupling_from_proto(None), Ok(None));
        let plain = Coupling {
            seed: 1,
            temperature: 1.0,
            ranking: Ranking::Plain,
        };
        assert_eq!(coupling_to_proto(plain), None);
    }

    #[test]
    fn a_temperature_that_is_none_is_refused() {
        for temperature in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let message = pb::Coupling {
                temperature,
                ..Default::default()
            };
            let error = coupling_from_proto(Some(&message)).unwrap_err();
            assert!(error.to_string().contains("coupling.temperature"));
        }
    }
}
