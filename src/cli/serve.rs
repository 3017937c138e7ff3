//! `argodrive serve`: a model behind an HTTP interface that OpenAI clients speak.

use super::run_args::plan_and_mounts;
use super::turn_args::TurnArgs;
use super::{print, remark};
use crate::bench::activations;
use crate::bench::config::Asked;
use crate::bench::keeping::{Keeping, keeping};
use crate::decode::speculate::{AcceptRule, DrafterKind};
use crate::drive::units::parse_bytes;
use crate::knob::Knob;
use crate::open::Model;
use crate::report::units::bytes;
use crate::serve::connections::Limits;
use crate::serve::{self, ServeOptions, Told, guard};
use anyhow::{Context, Result, bail};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Largest body that can be allowed.
const MOST_BODY_BYTES: u64 = 1 << 30;
/// Most connections that can be allowed: each is an open file.
const MOST_CONNECTIONS: usize = 1 << 20;

/// Serve a model to OpenAI clients over HTTP
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    turns: TurnArgs,
    #[command(flatten)]
    server: ServerArgs,
}

/// How the server is reached, and its bounds.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address and port; port 0 takes a free one, which is printed
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// A file with the key that clients must send
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen beyond loopback without a key
    #[arg(long)]
    no_key_needed: bool,
    /// Requests that may wait while one is at work; more are told to try again later
    #[arg(long, value_name = "N", default_value_t = 8)]
    queue: usize,
    /// Conversations that are kept to be gone on with; the least recently used one goes [default: up to 4, as memory allows; 1 with
    /// --kv-ram]
    #[arg(long, value_name = "N")]
    sessions: Option<usize>,
    /// Most bytes of a request
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4MiB")]
    max_body: u64,
    /// Most connections that are open; whoever comes beyond that is told to try again later
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_connections: usize,
    /// Longest time for a request's head to come, and again for its body
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "30s")]
    request_timeout: Duration,
    /// How long a connection stays open between two requests
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "75s")]
    keep_alive: Duration,
    /// How long the text at work may go on after SIGINT or SIGTERM
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "30s")]
    drain_timeout: Duration,
    /// Folder with past runs, for the page at /
    #[arg(long, value_name = "DIR", default_value = "results")]
    results: PathBuf,
    /// The model's name for clients [default: the name of the store's folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

impl ServerArgs {
    fn options(&self, store: &Path, seed: Option<u64>) -> Result<ServeOptions> {
        let folder = store.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
        let name = self.name.clone().or(folder).unwrap_or_else(|| "model".into());
        if name.trim().is_empty() {
            bail!("--name is empty; give the name by which clients ask for the model");
        }
        if !(1..=MOST_BODY_BYTES).contains(&self.max_body) {
            bail!("--max-body {}: give 1 byte to 1 GiB", self.max_body);
        }
        if !(1..=MOST_CONNECTIONS).contains(&self.max_connections) {
            bail!("--max-connections {}: give 1 to {MOST_CONNECTIONS}", self.max_connections);
        }
        if self.request_timeout.is_zero() {
            bail!("--request-timeout 0s: no request comes in no time; give more, for example 30s");
        }
        Ok(ServeOptions {
            listen: self.listen,
            key: self.api_key_file.as_deref().map(guard::read_key).transpose().map_err(anyhow::Error::msg)?,
            no_key_needed: self.no_key_needed,
            queue: self.queue,
            sessions: 1, // how many fit is known once the model is
            max_body: usize::try_from(self.max_body).context("--max-body")?,
            connections: Limits {
                most: self.max_connections,
                request: self.request_timeout,
                keep_alive: self.keep_alive,
            },
            drain: self.drain_timeout,
            name,
            seed,
            results: self.results.clone(),
        })
    }
}

/// What is asked for. Each request brings a prompt and may choose how tokens are drawn, so that flags of sampling are what it
/// leaves out.
fn asked_of(args: &Args) -> Result<Asked> {
    let mut asked = args.turns.asked("request")?;
    if asked.config.draft.speculate == DrafterKind::Model {
        if asked.given.remove(&Knob::DraftAccept) && asked.config.draft.draft_accept == AcceptRule::Standard {
            bail!(
                "--draft-accept standard draws other tokens than the seed alone would, so that a request could not be repeated; \
                 leave it out (exact-match) when serving"
            );
        }
        asked.config.draft.draft_accept = AcceptRule::ExactMatch;
    }
    // a request may choose another temperature, with which these do something
    let sampler = std::mem::take(&mut asked.config.sampler);
    sampler.validate()?;
    asked.check()?;
    asked.config.sampler = sampler;
    Ok(asked)
}

/// What is kept, in words.
fn words_of(keeping: &Keeping) -> String {
    let tokens = match keeping.token_bytes {
        0 => ", and their share of --kv-ram".into(),
        each => format!(", and {} for each of its tokens", bytes(each)),
    };
    let (texts, each) = (keeping.texts, bytes(keeping.state_bytes));
    let of =
        if texts == 1 { "1 text, which takes".into() } else { format!("up to {texts} texts, each of which takes") };
    format!("keeps {of} {each}{tokens}")
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let asked = asked_of(&args)?;
    let config = &asked.config;
    let seed = asked.given.contains(&Knob::Seed).then_some(config.sampler.seed);
    let mut options = args.server.options(&config.store, seed)?;
    let listener = serve::listen(&options)?;
    let model = Arc::new(Model::load_as(&config.store, config.model.isa()?, config.model.trunk)?);
    if let Some(label) = activations::label(model.manifest.trunk_format, config.model.activations) {
        remark(&label);
    }
    let keeping = keeping(&model, config, args.server.sessions).map_err(anyhow::Error::msg)?;
    options.sessions = keeping.texts;
    remark(&words_of(&keeping));
    let streamed = plan_and_mounts(&model, &asked)?;
    let name = options.name.clone();
    let mut ready = |address| {
        // whoever started it may have closed its output; it serves all the same
        let _ = print(&format!("serving {name} on http://{address}"));
    };
    let mut complain = |what: &str| remark(&format!("a text failed: {what}"));
    let told = Told { ready: &mut ready, complain: &mut complain };
    serve::serve(listener, options, &model, config.clone(), streamed.as_ref(), told)?;
    Ok(ExitCode::SUCCESS)
}
