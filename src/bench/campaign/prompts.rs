//! Prompts of a campaign: from files and folders, and never those that heat was counted on.

use super::CampaignError;
use crate::bench::config::RunConfig;
use crate::bench::inputs::digest;
use crate::bench::prompt_set::{is_set, parse};
use crate::layout::heat::Heat;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Largest prompt file that is read.
const MAX_PROMPT_BYTES: u64 = 16 << 20;
/// Most prompts of one campaign.
const MAX_PROMPTS: usize = 256;

/// One prompt, or a set of them (a `.jsonl` file) that every run gets together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    /// File name without its ending, or `prompt`.
    pub name: String,
    /// The file; `None` for text of a configuration.
    pub file: Option<PathBuf>,
    /// The text of a configuration; a file's is read again.
    pub text: Option<String>,
    /// Hash of the text.
    pub digest: String,
}

impl Prompt {
    /// A prompt that a configuration holds.
    pub fn inline(text: &str) -> Self {
        Self { name: "prompt".into(), file: None, text: Some(text.into()), digest: digest(text.as_bytes()) }
    }

    /// Makes it the prompt of a run: a set, a file or a text.
    pub fn put(&self, config: &mut RunConfig) {
        let (sets, files) = self.file.iter().cloned().partition::<Vec<_>, _>(|f| is_set(f));
        (config.prompt, config.prompt_file, config.prompts) =
            (self.text.clone(), files.into_iter().next(), sets.into_iter().next());
    }

    /// The texts as they are now: one, or those of a set.
    pub fn texts(&self) -> Result<Vec<String>, CampaignError> {
        let text = self.read()?;
        match self.file.as_deref().filter(|f| is_set(f)) {
            Some(file) => Ok(parse(text.as_bytes()).map_err(|e| fault(file, e))?.into_iter().map(|t| t.text).collect()),
            None => Ok(vec![text]),
        }
    }

    /// What its file holds now, or its text.
    pub fn read(&self) -> Result<String, CampaignError> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(file)) => read_prompt(file),
            (None, None) => Err(CampaignError::Option(format!("prompt `{}` has neither a text nor a file", self.name))),
        }
    }
}

fn fault(path: &Path, why: impl std::fmt::Display) -> CampaignError {
    CampaignError::Option(format!("prompt {}: {why}", path.display()))
}

fn read_prompt(path: &Path) -> Result<String, CampaignError> {
    let bytes = std::fs::metadata(path).map_err(|e| fault(path, e))?.len();
    if bytes > MAX_PROMPT_BYTES {
        return Err(fault(path, format!("{bytes} bytes; a prompt has at most {MAX_PROMPT_BYTES}")));
    }
    let text = std::fs::read(path).map_err(|e| fault(path, e))?;
    let text = String::from_utf8(text)
        .map_err(|e| fault(path, format!("not UTF-8 (byte {})", e.utf8_error().valid_up_to())))?;
    if is_set(path) {
        parse(text.as_bytes()).map_err(|e| fault(path, e))?;
    }
    if text.trim().is_empty() { Err(fault(path, "is empty")) } else { Ok(text) }
}

/// Prompts of files, and of all `.txt` files of folders in the order of their names.
pub fn load(paths: &[PathBuf]) -> Result<Vec<Prompt>, CampaignError> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|e| fault(path, e))?;
            let entries = entries.collect::<Result<Vec<_>, _>>().map_err(|e| fault(path, e))?;
            let mut found: Vec<PathBuf> = entries.into_iter().map(|e| e.path()).collect();
            found.retain(|p| p.extension().is_some_and(|e| e == "txt"));
            if found.is_empty() {
                return Err(fault(path, "the folder has no .txt file; each holds one prompt"));
            }
            found.sort();
            files.append(&mut found);
        } else {
            files.push(path.clone());
        }
    }
    if files.len() > MAX_PROMPTS {
        return Err(CampaignError::Option(format!("{} prompts, at most {MAX_PROMPTS}", files.len())));
    }
    let mut out: Vec<Prompt> = Vec::with_capacity(files.len());
    for file in files {
        let text = read_prompt(&file)?;
        let name = file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let prompt = Prompt { name, digest: digest(text.as_bytes()), file: Some(file.clone()), text: None };
        if let Some(twin) = out.iter().find(|p| p.digest == prompt.digest) {
            return Err(fault(&file, format!("is the same text as prompt `{}`", twin.name)));
        }
        out.push(prompt);
    }
    Ok(out)
}

/// Text with runs of white space as one space, so that line breaks make no difference.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Refuses prompts that are, or are part of, what heat was counted on (`heat_prompts`), or the other way round; and those
/// that a heat file names as its source.
pub fn check_apart(
    prompts: &[Prompt],
    heat_prompts: &[Prompt],
    heats: &[(PathBuf, Heat)],
) -> Result<(), CampaignError> {
    let mut texts: Vec<(&Prompt, String)> = Vec::new();
    for heat in heat_prompts {
        texts.extend(heat.texts()?.iter().map(|t| (heat, plain(t))));
    }
    for prompt in prompts {
        for text in prompt.texts()?.iter().map(|t| plain(t)) {
            if let Some((heat, _)) = texts.iter().find(|(_, h)| h.contains(&text) || text.contains(h.as_str())) {
                return Err(overlap(prompt, &format!("the heat prompt `{}`", heat.name)));
            }
        }
        let source = |(path, heat): &(PathBuf, Heat)| {
            heat.sources.iter().any(|s| s.digest == prompt.digest).then(|| path.display().to_string())
        };
        if let Some(path) = heats.iter().find_map(source) {
            return Err(overlap(prompt, &format!("a source of the heat {path}")));
        }
    }
    Ok(())
}

fn overlap(prompt: &Prompt, with: &str) -> CampaignError {
    CampaignError::Option(format!(
        "the evaluation prompt `{}` overlaps {with}: a layout must be judged on text that it was not made from; use \
         disjoint sets",
        prompt.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_ignores_white_space_and_sees_parts() {
        let apart = |a: &str, b: &str| check_apart(&[Prompt::inline(a)], &[Prompt::inline(b)], &[]);
        assert!(apart("a story of a fox", "a tale of a crow").is_ok());
        assert!(apart("a story\nof a  fox", "a story of a fox").is_err());
        assert!(apart("of a fox", "a story of a fox").unwrap_err().to_string().contains("overlaps"));
        assert!(apart("a story of a fox", "of a fox").is_err());
    }

    #[test]
    fn folders_give_their_texts_in_order() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b.txt"), "two").unwrap();
        std::fs::write(dir.path().join("a.txt"), "one").unwrap();
        std::fs::write(dir.path().join("c.md"), "three").unwrap();
        let prompts = load(&[dir.path().to_path_buf()]).unwrap();
        assert_eq!(prompts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        std::fs::write(dir.path().join("d.txt"), "one").unwrap();
        assert!(load(&[dir.path().to_path_buf()]).unwrap_err().to_string().contains("same text as prompt `a`"));
        std::fs::write(dir.path().join("d.txt"), " \n").unwrap();
        assert!(load(&[dir.path().join("d.txt")]).unwrap_err().to_string().contains("is empty"));
    }
}
