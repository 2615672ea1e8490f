use tonic::Code;
use treespec_rpc::{
    ServiceError,
    handshake::{self, FeatureDtype, Fingerprint, PROTOCOL_VERSION},
    proto::draft::v1::{Hello, link_request::Message},
};

use crate::{
    scripted::WINDOW,
    verifier::{Service, Verifier, fingerprint, hello},
};

#[tokio::test]
async fn a_matching_verifier_is_welcomed() {
    let service = Service::start().await;
    let welcome = Verifier::shake_hands(&service, hello("v")).await.unwrap();
    assert_eq!(welcome.protocol_version, PROTOCOL_VERSION);
    assert_eq!(welcome.context_window as usize, WINDOW);
    let theirs = Fingerprint::from_proto(welcome.fingerprint, "welcome.fingerprint").unwrap();
    assert_eq!(handshake::compare(&fingerprint(), &theirs), Ok(()));

    let info = service.model_info().await.unwrap();
    assert_eq!(info.drafter_instance, welcome.drafter_instance);
    assert_eq!(info.drafter_instance.len(), 32);
    assert_eq!(info.num_layers, 3);
    assert_eq!(info.context_window, welcome.context_window);
}

async fn refusal(service: &Service, hello: Hello) -> ServiceError {
    Verifier::shake_hands(service, hello).await.unwrap_err()
}

#[tokio::test]
async fn every_mismatch_names_the_field_and_both_values() {
    type Edit = fn(&mut Fingerprint);
    let cases: [(Edit, &str, &str, &str); 8] = [
        (|f| f.vocab_size = 41, "vocab_size", "41", "40"),
        (|f| f.hidden_size = 3, "hidden_size", "3", "2"),
        (
            |f| f.tokenizer_hash = "zz".into(),
            "tokenizer_hash",
            "zz",
            "aa",
        ),
        (|f| f.taps = vec![2, 1], "taps", "[2, 1]", "[1, 2]"),
        (|f| f.block_size = 9, "block_size", "9", "5"),
        (|f| f.mask_token_id = 8, "mask_token_id", "8", "3"),
        (
            |f| f.feature_dtype = FeatureDtype::Bf16,
            "feature_dtype",
            "Bf16",
            "F32",
        ),
        (
            |f| f.projection_hash = "yy".into(),
            "projection_hash",
            "yy",
            "bb",
        ),
    ];
    let service = Service::start().await;
    for (edit, field, theirs, ours) in cases {
        let mut verifier = fingerprint();
        edit(&mut verifier);
        let error = refusal(
            &service,
            Hello {
                fingerprint: Some((&verifier).into()),
                ..hello("v")
            },
        )
        .await;
        assert_eq!(error.code(), Code::FailedPrecondition);
        for part in [field, theirs, ours] {
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
    }
}

#[tokio::test]
async fn another_protocol_version_is_refused() {
    let service = Service::start().await;
    let error = refusal(
        &service,
        Hello {
            protocol_version: 77,
            ..hello("v")
        },
    )
    .await;
    assert_eq!(error.code(), Code::FailedPrecondition);
    for part in ["protocol_version", "77", "1"] {
        assert!(error.to_string().contains(part), "{error} lacks {part}");
    }
}

#[tokio::test]
async fn malformed_hellos_are_refused() {
    let service = Service::start().await;
    let unnamed = refusal(&service, hello("")).await;
    assert_eq!(unnamed.code(), Code::InvalidArgument);
    let long = refusal(&service, hello(&"v".repeat(129))).await;
    assert!(long.to_string().contains("129"), "{long}");
    let bare = Hello {
        fingerprint: None,
        ..hello("v")
    };
    let bare = refusal(&service, bare).await;
    assert!(bare.to_string().contains("hello.fingerprint"), "{bare}");
}

#[tokio::test]
async fn the_first_message_must_be_a_hello() {
    let service = Service::start().await;
    let mut verifier = Verifier::dial(&service).await;
    verifier.send_open(1, 0).await;
    let error = verifier.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.to_string().contains("Hello"), "{error}");
}

#[tokio::test]
async fn a_second_hello_and_an_unknown_message_end_the_link() {
    let service = Service::start().await;
    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.open(1, 0).await;
    verifier.send(Message::Hello(hello("v"))).await;
    let error = verifier.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    service.wait_open_contexts(0).await;

    let mut verifier = Verifier::connect(&service, "v").await;
    verifier.send_unknown().await;
    let error = verifier.receive().await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}
