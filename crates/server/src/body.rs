//! Bodies of responses: bytes that are there, or pieces as they come.

use std::{
    convert::Infallible,
    future::poll_fn,
    mem,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_core::Stream;
use http::{HeaderValue, Response, header};
use http_body::{Frame, SizeHint};
use serde::Serialize;

/// A response's body.
pub enum Body {
    /// All of it; `None` when it has been sent.
    Whole(Option<Bytes>),
    /// Piece by piece. Dropping it ends whatever makes the pieces.
    Pieces(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl Body {
    /// A response of a type.
    pub(crate) fn response(content_type: &'static str, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        let content_type = HeaderValue::from_static(content_type);
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, content_type);
        response
    }

    /// Pieces that a future hands over; it goes on when the next is wanted, and is dropped with the body.
    pub(crate) fn made<F>(maker: impl FnOnce(Hand) -> F) -> Body
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let hand = Arc::<Mutex<Option<Bytes>>>::default();
        let maker = Box::pin(maker(Hand(Arc::clone(&hand))));
        Body::Pieces(Box::pin(Made {
            maker: Some(maker),
            hand,
        }))
    }

    pub(crate) fn whole(content_type: &'static str, bytes: impl Into<Bytes>) -> Response<Body> {
        Body::response(content_type, Body::Whole(Some(bytes.into())))
    }

    pub(crate) fn json(value: &impl Serialize) -> Response<Body> {
        let bytes = serde_json::to_vec(value).expect("values made here have JSON");
        Body::whole("application/json", bytes)
    }
}

/// The piece that is handed over, on its way from the maker of a body to its reader.
pub(crate) struct Hand(Arc<Mutex<Option<Bytes>>>);

impl Hand {
    /// Hands a piece over, and waits until the next is wanted.
    pub(crate) async fn give(&self, piece: Vec<u8>) {
        *lock(&self.0) = Some(piece.into());
        let mut given = false;
        poll_fn(|_| {
            if mem::replace(&mut given, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

fn lock(hand: &Mutex<Option<Bytes>>) -> MutexGuard<'_, Option<Bytes>> {
    hand.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A maker until it has ended, and its hand.
struct Made {
    maker: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    hand: Arc<Mutex<Option<Bytes>>>,
}

impl Stream for Made {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some(maker) = &mut self.maker else {
            return Poll::Ready(None);
        };
        let made = maker.as_mut().poll(context);
        if made.is_ready() {
            self.maker = None;
        }
        match lock(&self.hand).take() {
            Some(piece) => Poll::Ready(Some(piece)),
            None => made.map(|()| None),
        }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Body::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Body::Pieces(stream) => stream
                .as_mut()
                .poll_next(context)
                .map(|piece| piece.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Body::Pieces(_) => SizeHint::default(),
        }
    }
}
