//! What can be asked for, and who answers it.

mod chat;
mod completions;
mod health;
mod models;
mod text;
mod wire;

use http::{Method, Response};

use crate::{
    body::Body,
    error::{ApiError, Kind},
    guard::Access,
    http::Call,
};

/// A row of the table.
pub(crate) struct Route {
    pub(crate) method: Method,
    /// A last segment of `{id}` stands for anything but nothing.
    pub(crate) path: &'static str,
    pub(crate) access: Access,
    pub(crate) handler: Handler,
}

/// Whose work it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    ChatCompletions,
    Completions,
    Models,
    Model,
    Tokenize,
    Detokenize,
    TokenizerInfo,
    ApplyTemplate,
    Props,
    Slots,
    Health,
    Ready,
    Metrics,
    OpenApi,
    /// Known to clients, and not built.
    NotBuilt,
}

const fn row(method: Method, path: &'static str, access: Access, handler: Handler) -> Route {
    Route {
        method,
        path,
        access,
        handler,
    }
}

/// All of them, in the order of the documentation.
pub(crate) const ROUTES: &[Route] = {
    use Access::{Keyed, Metrics, Public};
    &[
        row(
            Method::POST,
            "/v1/chat/completions",
            Keyed,
            Handler::ChatCompletions,
        ),
        row(Method::POST, "/v1/completions", Keyed, Handler::Completions),
        row(Method::GET, "/v1/models", Keyed, Handler::Models),
        row(Method::GET, "/models", Keyed, Handler::Models),
        row(Method::GET, "/v1/models/{id}", Keyed, Handler::Model),
        row(Method::POST, "/v1/embeddings", Keyed, Handler::NotBuilt),
        row(Method::POST, "/tokenize", Keyed, Handler::Tokenize),
        row(Method::POST, "/detokenize", Keyed, Handler::Detokenize),
        row(
            Method::GET,
            "/tokenizer_info",
            Keyed,
            Handler::TokenizerInfo,
        ),
        row(
            Method::POST,
            "/apply-template",
            Keyed,
            Handler::ApplyTemplate,
        ),
        row(Method::GET, "/props", Keyed, Handler::Props),
        row(Method::GET, "/slots", Keyed, Handler::Slots),
        row(Method::GET, "/health", Public, Handler::Health),
        row(Method::GET, "/v1/health", Public, Handler::Health),
        row(Method::GET, "/ready", Public, Handler::Ready),
        row(Method::GET, "/metrics", Metrics, Handler::Metrics),
        row(Method::GET, "/openapi.json", Public, Handler::OpenApi),
    ]
};

/// The number of the route, or the methods that the path takes instead: none if there is no such path.
pub(crate) fn find(method: &Method, path: &str) -> Result<usize, Vec<Method>> {
    let mut others = Vec::new();
    for (number, route) in ROUTES.iter().enumerate() {
        let matches = match route.path.strip_suffix("{id}") {
            Some(start) => path.strip_prefix(start).is_some_and(|id| !id.is_empty()),
            None => path == route.path,
        };
        if !matches {
            continue;
        }
        if route.method == *method || (*method == Method::HEAD && route.method == Method::GET) {
            return Ok(number);
        }
        if *method == Method::OPTIONS {
            return Ok(number);
        }
        others.push(route.method.clone());
    }
    Err(others)
}

pub(crate) async fn dispatch(handler: Handler, call: Call) -> Result<Response<Body>, ApiError> {
    match handler {
        Handler::ChatCompletions => chat::completions(call).await,
        Handler::Completions => completions::completions(call).await,
        Handler::Models => models::list(&call),
        Handler::Model => models::one(&call),
        Handler::Tokenize => text::tokenize(call).await,
        Handler::Detokenize => text::detokenize(call).await,
        Handler::TokenizerInfo => text::info(&call),
        Handler::ApplyTemplate => text::apply_template(call).await,
        Handler::Props => models::props(&call),
        Handler::Slots => models::slots(&call),
        Handler::Health => Ok(health::health(&call)),
        Handler::Ready => health::ready(&call),
        Handler::Metrics => Ok(health::metrics(&call)),
        Handler::OpenApi => Ok(Body::whole("application/json", OPENAPI)),
        Handler::NotBuilt => Err(ApiError::new(
            Kind::NotSupported,
            format!(
                "`{}` is not built: this server generates text and has no vectors or model files to give",
                call.parts.uri.path()
            ),
        )),
    }
}

/// Written by hand; a test holds it against the table.
const OPENAPI: &str = include_str!("openapi.json");
