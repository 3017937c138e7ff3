//! Whether a footer can be taken apart in about as many steps as it has bytes, before the Parquet library sees it: that skips what it
//! does not know, and a list of elements without bytes costs it as many steps as the footer claims elements. Knows the compact form of
//! Thrift (its specification, "Thrift compact protocol encoding"), and nothing of what the fields of a footer mean.

/// Deeper nesting is refused; a footer that is in order has less than ten levels.
const MOST_LEVELS: u32 = 32;

/// Types of values, as the specification numbers them.
mod kind {
    pub const TRUE: u8 = 1;
    pub const FALSE: u8 = 2;
    pub const BYTE: u8 = 3;
    pub const I16: u8 = 4;
    pub const I64: u8 = 6;
    pub const DOUBLE: u8 = 7;
    pub const BINARY: u8 = 8;
    pub const LIST: u8 = 9;
    pub const SET: u8 = 10;
    pub const MAP: u8 = 11;
    pub const STRUCT: u8 = 12;
    pub const UUID: u8 = 13;
}

/// Walks over a footer once.
///
/// # Errors
/// What is wrong with it, to stand behind the name of the file.
pub(super) fn check(footer: &[u8]) -> Result<(), String> {
    let mut rest = footer;
    skip(&mut rest, kind::STRUCT, MOST_LEVELS).map_err(|why| format!("its footer is damaged: {why}"))
}

fn skip(rest: &mut &[u8], of: u8, levels: u32) -> Result<(), String> {
    let Some(levels) = levels.checked_sub(1) else { return Err(format!("more than {MOST_LEVELS} levels")) };
    match of {
        kind::BYTE => take(rest, 1),
        kind::I16..=kind::I64 => number(rest).map(drop),
        kind::DOUBLE => take(rest, 8),
        kind::UUID => take(rest, 16),
        kind::BINARY => {
            let bytes = number(rest)?;
            take(rest, bytes)
        }
        kind::LIST | kind::SET => {
            let head = byte(rest)?;
            let count = if head >> 4 == 15 { number(rest)? } else { u64::from(head >> 4) };
            (0..elements(rest, count, head & 15)?).try_for_each(|_| skip(rest, head & 15, levels))
        }
        kind::MAP => {
            let count = number(rest)?;
            let head = if count > 0 { byte(rest)? } else { return Ok(()) };
            elements(rest, count, head >> 4)?;
            (0..elements(rest, count, head & 15)?).try_for_each(|_| {
                skip(rest, head >> 4, levels)?;
                skip(rest, head & 15, levels)
            })
        }
        kind::STRUCT => loop {
            let head = byte(rest)?;
            if head & 15 == 0 {
                return Ok(());
            }
            if head >> 4 == 0 {
                number(rest)?; // the field's number, where it does not follow from the one before
            }
            // the value of a boolean field is its type
            if !matches!(head & 15, kind::TRUE | kind::FALSE) {
                skip(rest, head & 15, levels)?;
            }
        },
        other => Err(format!("there is no type {other}")),
    }
}

/// `count`, if so many elements can be there: each has a byte at least, but for booleans, which no footer lists.
fn elements(rest: &[u8], count: u64, of: u8) -> Result<u64, String> {
    let booleans = matches!(of, kind::TRUE | kind::FALSE);
    match count > rest.len() as u64 || (booleans && count > 0) {
        true => Err(format!("a list should have {count} elements of type {of}, and {} bytes are left", rest.len())),
        false => Ok(count),
    }
}

fn byte(rest: &mut &[u8]) -> Result<u8, String> {
    let (first, more) = rest.split_first().ok_or("it ends too early")?;
    *rest = more;
    Ok(*first)
}

fn take(rest: &mut &[u8], bytes: u64) -> Result<(), String> {
    let more = usize::try_from(bytes).ok().and_then(|bytes| rest.get(bytes..)).ok_or("it ends too early")?;
    *rest = more;
    Ok(())
}

/// A number in groups of seven bits, the lowest first.
fn number(rest: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let next = byte(rest)?;
        value |= u64::from(next & 0x7f) << shift;
        if next & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number of more than ten bytes".into())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn what_takes_more_steps_than_bytes_is_refused() {
        // field 1: a list of three i32; field 2: a struct with a boolean; the end
        let sound = [0x19, 0x35, 2, 4, 6, 0x1c, 0x11, 0, 0];
        assert_eq!(check(&sound), Ok(()));
        assert!((0..sound.len()).all(|end| check(&sound[..end]).is_err()), "cut off anywhere");
        for (bytes, part) in [
            (&[0x19, 0xf1, 0xff, 0xff, 0xff, 0xff, 7, 0][..], "2147483647 elements of type 1"),
            (&[0x19, 0xf5, 0xff, 0xff, 3, 0], "65535 elements of type 5, and 1 bytes"),
            (&[0x1b, 0xff, 0xff, 3, 0x11, 0], "elements of type 1"),
            (&[0x19, 0x1e, 0, 0], "no type 14"),
            (&[0x16, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 0], "more than ten bytes"),
            (&[0x1c; 100], "more than 32 levels"),
        ] {
            let why = check(bytes).unwrap_err();
            assert!(why.contains(part), "{part}: {why}");
        }
    }
}
