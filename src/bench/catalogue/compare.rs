//! Two records, or two folders of them, beside each other: settings and inputs that differ, rates as they are. Calls no winner:
//! what was measured apart drifted apart.

use super::walk::Catalogue;
use super::{Kind, Row, Verdict};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;

/// Something in which two rows differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What.
    pub name: String,
    /// On the first side.
    pub a: String,
    /// On the second.
    pub b: String,
}

/// Two rows that belong together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    /// Of the first side.
    pub a: Row,
    /// Of the second.
    pub b: Row,
    /// Settings in which they differ; places of files left out.
    pub settings: Vec<Difference>,
    /// Model, plan, drives, program, machine, pace.
    pub inputs: Vec<Difference>,
}

impl Pair {
    /// Rate of `b` over that of `a`.
    pub fn ratio(&self) -> Option<f64> {
        let rate = |r: &Row| r.tok_s.or(r.bytes_per_s).filter(|v| *v > 0.0);
        rate(&self.a).zip(rate(&self.b)).map(|(a, b)| b / a)
    }
}

/// Two sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SideBySide {
    /// Rows that are on both.
    pub pairs: Vec<Pair>,
    /// Titles of rows that only the first has.
    pub only_a: Vec<String>,
    /// Titles of rows that only the second has.
    pub only_b: Vec<String>,
    /// Why no side is called faster, and what would tell.
    pub no_winner: String,
    /// What makes even the plain numbers incomparable.
    pub warnings: Vec<String>,
}

/// Settings that only say where something lies; what lies there is an input.
const PLACES: [&str; 10] = [
    "store",
    "plan",
    "drives",
    "trace",
    "prompt",
    "prompt_file",
    "prompts",
    "under_test",
    "reader.prefetch_table",
    "reader.cache_heat",
];

/// The rows of a side: what is not inside of something else, or everything if there is only that; and what could not be read.
fn side(path: &Path) -> Result<(Vec<Row>, Vec<String>), String> {
    if !path.exists() {
        return Err(format!("{}: no such file or folder", path.display()));
    }
    let all = Catalogue::read(path);
    if let (Some(fault), true) = (all.faults.first(), all.rows.is_empty() || all.other_versions().next().is_some()) {
        return Err(fault.reason.clone());
    }
    let mut rows: Vec<Row> = all.rows.iter().filter(|r| !r.inside && r.kind != Kind::Trace).cloned().collect();
    if rows.is_empty() {
        rows = all.rows.iter().filter(|r| r.kind == Kind::Run).cloned().collect();
    }
    let damaged = all.faults.iter().map(|f| format!("left out: {}", f.reason)).collect();
    if rows.is_empty() { Err(format!("{}: holds no record", path.display())) } else { Ok((rows, damaged)) }
}

/// Lays `a` and `b` beside each other.
pub fn compare(a: &Path, b: &Path) -> Result<SideBySide, String> {
    let ((left, mut damaged), (right, more)) = (side(a)?, side(b)?);
    damaged.extend(more);
    let kinds = |rows: &[Row]| rows.iter().map(|r| r.kind).collect::<BTreeSet<_>>();
    if kinds(&left).is_disjoint(&kinds(&right)) {
        let names = |rows: &[Row]| kinds(rows).iter().map(|k| k.name()).collect::<Vec<_>>().join(", ");
        return Err(format!(
            "{} holds {}, {} holds {}: there is nothing to lay side by side",
            a.display(),
            names(&left),
            b.display(),
            names(&right)
        ));
    }
    let mut out = SideBySide {
        pairs: Vec::new(),
        only_a: Vec::new(),
        only_b: Vec::new(),
        no_winner: String::new(),
        warnings: Vec::new(),
    };
    let alone = left.len() == 1 && right.len() == 1;
    let mut used = BTreeSet::new();
    for row in &left {
        let fits = |(_, other): &(usize, &Row)| {
            alone || (row.kind, &row.name, &row.control) == (other.kind, &other.name, &other.control)
        };
        // of several with the same name the one of the same experiment, else the newest
        let free = right.iter().enumerate().filter(|(i, _)| !used.contains(i)).filter(fits);
        match free.max_by_key(|(_, other)| (other.experiment == row.experiment, other.when.clone())) {
            Some((index, other)) => {
                used.insert(index);
                out.pairs.push(pair(row, other));
            }
            None => out.only_a.push(row.title()),
        }
    }
    out.only_b = right.iter().enumerate().filter(|(i, _)| !used.contains(i)).map(|(_, r)| r.title()).collect();
    out.no_winner = no_winner(a, b, &out.pairs);
    out.warnings = warnings(&out.pairs);
    out.warnings.extend(damaged);
    Ok(out)
}

fn pair(a: &Row, b: &Row) -> Pair {
    let names: BTreeSet<&String> = a.settings.keys().chain(b.settings.keys()).collect();
    let value = |row: &Row, name: &String| row.settings.get(name).cloned().unwrap_or_else(|| "not known".into());
    let settings = names
        .into_iter()
        .filter(|n| !PLACES.contains(&n.as_str()))
        .map(|n| Difference { name: n.clone(), a: value(a, n), b: value(b, n) })
        .filter(|d| d.a != d.b)
        .collect();
    let of = |row: &Row| {
        [
            ("model", row.model.clone()),
            ("plan", row.plan.clone()),
            ("drives", row.drives.join("+")),
            ("pace", if row.emulated { "EMULATED" } else { "real" }.into()),
            ("tokens", row.tokens.clone()),
            ("code", row.machine.argodrive.clone()),
            ("kernel", row.machine.kernel.clone()),
            ("cpu", row.machine.cpu.clone()),
        ]
    };
    let known = |text: String| if text.is_empty() { "not known".into() } else { text };
    let inputs = of(a)
        .into_iter()
        .zip(of(b))
        .map(|((name, a), (_, b))| Difference { name: name.into(), a: known(a), b: known(b) })
        .filter(|d| d.a != d.b)
        .chain(digests(a, b))
        .collect();
    Pair { a: a.clone(), b: b.clone(), settings, inputs }
}

/// Files and drives of which both sides hold a digest, or one does. What has a line of its own is left to it.
fn digests(a: &Row, b: &Row) -> Vec<Difference> {
    const SHOWN: [&str; 4] = ["model", "plan", "argodrive", "settings"];
    let value = |row: &Row, name: &str| row.inputs.get(name).cloned().unwrap_or_else(|| "not known".into());
    let names: BTreeSet<&String> = a.inputs.keys().chain(b.inputs.keys()).collect();
    let all = names.into_iter().filter(|n| !SHOWN.contains(&n.as_str()));
    let line = |n: &String| Difference { name: format!("what {n} says"), a: value(a, n), b: value(b, n) };
    all.map(|n| if n == "build" { Difference { name: n.clone(), ..line(n) } } else { line(n) })
        .filter(|d| d.a != d.b)
        .collect()
}

fn no_winner(a: &Path, b: &Path, pairs: &[Pair]) -> String {
    let why = "no winner is called: the two sides were measured apart, not in pairs, and a machine drifts";
    match pairs {
        [pair] if pair.a.kind == Kind::Run && pair.a.path.is_file() && pair.b.path.is_file() => {
            format!("{why}; `argodrive ab {} {}` pairs them", pair.a.path.display(), pair.b.path.display())
        }
        _ if pairs.iter().any(|p| p.a.kind == Kind::Comparison) => {
            format!("{why}; each verdict stands against its own control, in {} and in {}", a.display(), b.display())
        }
        _ => format!("{why}; `argodrive ab` measures two configurations in pairs"),
    }
}

fn warnings(pairs: &[Pair]) -> Vec<String> {
    let mut out = Vec::new();
    let differ = |name: &str| {
        pairs.iter().any(|p| p.inputs.iter().any(|d| d.name == name && d.a != "not known" && d.b != "not known"))
    };
    if differ("pace") {
        out.push("one side is EMULATED and the other is not: their rates have nothing to do with each other".into());
    }
    if differ("tokens") {
        out.push("the sides generated different text: even the same machine would need another time for it".into());
    }
    if differ("model") {
        out.push("the models differ".into());
    }
    if differ("cpu") {
        out.push("the machines differ: only shapes can be compared, not rates".into());
    }
    let rejected = pairs.iter().flat_map(|p| [&p.a, &p.b]).filter(|r| r.verdict == Verdict::Rejected);
    out.extend(rejected.map(|r| format!("{} does not count: {}", r.title(), r.says)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_campaigns_show_settings_and_inputs_and_no_winner() {
        let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples");
        let both = compare(&samples.join("mirror"), &samples.join("split")).unwrap();
        assert_eq!(both.pairs.len(), 1, "one candidate on each side");
        let pair = &both.pairs[0];
        assert!(pair.settings.iter().any(|d| d.name == "reader.dispatch") || !pair.inputs.is_empty());
        assert!(both.no_winner.contains("no winner") && both.no_winner.contains("own control"));
        let e = compare(&samples.join("mirror"), &samples.join("demo-ladder")).unwrap_err();
        assert!(e.contains("comparison") && e.contains("rung"), "{e}");
        assert!(compare(&samples.join("nothing"), &samples).unwrap_err().contains("nothing"));
    }

    #[test]
    fn a_side_of_emulated_drives_is_said_to_be() {
        let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/samples/demo-ladder");
        let (rows, damaged) = side(&samples).unwrap();
        assert!(damaged.is_empty());
        let real = Row { emulated: false, tokens: "x".into(), ..rows[1].clone() };
        let pair = pair(&rows[1], &real);
        assert_eq!(pair.ratio(), Some(1.0));
        let said = warnings(&[pair]);
        assert!(said.iter().any(|w| w.contains("EMULATED")) && said.iter().any(|w| w.contains("different text")));
    }
}
