//! `argodrive completions` and `argodrive man`: the command line, described for shells and for `man`.

use super::command;
use anyhow::{Context, Result, bail};
use clap_complete::{Shell, generate};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Write argodrive.1 and a page for every command into this folder, instead of the first page to standard output
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints the script.
pub fn run(args: &Args) -> Result<ExitCode> {
    let mut script = Vec::new();
    generate(args.shell, &mut command(), "argodrive", &mut script);
    write(&script)
}

/// Prints the page, or writes all of them.
pub fn man(args: &ManArgs) -> Result<ExitCode> {
    let Some(folder) = &args.out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command()).render(&mut page)?;
        return write(&page);
    };
    std::fs::create_dir_all(folder).with_context(|| format!("--out {}", folder.display()))?;
    if !folder.is_dir() {
        bail!("--out {} is no folder", folder.display());
    }
    clap_mangen::generate_to(command(), folder).with_context(|| format!("--out {}", folder.display()))?;
    super::print(&format!("{}: try `man {}`", folder.display(), folder.join("argodrive.1").display()))?;
    Ok(ExitCode::SUCCESS)
}

fn write(bytes: &[u8]) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}
