//! A layout policy: one small TOML file under `layouts/` that says what to place where. Parsing and naming only;
//! `planner` carries it out.

use super::barrier::Effort;
use super::level::Reads;
use super::plan::PlanError;
use super::training::CachePolicy;
use crate::drive::units::{parse_bytes, parse_duration_ns, parse_rate};
use serde::Deserialize;

/// A way of placing experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Everything on one drive; without a name on the first.
    Single {
        /// The drive.
        drive: Option<String>,
    },
    /// Experts go to the drives in turn, one copy each, turning further with every layer.
    RoundRobin {},
    /// One copy each, where a hash says; a drive is chosen as often as its rate allows.
    Hash {},
    /// One copy each, the hottest first, to the drive that would be done first.
    Lpt {},
    /// Every expert cut into blocks that lie on the drives in turn (RAID-0).
    Stripe {
        /// Bytes of a block; `None` = as many as give every drive one block of each expert, and so one read.
        unit_bytes: Option<u64>,
    },
    /// Every drive holds every expert; primaries turn like round-robin.
    FullMirror {},
    /// Each drive holds the hottest experts up to a limit of its own.
    HotReplica {
        /// The limits; the order is the order of preference.
        bands: Vec<Band>,
    },
    /// Homes that make the mean of the slowest drive's time small (`layout::barrier`).
    Barrier {
        /// Copies beyond the first.
        extra: Budget,
        /// How much is searched.
        effort: Effort,
    },
}

/// Bytes for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Thousandths of the bank (all experts once).
    Permille(u32),
    /// Bytes.
    Bytes(u64),
}

/// What one drive holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Band {
    /// The drive.
    pub drive: String,
    /// Which experts.
    pub holds: Holds,
}

/// Which experts a band holds, the hottest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// All of them.
    All,
    /// This many.
    Experts(u64),
    /// As many as fit.
    Bytes(u64),
    /// As many as take this share of the recorded reads, in thousandths.
    ReadsPermille(u32),
}

/// What a policy says about a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveLimit {
    /// Its name.
    pub name: String,
    /// Bytes per second.
    pub rate_bytes_per_s: Option<u64>,
    /// Fixed cost of its share of a barrier.
    pub fixed_ns: Option<u64>,
    /// Most bytes of experts.
    pub capacity_bytes: Option<u64>,
}

/// Drives that share an uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UplinkLimit {
    /// Their names.
    pub members: Vec<String>,
    /// Joint bytes per second.
    pub rate_bytes_per_s: u64,
}

/// A policy file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyFile {
    /// The policy.
    pub policy: Policy,
    /// Its seed.
    pub seed: u64,
    /// How experts will be read.
    pub reads: Reads,
    /// Bytes of the cache in memory that the run will have; 0 = none.
    pub cache_bytes: u64,
    /// What it keeps.
    pub cache_policy: CachePolicy,
    /// What is known of drives.
    pub drives: Vec<DriveLimit>,
    /// What they share.
    pub uplinks: Vec<UplinkLimit>,
}

/// Names that `policy = "..."` may have.
pub const POLICY_NAMES: [&str; 8] =
    ["single", "round-robin", "hash", "lpt", "stripe", "full-mirror", "hot-replica", "barrier"];

impl From<Policy> for PolicyFile {
    fn from(policy: Policy) -> Self {
        Self {
            policy,
            seed: 0,
            reads: Reads::default(),
            cache_bytes: 0,
            cache_policy: CachePolicy::default(),
            drives: Vec::new(),
            uplinks: Vec::new(),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Name {
    Single,
    RoundRobin,
    #[serde(alias = "weighted-hash")]
    Hash,
    Lpt,
    Stripe,
    FullMirror,
    HotReplica,
    Barrier,
}

/// Every key that any policy may have; which of them a policy understands is checked afterwards.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Raw {
    policy: Name,
    seed: Option<u64>,
    reads: Option<Reads>,
    cache: Option<String>,
    cache_policy: Option<CachePolicy>,
    on: Option<String>,
    unit: Option<String>,
    extra: Option<String>,
    effort: Option<Effort>,
    #[serde(default)]
    band: Vec<RawBand>,
    #[serde(default)]
    drive: Vec<RawDrive>,
    #[serde(default)]
    uplink: Vec<RawUplink>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBand {
    drive: String,
    experts: Option<toml::Value>,
    bytes: Option<String>,
    reads: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDrive {
    name: String,
    rate: Option<String>,
    fixed: Option<String>,
    capacity: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawUplink {
    members: Vec<String>,
    rate: String,
}

fn bad(reason: impl Into<String>) -> PlanError {
    PlanError::Policy(reason.into())
}

fn key<T>(name: &str, value: Result<T, String>) -> Result<T, PlanError> {
    value.map_err(|e| bad(format!("{name}: {e}")))
}

impl PolicyFile {
    /// Reads a policy file's text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let at = e.span().map(|s| text.bytes().take(s.start).filter(|b| *b == b'\n').count() + 1);
            let at = at.map(|l| format!("line {l}: ")).unwrap_or_default();
            bad(format!("{at}{}", e.message()))
        })?;
        let misplaced = [
            ("on", raw.on.is_some(), matches!(raw.policy, Name::Single)),
            ("unit", raw.unit.is_some(), matches!(raw.policy, Name::Stripe)),
            ("extra", raw.extra.is_some(), matches!(raw.policy, Name::Barrier)),
            ("effort", raw.effort.is_some(), matches!(raw.policy, Name::Barrier)),
            ("band", !raw.band.is_empty(), matches!(raw.policy, Name::HotReplica)),
        ];
        if let Some((name, _, _)) = misplaced.iter().find(|(_, given, fits)| *given && !fits) {
            return Err(bad(format!("`{name}` means nothing to this policy; leave it out")));
        }
        if raw.cache.is_none() && raw.cache_policy.is_some() {
            return Err(bad("`cache-policy` needs `cache`, the cache's size"));
        }
        let policy = match raw.policy {
            Name::Single => Policy::Single { drive: raw.on },
            Name::RoundRobin => Policy::RoundRobin {},
            Name::Hash => Policy::Hash {},
            Name::Lpt => Policy::Lpt {},
            Name::Stripe => {
                let unit = raw.unit.map(|u| key("unit", parse_bytes(&u))).transpose()?;
                if let Some(unit) = unit.filter(|u| *u == 0 || u % 4096 != 0) {
                    return Err(bad(format!("unit: {unit} bytes is no multiple of 4KiB above 0")));
                }
                Policy::Stripe { unit_bytes: unit }
            }
            Name::FullMirror => Policy::FullMirror {},
            Name::HotReplica => Policy::HotReplica { bands: bands(raw.band)? },
            Name::Barrier => Policy::Barrier {
                extra: key("extra", budget(raw.extra.as_deref().unwrap_or("25%")))?,
                effort: raw.effort.unwrap_or_default(),
            },
        };
        Ok(Self {
            policy,
            seed: raw.seed.unwrap_or(0),
            reads: raw.reads.unwrap_or_default(),
            cache_bytes: raw.cache.map(|c| key("cache", parse_bytes(&c))).transpose()?.unwrap_or(0),
            cache_policy: raw.cache_policy.unwrap_or_default(),
            drives: raw.drive.into_iter().map(drive_limit).collect::<Result<_, _>>()?,
            uplinks: raw.uplink.into_iter().map(uplink_limit).collect::<Result<_, _>>()?,
        })
    }
}

impl PolicyFile {
    /// The part of the policy that is about drives of these names: what it says of others falls away.
    pub fn over(&self, names: &[&str]) -> Self {
        let has = |name: &String| names.contains(&name.as_str());
        let mut out = self.clone();
        if let Policy::HotReplica { bands } = &mut out.policy {
            bands.retain(|b| has(&b.drive));
        }
        out.drives.retain(|d| has(&d.name));
        out.uplinks.iter_mut().for_each(|u| u.members.retain(has));
        out.uplinks.retain(|u| u.members.len() > 1);
        out
    }

    /// Every drive that it names, once.
    pub fn named(&self) -> std::collections::BTreeSet<&str> {
        let bands: &[Band] = if let Policy::HotReplica { bands } = &self.policy { bands } else { &[] };
        let on = if let Policy::Single { drive } = &self.policy { drive.as_deref() } else { None };
        let limits = self.drives.iter().map(|d| d.name.as_str());
        let members = self.uplinks.iter().flat_map(|u| &u.members).map(String::as_str);
        bands.iter().map(|b| b.drive.as_str()).chain(on).chain(limits).chain(members).collect()
    }
}

/// `25%` of the bank, or bytes.
pub fn budget(text: &str) -> Result<Budget, String> {
    if text.trim_end().ends_with('%') {
        permille(text).map(Budget::Permille)
    } else {
        parse_bytes(text).map(Budget::Bytes)
    }
}

fn permille(text: &str) -> Result<u32, String> {
    let wrong = || format!("`{text}` is not a share such as `25%` or `88.9%`");
    let number = text.trim().strip_suffix('%').ok_or_else(wrong)?.trim();
    let value: f64 = number.parse().map_err(|_| wrong())?;
    if !(0.0..=6300.0).contains(&value) {
        return Err(wrong());
    }
    Ok((value * 10.0).round() as u32)
}

fn bands(raw: Vec<RawBand>) -> Result<Vec<Band>, PlanError> {
    if raw.is_empty() {
        return Err(bad("hot-replica needs at least one [[band]] with a `drive`"));
    }
    let mut bands: Vec<Band> = Vec::new();
    for RawBand { drive, experts, bytes, reads } in raw {
        let holds = match (experts, bytes, reads) {
            (Some(toml::Value::String(all)), None, None) if all == "all" => Holds::All,
            (Some(toml::Value::Integer(n)), None, None) if n >= 0 => Holds::Experts(n as u64),
            (None, Some(text), None) => Holds::Bytes(key("bytes", parse_bytes(&text))?),
            (None, None, Some(text)) => Holds::ReadsPermille(key(
                "reads",
                permille(&text).and_then(|p| match p {
                    0..=1000 => Ok(p),
                    _ => Err(format!("`{text}` is more than all reads")),
                }),
            )?),
            _ => {
                return Err(bad(format!(
                    "the band of drive `{drive}` needs exactly one of experts = \"all\" or a number, bytes = \"...\", reads \
                     = \"...%\""
                )));
            }
        };
        if bands.iter().any(|b| b.drive == drive) {
            return Err(bad(format!("drive `{drive}` has two bands; keep the larger one")));
        }
        bands.push(Band { drive, holds });
    }
    Ok(bands)
}

fn drive_limit(raw: RawDrive) -> Result<DriveLimit, PlanError> {
    let named = |k: &str, e: String| bad(format!("drive `{}`: {k}: {e}", raw.name));
    Ok(DriveLimit {
        rate_bytes_per_s: raw.rate.as_deref().map(parse_rate).transpose().map_err(|e| named("rate", e))?,
        fixed_ns: raw.fixed.as_deref().map(parse_duration_ns).transpose().map_err(|e| named("fixed", e))?,
        capacity_bytes: raw.capacity.as_deref().map(parse_bytes).transpose().map_err(|e| named("capacity", e))?,
        name: raw.name,
    })
}

fn uplink_limit(raw: RawUplink) -> Result<UplinkLimit, PlanError> {
    Ok(UplinkLimit { rate_bytes_per_s: key("uplink: rate", parse_rate(&raw.rate))?, members: raw.members })
}

impl Policy {
    /// The name that plans carry.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::Single { .. } => "single",
            Policy::RoundRobin {} => "round-robin",
            Policy::Hash {} => "hash",
            Policy::Lpt {} => "lpt",
            Policy::Stripe { .. } => "stripe",
            Policy::FullMirror {} => "full-mirror",
            Policy::HotReplica { .. } => "hot-replica",
            Policy::Barrier { .. } => "barrier",
        }
    }

    /// Whether it needs to know what is hot.
    pub fn needs_heat(&self) -> bool {
        matches!(self, Policy::Lpt {} | Policy::HotReplica { .. } | Policy::Barrier { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_policies_parse_under_their_own_names() {
        for (text, name) in [
            (include_str!("../../layouts/single.toml"), "single"),
            (include_str!("../../layouts/round-robin.toml"), "round-robin"),
            (include_str!("../../layouts/weighted-hash.toml"), "hash"),
            (include_str!("../../layouts/lpt.toml"), "lpt"),
            (include_str!("../../layouts/stripe.toml"), "stripe"),
            (include_str!("../../layouts/full-mirror.toml"), "full-mirror"),
            (include_str!("../../layouts/hot-replica.toml"), "hot-replica"),
            (include_str!("../../layouts/k3-record.toml"), "hot-replica"),
            (include_str!("../../layouts/barrier.toml"), "barrier"),
            (include_str!("../../layouts/barrier-whole.toml"), "barrier"),
            (include_str!("../../layouts/barrier-cached.toml"), "barrier"),
        ] {
            assert_eq!(PolicyFile::parse(text).unwrap().policy.name(), name);
            assert!(POLICY_NAMES.contains(&name));
            assert!(text.starts_with("# "), "{name} says what it is for");
        }
    }

    #[test]
    fn the_layout_of_record_is_as_published() {
        let record = PolicyFile::parse(include_str!("../../layouts/k3-record.toml")).unwrap();
        let band = |drive: &str, holds| Band { drive: drive.into(), holds };
        let bands = vec![
            band("internal", Holds::Experts(69_776)),
            band("Green", Holds::All),
            band("White", Holds::ReadsPermille(889)),
            band("Yellow", Holds::ReadsPermille(665)),
        ];
        assert_eq!(record.policy, Policy::HotReplica { bands });
        assert_eq!(record.drives[0].rate_bytes_per_s, Some(13_550_000_000));
    }

    #[test]
    fn over_fewer_drives_a_policy_keeps_what_is_about_them() {
        let record = PolicyFile::parse(include_str!("../../layouts/k3-record.toml")).unwrap();
        assert!(record.named().contains("Yellow") && record.named().contains("internal"));
        let two = record.over(&["internal", "Green"]);
        assert_eq!(two.named(), ["Green", "internal"].into());
        let Policy::HotReplica { bands } = &two.policy else { panic!() };
        assert_eq!(bands.len(), 2);
        let all: Vec<&str> = record.named().into_iter().collect();
        assert_eq!(record.over(&all), record);
        assert_eq!(record.over(&["Green"]).uplinks, [], "one drive shares nothing");
    }

    #[test]
    fn typos_are_errors_that_list_what_exists() {
        let says = |text: &str| PolicyFile::parse(text).unwrap_err().to_string();
        let e = says("policy = \"mirror\"");
        assert!(e.contains("mirror") && e.contains("full-mirror"), "{e}");
        assert!(says("policy = \"full-mirror\"\nbugdet = 1").contains("line 2"));
        assert!(says("policy = \"lpt\"\nextra = \"5%\"").contains("`extra` means nothing"));
        assert!(says("policy = \"barrier\"\nextra = \"-5%\"").contains("extra"));
        assert!(says("policy = \"barrier\"\nextra = \"much\"").contains("much"));
        assert!(says("policy = \"barrier\"\ncache-policy = \"lfu\"").contains("needs `cache`"));
        assert!(says("policy = \"stripe\"\nunit = \"5kB\"").contains("4KiB"));
        assert!(says("policy = \"hot-replica\"").contains("[[band]]"));
        let band = "[[band]]\ndrive = \"a\"\n";
        assert!(says(&format!("policy = \"hot-replica\"\n{band}")).contains("exactly one"));
        assert!(says(&format!("policy = \"hot-replica\"\n{band}experts = 1\n{band}experts = 2")).contains("two bands"));
        assert!(says(&format!("policy = \"hot-replica\"\n{band}reads = \"101%\"")).contains("more than all"));
        assert!(says("policy = \"lpt\"\n[[drive]]\nname = \"a\"\nrate = \"fast\"").contains("drive `a`: rate"));
    }
}
