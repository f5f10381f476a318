//! Bodies of responses: bytes that are there, or pieces as they come.

use std::{
    convert::Infallible,
    pin::Pin,
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

    pub(crate) fn whole(content_type: &'static str, bytes: impl Into<Bytes>) -> Response<Body> {
        Body::response(content_type, Body::Whole(Some(bytes.into())))
    }

    pub(crate) fn json(value: &impl Serialize) -> Response<Body> {
        let bytes = serde_json::to_vec(value).expect("values made here have JSON");
        Body::whole("application/json", bytes)
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
