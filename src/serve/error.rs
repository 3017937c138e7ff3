//! What a client is told when something is refused or fails: the API's error object, with the status that clients of that API
//! turn into their exceptions.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after_s: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    /// The request is wrong as a whole.
    pub fn request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// One parameter is wrong.
    pub fn param(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some(code), ..Self::request(message) }
    }

    /// A parameter that would change the reply and cannot be honoured.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::param(param, "unsupported_parameter", message)
    }

    /// The prompt does not fit.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self::param(param, "context_length_exceeded", message)
    }

    /// Another model is asked for.
    pub fn no_model(asked: &str, have: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            ..Self::param(
                "model",
                "model_not_found",
                format!("the model `{asked}` does not exist; this server has `{have}`"),
            )
        }
    }

    /// There is nothing at this path.
    pub fn no_route(method: &str, path: &str) -> Self {
        let message = format!("unknown request: {method} {path}");
        Self { code: Some("unknown_url"), ..Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message) }
    }

    /// The path is right and the method is not.
    pub fn method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        let kind = "invalid_request_error";
        Self { code: Some("method_not_allowed"), ..Self::new(StatusCode::METHOD_NOT_ALLOWED, kind, message) }
    }

    /// No key, or a wrong one.
    pub fn key(message: &str) -> Self {
        Self { code: Some("invalid_api_key"), ..Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message) }
    }

    /// The request was made for another server.
    pub fn host(host: &str) -> Self {
        let message = format!(
            "this server listens on loopback, and the request is for the host `{host}`; use 127.0.0.1 or localhost"
        );
        Self { code: Some("host_not_allowed"), ..Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message) }
    }

    /// The body is larger than allowed.
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the body has more than {limit} bytes (--max-body)");
        Self {
            code: Some("request_too_large"),
            ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
        }
    }

    /// The body is not JSON by its header.
    pub fn content_type() -> Self {
        let message = "the body must be JSON: send the header `Content-Type: application/json`";
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self { code: Some("unsupported_media_type"), ..Self::new(status, "invalid_request_error", message) }
    }

    /// A part of the request did not come in time.
    pub fn late(part: &str) -> Self {
        let message = format!("the request's {part} did not come in time (--request-timeout)");
        Self {
            code: Some("request_timeout"),
            ..Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
        }
    }

    /// As many requests wait as may.
    pub fn queue_full(waiting: usize, retry_after_s: u64) -> Self {
        let message = format!("one text is generated at a time and {waiting} requests wait already; try again later");
        let kind = "rate_limit_error";
        Self {
            code: Some("queue_full"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, kind, message)
        }
    }

    /// As many connections are open as may be.
    pub fn too_many_connections(most: usize, retry_after_s: u64) -> Self {
        let message = format!("{most} connections are open, as many as may be (--max-connections); try again later");
        Self {
            code: Some("too_many_connections"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// The server is ending.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        Self { code: Some("shutting_down"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message) }
    }

    /// Generating failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// A reply as it goes over a connection that nothing else is sent on and that ends with it.
    pub fn whole_reply(&self) -> Vec<u8> {
        let body = self.json().to_string();
        let retry = self.retry_after_s.map_or(String::new(), |s| format!("retry-after: {s}\r\n"));
        let (status, len) = (self.status, body.len());
        format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n{retry}connection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }

    /// The object of the API.
    pub fn json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let mut response = (self.status, [json], self.json().to_string()).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
