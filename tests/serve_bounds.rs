//! The bounds of `argodrive serve` with the real binary: a queue that fills, clients that go away, keys, signals, flags.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;
mod served;

use prepared::{Drives, argodrive, dense_store, easy_pace, folder, mini_store, refused, tiny_store};
use serde_json::{Value, json};
use served::{Server, read_reply, wait_for_text};

/// A server whose drive is emulated as so slow that a text of any length is still at work when a test has looked.
fn slow(more: &[&str]) -> (Drives, Server) {
    let drives = Drives::new(1, Some(easy_pace()));
    let plan = drives.staged(mini_store(), "full-mirror");
    let toml = drives.toml.to_str().unwrap().to_string();
    let args = [&["--plan", plan.to_str().unwrap(), "--drives", &toml][..], more].concat();
    let server = Server::start(mini_store(), &args);
    (drives, server)
}

/// A text that goes on for long.
fn long(stream: bool, tokens: usize) -> Value {
    json!({"model": "model", "prompt": "fn main() {\n    let", "max_tokens": tokens, "temperature": 0, "stream": stream})
}

#[test]
fn a_full_queue_refuses_and_clients_that_leave_give_up_their_place() {
    let (_drives, s) = slow(&["--queue", "1"]);
    let at_work = s.begin("/v1/completions", &long(true, 4000));
    wait_for_text(&at_work);
    let waiting = s.begin("/v1/completions", &long(false, 4000));
    s.until("argodrive_queue_waiting", 1.0);
    let refused = s.post("/v1/completions", &long(false, 1));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let error = &refused.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("queue_full")));

    drop(waiting); // not streamed, not begun
    s.until("argodrive_cancelled_total", 1.0);
    s.until("argodrive_queue_waiting", 0.0);
    let next = s.begin("/v1/completions", &long(false, 4000));
    s.until("argodrive_queue_waiting", 1.0);
    drop(at_work); // streamed, at work
    s.until("argodrive_cancelled_total", 2.0);
    s.until("argodrive_queue_waiting", 0.0);
    let tokens = s.metric("argodrive_completion_tokens_total");
    while s.metric("argodrive_completion_tokens_total") == tokens {} // the next one is at work
    drop(next); // not streamed, at work
    s.until("argodrive_cancelled_total", 3.0);
    s.until("argodrive_generating", 0.0);
    assert!(s.metric("argodrive_completion_tokens_total") < 4000.0, "none of them ran to its end");
    let emulated = "argodrive_drive_reads_total{drive=\"amber\",emulated=\"true\"}";
    assert!(s.metric(emulated) > 0.0, "what is emulated is called so");
    let short = s.post("/v1/completions", &long(false, 2));
    assert_eq!(short.status, 200, "it still serves");
}

#[test]
fn a_signal_lets_the_text_at_work_end_and_tells_the_others() {
    let (_drives, s) = slow(&[]);
    let at_work = s.begin("/v1/completions", &long(true, 12));
    wait_for_text(&at_work);
    let waiting = s.begin("/v1/completions", &long(false, 4000));
    s.until("argodrive_queue_waiting", 1.0);
    s.terminate();
    let told = read_reply(waiting);
    assert_eq!((told.status, &told.json()["error"]["code"]), (503, &json!("shutting_down")));
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut &at_work, &mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("data: [DONE]"), "{rest}");
    assert_eq!(s.ended(), Some(0));
}

#[test]
fn a_text_that_takes_longer_than_the_drain_timeout_is_given_up() {
    let (_drives, s) = slow(&["--drain-timeout", "50ms"]);
    let at_work = s.begin("/v1/completions", &long(true, 4000));
    wait_for_text(&at_work);
    s.terminate();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut &at_work, &mut rest).unwrap();
    assert!(rest.contains("shutting_down") && !rest.contains("[DONE]"), "{rest}");
    assert_eq!(s.ended(), Some(0));
}

#[test]
fn a_key_is_asked_for_everywhere_but_for_health() {
    let dir = folder();
    let key = dir.path().join("key");
    std::fs::write(&key, "sesame\n").unwrap();
    let s = Server::start(dense_store(), &["--api-key-file", key.to_str().unwrap()]);
    for path in ["/v1/models", "/metrics", "/v1/nothing"] {
        for headers in [&[][..], &["Authorization: Bearer sesam"], &["Authorization: Basic sesame"]] {
            let reply = s.request("GET", path, headers, b"");
            assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")), "{path}");
            assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
        }
    }
    let with = ["Authorization: Bearer sesame"];
    assert_eq!(s.request("GET", "/v1/models", &with, b"").status, 200);
    assert_eq!(s.get("/health").status, 200);
    // a model without experts is served too
    let body = json!({"model": "model", "prompt": "fn main", "max_tokens": 2}).to_string();
    let headers = [with[0], "Content-Type: application/json"];
    let reply = s.request("POST", "/v1/completions", &headers, body.as_bytes());
    assert_eq!(reply.json()["usage"]["completion_tokens"], 2, "{}", reply.body);
}

#[test]
fn what_only_some_chat_forms_know_is_taken_where_they_do() {
    let s = Server::start(tiny_store(), &[]);
    let ask = |more: Value| {
        let mut body = json!({"model": "model", "max_tokens": 3, "messages": [
            {"role": "user", "content": "hi", "name": "bo"},
            {"role": "assistant", "content": "hello", "reasoning_content": "a greeting"},
            {"role": "user", "content": "again"},
        ]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        s.post("/v1/chat/completions", &body)
    };
    let tokens = |effort: &str| {
        let reply = ask(json!({"reasoning_effort": effort}));
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(tokens("none") < tokens("low"), "without thinking there is no effort in the prompt");
    let refused = ask(json!({"reasoning_effort": "medium"}));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("invalid_value")));
}

#[test]
fn flags_that_would_expose_or_do_nothing_are_refused() {
    let serve = |args: &[&str]| {
        let mut command = argodrive(["serve", "--store"]);
        command.arg(mini_store()).args(args);
        command
    };
    refused(&mut serve(&["--listen", "0.0.0.0:0"]), &["0.0.0.0:0", "--api-key-file", "--no-key-needed"]);
    refused(&mut serve(&["--listen", "127.0.0.1:0", "--no-key-needed"]), &["--no-key-needed", "loopback"]);
    refused(&mut serve(&["--api-key-file", "no/such/file"]), &["--api-key-file", "no/such/file"]);
    refused(&mut serve(&["--listen", "192.0.2.1:0", "--no-key-needed"]), &["--listen", "192.0.2.1:0"]);
    refused(&mut serve(&["--max-body", "0"]), &["--max-body"]);
    refused(&mut serve(&["--name", " "]), &["--name"]);
    refused(&mut serve(&["--prefetch-depth", "2"]), &["prefetch_depth does nothing without prefetch"]);
    refused(&mut serve(&["--resident", "--queue-depth", "2"]), &["resident", "queue_depth"]);
    refused(
        &mut serve(&["--speculate", "model", "--draft-model", "x", "--draft-accept", "standard"]),
        &["--draft-accept standard", "exact-match"],
    );
}
