//! `argodrive chat`: turns of a conversation from stdin (or one `--message`), answers to stdout.

use super::remark;
use super::run_args::{interrupt_flag, plan_and_mounts};
use super::turn_args::TurnArgs;
use crate::bench::activations;
use crate::bench::turns::{self, Text, Turns};
use crate::decode::sampler::Sampler;
use crate::model::chat::{ChatOptions, Message, Role};
use crate::model::reply::Channel;
use crate::open::Model;
use anyhow::{Result, bail};
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Talk to a model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// One message instead of a conversation on stdin
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,
    /// Instructions that stand before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    turns: TurnArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.message.as_ref().is_some_and(|m| m.trim().is_empty()) {
        bail!("--message is empty; give it some text");
    }
    let asked = args.turns.asked("turn")?;
    asked.check()?;
    let config = &asked.config;
    let model = Model::load_as(&config.store, config.model.isa()?, config.model.trunk)?;
    if let Some(label) = activations::label(model.manifest.trunk_format, config.model.activations) {
        remark(&label);
    }
    let template = model.chat()?;
    let mut sampler = Sampler::new(config.sampler)?;
    let draft = turns::draft_of(&model, config)?;
    let streamed = plan_and_mounts(&model, &asked)?;
    let mut turns = Turns::open(&model, config, draft.as_ref(), streamed.as_ref(), 1)?;
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
        // The whole conversation is rendered anew each turn, which is exact for any template; what the session holds of it is
        // not read again.
        let prompt = template.encode(&model.tokenizer, &messages, &options)?;
        let text = Text { prompt: &prompt, max_new: config.max_new };
        turns.check(text).map_err(anyhow::Error::msg)?;
        let mut reply = template.reply(&options);
        let mut said = Said::default();
        let mut broken = None;
        let mut on_token = |token| {
            broken = said.take(reply.push(&model.tokenizer, token)).err();
            if broken.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let done = turns.generate(text, &mut sampler, &mut on_token, interrupted)?;
        if let Some(e) = broken {
            return Err(e.into()); // nobody reads on (`| head`): the conversation is over
        }
        reply.finish().into_iter().try_for_each(|piece| said.take(piece)).and_then(|()| said.end())?;
        if interrupted.load(Ordering::SeqCst) {
            remark("interrupted");
            break;
        }
        if done.is_some_and(|turn| turn.generation.token_ids.len() >= config.max_new) {
            remark("the answer was cut at --max-new");
        }
        messages.push(said.into_message());
    }
    Ok(ExitCode::SUCCESS)
}

/// A reply as it is printed.
#[derive(Default)]
struct Said {
    thoughts: String,
    answer: String,
}

impl Said {
    /// Prints a piece; thoughts and answer are a line apart.
    fn take(&mut self, (channel, piece): (Channel, String)) -> std::io::Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        if channel == Channel::Answer && self.answer.is_empty() && !self.thoughts.is_empty() {
            out.write_all(b"\n\n")?;
        }
        match channel {
            Channel::Thoughts => self.thoughts.push_str(&piece),
            Channel::Answer => self.answer.push_str(&piece),
        }
        out.write_all(piece.as_bytes()).and_then(|()| out.flush())
    }

    /// Ends the line.
    fn end(&self) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(b"\n").and_then(|()| out.flush())
    }

    fn into_message(self) -> Message {
        let thoughts = Some(self.thoughts).filter(|t| !t.is_empty());
        Message { reasoning_content: thoughts, ..Message::new(Role::Assistant, self.answer) }
    }
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
