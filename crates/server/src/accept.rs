//! Connections: accepted while there is room, cut off where they stall, ended in order.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
    time::Duration,
};

use http::Request;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Runtime,
    sync::{Semaphore, watch},
    time::{Instant, Sleep, sleep},
};

use crate::{
    app::App,
    http::{MAX_HEAD_BYTES, handle},
    memory,
    metrics::Metrics,
};

/// Of a request's head.
const MAX_HEADERS: usize = 100;
/// What the system holds for a client that does not read. It would give megabytes to each: so many minutes pass before a stream
/// that nobody reads is noticed, and a thousand of them take the machine's memory.
const SEND_BUFFER: usize = 64 << 10;
/// Connections that may wait to be accepted; systems have a limit of their own. A crowd that comes at once is more than the usual
/// 128 or 1024, and who finds no place there may find the connection cut after it has asked.
const BACKLOG: u32 = 4096;
/// A listener that fails (no file descriptors left) is asked again after this.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Threads to serve on: so many for connections, and others that come and go for what takes a core for a while.
pub fn runtime(threads: usize) -> io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("carat-io")
        .thread_keep_alive(memory::THREAD_STAYS)
        .enable_all()
        .build()
}

/// Listens for connections. Must be called on a runtime.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Who starts again need not wait for connections of the last run to be forgotten. On Windows it would let two listen.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Accepts connections until `stop` says so, then lets requests under way end, for as long as the configuration allows.
pub async fn serve(app: Arc<App>, listener: TcpListener, stop: impl Future<Output = ()>) {
    let room = Arc::new(Semaphore::new(app.config.max_connections));
    let (closing, closed) = watch::channel(());
    let mut stop = std::pin::pin!(stop);
    let tidying = tokio::spawn(memory::tidy(Arc::clone(&app)));
    loop {
        let accepted = async {
            let permit = Arc::clone(&room).acquire_owned().await;
            (listener.accept().await, permit)
        };
        let (accepted, permit) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let app = Arc::clone(&app);
        let mut closed = closed.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let connection = connection(&app, stream);
            let mut connection = std::pin::pin!(connection);
            let result = tokio::select! {
                result = connection.as_mut() => result,
                _ = closed.changed() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = result {
                tracing::debug!(%error, "a connection ended badly");
            }
        });
    }
    drop(listener);
    tidying.abort();
    app.drain();
    // Connections without a request end at once, the others with theirs.
    let _ = closing.send(());
    let all = u32::try_from(app.config.max_connections).unwrap_or(u32::MAX);
    let ended = tokio::time::timeout(app.config.drain, room.acquire_many(all)).await;
    if ended.is_err() {
        tracing::warn!(
            seconds = app.config.drain.as_secs(),
            "some requests did not end in time; they are cut off"
        );
    }
}

type Connection<S> = http1::Connection<TokioIo<Watched>, S>;

fn connection(
    app: &Arc<App>,
    stream: TcpStream,
) -> Connection<
    impl hyper::service::Service<
        Request<Incoming>,
        Response = http::Response<crate::Body>,
        Error = std::convert::Infallible,
        Future: Send,
    > + use<>,
> {
    // Tokens are small and wanted at once. Both fail only where the connection has.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER);
    let its_app = Arc::clone(app);
    let service = service_fn(move |request| {
        let app = Arc::clone(&its_app);
        async move { Ok(handle(app, request).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(app.config.header_timeout)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(
            TokioIo::new(Watched {
                stream,
                limit: app.config.write_timeout,
                stalled: None,
                metrics: Arc::clone(&app.metrics),
            }),
            service,
        )
}

/// A connection that fails when its reader takes nothing for too long.
struct Watched {
    stream: TcpStream,
    limit: Duration,
    /// Since a write had to wait.
    stalled: Option<Pin<Box<Sleep>>>,
    metrics: Arc<Metrics>,
}

impl Watched {
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.limit;
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        if stalled.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        self.metrics.slow_clients.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read its answer",
        )))
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, buffer);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
