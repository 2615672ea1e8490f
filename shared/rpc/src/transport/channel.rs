use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use super::{
    CONNECTION_WINDOW, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, STREAM_WINDOW, TransportError,
};

/// Longest wait for a TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A channel to `endpoint` (`http://HOST:PORT`) that connects with the first call and again after a loss.
///
/// Needs a tokio runtime.
///
/// # Errors
/// [`TransportError::InvalidEndpoint`] quotes the text. Whether somebody listens there shows with the first call.
pub fn channel(endpoint: &str) -> Result<Channel, TransportError> {
    let invalid = |problem: String| TransportError::InvalidEndpoint {
        endpoint: endpoint.to_owned(),
        problem,
    };
    let parsed =
        Endpoint::from_shared(endpoint.to_owned()).map_err(|_| invalid("not a URL".to_owned()))?;
    let uri = parsed.uri();
    match uri.scheme_str() {
        Some("http") => {}
        Some(scheme) => return Err(invalid(format!("of the unsupported scheme {scheme:?}"))),
        None => return Err(invalid("without the scheme http://".to_owned())),
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(invalid("without a host".to_owned()));
    }
    if uri.port_u16().is_none() {
        return Err(invalid("without a port".to_owned()));
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(invalid("with a path".to_owned()));
    }
    Ok(parsed
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_lazy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn endpoints_are_checked_and_quoted() {
        for good in [
            "http://127.0.0.1:7071",
            "http://draft:7071/",
            "http://[::1]:7071",
        ] {
            assert!(channel(good).is_ok(), "{good}");
        }
        let cases = [
            ("", "not a URL"),
            ("draft:7071", "scheme"),
            ("127.0.0.1:7071", "scheme"),
            ("https://draft:7071", "https"),
            ("http://draft", "port"),
            ("http://draft:70710", "port"),
            ("http://:7071", "host"),
            ("http://draft:7071/v1", "path"),
            ("http://a b:1", "not a URL"),
        ];
        for (bad, problem) in cases {
            let text = channel(bad).unwrap_err().to_string();
            assert!(text.contains(problem), "{bad:?}: {text}");
            assert!(text.contains(&format!("{bad:?}")), "{text}");
        }
    }
}
