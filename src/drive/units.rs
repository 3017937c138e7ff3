//! Quantities as people write them in files: `26KiB`, `50MB/s`, `500us`. Integers throughout; a fraction that is no
//! whole number of bytes or nanoseconds is cut.

/// Units of bytes.
const BYTE_UNITS: [(&str, u128); 10] = [
    ("B", 1),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// Units of time, in nanoseconds.
const TIME_UNITS: [(&str, u128); 6] =
    [("ns", 1), ("us", 1_000), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000)];

/// Parses bytes: a number and a unit (`4096`, `26KiB`, `1.5 GB`). Without a unit it is bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    const WANTED: &str = "a size such as `26KiB` or `1.5GB`";
    let (digits, unit) = split(text, WANTED)?;
    let unit = if unit.is_empty() { "B" } else { unit };
    scaled(text, digits, unit, &BYTE_UNITS, WANTED)
}

/// Parses a rate into bytes per second: `50MB/s`, `13.6GB/s`.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    const WANTED: &str = "a rate such as `50MB/s` or `13.6GB/s`";
    let amount = text.trim().strip_suffix("/s").ok_or_else(|| format!("`{text}` is not {WANTED}"))?;
    let (digits, unit) = split(amount, WANTED)?;
    scaled(text, digits, unit, &BYTE_UNITS, WANTED)
}

/// Parses a duration into nanoseconds: `500us`, `2ms`, `1.5s`. The unit is required, except for `0`.
pub fn parse_duration_ns(text: &str) -> Result<u64, String> {
    const WANTED: &str = "a duration such as `500us` or `2ms`";
    let (digits, unit) = split(text, WANTED)?;
    let unit = if unit.is_empty() && digits.bytes().all(|b| b == b'0') { "ns" } else { unit };
    scaled(text, digits, unit, &TIME_UNITS, WANTED)
}

fn split<'a>(text: &'a str, wanted: &str) -> Result<(&'a str, &'a str), String> {
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    if end == 0 {
        return Err(format!("`{text}` is not {wanted}: it does not start with a number"));
    }
    Ok((&trimmed[..end], trimmed[end..].trim_start()))
}

fn scaled(text: &str, digits: &str, unit: &str, units: &[(&str, u128)], wanted: &str) -> Result<u64, String> {
    let factor = units.iter().find(|(name, _)| *name == unit).map(|(_, f)| *f);
    let factor = factor.ok_or_else(|| format!("`{text}` is not {wanted}: unknown unit `{unit}`"))?;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let bad = || format!("`{text}` is not {wanted}");
    // Any u64 has 20 digits at most; so many, and 18 behind the point, keep every product below 2^127.
    if whole.is_empty() || whole.len() > 20 || fraction.len() > 18 || fraction.contains('.') {
        return Err(bad());
    }
    let whole: u128 = whole.parse().map_err(|_| bad())?;
    let tenths = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| bad())? };
    let value = whole * factor + fraction * factor / tenths;
    u64::try_from(value).map_err(|_| format!("`{text}` is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_exact() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes(" 26 KiB "), Ok(26_624));
        assert_eq!(parse_bytes("1.5GB"), Ok(1_500_000_000));
        assert_eq!(parse_rate("50MB/s"), Ok(50_000_000));
        assert_eq!(parse_rate("13.6GB/s"), Ok(13_600_000_000));
        assert_eq!(parse_rate("1.25 GiB/s"), Ok(1_342_177_280));
        assert_eq!(parse_duration_ns("500us"), Ok(500_000));
        assert_eq!(parse_duration_ns("0.1ms"), Ok(100_000));
        assert_eq!(parse_duration_ns("0"), Ok(0));
    }

    #[test]
    fn nonsense_is_refused_with_the_text_in_the_message() {
        for bad in ["", "fast", "1.2.3MB", "-5MB", ".5MB", "5 furlongs", "99999999999TB", "1234567890123456789012"] {
            let message = parse_bytes(bad).unwrap_err();
            assert!(message.contains(bad), "{message}");
        }
        assert!(parse_rate("50MB").is_err());
        assert!(parse_rate("/s").is_err());
        assert!(parse_rate("50/s").is_err(), "a rate says its unit");
        assert!(parse_duration_ns("500").is_err(), "a bare number of what?");
        assert!(parse_duration_ns("5MB").is_err());
    }
}
