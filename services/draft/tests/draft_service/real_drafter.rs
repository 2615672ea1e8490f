//! The service with a drafter from disk. Its numbers are the engine's business; here it only has to fit together.

use std::{
    future::pending,
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
};

use treespec_draft::{Config, load, run};
use treespec_engine::DeviceChoice;
use treespec_rpc::{
    convert,
    handshake::Fingerprint,
    proto::draft::v1::{
        Context, Hello, Propose, TopkPlacement, link_request::Message, proposal::Draft,
    },
};
use treespec_telemetry::Announcer;

use crate::verifier::{Service, Verifier, hello, propose};

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/cases/01_llama_gqa_tied")
        .join(name)
}

fn config() -> Config {
    Config {
        cpu_precision: None,
        cpu_isa: None,
        device: DeviceChoice::Cpu,
        listen: ([127, 0, 0, 1], 0).into(),
        drafter: case("drafter_fit"),
        target: case("model"),
        threads: None,
        context_window: 128,
        max_sequences: 4,
        no_head: false,
        announce: false,
        exit_with_stdin: false,
    }
}

#[tokio::test]
async fn a_drafter_from_disk_drafts() {
    let config = config();
    let load = move || load(&config, &Announcer::silent());
    let service = Service::loading(Arc::default(), load).await;
    service.wait_loaded().await;
    let wire = service.model_info().await.unwrap().fingerprint;
    let known = Fingerprint::from_proto(wire.clone(), "fingerprint").unwrap();
    assert_eq!(known.tokenizer_hash.len(), 64);
    assert_eq!(known.projection_hash.len(), 64);

    let mut verifier = Verifier::dial(&service).await;
    let hello = Hello {
        fingerprint: wire,
        ..hello("v")
    };
    verifier.send(Message::Hello(hello)).await;
    verifier.receive().await.unwrap();
    verifier.open(1, 0).await;
    let width = known.hidden_size as usize;
    let values: Vec<f32> = (0..3 * width).map(|i| (i as f32 * 0.37).sin()).collect();
    let rows = convert::features_to_proto(0, &values, width).unwrap();
    let context = Context {
        sequence_id: 1,
        epoch: 0,
        rows: Some(rows),
    };
    verifier.send(Message::Context(context)).await;

    verifier.send_propose(propose(1, 0, 3)).await;
    let Some(Draft::Tree(tree)) = verifier.proposal().await.draft else {
        panic!("no tree");
    };
    let tree = convert::tree_from_proto(7, &tree, known.vocab_size as usize).unwrap();
    assert_eq!(tree.budget(), 8);

    let rows_wanted = Propose {
        placement: TopkPlacement::Verify.into(),
        ..propose(1, 0, 3)
    };
    verifier.send_propose(rows_wanted).await;
    let Some(Draft::BlockHidden(hidden)) = verifier.proposal().await.draft else {
        panic!("no hidden rows");
    };
    let block = known.block_size as usize;
    assert!(convert::block_hidden_from_proto(&hidden, block, width).is_ok());
}

#[tokio::test]
async fn paths_that_hold_no_drafter_are_one_line_errors() {
    let cases = [
        (case("no_such_folder"), "no_such_folder"),
        (case("."), "config.json"),
    ];
    for (drafter, part) in cases {
        let config = Config {
            drafter,
            ..config()
        };
        let error = run(config, pending()).await.unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
}

#[tokio::test]
async fn a_taken_port_is_an_error_before_anything_is_loaded() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let config = Config { listen, ..config() };
    let error = run(config, pending()).await.unwrap_err().to_string();
    assert!(error.contains(&listen.to_string()), "{error}");
}
