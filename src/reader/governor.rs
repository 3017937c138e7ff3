//! Turning prefetch down where it costs more than it brings. Pure: counters go in, a number of guesses comes out, the same
//! for the same counters.
//!
//! A guess is free while a drive has nothing else to do. On a drive that demand keeps busy it delays the next barrier, and
//! pays only if it is right. So after every [`WINDOW`] barriers: if demand had to queue behind prefetch, and more bytes were
//! late or for nothing than useful, half as many guesses are let through, down to none; otherwise twice as many. When none
//! is let through nothing is learnt either, so after a pause one guess per layer is let through again; pauses grow while
//! such probes fail.

/// Barriers between two decisions.
pub const WINDOW: u32 = 16;
/// Windows without any guess before the first probe, and at most.
const FIRST_PAUSE: u32 = 4;
const LONGEST_PAUSE: u32 = 64;

/// Decides how many guesses for a layer are let through.
#[derive(Clone, Debug)]
pub struct Governor {
    on: bool,
    barriers: u32,
    useful_bytes: u64,
    lost_bytes: u64,
    behind: u64,
    /// Guesses let through per layer; `None` = all.
    allowed: Option<u32>,
    /// Most guesses that came for one layer.
    most: u32,
    /// Windows until the next probe, and the pause after a probe that fails.
    pause: u32,
    next_pause: u32,
    cuts: u64,
    probes: u64,
}

impl Governor {
    /// Lets everything through until it has seen reasons not to; for ever if it is off.
    pub fn new(on: bool) -> Self {
        Self {
            on,
            barriers: 0,
            useful_bytes: 0,
            lost_bytes: 0,
            behind: 0,
            allowed: None,
            most: 0,
            pause: 0,
            next_pause: FIRST_PAUSE,
            cuts: 0,
            probes: 0,
        }
    }

    /// How many of `guesses` for one layer are let through.
    pub fn let_through(&mut self, guesses: u32) -> u32 {
        self.most = self.most.max(guesses);
        self.allowed.map_or(guesses, |allowed| allowed.min(guesses))
    }

    /// A prefetch was there in time.
    pub fn useful(&mut self, bytes: u64) {
        self.useful_bytes += bytes;
    }

    /// A prefetch came late, or for nothing.
    pub fn lost(&mut self, bytes: u64) {
        self.lost_bytes += bytes;
    }

    /// A demand read was put behind prefetch on its drive.
    pub fn behind(&mut self) {
        self.behind += 1;
    }

    /// Times that it lowered the number of guesses.
    pub fn cuts(&self) -> u64 {
        self.cuts
    }

    /// Times that it tried again after letting nothing through.
    pub fn probes(&self) -> u64 {
        self.probes
    }

    /// A barrier has closed. Every [`WINDOW`] of them something is decided.
    pub fn barrier_closed(&mut self) {
        self.barriers += 1;
        if !self.on || self.barriers < WINDOW {
            return;
        }
        let (useful, lost, behind) = (self.useful_bytes, self.lost_bytes, self.behind);
        (self.barriers, self.useful_bytes, self.lost_bytes, self.behind) = (0, 0, 0, 0);
        if self.allowed == Some(0) {
            self.pause = self.pause.saturating_sub(1);
            if self.pause == 0 {
                self.allowed = Some(1);
                self.probes += 1;
            }
        } else if useful + lost == 0 {
            // Nothing to judge by.
        } else if behind > 0 && useful < lost {
            let now = self.allowed.unwrap_or(self.most).min(self.most) / 2;
            self.allowed = Some(now);
            self.cuts += 1;
            if now == 0 {
                self.pause = self.next_pause;
                self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
            }
        } else {
            self.next_pause = FIRST_PAUSE;
            self.allowed = self.allowed.map(|allowed| allowed * 2).filter(|&more| more < self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One window in which `guesses` were asked for a layer; returns how many were let through.
    fn window(g: &mut Governor, useful: u64, lost: u64, behind: u64) -> u32 {
        let through = g.let_through(8);
        g.useful(useful);
        g.lost(lost);
        (0..behind).for_each(|_| g.behind());
        (0..WINDOW).for_each(|_| g.barrier_closed());
        through
    }

    #[test]
    fn useless_guesses_on_busy_drives_are_halved_down_to_none_and_probed_with_growing_pauses() {
        let mut g = Governor::new(true);
        let seen: Vec<u32> = (0..18).map(|_| window(&mut g, 10, 90, 3)).collect();
        // All 8, then 4, 2, 1, none for 4 windows, one again, none for 8, one again.
        assert_eq!(seen, [8, 4, 2, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((g.cuts(), g.probes()), (6, 2));
    }

    #[test]
    fn guesses_that_pay_or_cost_nothing_come_back() {
        let mut g = Governor::new(true);
        assert_eq!(window(&mut g, 10, 90, 3), 8);
        assert_eq!(window(&mut g, 10, 90, 3), 4);
        assert_eq!(window(&mut g, 90, 10, 3), 2, "useful: doubled");
        assert_eq!(window(&mut g, 10, 90, 0), 4, "nobody waited behind them: doubled");
        assert_eq!(window(&mut g, 0, 0, 0), 8, "and all are let through again");
        assert_eq!(g.cuts(), 2);
    }

    #[test]
    fn off_lets_everything_through() {
        let mut g = Governor::new(false);
        assert!((0..20).all(|_| window(&mut g, 0, 90, 9) == 8));
        assert_eq!((g.cuts(), g.probes()), (0, 0));
    }
}
