//! One reply on its way from the thread that decodes to the connection that wants it. The writer never waits: text that is not
//! taken yet grows together, so a slow client gets longer pieces and holds nobody up. Whoever waits for it may go away, and says so.

use super::error::ApiError;
use crate::model::reply::Channel;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// `stop` or `length`.
    pub reason: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, those that were not read again.
    pub cached_tokens: usize,
    /// Tokens generated, a stop token included.
    pub completion_tokens: usize,
}

/// What has come since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Text of the thoughts.
    pub thoughts: String,
    /// Text of the answer.
    pub answer: String,
    /// The end, if it is there: nothing comes after it.
    pub end: Option<Result<Ended, ApiError>>,
}

#[derive(Default)]
struct State {
    started: bool,
    news: News,
}

/// The place of one reply.
#[derive(Default)]
pub struct Mailbox {
    state: Mutex<State>,
    changed: Notify,
    gone: AtomicBool,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The text is being worked on.
    pub fn start(&self) {
        self.lock().started = true;
        self.changed.notify_one();
    }

    /// More text.
    pub fn add(&self, channel: Channel, text: &str) {
        if text.is_empty() {
            return;
        }
        let mut state = self.lock();
        match channel {
            Channel::Thoughts => state.news.thoughts.push_str(text),
            Channel::Answer => state.news.answer.push_str(text),
        }
        drop(state);
        self.changed.notify_one();
    }

    /// The end; only the first one counts.
    pub fn end(&self, end: Result<Ended, ApiError>) {
        self.lock().news.end.get_or_insert(end);
        self.changed.notify_one();
    }

    /// Waits until the text is being worked on, or has failed before that.
    pub async fn started(&self) -> Result<(), ApiError> {
        loop {
            {
                let state = self.lock();
                match &state.news.end {
                    Some(Err(error)) => return Err(error.clone()),
                    _ if state.started => return Ok(()),
                    _ => {}
                }
            }
            self.changed.notified().await;
        }
    }

    /// Waits for news; one caller at a time.
    pub async fn news(&self) -> News {
        loop {
            {
                let mut state = self.lock();
                if state.news != News::default() {
                    return std::mem::take(&mut state.news);
                }
            }
            self.changed.notified().await;
        }
    }

    /// Waits for the end, and gives the whole text.
    pub async fn whole(&self) -> (News, Result<Ended, ApiError>) {
        let mut all = News::default();
        loop {
            let News { thoughts, answer, end } = self.news().await;
            all.thoughts.push_str(&thoughts);
            all.answer.push_str(&answer);
            if let Some(end) = end {
                return (all, end);
            }
        }
    }

    /// Nobody wants the text any more.
    pub fn leave(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Whether somebody has said so.
    pub fn gone(&self) -> &AtomicBool {
        &self.gone
    }

    /// The same, as a value.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}
