//! A running `argodrive serve` for tests, and a client that speaks plain HTTP over a socket, so that a test decides what goes over the
//! wire and when the connection ends.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for anything: only a machine that has stopped takes so long.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Server {
    child: Child,
    pub addr: SocketAddr,
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The data of a stream's events.
    pub fn events(&self) -> Vec<String> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{}", self.body);
        let data = |event: &str| event.strip_prefix("data: ").map(str::to_string);
        self.body.split("\n\n").filter_map(data).collect()
    }
}

impl Server {
    /// Serves `store` as `model` on a free port.
    pub fn start(store: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_argodrive"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--name", "model", "--store"]).arg(store).args(more);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addr = line.trim().strip_prefix("serving model on http://").unwrap_or_else(|| panic!("{line:?}"));
        Self { addr: addr.parse().unwrap(), child }
    }

    /// Ends it at once, from wherever.
    #[allow(dead_code)]
    pub fn kill(&self) {
        // SAFETY: a signal to a child that nobody has waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGKILL) };
    }

    /// Sends these bytes and leaves the connection open.
    pub fn raw(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    }

    /// Sends a request and leaves the connection open.
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
        if !headers.iter().any(|h| h.starts_with("Host")) {
            head += &format!("Host: {}\r\n", self.addr);
        }
        headers.iter().for_each(|h| head += &format!("{h}\r\n"));
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        let _ = stream.write_all(body); // a refusal may come before all of it has gone
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Reply {
        read_reply(self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], b"")
    }

    /// Posts JSON and leaves the connection open.
    pub fn begin(&self, path: &str, body: &Value) -> TcpStream {
        self.send("POST", path, &["Content-Type: application/json"], body.to_string().as_bytes())
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        read_reply(self.begin(path, body))
    }

    /// Posts to an endpoint; it must succeed.
    pub fn ask(&self, path: &str, mut body: Value) -> Value {
        body["model"] = "model".into();
        let reply = self.post(path, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    }

    pub fn chat(&self, body: Value) -> Value {
        self.ask("/v1/chat/completions", body)
    }

    pub fn complete(&self, body: Value) -> Value {
        self.ask("/v1/completions", body)
    }

    /// A sample of the metrics, by name and labels as they stand there; 0 if it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics").body;
        let value = page.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0.0, |v| v.parse().unwrap())
    }

    /// Waits until a sample of the metrics has this value.
    pub fn until(&self, name: &str, want: f64) {
        let begun = Instant::now();
        while self.metric(name) != want {
            assert!(begun.elapsed() < PATIENCE, "{name} is {}, not {want}", self.metric(name));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the process to end.
    pub fn terminate(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }

    /// Waits for the process's end; returns its exit code.
    pub fn ended(mut self) -> Option<i32> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begun.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads until text of a streamed reply has come.
pub fn wait_for_text(stream: &TcpStream) {
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    while !line.contains("\"text\":\"") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
}

/// Reads until the server ends the connection.
pub fn read_all(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

/// The first reply, of a length that its head gives, and how many bytes follow it.
pub fn split_reply(bytes: &[u8]) -> (Reply, usize) {
    let reply = reply_of(bytes);
    let head_end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let len: usize = reply.header("content-length").unwrap().parse().unwrap();
    (reply_of(&bytes[..head_end + len]), bytes.len() - head_end - len)
}

/// Reads a reply to its end.
pub fn read_reply(stream: TcpStream) -> Reply {
    reply_of(&read_all(stream))
}

fn reply_of(bytes: &[u8]) -> Reply {
    let head_end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(bytes[..head_end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<(String, String)> =
        lines.map(|l| l.split_once(": ").map(|(n, v)| (n.to_string(), v.to_string())).unwrap()).collect();
    let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let body = if chunked { unchunk(&bytes[head_end + 4..]) } else { bytes[head_end + 4..].to_vec() };
    Reply { status, headers, body: String::from_utf8(body).unwrap() }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if len == 0 {
            return out;
        }
        out.extend_from_slice(&bytes[end + 2..][..len]);
        bytes = &bytes[end + 2 + len + 2..];
    }
    panic!("the last chunk is missing");
}

/// The text of a reply that is not streamed.
pub fn text_of(reply: &Value) -> String {
    let choice = &reply["choices"][0];
    let text = if choice["text"].is_string() { &choice["text"] } else { &choice["message"]["content"] };
    text.as_str().unwrap().to_string()
}

pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}
