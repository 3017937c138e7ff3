//! Heat files for the pinned cache: how often each expert was used, as CSV with the header `layer,expert,count`. What is
//! wrong is named with its line.

use super::cache::Heat;
use super::options::ReaderError;
use crate::ids::{ExpertId, LayerId};
use crate::layout::plan::Plan;
use std::collections::BTreeSet;
use std::path::Path;

/// The one header that is understood.
const HEADER: &str = "layer,expert,count";
/// Largest file that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Reads the heat of experts of `plan` from `path`.
pub fn load(path: &Path, plan: &Plan) -> Result<Vec<Heat>, ReaderError> {
    let fault = |reason: String| ReaderError::Option(format!("--cache-heat {}: {reason}", path.display()));
    let len = std::fs::metadata(path).map_err(|e| fault(e.to_string()))?.len();
    if len > MAX_BYTES {
        return Err(fault(format!("{len} bytes; a heat file has at most {MAX_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(|e| fault(e.to_string()))?;
    let known = |layer: LayerId, expert: ExpertId| plan.homes(layer, expert).is_some();
    parse(&text, known).map_err(|(line, reason)| fault(format!("line {line}: {reason}")))
}

/// The rows of `text`, or the line that is wrong and why.
fn parse(text: &str, known: impl Fn(LayerId, ExpertId) -> bool) -> Result<Vec<Heat>, (usize, String)> {
    let mut lines = text.lines().enumerate().map(|(i, l)| (i + 1, l.trim_end()));
    match lines.next() {
        Some((_, HEADER)) => {}
        Some((line, other)) => return Err((line, format!("the header must be `{HEADER}`, not `{other}`"))),
        None => return Err((1, format!("the file is empty; it must begin with `{HEADER}`"))),
    }
    let (mut heats, mut seen) = (Vec::new(), BTreeSet::new());
    for (line, text) in lines.filter(|(_, l)| !l.is_empty()) {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let &[layer, expert, count] = fields.as_slice() else {
            return Err((line, format!("{} fields, a row has 3: `{HEADER}`", fields.len())));
        };
        let id = |name: &str, value: &str| {
            value.parse::<u16>().map_err(|_| (line, format!("{name} `{value}` is not a whole number up to 65535")))
        };
        let (layer, expert) = (LayerId(id("layer", layer)?), ExpertId(id("expert", expert)?));
        let count = count.parse::<u64>().map_err(|_| (line, format!("count `{count}` is not a whole number")))?;
        if !known(layer, expert) {
            return Err((line, format!("expert {} of layer {} is not in the plan", expert.0, layer.0)));
        }
        if !seen.insert((layer, expert)) {
            return Err((line, format!("expert {} of layer {} has a row already", expert.0, layer.0)));
        }
        heats.push(Heat { layer, expert, count });
    }
    if heats.iter().all(|h| h.count == 0) {
        return Err((1, "no expert has a count above 0, so there is nothing to pin".into()));
    }
    Ok(heats)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_what_is_wrong_is_named_with_its_line() {
        let known = |layer: LayerId, expert: ExpertId| layer.0 == 1 && expert.0 < 4;
        let heat = |expert, count| Heat { layer: LayerId(1), expert: ExpertId(expert), count };
        let good = parse("layer,expert,count\r\n1,3,70\n\n1, 0, 2\n", known).unwrap();
        assert_eq!(good, [heat(3, 70), heat(0, 2)]);
        for (rows, line, part) in [
            ("", 1, "empty"),
            ("expert,count\n", 1, "header"),
            ("layer,expert,count\n", 1, "nothing to pin"),
            ("layer,expert,count\n1,3,0\n", 1, "nothing to pin"),
            ("layer,expert,count\n1,3,4\n1,2\n", 3, "2 fields"),
            ("layer,expert,count\n1,3,-4\n", 2, "`-4`"),
            ("layer,expert,count\n1,x,4\n", 2, "`x`"),
            ("layer,expert,count\n1,70000,4\n", 2, "`70000`"),
            ("layer,expert,count\n1,4,4\n", 2, "not in the plan"),
            ("layer,expert,count\n1,3,4\n1,3,5\n", 3, "already"),
        ] {
            let (at, reason) = parse(rows, known).unwrap_err();
            assert!(at == line && reason.contains(part), "{rows:?}: {at}: {reason}");
        }
    }
}
