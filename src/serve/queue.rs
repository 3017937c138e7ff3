//! The way from connections to the one thread that decodes: one text at work, a bounded number behind it. Requests whose client has
//! gone give up their place. Once closed it takes nothing and tells whoever waits.

use super::error::ApiError;
use super::mailbox::Mailbox;
use crate::decode::sampler::SamplerOptions;
use crate::model::reply::ReplyReader;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Seconds after which a client is told to try again.
const RETRY_AFTER_S: u64 = 1;

/// One text to generate.
pub struct Job {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_new: usize,
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Takes thoughts and answer apart.
    pub reply: ReplyReader,
    /// Which parameter the prompt is, for errors.
    pub param: &'static str,
    /// Where the reply goes.
    pub mailbox: Arc<Mailbox>,
    /// When it was asked for.
    pub asked: Instant,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: Option<Arc<Mailbox>>,
    closed: bool,
}

impl State {
    fn forget_gone(&mut self) {
        self.waiting.retain(|job| !job.mailbox.is_gone());
    }
}

/// The queue.
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    capacity: usize,
}

impl Queue {
    /// At most `capacity` requests wait while one is at work.
    pub fn new(capacity: usize) -> Self {
        Self { state: Mutex::default(), changed: Condvar::new(), capacity }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a request behind the others.
    ///
    /// # Errors
    /// 429 when as many wait as may, 503 once closed.
    pub fn push(&self, job: Job) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state.closed {
            return Err(ApiError::shutting_down());
        }
        state.forget_gone();
        // the first one to wait behind nobody is about to be taken
        let room = self.capacity + usize::from(state.running.is_none());
        if state.waiting.len() >= room {
            return Err(ApiError::queue_full(state.waiting.len(), RETRY_AFTER_S));
        }
        state.waiting.push_back(job);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// The next request, once the one before is over; `None` when the queue is closed. Waits.
    pub fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        state.running = None;
        loop {
            state.forget_gone();
            if let Some(job) = state.waiting.pop_front() {
                state.running = Some(Arc::clone(&job.mailbox));
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes nothing more, and tells whoever waits that nothing will come. What is at work goes on.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for job in state.waiting.drain(..) {
            job.mailbox.end(Err(ApiError::shutting_down()));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Gives up what is at work, within a token.
    pub fn give_up(&self) {
        if let Some(mailbox) = &self.lock().running {
            mailbox.end(Err(ApiError::shutting_down()));
            mailbox.leave();
        }
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Requests that wait, and whether one is at work.
    pub fn depth(&self) -> (usize, bool) {
        let mut state = self.lock();
        state.forget_gone();
        (state.waiting.len(), state.running.is_some())
    }

    /// Requests that may wait.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}
