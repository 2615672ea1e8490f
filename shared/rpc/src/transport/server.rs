use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tokio::net::TcpListener;
use tokio_stream::{StreamExt, wrappers::TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};

use super::{
    CONNECTION_WINDOW, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, STREAM_WINDOW, TransportError,
    connection::Connection,
};
use crate::{health::Readiness, proto::FILE_DESCRIPTOR_SET};

/// How long open streams may go on after shutdown was asked for.
pub const DRAIN: Duration = Duration::from_secs(10);
/// A connection carries every request of its peer; the default of 200 would queue requests where nobody counts them.
const MAX_CONCURRENT_STREAMS: u32 = 4096;

/// Binds `address`; port 0 takes a free one.
///
/// # Errors
/// [`TransportError::Bind`] names the address.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, TransportError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| TransportError::Bind { address, source })
}

/// The address of `listener`, with the real port.
///
/// # Errors
/// [`TransportError::LocalAddress`].
pub fn local_addr(listener: &TcpListener) -> Result<SocketAddr, TransportError> {
    listener.local_addr().map_err(TransportError::LocalAddress)
}

/// The endpoint at which a process on the same machine reaches `listener`: loopback when it listens everywhere.
///
/// # Errors
/// [`TransportError::LocalAddress`].
pub fn endpoint(listener: &TcpListener) -> Result<String, TransportError> {
    let mut address = local_addr(listener)?;
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(format!("http://{address}"))
}

/// Serves `routes` with health and reflection until `shutdown`, then reports NOT_SERVING, stops accepting, and closes
/// what is still open after [`DRAIN`]. Dropping the future closes every connection at once.
///
/// # Errors
/// [`TransportError`] when the server cannot start or fails.
pub async fn serve(
    listener: TcpListener,
    routes: Routes,
    readiness: Readiness,
    shutdown: impl Future<Output = ()>,
) -> Result<(), TransportError> {
    let routes = add_reflection(routes.add_service(readiness.server()), &readiness)?;
    let close = CancellationToken::new();
    let _close_on_return = close.clone().drop_guard();
    let draining = CancellationToken::new();

    let connections = TcpListenerStream::new(listener).map(move |accepted| {
        accepted.map(|stream| {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "cannot set TCP_NODELAY");
            }
            Connection::new(stream, close.clone())
        })
    });
    let server = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_CONCURRENT_STREAMS)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_routes(routes)
        .serve_with_incoming_shutdown(connections, async {
            shutdown.await;
            readiness.set_not_serving().await;
            draining.cancel();
        });
    let force_close = async {
        draining.cancelled().await;
        tokio::time::sleep(DRAIN).await;
        tracing::warn!("closing connections that are still open after the drain time");
    };
    tokio::select! {
        served = server => Ok(served?),
        () = force_close => Ok(()),
    }
}

/// Server reflection, v1 and v1alpha (older tools), listing only what this server mounts.
fn add_reflection(routes: Routes, readiness: &Readiness) -> Result<Routes, TransportError> {
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name("grpc.health.v1.Health");
        readiness
            .service_names()
            .fold(builder, |builder, name| builder.with_service_name(name))
    };
    Ok(routes
        .add_service(
            builder()
                .with_service_name("grpc.reflection.v1.ServerReflection")
                .build_v1()?,
        )
        .add_service(
            builder()
                .with_service_name("grpc.reflection.v1alpha.ServerReflection")
                .build_v1alpha()?,
        ))
}
