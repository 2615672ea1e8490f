//! What a verifier and a drafter must agree on before they use a link.

use std::fmt::Debug;

use treespec_checkpoint::{CheckpointError, DrafterCheckpoint, TargetCheckpoint, TextTokenizer};

use crate::{ServiceError, proto::draft::v1 as pb};

/// Version of the Link protocol spoken by this build.
pub const PROTOCOL_VERSION: u32 = 1;

/// Number format of feature rows on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeatureDtype {
    /// IEEE single precision, little-endian.
    F32,
    /// bfloat16, little-endian.
    Bf16,
}

/// Identity of a (target, drafter) pair as one side sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Rows of the target's head.
    pub vocab_size: u32,
    /// Width of a feature row.
    pub hidden_size: u32,
    /// SHA-256 of the vocabulary, hex.
    pub tokenizer_hash: String,
    /// Layers whose output is tapped, in concatenation order.
    pub taps: Vec<u32>,
    /// Slots of a block: the root and `block_size - 1` drafted positions.
    pub block_size: u32,
    /// Token id that stands in the slots to be drafted.
    pub mask_token_id: u32,
    /// Number format of feature rows.
    pub feature_dtype: FeatureDtype,
    /// SHA-256 over `fc.weight` and `hidden_norm.weight` as stored, hex: both sides project with the same weights.
    pub projection_hash: String,
}

impl Fingerprint {
    /// The fingerprint of a drafter and its target as they lie on disk. Both sides compute it from their own copies.
    ///
    /// # Errors
    /// When the projection's weights cannot be read.
    pub fn of(
        drafter: &DrafterCheckpoint,
        target: &TargetCheckpoint,
        tokenizer: &TextTokenizer,
    ) -> Result<Self, CheckpointError> {
        // Sizes come from checked configurations and stay far below 2^32.
        let size = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let config = &drafter.config;
        Ok(Self {
            vocab_size: size(target.config.vocab_size),
            hidden_size: size(config.hidden_size),
            tokenizer_hash: tokenizer.fingerprint().to_owned(),
            taps: config.taps.iter().map(|&tap| size(tap)).collect(),
            block_size: size(config.block_size),
            mask_token_id: config.mask_token_id,
            feature_dtype: FeatureDtype::F32,
            projection_hash: drafter.projection_hash()?,
        })
    }

    /// Reads a fingerprint off the wire; `field` is where it came from, for the error.
    ///
    /// # Errors
    /// [`ServiceError::InvalidArgument`] when it is absent or has an unknown feature dtype.
    pub fn from_proto(message: Option<pb::Fingerprint>, field: &str) -> Result<Self, ServiceError> {
        let message = message.ok_or_else(|| ServiceError::invalid(field, "missing"))?;
        let feature_dtype = match message.feature_dtype() {
            pb::FeatureDtype::F32 => FeatureDtype::F32,
            pb::FeatureDtype::Bf16 => FeatureDtype::Bf16,
            pb::FeatureDtype::Unspecified => {
                return Err(ServiceError::invalid(
                    format!("{field}.feature_dtype"),
                    format!("{} is not a known dtype", message.feature_dtype),
                ));
            }
        };
        Ok(Self {
            vocab_size: message.vocab_size,
            hidden_size: message.hidden_size,
            tokenizer_hash: message.tokenizer_hash,
            taps: message.taps,
            block_size: message.block_size,
            mask_token_id: message.mask_token_id,
            feature_dtype,
            projection_hash: message.projection_hash,
        })
    }
}

impl From<&Fingerprint> for pb::Fingerprint {
    fn from(fingerprint: &Fingerprint) -> Self {
        let feature_dtype = match fingerprint.feature_dtype {
            FeatureDtype::F32 => pb::FeatureDtype::F32,
            FeatureDtype::Bf16 => pb::FeatureDtype::Bf16,
        };
        Self {
            vocab_size: fingerprint.vocab_size,
            hidden_size: fingerprint.hidden_size,
            tokenizer_hash: fingerprint.tokenizer_hash.clone(),
            taps: fingerprint.taps.clone(),
            block_size: fingerprint.block_size,
            mask_token_id: fingerprint.mask_token_id,
            feature_dtype: feature_dtype.into(),
            projection_hash: fingerprint.projection_hash.clone(),
        }
    }
}

/// Checks the protocol versions of both sides.
///
/// # Errors
/// [`ServiceError::FailedPrecondition`] naming `protocol_version` and both values.
pub fn compare_versions(verifier: u32, drafter: u32) -> Result<(), ServiceError> {
    agree("protocol_version", &verifier, &drafter)
}

/// Checks that both sides mean the same models.
///
/// # Errors
/// [`ServiceError::FailedPrecondition`] naming the first field that differs and both values.
pub fn compare(verifier: &Fingerprint, drafter: &Fingerprint) -> Result<(), ServiceError> {
    let Fingerprint {
        vocab_size,
        hidden_size,
        tokenizer_hash,
        taps,
        block_size,
        mask_token_id,
        feature_dtype,
        projection_hash,
    } = verifier;
    agree("fingerprint.vocab_size", vocab_size, &drafter.vocab_size)?;
    agree("fingerprint.hidden_size", hidden_size, &drafter.hidden_size)?;
    agree(
        "fingerprint.tokenizer_hash",
        tokenizer_hash,
        &drafter.tokenizer_hash,
    )?;
    agree("fingerprint.taps", taps, &drafter.taps)?;
    agree("fingerprint.block_size", block_size, &drafter.block_size)?;
    agree(
        "fingerprint.mask_token_id",
        mask_token_id,
        &drafter.mask_token_id,
    )?;
    agree(
        "fingerprint.feature_dtype",
        feature_dtype,
        &drafter.feature_dtype,
    )?;
    agree(
        "fingerprint.projection_hash",
        projection_hash,
        &drafter.projection_hash,
    )
}

/// Values are shown by `Debug`: hashes come from the peer and may be any text, even an empty one.
fn agree<T: PartialEq + Debug>(field: &str, verifier: &T, drafter: &T) -> Result<(), ServiceError> {
    if verifier == drafter {
        return Ok(());
    }
    Err(ServiceError::precondition(
        field,
        format!("the verifier has {verifier:?}, the drafter has {drafter:?}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint {
            vocab_size: 49152,
            hidden_size: 576,
            tokenizer_hash: "aa".into(),
            taps: vec![1, 14, 26],
            block_size: 16,
            mask_token_id: 4,
            feature_dtype: FeatureDtype::F32,
            projection_hash: "bb".into(),
        }
    }

    #[test]
    fn equal_fingerprints_agree_and_survive_the_wire() {
        let ours = fingerprint();
        let wire = pb::Fingerprint::from(&ours);
        let theirs = Fingerprint::from_proto(Some(wire), "hello.fingerprint").unwrap();
        assert_eq!(compare(&ours, &theirs), Ok(()));
    }

    #[test]
    fn every_field_is_compared_and_named_with_both_values() {
        type Edit = fn(&mut Fingerprint);
        let cases: [(&str, Edit, &str, &str); 8] = [
            ("vocab_size", |f| f.vocab_size = 32000, "49152", "32000"),
            ("hidden_size", |f| f.hidden_size = 64, "576", "64"),
            (
                "tokenizer_hash",
                |f| f.tokenizer_hash = "cc".into(),
                "\"aa\"",
                "\"cc\"",
            ),
            ("taps", |f| f.taps = vec![2], "[1, 14, 26]", "[2]"),
            ("block_size", |f| f.block_size = 8, "16", "8"),
            ("mask_token_id", |f| f.mask_token_id = 0, "4", "0"),
            (
                "feature_dtype",
                |f| f.feature_dtype = FeatureDtype::Bf16,
                "F32",
                "Bf16",
            ),
            (
                "projection_hash",
                |f| f.projection_hash = String::new(),
                "\"bb\"",
                "\"\"",
            ),
        ];
        let verifier = fingerprint();
        for (field, edit, ours, theirs) in cases {
            let mut drafter = fingerprint();
            edit(&mut drafter);
            let error = compare(&verifier, &drafter).unwrap_err();
            assert_eq!(error.code(), tonic::Code::FailedPrecondition);
            let text = error.to_string();
            for part in [field, ours, theirs] {
                assert!(text.contains(part), "{text} lacks {part}");
            }
        }
    }

    #[test]
    fn versions_are_compared() {
        assert_eq!(compare_versions(PROTOCOL_VERSION, PROTOCOL_VERSION), Ok(()));
        let text = compare_versions(2, 1).unwrap_err().to_string();
        assert!(text.contains("protocol_version") && text.contains('2') && text.contains('1'));
    }

    #[test]
    fn absent_and_unknown_values_are_refused() {
        let missing = Fingerprint::from_proto(None, "hello.fingerprint").unwrap_err();
        assert_eq!(
            missing,
            ServiceError::invalid("hello.fingerprint", "missing")
        );
        for dtype in [0, 77] {
            let mut wire = pb::Fingerprint::from(&fingerprint());
            wire.feature_dtype = dtype;
            let error = Fingerprint::from_proto(Some(wire), "hello.fingerprint").unwrap_err();
            assert!(error.to_string().contains(&dtype.to_string()), "{error}");
        }
    }
}
