//! Connections: accepting them, their limits, and their end.

use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use russet_engine::Engine;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::app::{App, router};
use crate::{Error, ServerOptions};

/// How long a client may take to send the head of a request, and to stay without one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the head of a request that are buffered before it is complete; with what one read brings, twice as many.
const HEAD_BYTES: usize = 32 << 10;
/// Lines of the head of a request.
const HEADERS: usize = 100;
/// How often the engine is asked whether it runs.
const WATCH: Duration = Duration::from_millis(100);
/// How long connections may take to write their last answers once the engine has stopped.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `shutdown` is ready. Requests that run then may finish until the options' `shutdown_timeout` is over;
/// what remains is cut.
///
/// # Errors
/// When the socket can't be used, and when the engine stops by itself; requests are answered with that error then.
pub async fn serve(
    listener: TcpListener,
    engine: Arc<Engine>,
    options: ServerOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    listener.set_nonblocking(true).map_err(Error::Socket)?;
    let listener = tokio::net::TcpListener::from_std(listener).map_err(Error::Socket)?;
    let app = Arc::new(App::new(engine, options));
    let router = router(app.clone());
    let most = app.options.max_connections.clamp(1, u16::MAX.into());
    let places = Arc::new(Semaphore::new(most));
    let (closing, _) = watch::channel(false);
    let mut shutdown = pin!(shutdown);

    let stopped = loop {
        let accepted = async {
            // The semaphore is never closed; who waits for a place waits in the system's queue.
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        tokio::select! {
            () = &mut shutdown => break None,
            reason = engine_stops(&app.engine) => break Some(reason),
            (place, accepted) = accepted => match (place, accepted) {
                (Ok(place), Ok((stream, _))) => {
                    let timeout = app.options.write_timeout;
                    tokio::spawn(connection(stream, timeout, router.clone(), place, closing.subscribe()));
                }
                (_, Err(error)) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    // Without file handles the next attempt fails at once too.
                    sleep(WATCH).await;
                }
                (Err(_), Ok(_)) => {}
            },
        }
    };

    drop(listener);
    app.stop();
    tracing::info!(reason = stopped.as_deref().unwrap_or("told to"), "shutting down");
    // Tells connections to end after the answer they are at.
    closing.send_replace(true);
    let deadline = Instant::now() + app.options.shutdown_timeout;
    let engine = app.engine.clone();
    if let Err(error) = tokio::task::spawn_blocking(move || engine.stop(deadline)).await {
        tracing::error!(%error, "the engine did not stop in order");
    }
    // All places are free once all connections have ended.
    if timeout(LAST_WORDS, places.acquire_many(most as u32)).await.is_err() {
        tracing::warn!("some connections were cut");
    }
    stopped.map_or(Ok(()), |reason| Err(Error::Engine(reason)))
}

/// Why the engine stopped, once it has.
async fn engine_stops(engine: &Engine) -> String {
    loop {
        if let Some(reason) = engine.status().stopped {
            return reason;
        }
        sleep(WATCH).await;
    }
}

async fn connection(
    stream: TcpStream,
    write_timeout: Duration,
    router: Router,
    place: OwnedSemaphorePermit,
    mut closing: watch::Receiver<bool>,
) {
    // Tokens go out one by one. It is only slower if that fails.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    // A client that reads nothing must not hold its place for ever.
    stream.set_write_timeout(Some(write_timeout));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(HEADERS)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = async { drop(closing.wait_for(|closing| *closing).await) } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
    drop(place);
}
