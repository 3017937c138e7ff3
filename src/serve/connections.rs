//! Open connections: how many there may be, and how long a client may take over its part. Beyond their number a client is told to
//! come again; one that sends half a request, or does not take its reply, is cut off. Knows no route and no model.
//!
//! The times of a connection follow from what it waits for. Only who serves requests knows when one has come whole and when its
//! reply is out, and says so ([`Caller::serving`]); everything else is seen where bytes pass.

use super::error::ApiError;
use axum::body::{Body, Bytes};
use axum::extract::connect_info::Connected;
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

/// Longest time in which a client takes nothing of a reply that waits for it.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time for somebody who is turned away to take in why.
const FAREWELL: Duration = Duration::from_secs(2);
/// How many are told why at once; beyond that their connection just ends.
const FAREWELLS: usize = 64;
/// Seconds after which they may try again.
const RETRY_AFTER_S: u64 = 1;

/// Bounds of connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most that are open.
    pub most: usize,
    /// Longest time for a request's head to come, and again for its body.
    pub request: Duration,
    /// How long a connection stays open between two requests.
    pub keep_alive: Duration,
}

/// All connections.
pub struct Connections {
    limits: Limits,
    places: Arc<Semaphore>,
    refused: AtomicU64,
    late: [AtomicU64; Late::ALL.len()],
}

/// What a client was too slow with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// Sending a request's head.
    Head,
    /// Sending its body.
    Body,
    /// Taking the reply.
    Reply,
}

impl Late {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Head, Self::Body, Self::Reply];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Body => "body",
            Self::Reply => "reply",
        }
    }
}

impl Connections {
    /// None yet.
    pub fn new(limits: Limits) -> Self {
        let places = Arc::new(Semaphore::new(limits.most));
        Self { limits, places, refused: AtomicU64::new(0), late: Default::default() }
    }

    /// The bounds.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Open now.
    pub fn open(&self) -> usize {
        self.limits.most - self.places.available_permits()
    }

    /// Turned away because as many were open as may be.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Cut off because the client was too slow with this.
    pub fn late(&self, what: Late) -> u64 {
        self.late[what as usize].load(Ordering::Relaxed)
    }

    /// A client was too slow.
    pub fn note(&self, what: Late) {
        self.late[what as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// What a connection waits for, and since when.
#[derive(Clone, Copy, Debug)]
enum Waits {
    /// The first byte of the first request.
    First(Instant),
    /// The rest of a request's head.
    Head(Instant),
    /// Its reply, or the body that comes before it.
    Reply,
    /// The first byte of another request.
    Next(Instant),
}

impl Waits {
    /// When it has waited too long.
    fn until(self, limits: &Limits) -> Option<Instant> {
        match self {
            Self::First(since) | Self::Head(since) => since.checked_add(limits.request),
            Self::Next(since) => since.checked_add(limits.keep_alive),
            Self::Reply => None,
        }
    }
}

/// What the two ends of a connection's handling know of it together.
#[derive(Clone)]
pub struct Caller(Arc<Mutex<Waits>>);

impl Caller {
    fn waits(&self) -> MutexGuard<'_, Waits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request's head is there; what is returned is dropped when its reply is out.
    pub fn serving(&self) -> Serving {
        *self.waits() = Waits::Reply;
        Serving(self.clone())
    }

    /// Bytes have come.
    fn heard(&self) {
        let mut waits = self.waits();
        match *waits {
            Waits::First(since) => *waits = Waits::Head(since),
            Waits::Next(_) => *waits = Waits::Head(Instant::now()),
            Waits::Head(_) | Waits::Reply => {}
        }
    }
}

impl Connected<IncomingStream<'_, Gate>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Gate>) -> Self {
        stream.io().caller.clone()
    }
}

/// A request that is being served.
pub struct Serving(Caller);

impl Serving {
    /// The same reply, whose end is the end of serving.
    pub fn until_sent(self, reply: Response) -> Response {
        reply.map(|body| Body::new(Watched { body, _serving: self }))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        *self.0.waits() = Waits::Next(Instant::now());
    }
}

/// A reply's body on its way.
struct Watched {
    body: Body,
    _serving: Serving,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Where clients come in.
pub struct Gate {
    listener: TcpListener,
    all: Arc<Connections>,
    farewells: Arc<Semaphore>,
}

impl Gate {
    /// Lets in as many as `all` allows.
    pub fn new(listener: TcpListener, all: Arc<Connections>) -> Self {
        Self { listener, all, farewells: Arc::new(Semaphore::new(FAREWELLS)) }
    }
}

impl Listener for Gate {
    type Io = Line;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Line, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let _ = stream.set_nodelay(true); // a token is sent when it is there
            if let Ok(place) = Arc::clone(&self.all.places).try_acquire_owned() {
                return (Line::new(stream, Arc::clone(&self.all), place), address);
            }
            self.all.refused.fetch_add(1, Ordering::Relaxed);
            if let Ok(farewell) = Arc::clone(&self.farewells).try_acquire_owned() {
                let reply = ApiError::too_many_connections(self.all.limits.most, RETRY_AFTER_S).whole_reply();
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(FAREWELL, turn_away(stream, &reply)).await;
                    drop(farewell);
                });
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// Sends `reply`, ends the connection, and waits until the client has done so too: one that is dropped with bytes unread takes back
/// what was sent.
async fn turn_away(mut stream: TcpStream, reply: &[u8]) -> io::Result<()> {
    stream.writable().await?;
    stream.try_write(reply)?;
    poll_fn(|cx| Pin::new(&mut stream).poll_shutdown(cx)).await?;
    let mut unread = [0; 4096];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut unread) {
            Ok(0) => return Ok(()),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
            Ok(_) | Err(_) => {}
        }
    }
}

/// A connection that is watched.
pub struct Line {
    stream: TcpStream,
    caller: Caller,
    all: Arc<Connections>,
    /// Wakes when the client has taken too long to send, and to take.
    sends: Timer,
    takes: Timer,
    /// Since when it has taken nothing.
    stuck: Option<Instant>,
    _place: OwnedSemaphorePermit,
}

impl Line {
    fn new(stream: TcpStream, all: Arc<Connections>, place: OwnedSemaphorePermit) -> Self {
        let caller = Caller(Arc::new(Mutex::new(Waits::First(Instant::now()))));
        Self { stream, caller, all, sends: Timer(None), takes: Timer(None), stuck: None, _place: place }
    }

    /// What comes of a write: one that waits for too long has failed.
    fn wrote(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if done.is_ready() {
            self.stuck = None;
            return done;
        }
        let since = *self.stuck.get_or_insert_with(Instant::now);
        ready!(self.takes.poll(cx, since + SEND_TIMEOUT));
        self.all.note(Late::Reply);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Line {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buf.filled().len();
        if let Poll::Ready(done) = Pin::new(&mut this.stream).poll_read(cx, buf) {
            if buf.filled().len() > before {
                this.caller.heard();
            }
            return Poll::Ready(done);
        }
        let waits = *this.caller.waits();
        let Some(until) = waits.until(&this.all.limits) else { return Poll::Pending };
        ready!(this.sends.poll(cx, until));
        if let Waits::Head(_) = waits {
            this.all.note(Late::Head);
            // no request is being served, so that nothing is between two pieces unless an earlier reply waits
            if this.stuck.is_none() {
                let _ = this.stream.try_write(&ApiError::late("head").whole_reply());
            }
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Poll::Ready(Ok(())) // as if the client had ended it
    }
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(cx, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A moment that somebody waits for; which one may change.
struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    fn poll(&mut self, cx: &mut Context<'_>, until: Instant) -> Poll<()> {
        let sleep = self.0.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if sleep.deadline() != until {
            sleep.as_mut().reset(until);
        }
        sleep.as_mut().poll(cx)
    }
}
