//! A model behind an HTTP interface that clients of a well-known API speak: `/v1/models`, `/v1/completions`, `/v1/chat/completions`,
//! with metrics and a page for people beside it. One thread decodes, one text after the other; another one, with an event loop, talks to clients. They
//! meet in a bounded queue and in a mailbox for each reply. Builds no session itself and prints nothing.

pub mod connections;
pub mod dashboard;
pub mod error;
pub mod fields;
pub mod fine;
pub mod guard;
pub mod histogram;
pub mod live;
pub mod mailbox;
pub mod metrics;
pub mod queue;
pub mod reply;
pub mod request;
pub mod routes;
pub mod stop;
pub mod worker;

use crate::bench::config::RunConfig;
use crate::bench::turns::{Turns, TurnsError, draft_of};
use crate::drive::spec::DriveSpec;
use crate::layout::plan::Plan;
use crate::model::chat::{ChatError, ChatTemplate};
use crate::open::Model;
use connections::{Caller, Connections, Gate, Limits};
use live::Live;
use metrics::Metrics;
use queue::Queue;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Threads of the event loop that tokenise.
const TOKENISERS: usize = 2;
/// Time beyond the drain timeout for connections to take what was sent.
const LAST_BYTES: Duration = Duration::from_secs(2);
/// Exit code of a process that a second signal ends at once.
const INTERRUPTED: i32 = 130;

/// A server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address.
    #[error("--listen {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Anybody could use it.
    #[error(
        "--listen {0}: whoever reaches this address could use the model; give --api-key-file, or --no-key-needed if that is meant"
    )]
    Exposed(SocketAddr),
    /// A flag without effect.
    #[error("--no-key-needed does nothing {0}; leave it out")]
    Idle(&'static str),
    /// The model, its drives or its draft model.
    #[error(transparent)]
    Turns(#[from] TurnsError),
    /// The chat form.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The event loop.
    #[error("the server's event loop: {0}")]
    Loop(#[source] io::Error),
}

/// How a server is reached, and its bounds.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where it listens; port 0 = a free one.
    pub listen: SocketAddr,
    /// The key that requests must carry.
    pub key: Option<Vec<u8>>,
    /// Listen beyond loopback without one.
    pub no_key_needed: bool,
    /// Requests that may wait while one is at work.
    pub queue: usize,
    /// Texts that are kept to be gone on with.
    pub sessions: usize,
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// Bounds of connections.
    pub connections: Limits,
    /// How long a text may go on after the server was told to end.
    pub drain: Duration,
    /// The model's name for clients.
    pub name: String,
    /// The seed for requests without one; `None` = another one for each.
    pub seed: Option<u64>,
    /// The folder with past runs that the page shows.
    pub results: PathBuf,
}

/// Who is told what a server does.
pub struct Told<'a> {
    /// Its address, once requests are taken.
    pub ready: &'a mut dyn FnMut(SocketAddr),
    /// What went wrong with a text.
    pub complain: &'a mut dyn FnMut(&str),
}

/// What both threads see.
pub struct Shared {
    model: Arc<Model>,
    template: Option<ChatTemplate>,
    config: RunConfig,
    queue: Queue,
    connections: Arc<Connections>,
    metrics: Metrics,
    live: Live,
    key: Option<Vec<u8>>,
    loopback: bool,
    max_body: usize,
    name: String,
    seed: Option<u64>,
    results: PathBuf,
    sessions: usize,
    created: u64,
    fingerprint: String,
    replies: AtomicU64,
}

/// Takes the address, before anything else takes time.
///
/// # Errors
/// An address that is taken or not ours; one beyond loopback without a key.
pub fn listen(options: &ServeOptions) -> Result<TcpListener, ServeError> {
    let address = options.listen;
    match (address.ip().is_loopback(), options.key.is_some(), options.no_key_needed) {
        (false, false, false) => return Err(ServeError::Exposed(address)),
        (true, _, true) => return Err(ServeError::Idle("on loopback")),
        (false, true, true) => return Err(ServeError::Idle("with --api-key-file")),
        _ => {}
    }
    TcpListener::bind(address).map_err(|source| ServeError::Listen { address, source })
}

/// Serves until SIGINT or SIGTERM. `streamed` is the plan and where its drives are.
///
/// # Errors
/// Whatever keeps it from starting.
pub fn serve(
    listener: TcpListener,
    options: ServeOptions,
    model: &Arc<Model>,
    mut config: RunConfig,
    streamed: Option<&(Plan, Vec<DriveSpec>)>,
    told: Told<'_>,
) -> Result<(), ServeError> {
    (config.reader.trace_barriers, config.reader.trace_reads) = (live::BARRIERS_BETWEEN, live::READS_BETWEEN);
    let template = match model.chat() {
        Ok(template) => Some(template),
        Err(ChatError::NoTemplate { .. }) => None,
        Err(e) => return Err(e.into()),
    };
    let draft = draft_of(model, &config)?;
    let mut turns = Turns::open(model, &config, draft.as_ref(), streamed, options.sessions)?;
    let address = listener.local_addr().map_err(ServeError::Loop)?;
    let isa = model.decoder.isa();
    let shared = Arc::new(Shared {
        model: Arc::clone(model),
        template,
        config: config.clone(),
        queue: Queue::new(options.queue),
        connections: Arc::new(Connections::new(options.connections)),
        metrics: Metrics::default(),
        live: Live::new(turns.handle(), turns.clock()),
        key: options.key,
        loopback: address.ip().is_loopback(),
        max_body: options.max_body,
        name: options.name,
        seed: options.seed,
        results: options.results,
        sessions: options.sessions,
        created: std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
        fingerprint: format!("fp_{:.16}_{isa}", model.manifest.model_id),
        replies: AtomicU64::new(0),
    });
    let (of_loop, drain) = (Arc::clone(&shared), options.drain);
    let clients = turns.beside(|| {
        std::thread::Builder::new().name("http".into()).spawn(move || {
            let _closing = Closing(&of_loop.queue);
            talk(listener, &of_loop, drain)
        })
    });
    let clients = clients.map_err(ServeError::Loop)?;
    (told.ready)(address);
    worker::work(&mut turns, &model.tokenizer, &shared.queue, &shared.metrics, told.complain);
    match clients.join() {
        Ok(ended) => ended.map_err(ServeError::Loop),
        Err(_) => Err(ServeError::Loop(io::Error::other("it panicked"))),
    }
}

/// However the event loop ends, nobody will ask for more.
struct Closing<'a>(&'a Queue);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Talks to clients until a signal comes, and then until they have what they wait for.
fn talk(listener: TcpListener, shared: &Arc<Shared>, drain: Duration) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(TOKENISERS).build()?;
    let result = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        tokio::spawn(look(Arc::clone(shared)));
        let (told, mut closing) = tokio::sync::watch::channel(false);
        let of_signals = Arc::clone(shared);
        tokio::spawn(async move {
            let mut wait = async || {
                futures_util::future::select(Box::pin(interrupt.recv()), Box::pin(terminate.recv())).await;
            };
            wait().await;
            of_signals.queue.close();
            let _ = told.send(true);
            wait().await;
            std::process::exit(INTERRUPTED);
        });
        let mut also_closing = closing.clone();
        let of_drain = Arc::clone(shared);
        let bounded = async move {
            let _ = also_closing.wait_for(|closing| *closing).await;
            tokio::time::sleep(drain).await;
            of_drain.queue.give_up();
            tokio::time::sleep(LAST_BYTES).await;
        };
        let graceful = async move {
            let _ = closing.wait_for(|closing| *closing).await;
        };
        let gate = Gate::new(listener, Arc::clone(&shared.connections));
        let service = routes::router(Arc::clone(shared)).into_make_service_with_connect_info::<Caller>();
        let served = axum::serve(gate, service).with_graceful_shutdown(graceful);
        match futures_util::future::select(Box::pin(served.into_future()), Box::pin(bounded)).await {
            futures_util::future::Either::Left((served, _)) => served,
            futures_util::future::Either::Right(_) => Ok(()),
        }
    });
    runtime.shutdown_background();
    result
}

/// Looks at drives and barriers as long as the event loop runs.
async fn look(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(live::TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        shared.live.tick(shared.metrics.tokens());
    }
}
