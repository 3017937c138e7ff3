//! Whether a footer can be taken apart in about as many steps as it has bytes, before the Parquet library sees it: that skips what it
//! does not know, and a list of elements without bytes costs it as many steps as the footer claims elements. Knows the compact form of
//! Thrift (its specification, "Thrift compact protocol encoding") and what the format's fields are, and nothing of what they mean.

/// Deeper nesting is refused; a footer that is in order has less than ten levels.
const MOST_LEVELS: u32 = 32;

/// Types of values, as the specification numbers them.
mod kind {
    pub const TRUE: u8 = 1;
    pub const FALSE: u8 = 2;
    pub const BYTE: u8 = 3;
    pub const I16: u8 = 4;
    pub const I32: u8 = 5;
    pub const I64: u8 = 6;
    pub const DOUBLE: u8 = 7;
    pub const BINARY: u8 = 8;
    pub const LIST: u8 = 9;
    pub const SET: u8 = 10;
    pub const MAP: u8 = 11;
    pub const STRUCT: u8 = 12;
    pub const UUID: u8 = 13;
}

/// What a value has to be.
#[derive(Clone, Copy)]
enum Form {
    /// Whatever it says that it is.
    Any,
    /// Of this type.
    Plain(u8),
    /// True or false.
    Bool,
    /// A struct with these fields.
    Struct(Fields),
    /// A list of such.
    List(&'static Form),
}

/// Numbers of fields and what they have to be; others may be anything.
type Fields = &'static [(i64, Form)];

const I32: Form = Form::Plain(kind::I32);
const I64: Form = Form::Plain(kind::I64);
const BINARY: Form = Form::Plain(kind::BINARY);
/// Of a union whose members have nothing that a footer's reader knows, or nothing at all.
const EMPTY: Form = Form::Struct(&[]);

// The structs of a footer (parquet.thrift of the Parquet format, version 2.12). The library reads a field that it knows as what the
// format says, whatever type the file gives it, and from there on would see something else than this walk does.
const FILE: Fields = &[
    (1, I32),
    (2, Form::List(&Form::Struct(SCHEMA_ELEMENT))),
    (3, I64),
    (4, Form::List(&Form::Struct(ROW_GROUP))),
    (5, Form::List(&Form::Struct(KEY_VALUE))),
    (6, BINARY),
    (7, Form::List(&Form::Struct(&[(1, EMPTY), (2, EMPTY)]))),
    (8, EMPTY),
    (9, BINARY),
];
const SCHEMA_ELEMENT: Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, BINARY),
    (5, I32),
    (6, I32),
    (7, I32),
    (8, I32),
    (9, I32),
    (10, Form::Struct(LOGICAL_TYPE)),
];
const LOGICAL_TYPE: Fields = &[
    (1, EMPTY),
    (2, EMPTY),
    (3, EMPTY),
    (4, EMPTY),
    (5, Form::Struct(&[(1, I32), (2, I32)])),
    (6, EMPTY),
    (7, Form::Struct(TIME)),
    (8, Form::Struct(TIME)),
    (10, Form::Struct(&[(1, Form::Plain(kind::BYTE)), (2, Form::Bool)])),
    (11, EMPTY),
    (12, EMPTY),
    (13, EMPTY),
    (14, EMPTY),
    (15, EMPTY),
    (16, Form::Struct(&[(1, Form::Plain(kind::BYTE))])),
    (17, Form::Struct(&[(1, BINARY)])),
    (18, Form::Struct(&[(1, BINARY), (2, I32)])),
];
const TIME: Fields = &[(1, Form::Bool), (2, Form::Struct(&[(1, EMPTY), (2, EMPTY), (3, EMPTY)]))];
const ROW_GROUP: Fields = &[
    (1, Form::List(&Form::Struct(COLUMN_CHUNK))),
    (2, I64),
    (3, I64),
    (4, Form::List(&Form::Struct(&[(1, I32), (2, Form::Bool), (3, Form::Bool)]))),
    (5, I64),
    (6, I64),
    (7, Form::Plain(kind::I16)),
];
const COLUMN_CHUNK: Fields = &[
    (1, BINARY),
    (2, I64),
    (3, Form::Struct(COLUMN)),
    (4, I64),
    (5, I32),
    (6, I64),
    (7, I32),
    (8, Form::Struct(&[(1, EMPTY), (2, Form::Struct(&[(1, Form::List(&BINARY)), (2, BINARY)]))])),
    (9, BINARY),
];
const COLUMN: Fields = &[
    (1, I32),
    (2, Form::List(&I32)),
    (3, Form::List(&BINARY)),
    (4, I32),
    (5, I64),
    (6, I64),
    (7, I64),
    (8, Form::List(&Form::Struct(KEY_VALUE))),
    (9, I64),
    (10, I64),
    (11, I64),
    (12, Form::Struct(STATISTICS)),
    (13, Form::List(&Form::Struct(&[(1, I32), (2, I32), (3, I32)]))),
    (14, I64),
    (15, I32),
    (16, Form::Struct(&[(1, I64), (2, Form::List(&I64)), (3, Form::List(&I64))])),
    (17, Form::Struct(&[(1, Form::Struct(BOUNDING_BOX)), (2, Form::List(&I32))])),
];
const STATISTICS: Fields =
    &[(1, BINARY), (2, BINARY), (3, I64), (4, I64), (5, BINARY), (6, BINARY), (7, Form::Bool), (8, Form::Bool)];
const BOUNDING_BOX: Fields = &[
    (1, Form::Plain(kind::DOUBLE)),
    (2, Form::Plain(kind::DOUBLE)),
    (3, Form::Plain(kind::DOUBLE)),
    (4, Form::Plain(kind::DOUBLE)),
    (5, Form::Plain(kind::DOUBLE)),
    (6, Form::Plain(kind::DOUBLE)),
    (7, Form::Plain(kind::DOUBLE)),
    (8, Form::Plain(kind::DOUBLE)),
];
const KEY_VALUE: Fields = &[(1, BINARY), (2, BINARY)];

/// Walks over a footer once.
///
/// # Errors
/// What is wrong with it, to stand behind the name of the file.
pub(super) fn check(footer: &[u8]) -> Result<(), String> {
    let mut rest = footer;
    skip(&mut rest, kind::STRUCT, Form::Struct(FILE), MOST_LEVELS)
        .map_err(|why| format!("its footer is damaged: {why}"))
}

/// Walks over a value that says that it is `of` and should have this form.
fn skip(rest: &mut &[u8], of: u8, form: Form, levels: u32) -> Result<(), String> {
    let Some(levels) = levels.checked_sub(1) else { return Err(format!("more than {MOST_LEVELS} levels")) };
    let fits = match form {
        Form::Any => true,
        Form::Plain(wanted) => of == wanted,
        Form::Bool => matches!(of, kind::TRUE | kind::FALSE),
        Form::Struct(_) => of == kind::STRUCT,
        Form::List(_) => of == kind::LIST,
    };
    if !fits {
        return Err(format!("a field has type {of}, which is not that of the format"));
    }
    match of {
        // the value of a boolean field is its type
        kind::TRUE | kind::FALSE => Ok(()),
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
            let each = if let Form::List(each) = form { *each } else { Form::Any };
            (0..elements(rest, count, head & 15)?).try_for_each(|_| skip(rest, head & 15, each, levels))
        }
        kind::MAP => {
            let count = number(rest)?;
            let head = if count > 0 { byte(rest)? } else { return Ok(()) };
            elements(rest, count, head >> 4)?;
            (0..elements(rest, count, head & 15)?).try_for_each(|_| {
                skip(rest, head >> 4, Form::Any, levels)?;
                skip(rest, head & 15, Form::Any, levels)
            })
        }
        kind::STRUCT => {
            let fields = if let Form::Struct(fields) = form { Some(fields) } else { None };
            let mut last = 0;
            loop {
                let head = byte(rest)?;
                if head & 15 == 0 {
                    return Ok(());
                }
                // the field's number, or by how much it is larger than that of the one before
                let more = i64::from(head >> 4);
                let id = if more == 0 { signed(number(rest)?) } else { last + more };
                // Where it can, the library reads fields by their distance alone, and as they ascend.
                let late = fields.is_some() && (id <= last || (more == 0 && id <= last + 15));
                if late || i16::try_from(id).is_err() {
                    return Err(format!("field {id} comes after field {last}"));
                }
                last = id;
                let mut known = fields.unwrap_or_default().iter();
                let form = known.find(|(known, _)| *known == id).map_or(Form::Any, |(_, form)| *form);
                skip(rest, head & 15, form, levels)?;
            }
        }
        other => Err(format!("there is no type {other}")),
    }
}

/// A signed number as the compact form has it: small ones of either sign are small.
fn signed(zigzag: u64) -> i64 {
    (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64)
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
        // field 20: a list of three i32; field 21: a struct with a boolean; the end
        let sound = [0x09, 40, 0x35, 2, 4, 6, 0x1c, 0x11, 0, 0];
        assert_eq!(check(&sound), Ok(()));
        assert!((0..sound.len()).all(|end| check(&sound[..end]).is_err()), "cut off anywhere");
        let deep = [&[0x0c, 40][..], &[0x1c; 100]].concat();
        for (bytes, part) in [
            (&[0x09, 40, 0xf1, 0xff, 0xff, 0xff, 0xff, 7, 0][..], "2147483647 elements of type 1"),
            (&[0x09, 40, 0xf5, 0xff, 0xff, 3, 0], "65535 elements of type 5, and 1 bytes"),
            (&[0x0b, 40, 0xff, 0xff, 3, 0x11, 0], "elements of type 1"),
            (&[0x09, 40, 0x1e, 0, 0], "no type 14"),
            (&[0x06, 40, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 0], "more than ten bytes"),
            (&deep, "more than 32 levels"),
            (&[0x16, 2, 0], "type 6, which is not that of the format"),
            (&[0x15, 2, 0x19, 0x15, 2, 0], "type 5, which is not that of the format"),
            (&[0x15, 2, 0x05, 2, 2, 0], "field 1 comes after field 1"),
            (&[0x25, 2, 0], "type 5, which is not that of the format"),
            (&[0x05, 2, 2, 0], "field 1 comes after field 0"),
        ] {
            let why = check(bytes).unwrap_err();
            assert!(why.contains(part), "{part}: {why}");
        }
    }
}
