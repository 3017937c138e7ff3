//! The link that emulated drives share, as drives.toml has it: a name and a rate. Plain data; what it does to reads is
//! `io::paced_link`.

use super::units::parse_rate;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Longest name in bytes.
pub const MAX_LINK_NAME_BYTES: usize = 32;

/// Name of a link: 1 to 32 letters, digits, `-`, `_` or `.`. Of fixed size, so that an emulation stays plain data.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LinkName {
    bytes: [u8; MAX_LINK_NAME_BYTES],
    len: u8,
}

impl LinkName {
    /// Checks `text`.
    pub fn new(text: &str) -> Result<Self, String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if text.is_empty() || text.len() > MAX_LINK_NAME_BYTES || !text.chars().all(plain) {
            return Err(format!("name `{text}`: use 1 to {MAX_LINK_NAME_BYTES} letters, digits, `-`, `_` or `.`"));
        }
        let mut bytes = [0; MAX_LINK_NAME_BYTES];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self { bytes, len: text.len() as u8 })
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl TryFrom<String> for LinkName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::new(&text)
    }
}

impl From<LinkName> for String {
    fn from(name: LinkName) -> Self {
        name.as_str().to_string()
    }
}

impl fmt::Debug for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// A link that every emulated drive with its name shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmulatedLink {
    /// Its name.
    pub name: LinkName,
    /// Bytes per second of all its drives together.
    pub rate_bytes_per_s: u64,
}

/// The same in drives.toml.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLink {
    name: String,
    rate: String,
}

impl RawLink {
    pub(super) fn resolve(self) -> Result<EmulatedLink, String> {
        let rate_bytes_per_s = parse_rate(&self.rate)?;
        if rate_bytes_per_s == 0 {
            return Err("its rate must be above 0".into());
        }
        Ok(EmulatedLink { name: LinkName::new(&self.name)?, rate_bytes_per_s })
    }
}
