//! Numbers for people: bytes, rates, durations and shares with three significant digits and SI units. Pure.
//!
//! Decimal units throughout (1 kB = 1000 bytes), as drives are sold and as every other page of this crate counts.

/// Three significant digits, but all digits of the whole part up to a million: 1.23, 12.3, 123, 1234, 1.23e6.
fn three_digits(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude < 9.995 {
        format!("{value:.2}")
    } else if magnitude < 99.95 {
        format!("{value:.1}")
    } else if magnitude < 999_999.5 {
        format!("{value:.0}")
    } else {
        format!("{value:.2e}")
    }
}

/// Scales `value` by 1000 until it reads below 1000, and appends the unit.
fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or("");
    for next in units {
        // 999.5 would print as 1000.
        if value.abs() < 999.5 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    format!("{} {unit}", three_digits(value))
}

/// `26.1 kB`, `17.5 MB`, `512 B`.
pub fn bytes(count: u64) -> String {
    if count < 1000 {
        return format!("{count} B");
    }
    scaled(count as f64, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// `50.0 MB/s`; anything that is not a number prints as `–`.
pub fn rate(bytes_per_s: f64) -> String {
    if !bytes_per_s.is_finite() {
        return "–".to_owned();
    }
    scaled(bytes_per_s, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])
}

/// `950 ns`, `1.23 ms`, `12.3 s`, `4 min 05 s`, `2 h 03 min`.
pub fn duration(ns: u64) -> String {
    const SECOND_NS: u64 = 1_000_000_000;
    // The same place where three digits would print 100 s or more.
    if ns >= 120 * SECOND_NS {
        let seconds = ns / SECOND_NS + u64::from(ns % SECOND_NS >= SECOND_NS / 2);
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        return if hours > 0 {
            format!("{hours} h {minutes:02} min")
        } else {
            format!("{minutes} min {:02} s", seconds % 60)
        };
    }
    if ns < 1000 {
        return format!("{ns} ns");
    }
    scaled(ns as f64, &["ns", "µs", "ms", "s"])
}

/// A share of 0 to 1 as `66.3 %`; anything that is not a number prints as `–`.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1} %", share * 100.0) } else { "–".to_owned() }
}

/// A share of 0 to 1 in whole per cent. What is neither nothing nor all never prints as 0 % or 100 %.
pub fn percent_short(share: f64) -> String {
    match share {
        s if !s.is_finite() => "–".to_owned(),
        s if s > 0.0 && s < 0.005 => "<1 %".to_owned(),
        s if (0.995..1.0).contains(&s) => ">99 %".to_owned(),
        s => format!("{:.0} %", s * 100.0),
    }
}

/// Tokens per second: `29.7`, `0.96`, `123`.
pub fn tokens_per_s(value: f64) -> String {
    if value.is_finite() { three_digits(value) } else { "–".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_documented() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(26_112), "26.1 kB");
        assert_eq!(bytes(17_547_264), "17.5 MB");
        assert_eq!(bytes(999_999), "1.00 MB");
        assert_eq!(bytes(u64::MAX), "18.4 EB");
        assert_eq!(rate(50e6), "50.0 MB/s");
        assert_eq!(rate(0.0), "0.00 B/s");
        assert_eq!(rate(f64::INFINITY), "–");
        assert_eq!(rate(7.2e17), "720000 TB/s");
        assert_eq!(duration(950), "950 ns");
        assert_eq!(duration(1_234_000), "1.23 ms");
        assert_eq!(duration(999_999), "1.00 ms");
        assert_eq!(duration(12_340_000_000), "12.3 s");
        assert_eq!(duration(245_000_000_000), "4 min 05 s");
        assert_eq!(duration(119_999_999_999), "120 s");
        assert_eq!(duration(7_380_000_000_000), "2 h 03 min");
        assert_eq!(duration(u64::MAX), "5124095 h 34 min");
        assert_eq!(percent(0.663), "66.3 %");
        assert_eq!(percent(f64::NAN), "–");
        assert_eq!(percent_short(0.0), "0 %");
        assert_eq!(percent_short(0.001), "<1 %");
        assert_eq!(percent_short(0.999), ">99 %");
        assert_eq!(percent_short(1.0), "100 %");
        assert_eq!(tokens_per_s(29.7), "29.7");
        assert_eq!(tokens_per_s(0.964), "0.96");
        assert_eq!(tokens_per_s(1e300), "1.00e300");
    }
}
