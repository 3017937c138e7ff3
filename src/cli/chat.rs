//! `argodrive chat`: turns of a conversation from stdin (or one `--message`), answers to stdout.

use super::remark;
use super::run_args::{ModelArgs, ReaderArgs, SamplerArgs, interrupt_flag, plan_and_mounts};
use crate::clock::Clock;
use crate::decode::generate::{Request, generate};
use crate::decode::sampler::Sampler;
use crate::model::chat::{ChatOptions, Message, Role};
use crate::model::text_stream::TextStream;
use crate::open::{Model, NoExperts};
use crate::source::ExpertSource;
use anyhow::Result;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Talk to a model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store
    #[arg(long)]
    store: PathBuf,
    /// The plan; without one the store itself is the one drive
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Where the plan's drives are now, and which of them are emulated
    #[arg(long)]
    drives: Option<PathBuf>,
    /// One message instead of a conversation on stdin
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Instructions that stand before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_new: usize,
    /// Hold every expert in memory instead of streaming
    #[arg(long, conflicts_with_all = ["plan", "drives"])]
    resident: bool,
    #[command(flatten)]
    sampler: SamplerArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    reader: ReaderArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    let model = Model::load(&args.store, args.model.isa())?;
    let template = model.chat()?;
    let mut sampler = Sampler::new(args.sampler.options()?)?;
    let clock = Clock::start();
    let mut source: Box<dyn ExpertSource> = if !model.has_experts() {
        Box::new(NoExperts)
    } else if args.resident {
        Box::new(model.resident()?)
    } else {
        let (plan, mounts) = plan_and_mounts(&model, args.plan.as_ref(), args.drives.as_ref())?;
        Box::new(model.reader(&plan, &mounts, &args.reader.options(), clock)?)
    };
    let mut session = model.session(args.model.max_context, args.model.prefill_rows, clock)?;
    let interrupted = interrupt_flag()?;
    let mut messages: Vec<Message> = args.system.iter().map(|s| Message::new(Role::System, s.clone())).collect();
    let mut asked = args.message.clone();
    let prompt_user = args.message.is_none() && std::io::stdin().is_terminal();
    let options = ChatOptions::default();
    loop {
        let text = match asked.take() {
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
        let request = Request {
            prompt: &prompt,
            max_new: args.max_new,
            stop: &model.stop_ids,
            piece_rows: args.model.prefill_rows,
        };
        let mut stream = TextStream::new();
        let mut answer = String::new();
        let done = generate(&mut session, source.as_mut(), &mut sampler, request, &mut |token| {
            let bytes = model.tokenizer.decode_visible_bytes(&[token]);
            say(&mut answer, &stream.push(&bytes));
            if interrupted.load(Ordering::SeqCst) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        say(&mut answer, &stream.finish());
        say(&mut String::new(), "\n");
        if interrupted.load(Ordering::SeqCst) {
            remark("interrupted");
            break;
        }
        if done.token_ids.len() >= args.max_new {
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

fn say(answer: &mut String, piece: &str) {
    answer.push_str(piece);
    let mut out = std::io::stdout().lock();
    // a reader that has gone away ends the process with the next write elsewhere; nothing is lost here
    let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
}
