//! What drives can do, as given by a person or a profile, and the two bounds of each barrier that follow from it.

use super::ReplayError;
use crate::bound::{DriveRate, MAX_SUBSET_DRIVES, bound_drives_ns, bound_layout_ns};
use crate::drive::profile::Profile;
use crate::drive::units::{parse_duration_ns, parse_rate};
use crate::ids::{DriveId, ExpertId, LayerId};
use crate::layout::plan::{Plan, Shape};
use crate::trace::events::{BarrierRecord, Outcome, Purpose, ReadEvent, ReadResult};
use crate::trace::header::KV_DRIVE;
use crate::trace::log::{TraceDrive, TraceError};
use crate::trace::stream::Stream;
use serde::Deserialize;
use std::collections::HashMap;

/// A rate for a drive that is known by name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedRate {
    /// The drive.
    pub name: String,
    /// What it can do.
    pub rate: DriveRate,
}

/// Parses `name=136MB/s:200us,other=1.2GB/s`; the fixed cost may be left out.
pub fn parse_rates(text: &str) -> Result<Vec<NamedRate>, String> {
    text.split(',')
        .map(|item| {
            let wanted = || format!("`{item}` is not `name=rate` or `name=rate:fixed`, such as `nvme0=13.6GB/s:200us`");
            let (name, value) = item.split_once('=').ok_or_else(wanted)?;
            let (rate, fixed) = value.split_once(':').unwrap_or((value, "0"));
            named(name.trim(), rate, fixed)
        })
        .collect()
}

/// Parses a profile: the JSON of `argodrive ceiling`, or TOML with `[[drive]]` tables of `name`, `rate` and, if known,
/// `fixed`.
pub fn parse_profile(text: &str) -> Result<Vec<NamedRate>, String> {
    if text.trim_start().starts_with('{') {
        let measured = Profile::parse(text)?;
        return Ok(measured.drives.iter().map(|d| NamedRate { name: d.name.clone(), rate: d.bound_rate() }).collect());
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        drive: Vec<Entry>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        name: String,
        rate: String,
        fixed: Option<String>,
    }
    let file: File = toml::from_str(text).map_err(|e| e.to_string())?;
    file.drive.iter().map(|d| named(&d.name, &d.rate, d.fixed.as_deref().unwrap_or("0"))).collect()
}

fn named(name: &str, rate: &str, fixed: &str) -> Result<NamedRate, String> {
    let bytes_per_s = parse_rate(rate)? as f64;
    if name.is_empty() || bytes_per_s == 0.0 {
        return Err(format!("drive `{name}`: a bound needs a name and a rate above 0"));
    }
    let fixed_ns = parse_duration_ns(fixed)?;
    Ok(NamedRate { name: name.to_owned(), rate: DriveRate { bytes_per_s, fixed_ns } })
}

/// Whose homes the layout bound uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HomesFrom {
    /// The plan of the run.
    Plan,
    /// The drives that served an expert anywhere in the trace: a plan may have more, and then the true bound is lower.
    Trace,
}

/// Homes of experts as bit masks over the trace's drives.
#[derive(Clone, Debug)]
pub struct Homes {
    masks: HashMap<(LayerId, ExpertId), u64>,
    /// Every drive has bytes of its own of each expert: none could be read elsewhere.
    striped: bool,
    /// Where they come from.
    pub from: HomesFrom,
}

impl Homes {
    /// Those of a plan, whose drives are found by name among those of the trace.
    pub fn of_plan(plan: &Plan, drives: &[TraceDrive]) -> Result<Self, ReplayError> {
        let ids = plan.drives.iter().map(|d| {
            let at = drives.iter().position(|t| t.name == d.name);
            at.ok_or_else(|| ReplayError::Input(format!("the plan's drive `{}` is not in the trace", d.name)))
        });
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let bit = |d: &DriveId| ids.get(d.index()).and_then(|at| 1u64.checked_shl(*at as u32)).unwrap_or(0);
        let mut masks = HashMap::new();
        for (layer, homes) in &plan.layers {
            for (expert, homes) in homes.0.iter().enumerate() {
                masks.insert((*layer, ExpertId(expert as u16)), homes.iter().map(bit).sum());
            }
        }
        let striped = matches!(plan.shape, Shape::Stripe { .. });
        Ok(Self { masks, striped, from: HomesFrom::Plan })
    }

    /// Those seen in a whole stream of reads.
    pub fn of_reads(reads: &mut Stream<ReadEvent>) -> Result<Self, TraceError> {
        let mut masks: HashMap<(LayerId, ExpertId), u64> = HashMap::new();
        while let Some(read) = reads.next_value()? {
            let of_expert = matches!(read.purpose, Purpose::Demand | Purpose::Prefetch);
            if of_expert && read.result == ReadResult::Ok {
                *masks.entry((read.layer, read.expert)).or_default() |=
                    1u64.checked_shl(u32::from(read.drive.0)).unwrap_or(0);
            }
        }
        Ok(Self { masks, striped: false, from: HomesFrom::Trace })
    }
}

/// Computes both bounds, barrier by barrier.
#[derive(Debug)]
pub struct Bounds {
    rates: Vec<DriveRate>,
    homes: Homes,
    items: Vec<(u64, u64)>,
}

/// The bounds of one barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierBounds {
    /// With the homes given; `None` beyond [`MAX_SUBSET_DRIVES`] drives.
    pub layout_ns: Option<u64>,
    /// As if every expert were on every drive.
    pub drives_ns: u64,
}

impl Bounds {
    /// Bounds from rates for **all** drives of the trace.
    pub fn new(drives: &[TraceDrive], named: &[NamedRate], homes: Homes) -> Result<Self, ReplayError> {
        let input = |text: String| Err(ReplayError::Input(text));
        if let Some(unknown) = named.iter().find(|n| drives.iter().all(|d| d.name != n.name)) {
            let have: Vec<&str> = drives.iter().map(|d| d.name.as_str()).collect();
            return input(format!("--rates: drive `{}` is not in the trace ({})", unknown.name, have.join(", ")));
        }
        let used = homes.masks.values().fold(0, |used, mask| used | mask);
        let holds = |at: usize| 1u64.checked_shl(at as u32).is_some_and(|bit| used & bit != 0);
        // one that has latent rows and no experts stands last, and is not what a barrier could wait for
        let without = drives.last().is_some_and(|d| d.name == KV_DRIVE && !holds(drives.len() - 1));
        let mut rates = Vec::with_capacity(drives.len());
        for drive in &drives[..drives.len() - usize::from(without)] {
            let mut found = named.iter().filter(|n| n.name == drive.name);
            match (found.next(), found.next()) {
                (Some(one), None) => rates.push(one.rate),
                (None, _) => return input(format!("--rates: drive `{}` has none; bounds need all", drive.name)),
                (Some(_), Some(_)) => return input(format!("--rates: drive `{}` has two", drive.name)),
            }
        }
        Ok(Self { rates, homes, items: Vec::new() })
    }

    /// The fixed costs, for the verdict.
    pub fn fixed_ns(&self) -> Vec<Option<u64>> {
        self.rates.iter().map(|r| Some(r.fixed_ns)).collect()
    }

    /// Whose homes are used.
    pub fn homes_from(&self) -> HomesFrom {
        self.homes.from
    }

    /// The bounds of `record`: the bytes of its successful reads that were handed over after it opened. Reads under way
    /// before that are left out, so that both stay lower bounds.
    pub fn of(&mut self, record: &BarrierRecord, reads: &[ReadEvent]) -> Result<BarrierBounds, ReplayError> {
        self.items.clear();
        let needed = |r: &&ReadEvent| {
            r.result == ReadResult::Ok && r.outcome != Outcome::Wasted && r.submitted_ns >= record.open_ns
        };
        for read in reads.iter().filter(needed) {
            let own = 1u64.checked_shl(u32::from(read.drive.0)).unwrap_or(0);
            // a plan that does not list the drive which served is not the plan of this run
            let homes = self.homes.masks.get(&(read.layer, read.expert)).copied().unwrap_or(own);
            if homes & own == 0 {
                return Err(ReplayError::Input(format!(
                    "barrier {}: drive {} served expert {} of layer {}, but --plan gives it no copy there: it is not \
                     the plan of this run",
                    record.barrier, read.drive.0, read.expert.0, read.layer.0
                )));
            }
            self.items.push((read.bytes, if self.homes.striped { own } else { homes }));
        }
        let fail = |source| ReplayError::Bound { barrier: record.barrier, source };
        let total = self.items.iter().try_fold(0u64, |sum, i| sum.checked_add(i.0));
        let total = total.ok_or(crate::bound::BoundError::Overflow).map_err(fail)?;
        let layout = (self.rates.len() <= MAX_SUBSET_DRIVES).then(|| bound_layout_ns(&self.items, &self.rates));
        Ok(BarrierBounds {
            layout_ns: layout.transpose().map_err(fail)?,
            drives_ns: bound_drives_ns(total, &self.rates).map_err(fail)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_people_write_them() {
        let rates = parse_rates("a=136MB/s:200us, b=1.5GB/s").unwrap();
        assert_eq!(rates[0].rate, DriveRate { bytes_per_s: 136e6, fixed_ns: 200_000 });
        assert_eq!((rates[1].name.as_str(), rates[1].rate), ("b", DriveRate { bytes_per_s: 1.5e9, fixed_ns: 0 }));
        for bad in ["", "a", "a=5", "=5MB/s", "a=0MB/s", "a=5MB/s:3", "a=5MB/s,,b=5MB/s", "a=-5MB/s"] {
            assert!(parse_rates(bad).is_err(), "{bad}");
        }
        let toml = "[[drive]]\nname = \"a\"\nrate = \"136MB/s\"\nfixed = \"200us\"\n";
        assert_eq!(parse_profile(toml).unwrap(), rates[..1]);
        assert!(parse_profile("[[drive]]\nname = \"a\"\nrate = \"1MB/s\"\nlatency = \"1us\"\n").is_err());
        assert!(parse_profile(" {\"version\": 9}").unwrap_err().contains("newer argodrive"), "a measured profile");
    }

    #[test]
    fn every_drive_needs_one_rate_and_no_other_may_have_one() {
        let drive = |id: u8, name: &str| TraceDrive {
            id: DriveId(id),
            name: name.into(),
            path: "/x".into(),
            emulated: false,
            device_number: 0,
        };
        let drives = [drive(0, "a"), drive(1, "b")];
        let homes = || Homes { masks: HashMap::new(), striped: false, from: HomesFrom::Trace };
        let refuse = |text: &str, says: &str| {
            let message = Bounds::new(&drives, &parse_rates(text).unwrap(), homes()).unwrap_err().to_string();
            assert!(message.contains(says), "{message}");
        };
        refuse("a=1MB/s", "`b` has none");
        refuse("a=1MB/s,b=1MB/s,c=1MB/s", "`c` is not in the trace (a, b)");
        refuse("a=1MB/s,b=1MB/s,b=2MB/s", "`b` has two");
        assert!(Bounds::new(&drives, &parse_rates("b=1MB/s,a=1MB/s").unwrap(), homes()).is_ok());
    }
}
