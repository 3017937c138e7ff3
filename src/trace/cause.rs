//! Why the last read of a barrier was last: one set of rules, for the reader while it runs and for a report afterwards.
//! Pure; knows neither where the facts come from nor who asks.

use super::events::Cause;

/// Two drives that ended within this share of the barrier's whole wait (1/50 = 2 %) ended together.
pub const TIE_DIVISOR: u64 = 50;

/// What is known of the read that a barrier waited for last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastFacts {
    /// From open to its end.
    pub wait_ns: u64,
    /// How long after the next-to-last drive its drive ended; `None` = no other drive delivered.
    pub gap_drive_ns: Option<u64>,
    /// It was a hedge, and the read that it was to help was given up or came for nothing.
    pub hedged: bool,
    /// Its expert had been resident, and was evicted.
    pub evicted: bool,
    /// It was a guess.
    pub prefetch: bool,
    /// How long after open the reader decided on it.
    pub queued_after_ns: u64,
    /// Bytes that its drive delivered to the barrier.
    pub own_bytes: u64,
    /// Most bytes that any other drive delivered to it; `None` = no other did.
    pub most_of_others: Option<u64>,
}

/// The first rule that holds:
/// 1. two or more drives delivered, and the last two ended within 2 % of the wait of each other: `tie`;
/// 2. the read was a hedge, and the one that it was to help was given up or came for nothing: `hedged`;
/// 3. the expert had been there and was given up: `evicted`;
/// 4. the read was a prefetch: `prefetch_late`;
/// 5. it was queued in the second half of the wait, because it waited for a slot or for another copy to fail:
///    `queued_late`;
/// 6. its drive delivered more bytes than any other, or alone: `big_share`;
/// 7. otherwise the drive was slower than drives that had as much to do: `device_slow`.
pub fn cause(last: &LastFacts) -> Cause {
    if last.gap_drive_ns.is_some_and(|gap| gap <= last.wait_ns / TIE_DIVISOR) {
        Cause::Tie
    } else if last.hedged {
        Cause::Hedged
    } else if last.evicted {
        Cause::Evicted
    } else if last.prefetch {
        Cause::PrefetchLate
    } else if last.queued_after_ns > last.wait_ns / 2 {
        Cause::QueuedLate
    } else if last.most_of_others.is_none_or(|most| last.own_bytes > most) {
        Cause::BigShare
    } else {
        Cause::DeviceSlow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_rules_win() {
        let mut facts = LastFacts { wait_ns: 1000, own_bytes: 5, most_of_others: Some(5), ..LastFacts::default() };
        assert_eq!(cause(&facts), Cause::DeviceSlow);
        facts.own_bytes = 6;
        assert_eq!(cause(&facts), Cause::BigShare);
        facts.queued_after_ns = 500;
        assert_eq!(cause(&facts), Cause::BigShare, "in the first half of the wait");
        facts.queued_after_ns = 501;
        assert_eq!(cause(&facts), Cause::QueuedLate);
        facts.prefetch = true;
        assert_eq!(cause(&facts), Cause::PrefetchLate);
        facts.evicted = true;
        assert_eq!(cause(&facts), Cause::Evicted);
        facts.hedged = true;
        assert_eq!(cause(&facts), Cause::Hedged);
        facts.gap_drive_ns = Some(21);
        assert_eq!(cause(&facts), Cause::Hedged);
        facts.gap_drive_ns = Some(20);
        assert_eq!(cause(&facts), Cause::Tie);
    }
}
