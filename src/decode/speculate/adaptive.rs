//! How many tokens to propose. The choice weighs what a wider pass costs (its experts and rows, and the drafter's own time)
//! against the passes that accepted proposals save, from decaying averages of what was measured. It decides how fast a text
//! grows, never which text. Pure: times come in as numbers.

use super::MAX_DEPTH;

/// Weight that what was known before keeps when a pass is timed: about ten passes count.
const TIME_DECAY: f64 = 0.9;
/// The same for whether a proposal was accepted: about thirty count.
const ACCEPTED_DECAY: f64 = 0.97;
/// Plain passes before the first proposal, to know what a pass takes.
const FIRST_PLAIN: u32 = 3;
/// Passes with proposals before a choice is made, the first time and later, and proposals in each of them. One shows what a row
/// costs and whether it is right; where one does not pay, more hardly ever do.
const FIRST_PROBE: u32 = 4;
const LATER_PROBE: u32 = 2;
const PROBE_DEPTH: usize = 1;
/// A trial ends early if after so many passes all depths promise less than this share of what plain passes give.
const LEAST_PROBE: u32 = 2;
const HOPELESS: f64 = 0.9;
/// Plain passes after proposals proved not to be worth it: at first, and at most; they double each time, and what trying has cost
/// makes them more.
const FIRST_REST: u32 = 16;
const LONGEST_REST: u32 = 512;
/// Share of the time that trying may cost.
const TRYING: f64 = 0.01;
/// While proposals are worth it, one pass of so many is plain, to know what one takes now.
const PASSES_PER_PLAIN: u32 = 64;
/// Proposals must promise this much more than plain passes; below it is noise.
const LEAST_GAIN: f64 = 1.02;
/// After a rest, what was known of proposals counts as so many passes, so that a probe can change it.
const REMEMBERED: f64 = 2.0;
/// What is believed of a proposal before any was judged.
const UNKNOWN_ACCEPTANCE: f64 = 0.5;

/// Who chooses the depth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DepthPolicy {
    /// Always as many as are allowed.
    #[default]
    Fixed,
    /// As many as pay.
    Adaptive,
}

impl DepthPolicy {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Adaptive => "adaptive",
        }
    }
}

/// What one pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassSeen {
    /// Proposals that it checked.
    pub proposed: usize,
    /// How many of them, from the first on, were accepted.
    pub accepted: usize,
    /// Time of the pass, what restores the state included.
    pub pass_ns: u64,
    /// Time in which the proposals were made.
    pub draft_ns: u64,
}

/// An average in which old values count less.
#[derive(Clone, Copy, Debug, Default)]
struct Decayed {
    mean: f64,
    weight: f64,
}

impl Decayed {
    fn add(&mut self, x: f64, decay: f64) {
        self.weight = self.weight * decay + 1.0;
        self.mean += (x - self.mean) / self.weight;
    }

    fn fade(&mut self) {
        self.weight = self.weight.min(REMEMBERED);
    }
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// So many more plain passes, then proposals are tried.
    Plain { left: u32 },
    /// Proposals are tried in so many more passes.
    Probe { left: u32, first: bool },
    /// The best depth, and how many passes since a plain one.
    Best { since_plain: u32 },
}

/// Chooses depths by measured times and acceptance.
#[derive(Clone, Debug)]
pub struct Adaptive {
    most: usize,
    mode: Mode,
    rest: u32,
    /// What passes with proposals have cost more than plain ones would have for the same tokens, since the last rest, in plain
    /// passes; less than nothing where they paid.
    cost: f64,
    /// By proposals in a pass: its time.
    pass_ns: [Decayed; MAX_DEPTH + 1],
    /// How much longer a pass takes for each proposal: sums of a line through the plain pass.
    xy: f64,
    xx: f64,
    /// By position: whether a proposal was accepted that was judged at all.
    accepted: [Decayed; MAX_DEPTH],
    /// Time for each proposal made.
    draft_ns: Decayed,
}

impl Adaptive {
    /// At most `most` proposals in a pass.
    pub fn new(most: usize) -> Self {
        Self {
            most: most.min(MAX_DEPTH),
            mode: Mode::Plain { left: FIRST_PLAIN },
            rest: FIRST_REST,
            cost: 0.0,
            pass_ns: [Decayed::default(); MAX_DEPTH + 1],
            xy: 0.0,
            xx: 0.0,
            accepted: [Decayed::default(); MAX_DEPTH],
            draft_ns: Decayed::default(),
        }
    }

    /// Proposals for the next pass.
    pub fn depth(&self) -> usize {
        match self.mode {
            Mode::Plain { .. } => 0,
            Mode::Probe { .. } => self.most.min(PROBE_DEPTH),
            Mode::Best { since_plain } if since_plain >= PASSES_PER_PLAIN => 0,
            Mode::Best { .. } => self.best(),
        }
    }

    /// The pass is over. One without proposals although some were asked for (a drafter may have none) costs nothing and
    /// only tells what a plain pass takes.
    pub fn saw(&mut self, pass: PassSeen) {
        let proposed = pass.proposed.min(MAX_DEPTH);
        let took = pass.pass_ns as f64;
        self.pass_ns[proposed].add(took, TIME_DECAY);
        // What a drafter has to catch up with after a rest is not the price of a proposal.
        let catches_up = matches!(self.mode, Mode::Probe { first: true, .. });
        if proposed > 0 {
            let more = took - self.pass_ns[0].mean;
            if self.pass_ns[0].weight > 0.0 {
                self.cost += (took + pass.draft_ns as f64) / self.time_of(0) - (pass.accepted + 1) as f64;
                self.xy = self.xy * TIME_DECAY + more * proposed as f64;
                self.xx = self.xx * TIME_DECAY + (proposed * proposed) as f64;
            }
            if !catches_up {
                self.draft_ns.add(pass.draft_ns as f64 / proposed as f64, TIME_DECAY);
            }
            // behind the first wrong proposal none is judged
            for (position, seen) in self.accepted.iter_mut().enumerate().take(proposed) {
                if position <= pass.accepted {
                    seen.add(f64::from(position < pass.accepted), ACCEPTED_DECAY);
                }
            }
        }
        self.mode = match self.mode {
            Mode::Plain { left } if left > 1 => Mode::Plain { left: left - 1 },
            Mode::Plain { .. } => self.probe(),
            Mode::Probe { left, first } if proposed == 0 => Mode::Probe { left, first },
            Mode::Probe { left, .. } if left > 1 && !self.is_hopeless(left) => {
                Mode::Probe { left: left - 1, first: false }
            }
            Mode::Probe { .. } => Mode::Best { since_plain: 0 },
            Mode::Best { .. } if proposed == 0 => Mode::Best { since_plain: 0 },
            Mode::Best { since_plain } => Mode::Best { since_plain: since_plain + 1 },
        };
        if matches!(self.mode, Mode::Best { .. }) {
            if self.best() > 0 {
                self.rest = FIRST_REST;
            } else {
                let pays_back = (std::mem::take(&mut self.cost) / TRYING) as u32;
                self.mode = Mode::Plain { left: self.rest.max(pays_back).min(LONGEST_REST) };
                self.rest = (2 * self.rest).min(LONGEST_REST);
            }
        }
    }

    /// Proposals are to be tried: what was known of them before fades.
    fn probe(&mut self) -> Mode {
        let known = self.accepted[0].weight > 0.0;
        self.accepted.iter_mut().chain(&mut self.pass_ns[1..]).for_each(Decayed::fade);
        let fades = if self.xx > REMEMBERED { REMEMBERED / self.xx } else { 1.0 };
        (self.xy, self.xx) = (self.xy * fades, self.xx * fades);
        Mode::Probe { left: if known { LATER_PROBE } else { FIRST_PROBE }, first: true }
    }

    /// Whether a trial need not go on that had `left` passes left before the last one.
    fn is_hopeless(&self, left: u32) -> bool {
        // a later trial builds on what is remembered of those before it
        FIRST_PROBE.saturating_sub(left) + 1 >= LEAST_PROBE && self.best_above(HOPELESS) == 0
    }

    /// The depth that promises most tokens per second; 0 where none is clearly better than plain passes.
    fn best(&self) -> usize {
        self.best_above(LEAST_GAIN)
    }

    /// The depth that promises most tokens per second, if that is more than `least` times what plain passes give; else 0.
    fn best_above(&self, least: f64) -> usize {
        let plain = 1.0 / self.time_of(0);
        let (mut best, mut best_rate) = (0, plain * least);
        let (mut tokens, mut reached, mut believed) = (1.0, 1.0, UNKNOWN_ACCEPTANCE);
        for depth in 1..=self.most {
            let seen = self.accepted[depth - 1];
            // a position that was hardly judged is believed to be like the one before it
            believed = (seen.mean * seen.weight + believed) / (seen.weight + 1.0);
            reached *= believed;
            tokens += reached;
            let rate = tokens / (self.time_of(depth) + self.draft_ns.mean * depth as f64);
            if rate > best_rate {
                (best, best_rate) = (depth, rate);
            }
        }
        best
    }

    /// Time of a pass with so many proposals: what was measured, leaning on the line through all widths where little was.
    fn time_of(&self, proposed: usize) -> f64 {
        let seen = self.pass_ns[proposed];
        let slope = if self.xx > 0.0 { (self.xy / self.xx).max(0.0) } else { 0.0 };
        let line = self.pass_ns[0].mean + slope * proposed as f64;
        let time = if proposed == 0 { seen.mean } else { (seen.mean * seen.weight + line) / (seen.weight + 1.0) };
        time.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::SplitMix64;

    /// A machine on which passes and proposals take fixed times and proposals are accepted with fixed probability.
    struct World {
        plain_ns: f64,
        row_ns: f64,
        draft_ns: f64,
        accepted: f64,
    }

    /// Runs `passes`; tokens, time, and how often each depth was used.
    fn run(policy: &mut Adaptive, world: &World, passes: usize, rng: &mut SplitMix64) -> (f64, f64, [usize; 17]) {
        let (mut tokens, mut ns, mut depths) = (0.0, 0.0, [0; 17]);
        for _ in 0..passes {
            let depth = policy.depth();
            depths[depth] += 1;
            let lucky = |rng: &mut SplitMix64| ((rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64) < world.accepted;
            let accepted = (0..depth).take_while(|_| lucky(rng)).count();
            let noise = 0.95 + 0.1 * ((rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64);
            let pass_ns = (world.plain_ns + world.row_ns * depth as f64) * noise;
            let draft_ns = world.draft_ns * depth as f64;
            policy.saw(PassSeen { proposed: depth, accepted, pass_ns: pass_ns as u64, draft_ns: draft_ns as u64 });
            tokens += 1.0 + accepted as f64;
            ns += pass_ns + draft_ns;
        }
        (tokens, ns, depths)
    }

    /// Tokens per second at a fixed depth, in expectation.
    fn rate_at(world: &World, depth: usize) -> f64 {
        let tokens: f64 = (0..=depth).map(|i| world.accepted.powi(i as i32)).sum();
        tokens / (world.plain_ns + (world.row_ns + world.draft_ns) * depth as f64)
    }

    #[test]
    fn it_comes_close_to_the_best_depth_whatever_that_is() {
        for (row_ns, draft_ns, accepted) in [
            (0.1e6, 0.0, 0.9),    // nearly free rows: deep
            (0.3e6, 0.02e6, 0.7), // dear rows: one or two
            (0.6e6, 0.0, 0.6),    // break-even: none
            (1.0e6, 0.0, 0.5),    // rows cost a pass each: none
            (0.05e6, 0.9e6, 0.8), // a slow drafter: none
            (0.1e6, 0.05e6, 0.1), // a bad one: none
        ] {
            let world = World { plain_ns: 1e6, row_ns, draft_ns, accepted };
            let mut policy = Adaptive::new(8);
            let (tokens, ns, depths) = run(&mut policy, &world, 4000, &mut SplitMix64::new(3));
            let best = (0..=8).map(|d| rate_at(&world, d)).fold(0.0, f64::max);
            let share = tokens / ns / best;
            assert!(
                share > 0.93,
                "rows {row_ns}, draft {draft_ns}, accepted {accepted}: {share} of the best; {depths:?}"
            );
        }
    }

    #[test]
    fn not_worth_it_costs_less_and_less_and_is_tried_again() {
        let world = World { plain_ns: 1e6, row_ns: 1e6, draft_ns: 0.1e6, accepted: 0.2 };
        let mut policy = Adaptive::new(4);
        let mut rng = SplitMix64::new(1);
        let (_, _, depths) = run(&mut policy, &world, 3000, &mut rng);
        let with: usize = depths[1..].iter().sum();
        assert!((2..=40).contains(&with), "{depths:?}");
        // the text becomes predictable and rows cheap: found out at the next probe
        let better = World { row_ns: 0.1e6, accepted: 0.95, ..world };
        let (_, _, depths) = run(&mut policy, &better, 2000, &mut rng);
        assert!(depths[4] > 1000, "{depths:?}");
        let (_, _, depths) = run(&mut policy, &world, 1000, &mut rng);
        assert!(depths[0] > 800, "and given up again: {depths:?}");
    }

    #[test]
    fn trying_costs_a_hundredth_where_it_does_not_pay() {
        for (row_ns, accepted) in [(0.8e6, 0.6), (1.0e6, 0.3), (0.5e6, 0.1)] {
            let world = World { plain_ns: 1e6, row_ns, draft_ns: 0.02e6, accepted };
            for passes in [128, 1000] {
                let (tokens, ns): (Vec<f64>, Vec<f64>) = (0..50)
                    .map(|seed| run(&mut Adaptive::new(4), &world, passes, &mut SplitMix64::new(seed)))
                    .map(|(tokens, ns, _)| (tokens, ns))
                    .unzip();
                let share = tokens.iter().sum::<f64>() * world.plain_ns / ns.iter().sum::<f64>();
                assert!(share > 0.985, "rows {row_ns}, accepted {accepted}, {passes} passes: {share} of plain passes");
            }
        }
    }

    #[test]
    fn a_drafter_without_proposals_is_asked_on_and_the_plain_pass_is_timed_again() {
        let mut policy = Adaptive::new(4);
        for _ in 0..100 {
            policy.saw(PassSeen { pass_ns: 1_000_000, ..PassSeen::default() });
        }
        assert_eq!(policy.depth(), PROBE_DEPTH, "asking costs nothing");
        let world = World { plain_ns: 1e6, row_ns: 0.0, draft_ns: 0.0, accepted: 1.0 };
        let (_, _, depths) = run(&mut policy, &world, 600, &mut SplitMix64::new(1));
        assert!((5..=15).contains(&depths[0]), "{depths:?}");
        assert!(depths[4] > 500, "{depths:?}");
    }
}
