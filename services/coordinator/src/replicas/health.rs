use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use treespec_rpc::{
    ServiceError,
    proto::verify::v1::{
        GetModelInfoRequest, GetModelInfoResponse, verify_service_server::SERVICE_NAME,
    },
    transport::verify_client,
};

use super::replica::{Replica, State};

const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LONGEST_BACKOFF: Duration = Duration::from_secs(2);
const MODEL_INFO_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps a replica's state up to date for ever: watches its health, and reads its model whenever it starts to serve.
pub(super) async fn follow(replica: Arc<Replica>, tokenizer_hash: Arc<str>) {
    let mut backoff = FIRST_BACKOFF;
    loop {
        let watched = tokio::select! {
            error = watch(&replica, &tokenizer_hash, &mut backoff) => error,
            () = replica.recheck.notified() => {
                // Watch anew at once: the process behind the endpoint may be another one by now.
                sleep(FIRST_BACKOFF).await;
                continue;
            }
        };
        replica.set_state(State::Away {
            reason: watched.to_string(),
        });
        sleep(backoff).await;
        backoff = (backoff * 2).min(LONGEST_BACKOFF);
    }
}

/// Follows one health stream to its end. A status that arrives resets `backoff`.
async fn watch(replica: &Replica, tokenizer_hash: &str, backoff: &mut Duration) -> ServiceError {
    let request = HealthCheckRequest {
        service: SERVICE_NAME.to_owned(),
    };
    let mut health = HealthClient::new(replica.channel());
    let mut statuses = match health.watch(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => return ServiceError::from_status(&status),
    };
    loop {
        let status = match statuses.message().await {
            Ok(Some(response)) => response.status(),
            Ok(None) => return ServiceError::unavailable("its health stream ended"),
            Err(status) => return ServiceError::from_status(&status),
        };
        *backoff = FIRST_BACKOFF;
        if status != ServingStatus::Serving {
            replica.set_state(State::Away {
                reason: format!("its health is {}", status.as_str_name()),
            });
            continue;
        }
        match read_model(replica).await {
            Err(error) => return error,
            Ok(model) => replica.set_state(assess(model, tokenizer_hash)),
        }
    }
}

async fn read_model(replica: &Replica) -> Result<GetModelInfoResponse, ServiceError> {
    let mut client = verify_client(replica.channel());
    timeout(
        MODEL_INFO_TIMEOUT,
        client.get_model_info(GetModelInfoRequest {}),
    )
    .await
    .map_err(|_| ServiceError::unavailable("it does not answer GetModelInfo"))?
    .map(tonic::Response::into_inner)
    .map_err(|status| ServiceError::from_status(&status))
}

/// Token ids mean the same on both sides only when the tokenizers are equal.
fn assess(model: GetModelInfoResponse, tokenizer_hash: &str) -> State {
    if model.tokenizer_hash == tokenizer_hash {
        return State::Serving(Arc::new(model));
    }
    State::Misfit(ServiceError::precondition(
        "tokenizer_hash",
        format!(
            "verify has {}, the coordinator {tokenizer_hash}: start both with the same --target",
            model.tokenizer_hash
        ),
    ))
}
