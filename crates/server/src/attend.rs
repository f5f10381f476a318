//! Signs of life for a stream whose model has to be loaded before it can begin.
//!
//! Until the first of them is due nothing is sent, as with any stream: a failure has a status of its own. From then on the
//! response is open, and what the request comes to follows in it.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt;
use tokio::{
    sync::{
        mpsc::{self, Sender},
        oneshot,
    },
    time::{sleep, timeout},
};

use crate::{
    app::App,
    body::Body,
    error::{ApiError, Dialect},
    http::{Unwound, mistake},
    stream,
};

/// Sign of life of a stream that has not begun.
pub(crate) enum Sign {
    /// A comment among server-sent events.
    Comment,
    /// A line of JSON that says nothing.
    Line(Vec<u8>),
}

impl Sign {
    fn content_type(&self) -> &'static str {
        match self {
            Sign::Comment => stream::SSE,
            Sign::Line(_) => stream::NDJSON,
        }
    }

    fn bytes(&self) -> Bytes {
        let mut out = Vec::new();
        match self {
            Sign::Comment => stream::comment(&mut out),
            Sign::Line(line) => out.extend_from_slice(line),
        }
        out.into()
    }
}

/// By which a request says that it waits for its model.
pub(crate) struct Waits(Mutex<Option<oneshot::Sender<Sign>>>);

impl Waits {
    /// And where that is heard.
    pub(crate) fn new() -> (Waits, oneshot::Receiver<Sign>) {
        let (sender, receiver) = oneshot::channel();
        (Waits(Mutex::new(Some(sender))), receiver)
    }

    pub(crate) fn begin(&self, sign: Sign) {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = sender.take() {
            // Nobody listens where the request has been given up.
            drop(sender.send(sign));
        }
    }
}

type Work = Pin<Box<dyn Future<Output = Result<Response<Body>, ApiError>> + Send>>;

/// Answers a request, with signs of life once it says that its stream waits for a model.
pub(crate) async fn attend(
    app: &Arc<App>,
    dialect: Dialect,
    waits: oneshot::Receiver<Sign>,
    mut work: Work,
) -> Result<Response<Body>, ApiError> {
    let sign = tokio::select! {
        biased;
        done = &mut work => return done,
        Ok(sign) = waits => sign,
    };
    if let Ok(done) = timeout(app.config.ping, &mut work).await {
        return done;
    }
    let (sender, pieces) = mpsc::channel(stream::AHEAD);
    // There is room for it.
    let _ = sender.try_send(sign.bytes());
    let response = stream::response(sign.content_type(), stream::pieces(pieces));
    let app = Arc::clone(app);
    tokio::spawn(async move {
        let mut work = Unwound(work);
        let done = loop {
            tokio::select! {
                done = &mut work => break done.unwrap_or_else(|| Err(mistake())),
                () = sleep(app.config.ping) => {
                    if sender.send(sign.bytes()).await.is_err() {
                        return;
                    }
                }
                () = sender.closed() => return,
            }
        };
        match done {
            Ok(response) => pass_on(response.into_body(), &sender).await,
            Err(error) => {
                error.note(&app);
                let mut out = Vec::new();
                let body = error.body(dialect, "");
                match dialect {
                    Dialect::OpenAi => stream::data(&mut out, &body),
                    Dialect::Anthropic => stream::event(&mut out, "error", &body),
                    Dialect::Ollama => stream::line(&mut out, &body),
                }
                // Whoever has left needs no reason.
                let _ = sender.send(out.into()).await;
            }
        }
    });
    Ok(response)
}

async fn pass_on(mut body: Body, sender: &Sender<Bytes>) {
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = sender.closed() => return,
        };
        let Some(Ok(frame)) = frame else {
            return;
        };
        if let Ok(bytes) = frame.into_data()
            && sender.send(bytes).await.is_err()
        {
            return;
        }
    }
}
