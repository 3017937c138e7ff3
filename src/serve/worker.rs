//! The thread that decodes: takes one request after the other from the queue, generates, and puts the text into the request's
//! mailbox. Knows no connection.

use super::error::ApiError;
use super::mailbox::Ended;
use super::metrics::Metrics;
use super::queue::{Job, Queue};
use super::stop::StopFinder;
use crate::bench::turns::{Text, Turns};
use crate::decode::generate::StopReason;
use crate::decode::sampler::Sampler;
use crate::model::reply::Channel;
use crate::model::tokenizer::Tokenizer;
use std::ops::ControlFlow;

/// Works until the queue is closed and empty. What goes wrong with one text is told to whoever wanted it and to `complain`.
pub fn work(
    turns: &mut Turns<'_>,
    tokenizer: &Tokenizer,
    queue: &Queue,
    metrics: &Metrics,
    complain: &mut dyn FnMut(&str),
) {
    while let Some(job) = queue.next() {
        let mailbox = job.mailbox.clone();
        mailbox.start();
        let done = one(turns, tokenizer, metrics, job);
        metrics.kept(turns.kept());
        match done {
            Ok(end) => mailbox.end(Ok(end)),
            Err(Failure::Refused(error)) => mailbox.end(Err(error)),
            Err(Failure::Gone) => mailbox.end(Err(ApiError::shutting_down())),
            Err(Failure::Broken(what)) => {
                metrics.failed();
                complain(&what);
                mailbox.end(Err(ApiError::failed(what)));
            }
        }
    }
}

/// Why there is no whole text.
enum Failure {
    /// It does not fit.
    Refused(ApiError),
    /// Nobody wants it any more.
    Gone,
    /// A pass failed.
    Broken(String),
}

fn one(turns: &mut Turns<'_>, tokenizer: &Tokenizer, metrics: &Metrics, job: Job) -> Result<Ended, Failure> {
    let Job { prompt, max_new, sampler, stop, mut reply, param, mailbox, asked } = job;
    let text = Text { prompt: &prompt, max_new };
    turns.check(text).map_err(|what| Failure::Refused(ApiError::too_long(param, what)))?;
    let mut sampler = Sampler::new(sampler).map_err(|e| Failure::Broken(e.to_string()))?;
    let mut finder = StopFinder::new(stop);
    let (mut stopped, mut tokens) = (false, 0usize);
    let mut on_token = |token| {
        if tokens == 0 {
            metrics.first_token(asked.elapsed());
        }
        tokens += 1;
        metrics.token();
        let (channel, piece) = reply.push(tokenizer, token);
        match channel {
            Channel::Thoughts => mailbox.add(channel, &piece),
            Channel::Answer => {
                let (certain, found) = finder.push(&piece);
                mailbox.add(channel, &certain);
                stopped |= found;
            }
        }
        if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let done = turns.generate(text, &mut sampler, &mut on_token, mailbox.gone());
    let turn = done.map_err(|e| Failure::Broken(e.to_string()))?.ok_or(Failure::Gone)?;
    metrics.prompt(prompt.len(), turn.reused);
    if !stopped {
        let [(_, thoughts), (_, rest)] = reply.finish();
        mailbox.add(Channel::Thoughts, &thoughts);
        let (certain, found) = finder.push(&rest);
        mailbox.add(Channel::Answer, &certain);
        stopped = found;
        if !found {
            mailbox.add(Channel::Answer, &finder.finish());
        }
    }
    let reason = match turn.generation.stopped {
        _ if stopped => "stop",
        StopReason::StopToken => "stop",
        StopReason::MaxNew | StopReason::ContextFull => "length",
        StopReason::Interrupted => return Err(Failure::Gone),
    };
    Ok(Ended {
        reason,
        prompt_tokens: prompt.len(),
        cached_tokens: turn.reused,
        completion_tokens: turn.generation.token_ids.len(),
    })
}
