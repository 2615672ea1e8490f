//! A client of the public API.

use tonic::transport::Channel;
use tonic::{IntoRequest, Status};
use treespec_rpc::proto::coordinator::v1::{
    DetokenizeRequest, GenerateRequest, GetModelInfoRequest, GetModelInfoResponse, TokenizeRequest,
    coordinator_service_client::CoordinatorServiceClient,
};
use treespec_rpc::transport;

use crate::{Answer, AnswerStream};

/// Calls a coordinator.
#[derive(Debug, Clone)]
pub struct Client(CoordinatorServiceClient<Channel>);

impl Client {
    /// A client over `channel`.
    pub fn new(channel: Channel) -> Self {
        Self(transport::coordinator_client(channel))
    }

    /// Starts a generation.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub async fn open(&self, request: impl Into<GenerateRequest>) -> Result<AnswerStream, Status> {
        let request = request.into();
        let choices = request.choices.unwrap_or(1);
        let response = self.0.clone().generate(request.into_request()).await?;
        Ok(AnswerStream::new(response.into_inner(), choices as usize))
    }

    /// The whole answer; the first, when several were asked for.
    ///
    /// # Errors
    /// The status, whether it refused the request or broke the stream.
    pub async fn generate(&self, request: impl Into<GenerateRequest>) -> Result<Answer, Status> {
        self.open(request).await?.finish().await
    }

    /// All answers of a request for several.
    ///
    /// # Errors
    /// As [`Client::generate`].
    pub async fn generate_all(
        &self,
        request: impl Into<GenerateRequest>,
    ) -> Result<Vec<Answer>, Status> {
        self.open(request).await?.finish_all().await
    }

    /// Token ids of text or messages.
    ///
    /// # Errors
    /// The status of the call, here and below.
    pub async fn tokenize(&self, request: TokenizeRequest) -> Result<Vec<u32>, Status> {
        let response = self.0.clone().tokenize(request).await?;
        Ok(response.into_inner().token_ids)
    }

    /// Text of token ids.
    ///
    /// # Errors
    /// As [`Client::tokenize`].
    pub async fn detokenize(
        &self,
        token_ids: &[u32],
        skip_special_tokens: bool,
    ) -> Result<String, Status> {
        let request = DetokenizeRequest {
            token_ids: token_ids.to_vec(),
            skip_special_tokens: Some(skip_special_tokens),
        };
        let response = self.0.clone().detokenize(request).await?;
        Ok(response.into_inner().text)
    }

    /// What is served.
    ///
    /// # Errors
    /// As [`Client::tokenize`].
    pub async fn model_info(&self) -> Result<GetModelInfoResponse, Status> {
        let response = self
            .0
            .clone()
            .get_model_info(GetModelInfoRequest {})
            .await?;
        Ok(response.into_inner())
    }
}
