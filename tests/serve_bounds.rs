//! The bounds of `argodrive serve` with the real binary: a queue that fills, clients that go away, keys, signals, flags.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod prepared;
mod served;

use prepared::{Drives, argodrive, dense_store, easy_pace, folder, mini_store, refused, tiny_store};
use serde_json::{Value, json};
use served::{Server, read_all, read_reply, split_reply, wait_for_text};

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
fn clients_that_send_half_or_nothing_are_cut_off() {
    let s = Server::start(dense_store(), &["--request-timeout", "300ms", "--keep-alive", "300ms"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let body = json!({"model": "model", "prompt": "fn main", "max_tokens": 2}).to_string();
    let whole = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    // half a head, half a body
    for sent in [&whole[..30], &whole[..whole.len() - 9]] {
        let reply = read_reply(s.raw(sent.as_bytes()));
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (408, &json!("request_timeout")), "{sent:?}");
    }
    assert!(read_all(s.raw(b"")).is_empty(), "whoever says nothing is told nothing");
    // a whole request is answered, and the connection ends for want of another one
    let (reply, rest) = split_reply(&read_all(s.raw(whole.as_bytes())));
    assert_eq!((reply.status, rest), (200, 0));
    assert!(reply.header("connection").is_none(), "it could have been used again");
    let late = |with: &str| s.metric(&format!("argodrive_clients_too_slow_total{{with=\"{with}\"}}"));
    assert_eq!([late("head"), late("body"), late("reply")], [1.0, 1.0, 0.0]);
    // two requests over one connection
    let twice = read_all(s.raw(format!("{whole}{whole}").as_bytes()));
    let (first, rest) = split_reply(&twice);
    let (second, none) = split_reply(&twice[twice.len() - rest..]);
    assert_eq!((first.status, second.status, none), (200, 200, 0));
}

#[test]
fn more_connections_than_may_be_are_told_to_come_again() {
    let s = Server::start(dense_store(), &["--max-connections", "2"]);
    let held = [s.raw(b""), s.raw(b"GET /metrics HTTP/1.1\r\n")];
    for _ in 0..3 {
        let reply = s.get("/health");
        assert_eq!((reply.status, reply.header("retry-after")), (503, Some("1")));
        assert_eq!(reply.json()["error"]["code"], "too_many_connections");
    }
    // who was let in is served
    let [first, mut second] = held;
    std::io::Write::write_all(&mut second, b"Host: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let page = read_reply(second).body;
    for line in ["connections_open 2", "connections_limit 2", "connections_refused_total 3"] {
        assert!(page.contains(&format!("\nargodrive_{line}\n")), "{line}: {page}");
    }
    drop(first);
    s.until("argodrive_connections_open", 1.0); // the one that asks
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
    refused(&mut serve(&["--max-connections", "0"]), &["--max-connections"]);
    refused(&mut serve(&["--sessions", "0"]), &["--sessions 0"]);
    refused(&mut serve(&["--request-timeout", "0s"]), &["--request-timeout"]);
    refused(&mut serve(&["--name", " "]), &["--name"]);
    refused(&mut serve(&["--prefetch-depth", "2"]), &["prefetch_depth does nothing without prefetch"]);
    refused(&mut serve(&["--resident", "--queue-depth", "2"]), &["resident", "queue_depth"]);
    refused(
        &mut serve(&["--speculate", "model", "--draft-model", "x", "--draft-accept", "standard"]),
        &["--draft-accept standard", "exact-match"],
    );
}
