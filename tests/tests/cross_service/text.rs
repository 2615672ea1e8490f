//! Text in and out: tokenizer and chat template as transformers has them.

use treespec_rpc::proto::coordinator::v1::{
    Message, Messages, TokenizeRequest, tokenize_request::Input,
};
use treespec_testkit::{Ask, Mode};
use treespec_tests::{ChatTurn, DENSE_CASES, Expected, case_json};

use crate::models::{LLAMA, plain_cluster};

fn text(text: &str, add_special_tokens: bool) -> TokenizeRequest {
    TokenizeRequest {
        input: Some(Input::Text(text.to_owned())),
        add_special_tokens: Some(add_special_tokens),
    }
}

fn messages(turns: &[ChatTurn]) -> TokenizeRequest {
    let messages = turns.iter().cloned().map(|turn| Message {
        role: turn.role,
        content: turn.content,
    });
    TokenizeRequest {
        input: Some(Input::Messages(Messages {
            messages: messages.collect(),
        })),
        add_special_tokens: None,
    }
}

#[tokio::test]
async fn text_and_conversations_have_the_tokens_of_the_reference() {
    for case in DENSE_CASES {
        let expected: Expected = case_json(case, "expected.json");
        let cluster = plain_cluster(case).start().await;
        let client = cluster.client();
        for case in &expected.tokenizer_cases.encode {
            let with_special = client.tokenize(text(&case.text, true)).await.unwrap();
            assert_eq!(with_special, case.ids_with_special, "{:?}", case.text);
            let without = client.tokenize(text(&case.text, false)).await.unwrap();
            assert_eq!(without, case.ids_without_special, "{:?}", case.text);
            let kept = client.detokenize(&without, false).await.unwrap();
            assert_eq!(kept, case.decoded_keep_special);
            let skipped = client.detokenize(&without, true).await.unwrap();
            assert_eq!(skipped, case.decoded_skip_special);
        }
        for case in &expected.tokenizer_cases.chat {
            assert!(case.add_generation_prompt, "the service always adds one");
            let ids = client.tokenize(messages(&case.messages)).await.unwrap();
            assert_eq!(ids, case.ids, "{:?}", case.rendered);
        }
    }
}

#[tokio::test]
async fn the_text_of_a_stream_is_the_text_of_its_tokens() {
    let expected: Expected = case_json(LLAMA, "expected.json");
    let cluster = plain_cluster(LLAMA).start().await;
    let client = cluster.client();
    for prompt in &expected.prompts {
        let ask = Ask::tokens(&prompt.prompt).mode(Mode::Ar).max_tokens(48);
        let answer = client.generate(ask).await.unwrap();
        // Greedy tokens of a random model are any bytes: whole text only at the end.
        let whole = client.detokenize(&answer.token_ids, true).await.unwrap();
        assert_eq!(answer.text, whole);
    }
}
