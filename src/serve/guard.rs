//! Who may ask: the API key, and the name by which a server on loopback is called. A page in a browser can be made to resolve its own
//! name to 127.0.0.1 and then read what a local server says; such a request carries that name, and is refused.

use super::error::ApiError;
use axum::http::{HeaderMap, header};
use std::net::IpAddr;
use std::path::Path;
use subtle::ConstantTimeEq;

/// Longest key.
const MAX_KEY_BYTES: usize = 4096;

/// Reads a key from a file: its text without white space around it.
///
/// # Errors
/// A sentence that names the flag and the file.
pub fn read_key(path: &Path) -> Result<Vec<u8>, String> {
    let wrong = |what: String| format!("--api-key-file {}: {what}", path.display());
    let len = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
    if len > MAX_KEY_BYTES as u64 {
        return Err(wrong(format!("{len} bytes; a key has at most {MAX_KEY_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let key = text.trim();
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(wrong("a key is one line of visible ASCII characters".into()));
    }
    Ok(key.as_bytes().to_vec())
}

/// Whether a request carries the key; every request does where there is none.
pub fn check_key(key: Option<&[u8]>, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(key) = key else { return Ok(()) };
    let Some(given) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::key("no API key: send the header `Authorization: Bearer KEY`"));
    };
    let bytes = given.as_bytes();
    let scheme = bytes.get(..7).is_some_and(|s| s.eq_ignore_ascii_case(b"bearer "));
    let given = if scheme { bytes[7..].trim_ascii() } else { &[] };
    // says nothing of where the two differ, only whether they do
    match bool::from(given.ct_eq(key)) {
        true => Ok(()),
        false => Err(ApiError::key("the API key is wrong")),
    }
}

/// Whether a server on loopback is called by an address or as `localhost`.
pub fn check_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let host =
        headers.get(header::HOST).map(|h| String::from_utf8_lossy(h.as_bytes()).into_owned()).unwrap_or_default();
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name),
    };
    match name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() {
        true => Ok(()),
        false => Err(ApiError::host(&host)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_must_be_there_and_whole() {
        let with = |value: &str| HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())]);
        let key = Some(&b"sesame"[..]);
        assert!(check_key(None, &HeaderMap::new()).is_ok());
        assert!(check_key(key, &with("Bearer sesame")).is_ok() && check_key(key, &with("bearer  sesame ")).is_ok());
        for wrong in ["Bearer sesam", "Bearer sesame2", "Bearer", "Basic sesame", "sesame", "Bearer "] {
            assert!(check_key(key, &with(wrong)).is_err(), "{wrong}");
        }
        assert!(check_key(key, &HeaderMap::new()).is_err());
    }

    #[test]
    fn only_loopback_names_reach_a_server_on_loopback() {
        let with = |value: &str| HeaderMap::from_iter([(header::HOST, value.parse().unwrap())]);
        for good in ["localhost:8080", "127.0.0.1", "127.0.0.1:80", "[::1]:8080", "LOCALHOST"] {
            assert!(check_host(&with(good)).is_ok(), "{good}");
        }
        for bad in ["evil.example:8080", "", "localhost.evil.example", "127.0.0.1.nip.example"] {
            assert!(check_host(&with(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_file_is_named_when_it_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let at = |text: &str| {
            let path = dir.path().join("key");
            std::fs::write(&path, text).unwrap();
            read_key(&path)
        };
        assert_eq!(at(" sesame\n").unwrap(), b"sesame");
        for bad in ["", "\n", "two words", "schl\u{fc}ssel"] {
            assert!(at(bad).unwrap_err().contains("--api-key-file"), "{bad}");
        }
        assert!(read_key(&dir.path().join("none")).unwrap_err().contains("none"));
    }
}
