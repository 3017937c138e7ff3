//! A page that shows what the server does now, and what was measured before. One static file inside the binary; it asks for
//! numbers at `/api/live` and `/api/runs`, and for nothing anywhere else.

use super::Shared;
use crate::bench::catalogue::walk::Catalogue;
use crate::bench::turns::longest_prompt;
use axum::http::{HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

const PAGE: &str = include_str!("../../assets/dashboard.html");
/// Runs that are shown, the newest.
const MOST_RUNS: usize = 1000;
/// Files that could not be read, of which the reason is told.
const MOST_FAULTS: usize = 50;

/// The page. Only its own script and style run, and it reaches only this server.
pub fn page() -> Response {
    // keyed anew by the system's random numbers each time
    let nonce: String = (0..2).map(|n| format!("{:016x}", RandomState::new().hash_one(n))).collect();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let mut response = Html(PAGE.replace("{{nonce}}", &nonce)).into_response();
    let headers = response.headers_mut();
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// The number behind `since=` of a query; 0 without one.
pub fn since_of(query: Option<&str>) -> u64 {
    let pairs = query.unwrap_or_default().split('&');
    pairs.filter_map(|p| p.strip_prefix("since=")).find_map(|n| n.parse().ok()).unwrap_or(0)
}

/// Whether a query asks for windows of 10 ms too.
pub fn wants_fine(query: Option<&str>) -> bool {
    query.unwrap_or_default().split('&').any(|p| p == "fine=1")
}

/// What happened in the windows after number `since`, and how things stand; with `fine` also by windows of 10 ms.
pub fn live(shared: &Shared, since: u64, fine: bool) -> Value {
    let (windows, barriers) = shared.live.shown(since);
    let degraded = shared.live.degraded();
    let drive = |d: &super::live::DriveName| json!({"name": d.name, "emulated": d.emulated, "degraded": degraded.contains(&d.name.as_str())});
    let drives: Vec<Value> = shared.live.drives().iter().map(drive).collect();
    let (waiting, generating) = shared.queue.depth();
    json!({
        "model": shared.name, "version": env!("CARGO_PKG_VERSION"),
        // tells one server from the next on the same port
        "started": format!("{}-{}", shared.created, std::process::id()),
        "max_model_len": longest_prompt(&shared.model, &shared.config),
        "queue": {
            "waiting": waiting, "capacity": shared.queue.capacity(), "generating": generating,
            "closing": shared.queue.is_closed(),
        },
        "tokens": shared.metrics.tokens(), "drives": drives, "windows": windows, "barriers": barriers,
        "fine": fine.then(|| shared.live.fine()),
    })
}

/// The catalogue below `folder`, the newest first, runs that do not count among them. A folder that is not there is empty.
pub fn runs(folder: &Path) -> Value {
    let mut found = if folder.exists() { Catalogue::read(folder) } else { Catalogue::default() };
    // runs of a ladder or a campaign are in its own rows, unless they do not count
    found.rows.retain(|row| !row.inside || !row.verdict.counts());
    found.rows.sort_by(|a, b| b.when.cmp(&a.when));
    let left_out = found.rows.len().saturating_sub(MOST_RUNS);
    let row = |row: &crate::bench::catalogue::Row| {
        let mut value = serde_json::to_value(row).unwrap_or_default();
        value["path"] = row.path.strip_prefix(folder).unwrap_or(&row.path).display().to_string().into();
        value["counts"] = row.verdict.counts().into();
        value
    };
    let rows: Vec<Value> = found.rows.iter().take(MOST_RUNS).map(row).collect();
    let faults: Vec<&str> = found.faults.iter().take(MOST_FAULTS).map(|f| f.reason.as_str()).collect();
    json!({"folder": folder.display().to_string(), "rows": rows, "left_out": left_out, "faults": faults})
}
