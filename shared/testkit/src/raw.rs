//! Calls whose message is any bytes at all.

use bytes::{Buf, BufMut, Bytes};
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::Channel;
use tonic::{Request, Status};

/// A method that answers with a stream.
pub type Path = &'static str;

/// Sends `message` as the one message of a call to `path` (`/package.Service/Method`) and returns how many messages
/// came back.
///
/// # Errors
/// The status of the call, at its start or at its end.
pub async fn call_with_bytes(
    channel: Channel,
    path: Path,
    message: Vec<u8>,
) -> Result<usize, Status> {
    let mut grpc = Grpc::new(channel);
    grpc.ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    let path = tonic::codegen::http::uri::PathAndQuery::from_static(path);
    let mut responses = grpc
        .server_streaming(Request::new(Bytes::from(message)), path, BytesCodec)
        .await?
        .into_inner();
    let mut count = 0;
    while responses.message().await?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// Passes messages through as they are.
#[derive(Debug, Clone, Copy)]
struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        *self
    }

    fn decoder(&mut self) -> Self::Decoder {
        *self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
