//! Faults that a run is to meet, as a user writes them: one line of words for each. Parsing, printing and the choice of reads;
//! nothing here reads (`io::faults` carries them out).
//!
//! `KIND [VALUE] [@FROM..TO] [SHARE%] [seed=N]`, for example `eio 1%`, `stall 2s @100..101`, `slow 4x @200..`,
//! `slow 20MB/s @2s..5s`, `vanish @300..600`. Numbers after `@` count the reads of the drive from 0, times count from its first
//! read; the end is left out of the range, and an open end means for ever. Which reads of a range a share falls on follows from
//! the drive's name, the seed and the read's number alone.

use super::units::{parse_duration_ns, parse_rate};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Most rules for one drive.
pub const MAX_RULES: usize = 16;
/// All reads, in parts per million.
const ALL_PPM: u32 = 1_000_000;

/// What happens to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Its answer comes so much later than it was asked; `None` = never.
    Stall {
        /// Time from asking to the answer, at least.
        for_ns: Option<u64>,
    },
    /// It takes so many times as long, in hundredths.
    Slow {
        /// 400 = four times.
        hundredths: u32,
    },
    /// The drive delivers no faster than this, one read after the other.
    SlowTo {
        /// Bytes per second.
        bytes_per_s: u64,
    },
    /// The kernel answers EIO.
    Eio,
    /// The file ends half-way through the read.
    Short,
    /// One bit of what was delivered is another.
    Flip,
    /// The drive is not there: ENODEV.
    Vanish,
}

impl FaultKind {
    /// Its name in rules and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stall { .. } => "stall",
            Self::Slow { .. } | Self::SlowTo { .. } => "slow",
            Self::Eio => "eio",
            Self::Short => "short",
            Self::Flip => "flip",
            Self::Vanish => "vanish",
        }
    }
}

/// Which reads a rule is about. `to` is left out; `None` = for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// By number on the drive, from 0.
    Reads {
        /// The first.
        from: u64,
        /// The first that is spared again.
        to: Option<u64>,
    },
    /// By time since the drive's first read.
    Time {
        /// From here on.
        from_ns: u64,
        /// Until here.
        to_ns: Option<u64>,
    },
}

/// One fault of one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FaultRule {
    /// What happens.
    pub kind: FaultKind,
    /// To which reads.
    pub when: When,
    /// To how many of them, in parts per million.
    pub share_ppm: u32,
    /// Decides which.
    pub seed: u64,
}

impl FaultRule {
    /// Every read of `when`.
    pub fn new(kind: FaultKind, when: When) -> Self {
        Self { kind, when, share_ppm: ALL_PPM, seed: 0 }
    }

    /// Whether it falls on read number `ordinal` of the drive with `drive_key`, asked for `since_first_ns` after the first.
    pub fn hits(&self, drive_key: u64, ordinal: u64, since_first_ns: u64) -> bool {
        let within = |at: u64, from: u64, to: Option<u64>| at >= from && to.is_none_or(|to| at < to);
        let inside = match self.when {
            When::Reads { from, to } => within(ordinal, from, to),
            When::Time { from_ns, to_ns } => within(since_first_ns, from_ns, to_ns),
        };
        inside
            && (self.share_ppm >= ALL_PPM
                || self.draw(drive_key, ordinal) % u64::from(ALL_PPM) < u64::from(self.share_ppm))
    }

    /// A number that depends on the seed, the drive and the read alone.
    pub fn draw(&self, drive_key: u64, ordinal: u64) -> u64 {
        let mut key = [0u8; 16];
        key[..8].copy_from_slice(&drive_key.to_le_bytes());
        key[8..].copy_from_slice(&ordinal.to_le_bytes());
        xxhash_rust::xxh3::xxh3_64_with_seed(&key, self.seed)
    }

    /// Whether it must fall on one of the first `reads` reads of a drive, whatever the seed and the clock say.
    pub fn must_hit(&self, reads: u64) -> bool {
        // A drive may be as slow as that by itself.
        let at_most = matches!(self.kind, FaultKind::SlowTo { .. } | FaultKind::Stall { for_ns: Some(_) });
        matches!(self.when, When::Reads { from, .. } if from < reads) && self.share_ppm >= ALL_PPM && !at_most
    }
}

/// The key of a drive's name in [`FaultRule::hits`].
pub fn drive_key(name: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(name.as_bytes())
}

impl FromStr for FaultRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |why: String| format!("fault `{text}`: {why}");
        let mut words = text.split_whitespace().peekable();
        let name = words.next().ok_or_else(|| bad("is empty".into()))?;
        let value = words.next_if(|w| !w.starts_with('@') && !w.ends_with('%') && !w.starts_with("seed="));
        let kind = kind_of(name, value).map_err(bad)?;
        let mut rule = Self::new(kind, When::Reads { from: 0, to: None });
        for word in words {
            if let Some(range) = word.strip_prefix('@') {
                rule.when = range_of(range).map_err(bad)?;
            } else if let Some(share) = word.strip_suffix('%') {
                let ppm = share.parse::<f64>().ok().map(|p| p * 10_000.0).filter(|p| (1.0..=1e6).contains(p));
                rule.share_ppm =
                    ppm.ok_or_else(|| bad(format!("`{word}` is no share from 0.0001% to 100%")))?.round() as u32;
            } else if let Some(seed) = word.strip_prefix("seed=") {
                rule.seed = seed.parse().map_err(|_| bad(format!("`{word}`: the seed is a whole number")))?;
            } else {
                return Err(bad(format!("`{word}` is neither @FROM..TO, nor SHARE%, nor seed=N")));
            }
        }
        Ok(rule)
    }
}

fn kind_of(name: &str, value: Option<&str>) -> Result<FaultKind, String> {
    let kind = match (name, value) {
        ("stall", None) => FaultKind::Stall { for_ns: None },
        ("stall", Some(time)) => FaultKind::Stall { for_ns: Some(parse_duration_ns(time)?) },
        ("slow", Some(value)) if value.ends_with('x') => {
            let factor = value.trim_end_matches('x').parse::<f64>().ok().filter(|f| (1.01..=10_000.0).contains(f));
            let factor = factor.ok_or_else(|| format!("`{value}` is no factor from 1.01x to 10000x"))?;
            FaultKind::Slow { hundredths: (factor * 100.0).round() as u32 }
        }
        ("slow", Some(rate)) => match parse_rate(rate)? {
            0 => return Err("a rate of 0 never delivers; that is `stall`".into()),
            bytes_per_s => FaultKind::SlowTo { bytes_per_s },
        },
        ("slow", None) => return Err("how slow? `slow 4x` or `slow 20MB/s`".into()),
        ("eio", None) => FaultKind::Eio,
        ("short", None) => FaultKind::Short,
        ("flip", None) => FaultKind::Flip,
        ("vanish", None) => FaultKind::Vanish,
        ("eio" | "short" | "flip" | "vanish", Some(value)) => {
            return Err(format!("`{value}`: {name} takes no value; ranges begin with @, shares end with %"));
        }
        _ => return Err(format!("`{name}` is not stall, slow, eio, short, flip or vanish")),
    };
    Ok(kind)
}

fn range_of(text: &str) -> Result<When, String> {
    let (from, to) = match text.split_once("..") {
        Some((from, "")) => (from, None),
        Some((from, to)) => (from, Some(to)),
        None => (text, Some("")), // one read
    };
    let count = |word: &str| word.parse::<u64>().ok();
    let when = match (count(from), to) {
        (Some(from), Some("")) => When::Reads { from, to: from.checked_add(1) },
        (Some(from), None) => When::Reads { from, to: None },
        (Some(from), Some(to)) => {
            let to = count(to).ok_or_else(|| format!("`@{text}`: both ends count reads, or both are times"))?;
            When::Reads { from, to: Some(to) }
        }
        (None, Some("")) => return Err(format!("`@{text}`: a time needs an end; write @{text}.. for ever")),
        (None, to) => When::Time { from_ns: parse_duration_ns(from)?, to_ns: to.map(parse_duration_ns).transpose()? },
    };
    match when {
        When::Reads { from, to: Some(to) } if to <= from => Err(format!("`@{text}` is empty")),
        When::Time { from_ns, to_ns: Some(to) } if to <= from_ns => Err(format!("`@{text}` is empty")),
        when => Ok(when),
    }
}

impl fmt::Display for FaultRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        match self.kind {
            FaultKind::Stall { for_ns: Some(ns) } => write!(f, " {ns}ns")?,
            FaultKind::Slow { hundredths } => write!(f, " {}x", f64::from(hundredths) / 100.0)?,
            FaultKind::SlowTo { bytes_per_s } => write!(f, " {bytes_per_s}B/s")?,
            _ => {}
        }
        match self.when {
            When::Reads { from: 0, to: None } => {}
            When::Reads { from, to: None } => write!(f, " @{from}..")?,
            When::Reads { from, to: Some(to) } => write!(f, " @{from}..{to}")?,
            When::Time { from_ns, to_ns: None } => write!(f, " @{from_ns}ns..")?,
            When::Time { from_ns, to_ns: Some(to) } => write!(f, " @{from_ns}ns..{to}ns")?,
        }
        if self.share_ppm < ALL_PPM {
            write!(f, " {}%", f64::from(self.share_ppm) / 10_000.0)?;
        }
        if self.seed != 0 {
            write!(f, " seed={}", self.seed)?;
        }
        Ok(())
    }
}

impl TryFrom<String> for FaultRule {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<FaultRule> for String {
    fn from(rule: FaultRule) -> Self {
        rule.to_string()
    }
}

/// A fault and the drive that it is for: `DRIVE: RULE`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DriveFault {
    /// Name of the drive in the plan.
    pub drive: String,
    /// The fault.
    pub rule: FaultRule,
}

impl DriveFault {
    /// Those of a text: separated by `;` or line ends; `#` begins a comment.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, String> {
        let lines = text.lines().map(|l| l.split('#').next().unwrap_or_default());
        let rules = lines.flat_map(|l| l.split(';')).map(str::trim).filter(|r| !r.is_empty());
        rules.map(str::parse).collect()
    }
}

impl FromStr for DriveFault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (drive, rule) =
            text.split_once(':').ok_or_else(|| format!("`{text}`: write DRIVE: FAULT, as `blue: eio 1%`"))?;
        Ok(Self { drive: drive.trim().to_string(), rule: rule.trim().parse()? })
    }
}

impl fmt::Display for DriveFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.drive, self.rule)
    }
}

impl TryFrom<String> for DriveFault {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DriveFault> for String {
    fn from(fault: DriveFault) -> Self {
        fault.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_mean_what_they_say_and_survive_a_round_trip() {
        let rule = |text: &str| text.parse::<FaultRule>().unwrap();
        let stall = rule("stall 2s @100..101");
        assert_eq!(stall.kind, FaultKind::Stall { for_ns: Some(2_000_000_000) });
        assert_eq!(rule("stall @7").when, When::Reads { from: 7, to: Some(8) });
        assert_eq!(rule("slow 1.5x").kind, FaultKind::Slow { hundredths: 150 });
        assert_eq!(rule("slow 20MB/s @2s..5s").kind, FaultKind::SlowTo { bytes_per_s: 20_000_000 });
        assert_eq!((rule("eio 1% seed=9").share_ppm, rule("eio 1% seed=9").seed), (10_000, 9));
        for text in
            ["stall", "slow 4x @200..", "slow 20MB/s @2s..5s", "vanish @300..600", "flip 0.5% seed=3", "short @1"]
        {
            let parsed = rule(text);
            assert_eq!(rule(&parsed.to_string()), parsed, "{text}");
        }
        let all = DriveFault::parse_all("blue: eio 1% ; coral: vanish @3.. # gone\n\namber: stall 1ms").unwrap();
        assert_eq!(all.iter().map(|f| f.drive.as_str()).collect::<Vec<_>>(), ["blue", "coral", "amber"]);
        assert_eq!(all[1].to_string().parse::<DriveFault>().unwrap(), all[1]);
    }

    #[test]
    fn what_means_nothing_is_refused_with_its_words() {
        let cases = [
            ("melt", "`melt`"),
            ("slow", "how slow"),
            ("slow 0.5x", "`0.5x`"),
            ("slow 0MB/s", "stall"),
            ("eio 3", "`3`"),
            ("eio @5..5", "empty"),
            ("eio @5..2s", "both"),
            ("eio @2s", "@2s.."),
            ("eio 101%", "101%"),
            ("eio x", "`x`"),
            ("eio 1% often", "`often`"),
            ("flip seed=x", "seed=x"),
            ("", "empty"),
        ];
        for (text, word) in cases {
            let message = text.parse::<FaultRule>().unwrap_err();
            assert!(message.contains(word), "{text}: {message}");
        }
        assert!(DriveFault::parse_all("eio 1%").unwrap_err().contains("DRIVE: FAULT"));
    }

    #[test]
    fn a_share_falls_on_the_same_reads_each_time_and_on_about_as_many_as_it_says() {
        let rule: FaultRule = "eio 10% @100.. seed=4".parse().unwrap();
        let hits = |key| (0..10_100u64).filter(|&n| rule.hits(key, n, 0)).collect::<Vec<_>>();
        let (a, b) = (hits(drive_key("a")), hits(drive_key("b")));
        assert_eq!(a, hits(drive_key("a")));
        assert_ne!(a, b, "another drive, other reads");
        assert!((900..1100).contains(&a.len()) && a[0] >= 100, "{} reads", a.len());
        assert!(!rule.must_hit(1000), "a share may miss");
        let sure: FaultRule = "eio @100..".parse().unwrap();
        assert!(!sure.must_hit(100) && sure.must_hit(101));
    }
}
