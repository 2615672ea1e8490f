use std::{pin::Pin, sync::Arc};

use futures_util::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status};
use treespec_rpc::{
    ServiceError,
    proto::coordinator::v1::{
        DetokenizeRequest, DetokenizeResponse, GenerateRequest, GenerateResponse,
        GetModelInfoRequest, GetModelInfoResponse, Started, TokenizeRequest, TokenizeResponse,
        coordinator_service_server::CoordinatorService, generate_response::Event,
        tokenize_request::Input,
    },
};

use crate::{
    admission::Admission,
    deadline::Deadline,
    drafters::Drafters,
    generation::{Generation, Job},
    in_flight::InFlight,
    replicas::Replicas,
    request::{Limits, Options, encode_prompt},
    text::TextCodec,
};

/// The handlers of the public API.
pub(crate) struct Coordinator {
    pub(crate) model_name: String,
    pub(crate) text: Arc<TextCodec>,
    pub(crate) replicas: Arc<Replicas>,
    pub(crate) drafters: Arc<Drafters>,
    pub(crate) admission: Admission,
    pub(crate) in_flight: InFlight,
}

impl Coordinator {
    /// The answers to a request, each with its place.
    async fn start(
        &self,
        mut request: GenerateRequest,
        deadline: Deadline,
    ) -> Result<Answers, Status> {
        let model = self.replicas.model()?;
        let limits = Limits {
            model: &model,
            has_drafter: !self.drafters.is_empty(),
        };
        let options = Options::from_proto(&request, limits)?;
        let id = Arc::new(
            self.in_flight
                .claim(std::mem::take(&mut request.request_id))?,
        );
        // Before the prompt is tokenised: the queue bounds that work too.
        let tickets = (0..options.choices())
            .map(|_| self.admission.enter())
            .collect::<Result<Vec<_>, _>>()?;
        let prompt = request.prompt;
        let prompt = deadline
            .enforce(self.with_text(move |text| encode_prompt(prompt, text, &model)))
            .await?;
        let started = Started {
            request_id: id.as_str().to_owned(),
            seed: options.seed(),
            prompt_tokens: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
        };
        let generations = (0..).zip(tickets).map(|(choice, ticket)| {
            let job = Job {
                ticket,
                deadline,
                replicas: Arc::clone(&self.replicas),
                drafters: options.wants_drafts().then(|| Arc::clone(&self.drafters)),
                choice,
                ending: options.ending(),
                request: options.verify_request(id.as_str(), prompt.clone(), choice),
                id: Arc::clone(&id),
            };
            Generation::new(job, self.text.incremental_decoder())
        });
        Ok(Answers {
            started,
            generations: generations.collect(),
        })
    }

    fn model_info(&self) -> Result<GetModelInfoResponse, ServiceError> {
        let model = self.replicas.model()?;
        let limits = Limits {
            model: &model,
            has_drafter: !self.drafters.is_empty(),
        };
        Ok(GetModelInfoResponse {
            name: self.model_name.clone(),
            architecture: model.architecture.clone(),
            vocab_size: model.vocab_size,
            context_length: model.context_length,
            eos_token_ids: model.eos_token_ids.clone(),
            numerics_profile: model.numerics_profile.clone(),
            has_chat_template: self.text.has_chat_template(),
            modes: limits.modes().into_iter().map(i32::from).collect(),
            max_budget: model.max_budget,
            default_budget: model.default_budget,
            block_size: model.block_size,
        })
    }

    /// Runs text work where it may take its time: a long text would stall every stream of its worker thread.
    async fn with_text<T: Send + 'static>(
        &self,
        work: impl FnOnce(&TextCodec) -> Result<T, ServiceError> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let text = Arc::clone(&self.text);
        tokio::task::spawn_blocking(move || work(&text))
            .await
            .map_err(|error| ServiceError::internal(format!("text worker: {error}")))?
    }
}

/// All answers to one request.
struct Answers {
    started: Started,
    generations: Vec<Generation>,
}

impl Answers {
    /// Started, then the events of all answers as they come. The first failure ends it.
    fn into_stream(self) -> impl Stream<Item = Result<GenerateResponse, Status>> + Send + 'static {
        let started = GenerateResponse {
            event: Some(Event::Started(self.started)),
        };
        let answers = self.generations.into_iter();
        let answers = stream::select_all(answers.map(|answer| Box::pin(answer.into_stream())));
        stream::iter([Ok(started)]).chain(answers)
    }
}

#[tonic::async_trait]
impl CoordinatorService for Coordinator {
    type GenerateStream =
        Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send + 'static>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let deadline = Deadline::from_metadata(request.metadata())?;
        let answers = self.start(request.into_inner(), deadline).await?;
        Ok(Response::new(Box::pin(answers.into_stream())))
    }

    async fn get_model_info(
        &self,
        _request: Request<GetModelInfoRequest>,
    ) -> Result<Response<GetModelInfoResponse>, Status> {
        Ok(Response::new(self.model_info()?))
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let request = request.into_inner();
        let add_special = request.add_special_tokens.unwrap_or(true);
        let token_ids = self
            .with_text(move |text| match request.input {
                None => Err(ServiceError::invalid(
                    "input",
                    "is missing: set text or messages",
                )),
                Some(Input::Text(raw)) => text.encode_text(&raw, add_special),
                Some(Input::Messages(messages)) => text.encode_messages(messages),
            })
            .await?;
        Ok(Response::new(TokenizeResponse { token_ids }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let skip_special = request.skip_special_tokens.unwrap_or(false);
        let text = self
            .with_text(move |text| text.decode(&request.token_ids, skip_special))
            .await?;
        Ok(Response::new(DetokenizeResponse { text }))
    }
}
