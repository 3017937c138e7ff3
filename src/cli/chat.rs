//! `argodrive chat`: turns of a conversation from stdin (or one `--message`), answers to stdout.

use super::draft_args::DraftArgs;
use super::remark;
use super::run_args::{ModelArgs, ReaderArgs, SamplerArgs, check_context, interrupt_flag, plan_and_mounts, start_over};
use crate::bench::activations;
use crate::bench::affinity::Placed;
use crate::bench::run::{give_threads, use_threads};
use crate::clock::Clock;
use crate::decode::generate::{Beside, Request, generate_with};
use crate::decode::sampler::Sampler;
use crate::knob::Knob;
use crate::model::chat::{ChatOptions, Message, Role};
use crate::model::text_stream::TextStream;
use crate::open::{Model, NoExperts};
use crate::source::ExpertSource;
use anyhow::{Result, bail};
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Tokens of an answer unless somebody says otherwise.
const DEFAULT_TOKENS: usize = 512;

/// Talk to a model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long, value_name = "DIR", required_unless_present = "profile")]
    store: Option<PathBuf>,
    /// Begin with these settings (`argodrive tune` writes them); flags override them
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// The plan; without one the store itself is the one drive
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long, value_name = "FILE")]
    drives: Option<PathBuf>,
    /// One message instead of a conversation on stdin
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Instructions that stand before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer [default: the profile's, or 512]
    #[arg(long, value_name = "N")]
    max_new: Option<usize>,
    /// Hold every expert in memory instead of streaming
    #[arg(long)]
    resident: bool,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.message.as_ref().is_some_and(|m| m.trim().is_empty()) {
        bail!("--message is empty; give it some text");
    }
    let mut asked = start_over(args.profile.as_ref(), None)?;
    let config = &mut asked.config;
    config.store = args.store.clone().unwrap_or(std::mem::take(&mut config.store));
    config.plan = args.plan.clone().or(config.plan.take());
    config.drives = args.drives.clone().or(config.drives.take());
    config.resident |= args.resident;
    // each turn is a prompt of its own
    (config.prompt, config.prompt_file, config.prompts) = (Some("turn".into()), None, None);
    if args.max_new.is_some() || !asked.given.contains(&Knob::MaxNew) {
        asked.config.max_new = args.max_new.unwrap_or(DEFAULT_TOKENS);
    }
    args.sampler.apply(&mut asked);
    args.model.apply(&mut asked);
    args.draft.apply(&mut asked);
    args.reader.apply(&mut asked);
    asked.check()?;
    let config = &asked.config;
    let model = Model::load_as(&config.store, config.model.isa()?, config.model.trunk)?;
    use_threads(&model, config);
    activations::use_activations(&model, config)?;
    let draft = model.draft(&config.draft, config.model.isa()?)?;
    let placed = Placed::compute(&model.decoder, &config.model.affinity)?;
    // its threads inherit the CPUs of compute
    if let Some(draft) = &draft {
        give_threads(&draft.decoder, config);
    }
    if let Some(label) = activations::label(model.manifest.trunk_format, config.model.activations) {
        remark(&label);
    }
    let template = model.chat()?;
    let mut sampler = Sampler::new(config.sampler)?;
    let clock = Clock::start();
    let mut pace = None;
    let mut source: Box<dyn ExpertSource> = match plan_and_mounts(&model, &asked)? {
        Some((plan, mounts)) => {
            let reader = placed.reading(|| model.reader(&plan, &mounts, &config.reader, clock))?;
            pace = model.own_drive(&mounts).and_then(|drive| reader.handle().pace(drive));
            Box::new(reader)
        }
        None if model.has_experts() => Box::new(model.resident()?),
        None => Box::new(NoExperts),
    };
    let mut session =
        model.session(config.model.max_context, config.model.prefill_rows, config.reader.prefetch, clock)?;
    let piece_rows = config.model.prefill_rows;
    let mut speculator = model.speculator(&config.draft, draft.as_ref(), &config.sampler, piece_rows, &session)?;
    placed.reading(|| model.stream_trunk(session.trunk_mut(), &config.reader, clock, pace))?;
    let interrupted = interrupt_flag()?;
    let mut messages: Vec<Message> = args.system.iter().map(|s| Message::new(Role::System, s.clone())).collect();
    let mut next_message = args.message.clone();
    let prompt_user = args.message.is_none() && std::io::stdin().is_terminal();
    let options = ChatOptions::default();
    loop {
        let text = match next_message.take() {
            Some(text) => text,
            None if args.message.is_some() => break,
            None => match read_line(prompt_user)? {
                Some(line) => line,
                None => break,
            },
        };
        messages.push(Message::new(Role::User, text));
        // The whole conversation is fed again each turn: simple, and exact for any template.
        session.reset();
        let prompt = template.encode(&model.tokenizer, &messages, &options)?;
        check_context(&model, &asked, prompt.len())?;
        let request = Request {
            prompt: &prompt,
            max_new: config.max_new,
            stop: &model.stop_ids,
            piece_rows: config.model.prefill_rows,
        };
        let mut stream = TextStream::new();
        let mut answer = String::new();
        let mut broken = None;
        let beside = Beside { speculator: speculator.as_mut(), ..Beside::default() };
        let mut on_token = |token| {
            let bytes = model.tokenizer.decode_visible_bytes(&[token]);
            broken = say(&mut answer, &stream.push(&bytes)).err();
            let stop = broken.is_some() || interrupted.load(Ordering::SeqCst);
            if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let done = generate_with(&mut session, source.as_mut(), &mut sampler, request, &mut on_token, beside)?;
        if let Some(e) = broken {
            return Err(e.into()); // nobody reads on (`| head`): the conversation is over
        }
        say(&mut answer, &stream.finish()).and_then(|()| say(&mut String::new(), "\n"))?;
        if interrupted.load(Ordering::SeqCst) {
            remark("interrupted");
            break;
        }
        if done.token_ids.len() >= config.max_new {
            remark("the answer was cut at --max-new");
        }
        messages.push(Message::new(Role::Assistant, answer));
    }
    Ok(ExitCode::SUCCESS)
}

fn read_line(prompt_user: bool) -> Result<Option<String>> {
    loop {
        if prompt_user {
            let mut err = std::io::stderr().lock();
            let _ = write!(err, "> ").and_then(|()| err.flush());
        }
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end_matches(['\n', '\r']);
        if !line.trim().is_empty() {
            return Ok(Some(line.to_string()));
        }
    }
}

fn say(answer: &mut String, piece: &str) -> std::io::Result<()> {
    answer.push_str(piece);
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes()).and_then(|()| out.flush())
}
