//! The file form of a prefetch table: one line of JSON that says what it is, then comma-separated rows. Read with a bound
//! on every line and number; a fault is named by file and line.
//!
//! ```text
//! {"argodrive_prefetch_table":1,"model_id":"..","layers":[1,2],"depth":2,"experts":96,"successors":32,"rows":2}
//! layer,ahead,expert,total,followers
//! 1,1,0,57,3:31 8:12
//! 1,2,0,57,5:20
//! ```
//!
//! A row: of `total` tokens that went to `expert` of `layer`, 31 went to expert 3 and 12 to expert 8 of the layer `ahead`
//! layers (of those with experts) later; behind the last layer comes the first layer of the token that follows.

use super::table::{Followers, MAX_EXPERTS, MAX_LAYERS, MAX_SUCCESSORS, Table, TableError};
use crate::ids::{ExpertId, LayerId};
use crate::source::guess::MAX_LOOKAHEAD;
use crate::trace::log::TraceError;
use crate::trace::rows::{Lines, Row, Rows, parse_whole, shown};
use crate::trace::stream::Growing;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;

/// Version of the files that this program writes.
pub const TABLE_VERSION: u32 = 1;
/// Most experts, over layers and distances, that a file may speak of.
const MAX_ENTRIES: usize = 4 << 20;
const COLUMNS: [&str; 5] = ["layer", "ahead", "expert", "total", "followers"];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    argodrive_prefetch_table: u32,
    model_id: String,
    layers: Vec<LayerId>,
    depth: usize,
    experts: usize,
    successors: usize,
    /// Rows behind the column names: tells a file that was cut off.
    rows: usize,
}

#[derive(Deserialize)]
struct Version {
    argodrive_prefetch_table: u32,
}

/// Writes `table` to `path`.
pub fn write(path: &Path, table: &Table) -> Result<(), TableError> {
    let mut out = Growing::create(path)?;
    let header = Header {
        argodrive_prefetch_table: TABLE_VERSION,
        model_id: table.model_id.clone(),
        layers: table.layers.clone(),
        depth: table.depth,
        experts: table.experts,
        successors: table.successors,
        rows: table.entries(),
    };
    let json = serde_json::to_string(&header);
    let json = json.map_err(|e| TraceError::Syntax { path: path.to_path_buf(), reason: e.to_string() })?;
    let mut text = format!("{json}\n{}\n", COLUMNS.join(","));
    for (at, layer) in table.followers.iter().enumerate() {
        for (ahead, by_expert) in layer.iter().enumerate() {
            for (expert, f) in by_expert.iter().enumerate().filter(|(_, f)| f.total > 0) {
                let next: Vec<String> = f.next.iter().map(|(e, n)| format!("{}:{n}", e.0)).collect();
                let start = format!("{},{},{expert},{}", table.layers[at].0, ahead + 1, f.total);
                text.push_str(&format!("{start},{}\n", next.join(" ")));
                out.write_all(text.as_bytes()).map_err(|e| out.io(e))?;
                text.clear();
            }
        }
    }
    out.write_all(text.as_bytes()).map_err(|e| out.io(e))?;
    Ok(out.finish()?)
}

/// Reads the table at `path`.
pub fn read(path: &Path) -> Result<Table, TableError> {
    let mut lines = Lines::open(path)?;
    let first = lines.next_line()?.map(<[u8]>::to_vec).unwrap_or_default();
    let header = parse_header(&lines, &first)?;
    let names = lines.next_line()?.map(<[u8]>::to_vec).unwrap_or_default();
    if names != COLUMNS.join(",").as_bytes() {
        return Err(lines.error(0, "", format!("the columns are not `{}`", COLUMNS.join(","))).into());
    }
    let mut rows = Rows::new(lines, COLUMNS.map(String::from).to_vec());
    let mut followers = vec![vec![Vec::new(); header.depth]; header.layers.len()];
    let mut count = 0usize;
    while let Some(row) = rows.next_row()? {
        let layer = LayerId(row.u16(0)?);
        let Ok(at) = header.layers.binary_search(&layer) else {
            return Err(row.error(0, format!("layer {} is not among the table's layers", layer.0)).into());
        };
        let ahead = row.whole(1, header.depth as u64)? as usize;
        if ahead == 0 {
            return Err(row.error(1, "`0` is not a distance; it begins at 1".into()).into());
        }
        let expert = row.whole(2, header.experts.saturating_sub(1) as u64)? as usize;
        let entry = parse_followers(&row, &header)?;
        let by_expert: &mut Vec<Followers> = &mut followers[at][ahead - 1];
        if by_expert.len() <= expert {
            by_expert.resize(expert + 1, Followers::default());
        }
        if by_expert[expert].total > 0 {
            return Err(row.error(2, format!("expert {expert} stands twice at this layer and distance")).into());
        }
        by_expert[expert] = entry;
        count += 1;
    }
    if count != header.rows {
        let reason = format!("has {count} rows, its first line promises {}: it was cut off or changed", header.rows);
        return Err(TraceError::Syntax { path: path.to_path_buf(), reason }.into());
    }
    let Header { model_id, layers, depth, experts, successors, .. } = header;
    Ok(Table { model_id, layers, depth, experts, successors, followers })
}

fn parse_header(lines: &Lines, first: &[u8]) -> Result<Header, TableError> {
    let fault = |reason: String| TableError::from(lines.error(0, "", reason));
    let Ok(Version { argodrive_prefetch_table: version }) = serde_json::from_slice(first) else {
        let reason = "is not a prefetch table; `argodrive trace learn` makes one from traces";
        return Err(fault(reason.into()));
    };
    if version > TABLE_VERSION {
        return Err(fault(format!(
            "prefetch table version {version}, this program reads up to {TABLE_VERSION}; use a newer argodrive"
        )));
    }
    let header: Header = serde_json::from_slice(first).map_err(|e| fault(e.to_string()))?;
    let limit = |what: &str, seen: usize, max: usize| match (1..=max).contains(&seen) {
        true => Ok(()),
        false => Err(fault(format!("`{what}` is {seen}, not within 1 to {max}"))),
    };
    limit("layers", header.layers.len(), MAX_LAYERS)?;
    limit("depth", header.depth, MAX_LOOKAHEAD)?;
    limit("experts", header.experts, MAX_EXPERTS)?;
    limit("successors", header.successors, MAX_SUCCESSORS)?;
    let entries = header.layers.len() * header.depth * header.experts;
    if entries > MAX_ENTRIES || header.rows > entries {
        return Err(fault(format!(
            "has {} rows for {entries} places, of which at most {MAX_ENTRIES} are read",
            header.rows
        )));
    }
    if !header.layers.is_sorted_by(|a, b| a < b) {
        return Err(fault("`layers` do not ascend".into()));
    }
    Ok(header)
}

fn parse_followers(row: &Row<'_>, header: &Header) -> Result<Followers, TraceError> {
    let total = row.u32(3)?;
    let bytes = row.bytes(4);
    let mut next: Vec<(ExpertId, u32)> = Vec::with_capacity(header.successors.min(32));
    for pair in bytes.split(|b| *b == b' ').filter(|p| !p.is_empty()) {
        let at = pair.iter().position(|b| *b == b':').unwrap_or(pair.len());
        let expert = parse_whole(&pair[..at]).filter(|e| *e < header.experts as u64);
        let count = pair.get(at + 1..).and_then(parse_whole).filter(|n| (1..=u64::from(total)).contains(n));
        let (Some(expert), Some(count)) = (expert, count) else {
            let reason = format!(
                "`{}` is not an expert below {} and a count of 1 to {total}, as in `3:31`",
                shown(pair),
                header.experts
            );
            return Err(row.error(4, reason));
        };
        let expert = ExpertId(expert as u16);
        if next.iter().any(|(e, _)| *e == expert) {
            return Err(row.error(4, format!("expert {} stands twice", expert.0)));
        }
        if next.len() >= header.successors {
            return Err(row.error(4, format!("has more than the table's {} followers", header.successors)));
        }
        next.push((expert, count as u32));
    }
    if total == 0 {
        return Err(row.error(3, "`0` tokens have no followers".into()));
    }
    Ok(Followers { total, next })
}

#[cfg(test)]
mod tests {
    use super::super::table::TableBuilder;
    use super::*;

    fn table() -> Table {
        let ids = |list: &[u16]| list.iter().copied().map(ExpertId).collect::<Vec<_>>();
        let mut builder = TableBuilder::new(&[LayerId(1), LayerId(4)], 2).unwrap();
        builder.add(0, 1, &ids(&[2, 5]), &ids(&[0, 7, 3])).unwrap();
        builder.add(0, 1, &ids(&[2]), &ids(&[7])).unwrap();
        builder.add(1, 2, &ids(&[0]), &ids(&[6])).unwrap();
        builder.finish("0123", 2)
    }

    #[test]
    fn a_table_survives_the_round_trip_as_documented() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        write(&path, &table()).unwrap();
        assert_eq!(read(&path).unwrap(), table());
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\"argodrive_prefetch_table\":1,\"model_id\":\"0123\",\"layers\":[1,4],\"depth\":2,\"experts\":8,\
             \"successors\":2,\"rows\":3}\nlayer,ahead,expert,total,followers\n1,1,2,2,7:2 0:1\n1,1,5,1,0:1 3:1\n\
             4,2,0,1,6:1\n",
            "the most frequent first, equal ones by id, two at most"
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn bad_files_are_named_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t");
        write(&path, &table()).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, line, word) in [
            ("_table\":1", "_table\":2", ":1", "newer argodrive"),
            ("\"depth\":2", "\"depth\":99", ":1", "`depth` is 99"),
            ("\"experts\":8", "\"experts\":4000000000", ":1", "`experts`"),
            ("[1,4]", "[4,1]", ":1", "ascend"),
            ("{", "[", ":1", "trace learn"),
            ("\"rows\":3", "\"rows\":3,\"more\":1", ":1", "more"),
            ("\"rows\":3", "\"rows\":4", "t: ", "promises 4"),
            ("\"rows\":3", "\"rows\":99", ":1", "32 places"),
            ("total", "sum", ":2", "columns"),
            ("1,1,5,1", "2,1,5,1", ":4", "layer 2"),
            ("1,1,5,1", "1,0,5,1", ":4", "distance"),
            ("1,1,5,1", "1,3,5,1", ":4", "0 to 2"),
            ("1,1,5,1", "1,1,8,1", ":4", "0 to 7"),
            ("1,1,5,1", "1,1,2,1", ":4", "twice"),
            ("1,1,5,1", "1,1,5,0", ":4", "count of 1 to 0"),
            ("7:2 0:1", "7:2 7:1", ":3", "twice"),
            ("7:2 0:1", "7:2 0:1 3:1", ":3", "more than"),
            ("7:2 0:1", "7:3 0:1", ":3", "`7:3`"),
            ("7:2 0:1", "8:2 0:1", ":3", "`8:2`"),
            ("7:2 0:1", "7 0:1", ":3", "`7`"),
            ("7:2 0:1", "-7:1", ":3", "`-7:1`"),
            ("6:1\n", "6:1", ":5", "cut off"),
        ] {
            assert!(good.contains(from), "{from}");
            std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
            let message = read(&path).unwrap_err().to_string();
            assert!(message.contains(line) && message.contains(word), "{from} -> {to}: {message}");
        }
        std::fs::write(&path, "").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("trace learn"));
    }
}
