/// Inverse frequencies of a rotary embedding, one per pair of a head: `theta^(-2i / head_dim)`, in f32 throughout as the
/// reference implementations compute them (transformers, `modeling_rope_utils.py`).
pub fn inverse_frequencies(theta: f64, head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|pair| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / (theta as f32).powf(exponent)
        })
        .collect()
}
