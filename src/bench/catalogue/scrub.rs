//! What leaves the machine with a record: paths lose everything but their last part, names of users and of the host are
//! replaced. Works on text and on JSON values; knows no files.

use serde_json::Value;
use std::collections::BTreeSet;

/// Keys whose text is a path, whether it is absolute or not.
const PATH_KEYS: [&str; 16] = [
    "store",
    "plan",
    "drives",
    "trace",
    "prompt_file",
    "prompts",
    "prefetch_table",
    "cache_heat",
    "path",
    "source",
    "file",
    "from",
    "folder",
    "snapshot_dir",
    "kv_dir",
    "resume",
];
/// Keys whose text is data in base64, in which `/` is a digit.
const DATA_KEYS: [&str; 1] = ["clat_hdr"];
/// Maps whose keys are arms.
const NAME_MAPS: [&str; 5] = ["rejected", "fired", "refused", "verdict", "tokens"];
/// Account names that say nothing of anybody.
const NOBODY: [&str; 4] = ["root", "user", "nobody", "host"];

/// What to take out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrub {
    users: BTreeSet<String>,
    hosts: BTreeSet<String>,
    /// Leave out the text of prompts.
    pub without_prompts: bool,
}

impl Scrub {
    /// Takes out these names of users and hosts, and what [`Scrub::learn`] sees.
    pub fn new(users: impl IntoIterator<Item = String>, hosts: impl IntoIterator<Item = String>) -> Self {
        let sound = |n: &String| n.len() > 1 && !NOBODY.contains(&n.as_str());
        Self {
            users: users.into_iter().filter(sound).collect(),
            hosts: hosts.into_iter().filter(sound).collect(),
            without_prompts: false,
        }
    }

    /// Those of this process and machine.
    pub fn here() -> Self {
        let home = std::env::home_dir().and_then(|h| Some(h.file_name()?.to_string_lossy().into_owned()));
        let named = ["USER", "LOGNAME"].into_iter().filter_map(|n| std::env::var(n).ok());
        let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let short = node.split('.').next().map(str::to_string);
        Self::new(named.chain(home), std::iter::once(node.clone()).chain(short))
    }

    /// Notes whose home folders a text names: they are to be taken out elsewhere too.
    pub fn learn(&mut self, text: &str) {
        for root in ["/home/", "/Users/"] {
            for (at, _) in text.match_indices(root) {
                let name: String =
                    text[at + root.len()..].chars().take_while(|c| !ends_part(*c) && *c != '/').collect();
                if name.len() > 1 && !NOBODY.contains(&name.as_str()) {
                    self.users.insert(name);
                }
            }
        }
    }

    /// A text without them.
    pub fn text(&self, text: &str) -> String {
        let mut out = last_parts(text);
        for (names, with) in [(&self.users, "user"), (&self.hosts, "host")] {
            // a whole name before what it begins with, or its rest would stay
            let mut names: Vec<&String> = names.iter().collect();
            names.sort_by_key(|n| std::cmp::Reverse(n.len()));
            for name in names {
                out = replace_word(&out, name, with);
            }
        }
        out
    }

    /// A JSON value without them, keys included.
    pub fn value(&self, value: Value) -> Value {
        self.of("", value)
    }

    fn of(&self, key: &str, value: Value) -> Value {
        match value {
            Value::String(text) if DATA_KEYS.contains(&key) => Value::String(text),
            Value::String(_) if key == "prompt" && self.without_prompts => Value::String("(left out)".into()),
            Value::String(text) if key == "text" && self.without_prompts => {
                Value::String("(left out)".repeat(usize::from(!text.is_empty())))
            }
            Value::String(text) if PATH_KEYS.contains(&key) => {
                let last = text.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
                Value::String(self.text(last))
            }
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(items) => {
                Value::Array(self.command(key, items).into_iter().map(|v| self.of(key, v)).collect())
            }
            Value::Object(map) => {
                // Names stand only where arms are keys; elsewhere a key is the record's own word, whatever an account is called.
                let named = NAME_MAPS.contains(&key) && map.values().all(|v| v.is_string() || v.is_array());
                let name = |k: &str| if named { self.text(k) } else { k.to_string() };
                Value::Object(map.into_iter().map(|(k, v)| (name(&k), self.of(&k, v))).collect())
            }
            other => other,
        }
    }

    /// The words of a command: what follows `--prompt` is a prompt, and of whatever else looks like a path only the last part
    /// stays.
    fn command(&self, key: &str, mut words: Vec<Value>) -> Vec<Value> {
        let mut is_prompt = false;
        for word in words.iter_mut().filter(|_| key == "command") {
            let Some(text) = word.as_str() else { continue };
            if std::mem::replace(&mut is_prompt, text == "--prompt") || text.starts_with("--prompt=") {
                continue;
            }
            let (flag, value) = match text.split_once('=').filter(|_| text.starts_with("--")) {
                Some((flag, value)) => (format!("{flag}="), value),
                None => (String::new(), text),
            };
            *word = Value::String(flag + value.trim_end_matches('/').rsplit('/').next().unwrap_or_default());
        }
        if key == "command" && self.without_prompts {
            let at = words.iter().position(|w| w.as_str() == Some("--prompt"));
            if let Some(prompt) = at.and_then(|at| words.get_mut(at + 1)) {
                *prompt = Value::String("(left out)".into());
            }
            for word in &mut words {
                if word.as_str().is_some_and(|w| w.starts_with("--prompt=")) {
                    *word = Value::String("--prompt=(left out)".into());
                }
            }
        }
        words
    }
}

/// What cannot be part of a path's part in running text.
fn ends_part(c: char) -> bool {
    c.is_whitespace() || c.is_control() || "\"'`,;:()[]{}<>|".contains(c)
}

/// Every absolute path in `text` as its last part alone.
fn last_parts(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '~']) {
        let before = rest[..at].chars().next_back().or(out.chars().next_back());
        let tail = &rest[at..];
        let address = ["http:", "https:"].iter().any(|scheme| rest[..at].ends_with(scheme));
        // `</` ends an element of a figure
        let begins = before.is_none_or(|c| (ends_part(c) && c != '<') || c == '=') && !address;
        if !begins || !(tail.starts_with('/') || tail.starts_with("~/")) {
            let step = at + if address { tail.find(ends_part).unwrap_or(tail.len()) } else { 1 };
            out.push_str(&rest[..step]);
            rest = &rest[step..];
            continue;
        }
        let length = tail.find(ends_part).unwrap_or(tail.len());
        let path = &tail[..length];
        out.push_str(&rest[..at]);
        let last = path.trim_end_matches(['/', '.']).rsplit('/').next().unwrap_or_default();
        // a slash between words, as in "/ wall time", stays
        out.push_str(if last.is_empty() { path } else { last });
        rest = &tail[length..];
    }
    out.push_str(rest);
    out
}

/// Replaces `name` where it stands as a word.
fn replace_word(text: &str, name: &str, with: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let end = at + name.len();
        let inside = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let word =
            !inside(rest[..at].chars().next_back().or(out.chars().next_back())) && !inside(rest[end..].chars().next());
        out.push_str(&rest[..at]);
        out.push_str(if word { with } else { name });
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scrub() -> Scrub {
        Scrub::new(["ada".to_string(), "root".into()], ["tower".to_string(), "tower.lan".into()])
    }

    #[test]
    fn paths_keep_their_last_part_wherever_they_stand() {
        let s = scrub();
        for (from, to) in [
            ("/home/ada/models/k3", "k3"),
            ("drive `a`: /mnt/ada/fast/x is no folder", "drive `a`: x is no folder"),
            ("plan=/home/ada/p.json, /srv/q.json", "plan=p.json, q.json"),
            ("~/secret/heat.csv", "heat.csv"),
            ("bytes / wall time", "bytes / wall time"),
            ("tok/s and B/s", "tok/s and B/s"),
            ("https://example.org/a/b", "https://example.org/a/b"),
            ("file:///home/ada/x and //home/ada/y", "file:x and y"),
            ("<text x=\"1\">bytes</text><path d=\"M1\"/>", "<text x=\"1\">bytes</text><path d=\"M1\"/>"),
            ("measured by ada on tower.lan", "measured by user on host"),
            ("adage of towers", "adage of towers"),
            ("ada_ada.ada", "user_user.user"),
        ] {
            assert_eq!(s.text(from), to);
        }
    }

    #[test]
    fn values_lose_paths_by_key_and_data_stays() {
        let mut s = scrub();
        s.learn("see /home/grace/x and /Users/linus/y");
        let value = json!({
            "store": "../ada/models/k3", "prompt": "a story of grace", "clat_hdr": "/home/ada/++",
            "command": ["ladder", "--store=/home/ada/k3", "--prompt", "a secret", "--drives", "../clients/my project/d.toml"],
            "mounts": [{"path": "/mnt/fast/"}], "rejected": {"ada": "x", "linus": "y"}, "ada_share": {"linus": 1}, "n": 1.5,
        });
        let kept = s.value(value.clone());
        assert_eq!(kept["store"], "k3");
        assert_eq!(kept["prompt"], "a story of user");
        assert_eq!(kept["clat_hdr"], "/home/ada/++");
        assert_eq!(kept["command"], json!(["ladder", "--store=k3", "--prompt", "a secret", "--drives", "d.toml"]));
        assert_eq!(kept["mounts"][0]["path"], "fast");
        assert_eq!(kept["rejected"], json!({"user": "y"}), "an arm may be called like somebody");
        assert_eq!(kept["ada_share"]["linus"], 1, "a key of the format stays what it is");
        s.without_prompts = true;
        let kept = s.value(value);
        assert_eq!((&kept["prompt"], &kept["command"][3]), (&json!("(left out)"), &json!("(left out)")));
    }
}
