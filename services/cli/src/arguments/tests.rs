use clap::{CommandFactory as _, error::ErrorKind};

use super::*;
use crate::mode::Mode;

fn parse(line: &str) -> Result<Command, ErrorKind> {
    Arguments::try_parse_from(line.split(' '))
        .map(|arguments| arguments.command)
        .map_err(|error| error.kind())
}

fn generate(line: &str) -> GenerateArgs {
    match parse(line) {
        Ok(Command::Generate(args)) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_definition_is_consistent() {
    Arguments::command().debug_assert();
}

#[test]
fn generate_is_greedy_and_automatic_by_default() {
    let args = generate("treespec generate --prompt hello");
    assert_eq!(args.generation.sampling.temperature, 0.0);
    assert_eq!(args.generation.mode, Mode::Auto);
    assert_eq!(args.generation.max_tokens, 256);
    assert_eq!(args.generation.budget, None);
    assert_eq!(args.logprobs, None);
    assert!(!args.json && !args.prompt_logprobs && !args.generation.ending.ignore_eos);
}

#[test]
fn generate_takes_every_documented_flag() {
    let args = generate(
        "treespec generate --tokens 1,2,3 --target t --drafter d --mode tree --budget 16 --max-tokens 5 --temperature 0 \
         --logprobs 5 --prompt-logprobs --topk-placement verify --stop-token 7,8 --stop-token 9 --ignore-eos \
         --request-id r --threads 2 --json",
    );
    assert_eq!(args.prompt.tokens.unwrap().0, [1, 2, 3]);
    assert_eq!(args.generation.mode, Mode::Tree(None));
    assert_eq!(args.generation.budget, Some(16));
    assert_eq!(args.generation.ending.stop_token, [7, 8, 9]);
    assert_eq!(args.generation.request_id, "r");
    assert_eq!(args.logprobs, Some(5));
    assert_eq!(
        args.connection.cluster.models.threads,
        std::num::NonZeroUsize::new(2)
    );
}

#[test]
fn exactly_one_prompt_is_needed() {
    assert_eq!(
        parse("treespec generate").unwrap_err(),
        ErrorKind::MissingRequiredArgument
    );
    assert_eq!(
        parse("treespec generate --prompt a --raw-prompt b").unwrap_err(),
        ErrorKind::ArgumentConflict
    );
}

#[test]
fn an_endpoint_excludes_an_own_cluster() {
    for flag in [
        "--target t",
        "--drafter d",
        "--no-drafter",
        "--threads 2",
        "--topk-placement draft",
        "--draft-placement local",
        "--device cpu",
        "--draft-device cpu",
    ] {
        let line = format!("treespec generate --prompt a --endpoint http://h:1 {flag}");
        assert_eq!(
            parse(&line).unwrap_err(),
            ErrorKind::ArgumentConflict,
            "{flag}"
        );
    }
}

#[test]
fn bad_values_are_usage_errors() {
    for flags in [
        "--mode beam",
        "--mode tree:0",
        "--budget x",
        "--temperature warm",
        "--topk-placement moon",
        "--draft-placement moon",
        "--device gpu",
        "--draft-device cuda:-1",
    ] {
        let line = format!("treespec generate --prompt a {flags}");
        assert_eq!(
            parse(&line).unwrap_err(),
            if flags.contains("moon") {
                ErrorKind::InvalidValue
            } else {
                ErrorKind::ValueValidation
            },
            "{flags}"
        );
    }
}

#[test]
fn bench_and_inspect_parse_their_documented_lines() {
    for line in [
        "treespec bench sweep --modes ar,chain,tree --budgets 8,16 --json out.json",
        "treespec bench step --rows 1,2,4,8,17,33 --context 256",
        "treespec bench parity --reference f.json --modes ar,chain,tree:8 --prompts 4 --max-tokens 48",
        "treespec inspect score --target p --tokens 1,2 --tree t.json --top 5 --json",
        "treespec inspect draft --target p --drafter d --tokens 1,2 --root 3 --top 40 --json",
        "treespec inspect tree - --budget 8 --json",
        "treespec inspect step --prompt hello --mode tree:8 --max-tokens 20",
        "treespec up --port 0 --target p --drafter d --topk-placement verify",
        "treespec up --device cuda:1 --draft-device cuda:2",
        "treespec bench sweep --device cuda --draft-placement local",
        "treespec bench parity --draft-placement remote --device cpu",
        "treespec bench step --device cuda:0",
        "treespec bench step --shape qwen3-8b --rows 1,8,16 --context 512 --device cuda:0 --json out.json",
        "treespec bench topk --vocab 49152,151936 --hidden 4096 --rows 15 --k 64 --device cuda:0 --json out.json",
        "treespec bench engine --modes ar,chain,tree:8 --reference f.json --repeats 5 --batch 4 --device cuda",
    ] {
        assert!(parse(line).is_ok(), "{line}");
    }
}
