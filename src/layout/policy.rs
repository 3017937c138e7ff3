//! A layout policy: one small TOML file under `layouts/` that says what to place where. Parsing and naming only;
//! `planner` carries it out.

use super::plan::PlanError;
use serde::{Deserialize, Serialize};

/// A policy file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Policy {
    /// Experts go to the drives in turn, one copy each, turning further with every layer.
    RoundRobin {},
    /// Every drive holds every expert; primaries turn like round-robin.
    FullMirror {},
}

/// Names that `policy = "..."` may have.
pub const POLICY_NAMES: [&str; 2] = ["round-robin", "full-mirror"];

impl Policy {
    /// Reads a policy file's text.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        toml::from_str(text).map_err(|e| {
            PlanError::Syntax(format!("policy file: {} (known policies: {})", e.message(), POLICY_NAMES.join(", ")))
        })
    }

    /// The name that plans carry.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::RoundRobin {} => "round-robin",
            Policy::FullMirror {} => "full-mirror",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_policies_parse_under_their_own_names() {
        for (text, name) in [
            (include_str!("../../layouts/round-robin.toml"), "round-robin"),
            (include_str!("../../layouts/full-mirror.toml"), "full-mirror"),
        ] {
            assert_eq!(Policy::parse(text).unwrap().name(), name);
        }
    }

    #[test]
    fn typos_are_errors_that_list_what_exists() {
        let e = Policy::parse("policy = \"mirror\"").unwrap_err().to_string();
        assert!(e.contains("mirror") && e.contains("full-mirror"), "{e}");
        assert!(Policy::parse("policy = \"full-mirror\"\nbugdet = 1").is_err());
    }
}
