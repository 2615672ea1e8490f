use bytes::Bytes;

use crate::{ServiceError, proto::draft::v1 as pb};

const F32_BYTES: usize = size_of::<f32>();

/// Consecutive feature rows of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureSpan {
    /// Position of the first row.
    pub start: u32,
    /// First position after the last row.
    pub end: u32,
    /// `[end - start, hidden_size]`, row-major, all finite.
    pub values: Vec<f32>,
}

/// Packs feature rows `[n, hidden_size]` for the positions from `start`.
///
/// # Errors
/// [`ServiceError::Internal`] when `rows` is not a whole number of rows or ends beyond the last position.
pub fn features_to_proto(
    start: u32,
    rows: &[f32],
    hidden_size: usize,
) -> Result<pb::FeatureRows, ServiceError> {
    let end = whole_rows(rows.len(), hidden_size)
        .and_then(|count| start.checked_add(count))
        .ok_or_else(|| {
            ServiceError::internal(format!(
                "{} floats are no feature rows of width {hidden_size} from position {start}",
                rows.len()
            ))
        })?;
    Ok(pb::FeatureRows {
        ctx_start: start,
        ctx_end: end,
        data: floats_to_bytes(rows),
    })
}

/// Reads feature rows. `hidden_size` is that of the fingerprint.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] when the rows are absent, their size contradicts the range, or a value is not
/// finite.
pub fn features_from_proto(
    message: Option<pb::FeatureRows>,
    hidden_size: usize,
) -> Result<FeatureSpan, ServiceError> {
    let message = message.ok_or_else(|| ServiceError::invalid("rows", "missing"))?;
    let (start, end) = (message.ctx_start, message.ctx_end);
    let count = end.checked_sub(start).ok_or_else(|| {
        ServiceError::invalid("rows.ctx_end", format!("{end} is before ctx_start {start}"))
    })?;
    let values = floats_from_bytes(&message.data, count, hidden_size, "rows.data")?;
    Ok(FeatureSpan { start, end, values })
}

/// Packs the final hidden rows of a block, `[n, hidden_size]`.
///
/// # Errors
/// [`ServiceError::Internal`] when `hidden` is not a whole number of rows.
pub fn block_hidden_to_proto(
    hidden: &[f32],
    hidden_size: usize,
) -> Result<pb::BlockHidden, ServiceError> {
    let rows = whole_rows(hidden.len(), hidden_size).ok_or_else(|| {
        ServiceError::internal(format!(
            "{} floats are no hidden rows of width {hidden_size}",
            hidden.len()
        ))
    })?;
    Ok(pb::BlockHidden {
        rows,
        data: floats_to_bytes(hidden),
    })
}

/// Reads the hidden rows of a block: `[block_size - 1, hidden_size]`.
///
/// # Errors
/// [`ServiceError::InvalidArgument`] when there are more or fewer rows, or a value is not finite.
pub fn block_hidden_from_proto(
    message: &pb::BlockHidden,
    block_size: usize,
    hidden_size: usize,
) -> Result<Vec<f32>, ServiceError> {
    let expected = block_size.saturating_sub(1);
    if usize::try_from(message.rows).ok() != Some(expected) {
        return Err(ServiceError::invalid(
            "block_hidden.rows",
            format!(
                "{}, but a block of {block_size} has {expected}",
                message.rows
            ),
        ));
    }
    floats_from_bytes(
        &message.data,
        message.rows,
        hidden_size,
        "block_hidden.data",
    )
}

fn whole_rows(floats: usize, width: usize) -> Option<u32> {
    if width == 0 || !floats.is_multiple_of(width) {
        return None;
    }
    u32::try_from(floats / width).ok()
}

fn floats_to_bytes(floats: &[f32]) -> Bytes {
    let mut bytes = vec![0; floats.len() * F32_BYTES];
    for (target, value) in bytes.chunks_exact_mut(F32_BYTES).zip(floats) {
        target.copy_from_slice(&value.to_le_bytes());
    }
    bytes.into()
}

fn floats_from_bytes(
    data: &[u8],
    rows: u32,
    width: usize,
    field: &str,
) -> Result<Vec<f32>, ServiceError> {
    // In u128, so that no range and no width can overflow.
    let expected = u128::from(rows) * width as u128 * F32_BYTES as u128;
    if data.len() as u128 != expected {
        return Err(ServiceError::invalid(
            field,
            format!(
                "{} bytes, but {rows} rows of {width} f32 are {expected}",
                data.len()
            ),
        ));
    }
    let values: Vec<f32> = data
        .as_chunks::<F32_BYTES>()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(ServiceError::invalid(
            field,
            format!(
                "row {} has {} in column {}",
                at / width,
                values[at],
                at % width
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(ctx_start: u32, ctx_end: u32, floats: &[f32]) -> Option<pb::FeatureRows> {
        Some(pb::FeatureRows {
            ctx_start,
            ctx_end,
            data: floats_to_bytes(floats),
        })
    }

    proptest! {
        #[test]
        fn rows_survive_the_wire_by_bits(
            start in any::<u32>(),
            bits in prop::collection::vec(any::<u32>(), 0..40),
            width in 1usize..5,
        ) {
            let mut rows: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).filter(|v| v.is_finite()).collect();
            rows.truncate(rows.len() / width * width);
            let count = (rows.len() / width) as u32;
            let wire = features_to_proto(start, &rows, width);
            match start.checked_add(count) {
                None => prop_assert!(wire.is_err()),
                Some(end) => {
                    let span = features_from_proto(Some(wire.unwrap()), width).unwrap();
                    prop_assert_eq!((span.start, span.end), (start, end));
                    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    prop_assert_eq!(bits(&span.values), bits(&rows));
                }
            }
        }

        #[test]
        fn no_message_panics(start in any::<u32>(), end in any::<u32>(), data in prop::collection::vec(any::<u8>(), 0..64)) {
            let message = pb::FeatureRows { ctx_start: start, ctx_end: end, data: data.into() };
            if let Ok(span) = features_from_proto(Some(message), 3) {
                prop_assert_eq!(span.values.len(), (span.end - span.start) as usize * 3);
            }
        }
    }

    #[test]
    fn contradictions_are_refused_with_their_values() {
        let text = |message, width| features_from_proto(message, width).unwrap_err().to_string();
        assert_eq!(text(None, 2), "rows: missing");
        assert_eq!(
            text(message(5, 4, &[]), 2),
            "rows.ctx_end: 4 is before ctx_start 5"
        );
        assert_eq!(
            text(message(0, 2, &[1.0; 3]), 2),
            "rows.data: 12 bytes, but 2 rows of 2 f32 are 16"
        );
        assert!(text(message(0, u32::MAX, &[1.0; 2]), usize::MAX).contains("8 bytes"));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let text = text(message(3, 5, &[1.0, 2.0, 3.0, bad]), 2);
            assert!(
                text.contains("row 1") && text.contains("column 1"),
                "{text}"
            );
        }
    }

    #[test]
    fn hidden_rows_must_fill_the_block() {
        let hidden = [1.0, -2.0, 3.0, -4.0];
        let wire = block_hidden_to_proto(&hidden, 2).unwrap();
        assert_eq!(block_hidden_from_proto(&wire, 3, 2), Ok(hidden.to_vec()));
        for (block_size, hidden_size, part) in [(4, 2, "rows"), (0, 2, "rows"), (3, 4, "data")] {
            let text = block_hidden_from_proto(&wire, block_size, hidden_size)
                .unwrap_err()
                .to_string();
            assert!(text.contains(part), "{text}");
        }
        assert!(block_hidden_to_proto(&hidden, 3).is_err());
        assert!(block_hidden_to_proto(&hidden, 0).is_err());
    }
}
