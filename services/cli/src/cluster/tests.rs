//! Start-up and failure of child processes, with a shell script in the place of the executable.

use std::{fs, num::NonZeroUsize, path::Path};

use treespec_engine::{DeviceChoice, PrefillMode};
use treespec_verify::DraftPlacement;

use super::{options::TopkPlacement, *};
use crate::models::ModelPaths;

/// A cluster of scripts that do what `behaviour` says (shell code that knows `$role` and `serve`).
fn options(folder: &Path, behaviour: &str) -> ClusterOptions {
    fs::write(folder.join("behaviour"), behaviour).unwrap();
    ClusterOptions {
        cpu_precision: None,
        cpu_isa: None,
        program: Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cluster/fake_service.sh"),
        models: ModelPaths {
            target: folder.to_owned(),
            drafter: Some("drafter".into()),
        },
        port: 0,
        threads: NonZeroUsize::new(2),
        topk_placement: Some(TopkPlacement::Verify),
        draft_placement: DraftPlacement::Remote,
        device: Some(DeviceChoice::Cuda(1)),
        draft_device: Some(DeviceChoice::Cpu),
        prefill: Some(PrefillMode::Fast),
        log_level: "warn",
    }
}

async fn start_error(options: &ClusterOptions) -> String {
    match Cluster::start(options).await {
        Ok(_) => panic!("the cluster started"),
        Err(error) => format!("{error:#}"),
    }
}

#[tokio::test]
async fn a_cluster_starts_passes_the_endpoints_on_and_stops_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(&options(folder.path(), "serve"))
        .await
        .unwrap();
    let coordinator = "http://127.0.0.1:1/coordinator";
    assert_eq!(cluster.endpoint(Role::Coordinator), Some(coordinator));

    let arguments = |role: &str| {
        let path = folder.path().join(format!("{role}.arguments"));
        fs::read_to_string(path).unwrap()
    };
    let target = folder.path().display();
    assert_eq!(
        arguments("coordinator").trim(),
        format!(
            "coordinator --listen 127.0.0.1:0 --announce --exit-with-stdin --target {target} \
             --verify http://127.0.0.1:1/verify --draft http://127.0.0.1:1/draft"
        )
    );
    let models = "--drafter drafter --threads 2 --device";
    assert!(arguments("verify").contains(&format!(
        "{models} cuda:1 --draft-placement remote --prefill fast --topk-placement verify"
    )));
    assert!(arguments("draft").contains(&format!("{models} cpu --no-head")));

    cluster.stop().await;
    for role in ["draft", "verify", "coordinator"] {
        let ended = folder.path().join(format!("{role}.ended"));
        assert!(ended.exists(), "{role} was killed");
    }
}

#[tokio::test]
async fn without_a_drafter_there_is_no_draft_service() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), "serve");
    options.models.drafter = None;
    let cluster = Cluster::start(&options).await.unwrap();
    assert_eq!(cluster.endpoint(Role::Draft), None);
    let arguments = fs::read_to_string(folder.path().join("coordinator.arguments")).unwrap();
    assert!(!arguments.contains("--draft"), "{arguments}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_local_drafter_is_no_service() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), "serve");
    options.draft_placement = DraftPlacement::Local;
    options.topk_placement = None;
    let cluster = Cluster::start(&options).await.unwrap();
    assert_eq!(cluster.endpoint(Role::Draft), None);
    let arguments = |role: &str| {
        let path = folder.path().join(format!("{role}.arguments"));
        fs::read_to_string(path).unwrap()
    };
    assert!(!arguments("coordinator").contains("--draft"));
    let verify = arguments("verify");
    assert!(verify.contains("--drafter drafter"), "{verify}");
    assert!(verify.contains("--draft-placement local"), "{verify}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_taken_port_is_noticed_before_anything_is_started() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut options = options(folder.path(), "serve");
    options.port = taken.local_addr().unwrap().port();
    let error = start_error(&options).await;
    let expected = format!("cannot listen on 127.0.0.1:{}", options.port);
    assert!(error.starts_with(&expected), "{error}");
    assert!(!folder.path().join("verify.arguments").exists());
}

#[tokio::test]
async fn a_service_that_reports_a_failure_ends_the_start_with_its_message() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = r#"
        if [ "$role" = verify ]; then
          until [ -e "$folder/draft.arguments" ]; do sleep 0.01; done
          echo '{"event":"failed","message":"no such tensor"}'
          exit 1
        fi
        serve"#;
    let error = start_error(&options(folder.path(), behaviour)).await;
    assert_eq!(error, "verify: no such tensor");
    assert!(
        folder.path().join("draft.ended").exists(),
        "the others are stopped"
    );
}

#[tokio::test]
async fn a_service_that_exits_silently_is_told_with_its_status_and_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = r#"
        if [ "$role" = draft ]; then
          echo "error: unexpected argument" >&2
          echo "see --help" >&2
          exit 2
        fi
        serve"#;
    let error = start_error(&options(folder.path(), behaviour)).await;
    assert_eq!(error, "draft ended (exit status: 2): unexpected argument");
}

#[tokio::test]
async fn a_service_that_dies_later_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = r#"
        if [ "$role" = coordinator ]; then
          echo '{"event":"listening","endpoint":"x"}'
          echo '{"event":"serving"}'
          kill -9 $$
        fi
        serve"#;
    let mut cluster = Cluster::start(&options(folder.path(), behaviour))
        .await
        .unwrap();
    let error = cluster.failure().await.to_string();
    assert!(error.starts_with("coordinator ended (signal: 9"), "{error}");
    cluster.stop().await;
}

#[tokio::test]
async fn the_end_of_the_drafter_is_not_the_end_of_the_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = r#"
        echo "{\"event\":\"listening\",\"endpoint\":\"$role\"}"
        echo '{"event":"serving"}'
        case $role in
          draft)
            until [ -e "$folder/all.serve" ]; do sleep 0.01; done
            touch "$folder/draft.gone"
            exit 3 ;;
          coordinator)
            until [ -e "$folder/draft.gone" ]; do sleep 0.01; done
            sleep 0.1
            exit 4 ;;
        esac
        cat >/dev/null"#;
    let mut cluster = Cluster::start(&options(folder.path(), behaviour))
        .await
        .unwrap();
    fs::write(folder.path().join("all.serve"), "").unwrap();
    let error = cluster.failure().await.to_string();
    assert!(
        error.starts_with("coordinator ended (exit status: 4)"),
        "{error}"
    );
    cluster.stop().await;
}

#[tokio::test]
async fn a_program_that_cannot_run_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path(), "serve");
    options.program = "/no/such/program".into();
    let error = start_error(&options).await;
    let expected = "cannot start draft: cannot run /no/such/program";
    assert!(error.starts_with(expected), "{error}");
}
