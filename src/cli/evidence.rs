//! The table of settings and guards that a run ends with: asked, seen, verdict.

use super::WIDTH;
use crate::bench::evidence::Verdict;
use crate::bench::guards::GuardVerdict;
use crate::bench::record::RunRecord;
use crate::report::table::{Align, Table};

/// The settings and guards of a run as text.
pub fn table(record: &RunRecord) -> String {
    let columns = [("setting", Align::Left), ("asked", Align::Left), ("seen", Align::Left), ("verdict", Align::Left)];
    let mut table = Table::new(columns);
    for e in &record.settings {
        let verdict = match e.verdict {
            Verdict::Proved => "proved",
            Verdict::Contradicted => "CONTRADICTED",
            Verdict::Unverified if e.under_test => "UNVERIFIED",
            Verdict::Unverified => "unverified",
        };
        let name = if e.under_test { format!("{} *", e.name) } else { e.name.clone() };
        table.row([name.as_str(), &e.asked, &e.seen, verdict]);
    }
    let mut guards = Table::new([("guard", Align::Left), ("seen", Align::Left), ("verdict", Align::Left)]);
    for g in &record.guards {
        let verdict = match g.verdict {
            GuardVerdict::Held => "held",
            GuardVerdict::Tripped => "TRIPPED",
            GuardVerdict::Unverified => "unverified",
        };
        guards.row([g.name.as_str(), &g.seen, verdict]);
    }
    format!("{}* under test: must be proved\n\n{}", table.render(WIDTH), guards.render(WIDTH))
}
