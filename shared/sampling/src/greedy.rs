/// A token with its logit or log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoredToken {
    /// Token id.
    pub token: u32,
    /// Logit or log-probability; greater is better.
    pub score: f32,
}

/// The best-scored token, ties to the lower id. NaN never wins: `None` when nothing else is there.
pub fn greedy(candidates: &[ScoredToken]) -> Option<u32> {
    candidates
        .iter()
        .filter(|candidate| !candidate.score.is_nan())
        .copied()
        .reduce(|best, next| if beats(next, best) { next } else { best })
        .map(|best| best.token)
}

fn beats(a: ScoredToken, b: ScoredToken) -> bool {
    a.score > b.score || (a.score == b.score && a.token < b.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(pairs: &[(u32, f32)]) -> Vec<ScoredToken> {
        pairs
            .iter()
            .map(|&(token, score)| ScoredToken { token, score })
            .collect()
    }

    #[test]
    fn best_score_wins() {
        assert_eq!(greedy(&scored(&[(3, -1.0), (9, 2.5), (4, 2.0)])), Some(9));
    }

    #[test]
    fn ties_go_to_the_lower_id_in_any_order() {
        assert_eq!(greedy(&scored(&[(7, 1.0), (2, 1.0), (5, 1.0)])), Some(2));
        assert_eq!(greedy(&scored(&[(2, 0.0), (1, -0.0)])), Some(1));
    }

    #[test]
    fn nan_never_wins() {
        assert_eq!(
            greedy(&scored(&[
                (0, f32::NAN),
                (8, f32::NEG_INFINITY),
                (1, -f32::NAN)
            ])),
            Some(8)
        );
        assert_eq!(greedy(&scored(&[(0, f32::NAN)])), None);
    }

    #[test]
    fn nothing_to_choose_from() {
        assert_eq!(greedy(&[]), None);
    }
}
