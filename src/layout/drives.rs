//! What a planner knows of drives: rate, fixed cost, room, and which of them share an uplink. Plain numbers that a
//! profile, a policy or a drives file was turned into; this file opens none of them and knows no experts.

use super::plan::{MAX_DRIVES, PlanError};
use super::policy::PolicyFile;
use super::simple::unknown_drive;

/// One drive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveModel {
    /// Bytes per second while the other drives work too.
    pub rate_bytes_per_s: f64,
    /// Cost before the first byte of a barrier's share, nanoseconds.
    pub fixed_ns: u64,
    /// Bytes of experts that it may hold; `None` = as many as there are.
    pub capacity_bytes: Option<u64>,
    /// The uplink that it shares, an index into [`DriveSet::uplinks`].
    pub uplink: Option<usize>,
}

impl DriveModel {
    /// A drive of `rate_bytes_per_s` without fixed cost, limit or shared uplink.
    pub fn plain(rate_bytes_per_s: f64) -> Self {
        Self { rate_bytes_per_s, fixed_ns: 0, capacity_bytes: None, uplink: None }
    }

    /// Nanoseconds that the drive needs for `bytes` alone.
    pub fn alone_ns(&self, bytes: u64) -> f64 {
        self.fixed_ns as f64 + bytes as f64 / self.rate_bytes_per_s * 1e9
    }
}

/// What was measured or stated of one drive.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriveFacts {
    /// Bytes per second while the other drives work too.
    pub rate_bytes_per_s: Option<f64>,
    /// Cost before the first byte of a barrier's share, nanoseconds.
    pub fixed_ns: Option<u64>,
    /// Bytes of experts that it may hold.
    pub capacity_bytes: Option<u64>,
}

/// Drives that were measured together.
#[derive(Clone, Debug, PartialEq)]
pub struct JointRate {
    /// Their names.
    pub members: Vec<String>,
    /// Bytes per second.
    pub rate_bytes_per_s: f64,
}

/// The drives of a plan, in its order, with what they share.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveSet {
    /// The drives.
    pub drives: Vec<DriveModel>,
    /// Joint bytes per second of each shared uplink.
    pub uplinks: Vec<f64>,
    /// Bytes per second that all drives together can deliver, where that is less than their sum.
    pub together_bytes_per_s: Option<f64>,
    /// Whether the rates were stated or measured; otherwise every drive was taken to be equal.
    pub known: bool,
}

impl DriveSet {
    /// Drives about which nothing is known: equal ones.
    pub fn equal(count: usize) -> Self {
        Self {
            drives: vec![DriveModel::plain(1e9); count],
            uplinks: Vec::new(),
            together_bytes_per_s: None,
            known: false,
        }
    }

    /// Plain drives of these rates.
    pub fn of_rates(rates: &[f64]) -> Self {
        Self {
            drives: rates.iter().map(|&r| DriveModel::plain(r)).collect(),
            uplinks: Vec::new(),
            together_bytes_per_s: None,
            known: true,
        }
    }

    /// Drives called `names` of which `facts` are known (in that order), with shared uplinks and the rate of all together.
    /// What the policy says of a drive goes before what was measured. Uplinks of fewer than two of the drives are left out.
    pub fn assemble(
        names: &[&str],
        facts: &[DriveFacts],
        joints: &[JointRate],
        together_bytes_per_s: Option<f64>,
        policy: &PolicyFile,
    ) -> Result<Self, PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(reason));
        let index = |name: &String| names.iter().position(|n| n == name);
        let mut facts = facts.to_vec();
        facts.resize(names.len(), DriveFacts::default());
        for (at, limit) in policy.drives.iter().enumerate() {
            let Some(d) = index(&limit.name) else { return Err(unknown_drive(&limit.name, names.iter().copied())) };
            if policy.drives[..at].iter().any(|l| l.name == limit.name) {
                return bad(format!("the policy describes drive `{}` twice", limit.name));
            }
            let own = &mut facts[d];
            own.rate_bytes_per_s = limit.rate_bytes_per_s.map(|r| r as f64).or(own.rate_bytes_per_s);
            own.fixed_ns = limit.fixed_ns.or(own.fixed_ns);
            own.capacity_bytes = limit.capacity_bytes.or(own.capacity_bytes);
        }
        let unknown: Vec<&str> =
            names.iter().zip(&facts).filter(|(_, f)| f.rate_bytes_per_s.is_none()).map(|(n, _)| *n).collect();
        if !unknown.is_empty() && unknown.len() < names.len() {
            return bad(format!(
                "rates are known of some drives but not of {}; measure all of them together with `argodrive ceiling` and \
                 give --profile, or give each a `rate` in the policy's [[drive]] tables",
                unknown.join(", ")
            ));
        }
        let known = unknown.is_empty();
        let mut set =
            Self { known, together_bytes_per_s: together_bytes_per_s.filter(|_| known), ..Self::equal(names.len()) };
        for (drive, facts) in set.drives.iter_mut().zip(&facts) {
            drive.rate_bytes_per_s = facts.rate_bytes_per_s.unwrap_or(drive.rate_bytes_per_s);
            drive.fixed_ns = facts.fixed_ns.unwrap_or(0);
            drive.capacity_bytes = facts.capacity_bytes;
        }
        for limit in &policy.uplinks {
            if let Some(name) = limit.members.iter().find(|m| index(m).is_none()) {
                return Err(unknown_drive(name, names.iter().copied()));
            }
        }
        let stated = policy.uplinks.iter().map(|u| (&u.members, u.rate_bytes_per_s as f64));
        let measured = joints.iter().map(|j| (&j.members, j.rate_bytes_per_s));
        for (members, rate) in stated.chain(measured.filter(|_| policy.uplinks.is_empty() && known)) {
            let own: Vec<usize> = members.iter().filter_map(index).collect();
            if own.len() < 2 {
                continue;
            }
            for &d in &own {
                if set.drives[d].uplink.replace(set.uplinks.len()).is_some() {
                    return bad(format!("drive `{}` is in two shared uplinks; name it in one", names[d]));
                }
            }
            set.uplinks.push(rate);
        }
        set.check(names)?;
        Ok(set)
    }

    /// Experts of `expert_bytes` that drive `drive` may hold.
    pub fn slots(&self, drive: usize, expert_bytes: u64) -> usize {
        let capacity = self.drives[drive].capacity_bytes;
        capacity.map_or(usize::MAX, |c| usize::try_from(c / expert_bytes.max(1)).unwrap_or(usize::MAX))
    }

    /// The set without one drive.
    pub fn without(&self, drive: usize) -> Self {
        let mut rest = self.clone();
        rest.drives.remove(drive);
        rest
    }

    /// Rates are numbers above zero, uplinks exist. `names` are those of the plan, for messages.
    pub fn check(&self, names: &[&str]) -> Result<(), PlanError> {
        let bad = |reason: String| Err(PlanError::Inconsistent(reason));
        if self.drives.is_empty() || self.drives.len() > MAX_DRIVES {
            return bad(format!("{} drives; a plan needs 1 to {MAX_DRIVES}", self.drives.len()));
        }
        if self.drives.len() != names.len() {
            return bad(format!("rates are given for {} drives, the plan has {}", self.drives.len(), names.len()));
        }
        let fine = |rate: f64| rate.is_finite() && rate > 0.0;
        for (drive, name) in self.drives.iter().zip(names) {
            if !fine(drive.rate_bytes_per_s) {
                return bad(format!(
                    "drive `{name}`: its rate is {} bytes/s; give a finite rate above 0 (measure it with `argodrive \
                     ceiling`)",
                    drive.rate_bytes_per_s
                ));
            }
            if drive.uplink.is_some_and(|u| u >= self.uplinks.len()) {
                return bad(format!("drive `{name}` names a shared uplink that is not listed"));
            }
        }
        for (index, &rate) in self.uplinks.iter().enumerate() {
            if !fine(rate) {
                return bad(format!(
                    "shared uplink {index}: its joint rate is {rate} bytes/s; give a finite rate above 0"
                ));
            }
        }
        match self.together_bytes_per_s {
            Some(rate) if !fine(rate) => {
                bad(format!("the rate of all drives together is {rate} bytes/s; give a finite rate above 0"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_that_are_no_rates_are_named() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let message = DriveSet::of_rates(&[1e9, rate]).check(&["a", "b"]).unwrap_err().to_string();
            assert!(message.contains("`b`") && message.contains("ceiling"), "{message}");
            let mut set = DriveSet::of_rates(&[1e9]);
            set.together_bytes_per_s = Some(rate);
            assert!(set.check(&["a"]).unwrap_err().to_string().contains("together"));
            set.together_bytes_per_s = None;
            set.uplinks = vec![rate];
            assert!(set.check(&["a"]).unwrap_err().to_string().contains("uplink 0"));
        }
        let mut set = DriveSet::of_rates(&[1e9]);
        set.drives[0].uplink = Some(0);
        assert!(set.check(&["a"]).unwrap_err().to_string().contains("not listed"));
        assert!(DriveSet::equal(0).check(&[]).is_err());
        assert!(DriveSet::equal(2).check(&["a"]).is_err());
    }

    #[test]
    fn facts_policy_and_groups_come_together() {
        let rate = |r: f64| DriveFacts { rate_bytes_per_s: Some(r), ..DriveFacts::default() };
        let text = "policy = \"round-robin\"\n[[drive]]\nname = \"b\"\nrate = \"2GB/s\"\ncapacity = \"5GB\"\n";
        let policy = PolicyFile::parse(text).unwrap();
        let joint = |members: &[&str]| JointRate {
            members: members.iter().map(|m| m.to_string()).collect(),
            rate_bytes_per_s: 1.5e9,
        };
        let names = ["a", "b"];
        let facts = [rate(1e9), rate(9e9)];
        let set = DriveSet::assemble(&names, &facts, &[joint(&["a", "b", "c"])], Some(2.5e9), &policy).unwrap();
        assert_eq!((set.drives[1].rate_bytes_per_s, set.drives[1].capacity_bytes), (2e9, Some(5_000_000_000)));
        assert_eq!((set.drives[0].uplink, set.uplinks.clone(), set.known), (Some(0), vec![1.5e9], true));
        let says = |names: &[&str], facts: &[DriveFacts], joints: &[JointRate], policy: &PolicyFile| {
            DriveSet::assemble(names, facts, joints, None, policy).unwrap_err().to_string()
        };
        assert!(says(&["a", "x"], &facts, &[], &policy).contains("the drives are a, x"));
        let plain = PolicyFile::parse("policy = \"round-robin\"").unwrap();
        assert!(says(&names, &[rate(1e9)], &[], &plain).contains("not of b"));
        assert!(says(&names, &facts, &[joint(&["a", "b"]), joint(&["b", "a"])], &plain).contains("two shared"));
        let uplink = PolicyFile::parse("policy = \"lpt\"\n[[uplink]]\nmembers = [\"a\", \"z\"]\nrate = \"1GB/s\"\n");
        assert!(says(&names, &facts, &[], &uplink.unwrap()).contains("`z`"));
        assert!(!DriveSet::assemble(&names, &[], &[], None, &plain).unwrap().known);
    }

    #[test]
    fn room_is_counted_in_whole_experts() {
        let mut set = DriveSet::equal(2);
        set.drives[0].capacity_bytes = Some(999);
        assert_eq!((set.slots(0, 100), set.slots(1, 100)), (9, usize::MAX));
        assert_eq!(set.without(0).drives.len(), 1);
    }
}
