//! Table of routes, and their handlers.

mod chat;
mod completions;
mod health;
mod messages;
mod models;
mod ollama;
mod raw;
mod responses;
#[cfg(test)]
mod samples;
mod stats;
mod text;
mod web;
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

/// Handler of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    ChatCompletions,
    Completions,
    Responses,
    Messages,
    CountTokens,
    OllamaChat,
    OllamaGenerate,
    OllamaTags,
    OllamaShow,
    OllamaPs,
    OllamaVersion,
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
    Page,
    PageFile,
    Stats,
    Requests,
    CancelRequest,
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
        row(Method::POST, "/v1/responses", Keyed, Handler::Responses),
        row(Method::POST, "/v1/messages", Keyed, Handler::Messages),
        row(
            Method::POST,
            "/v1/messages/count_tokens",
            Keyed,
            Handler::CountTokens,
        ),
        row(Method::POST, "/api/chat", Keyed, Handler::OllamaChat),
        row(
            Method::POST,
            "/api/generate",
            Keyed,
            Handler::OllamaGenerate,
        ),
        row(Method::GET, "/api/tags", Keyed, Handler::OllamaTags),
        row(Method::POST, "/api/show", Keyed, Handler::OllamaShow),
        row(Method::GET, "/api/ps", Keyed, Handler::OllamaPs),
        row(Method::GET, "/api/version", Keyed, Handler::OllamaVersion),
        row(Method::POST, "/api/embed", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/embeddings", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/pull", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/push", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/create", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/copy", Keyed, Handler::NotBuilt),
        row(Method::DELETE, "/api/delete", Keyed, Handler::NotBuilt),
        row(Method::POST, "/api/blobs/{id}", Keyed, Handler::NotBuilt),
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
        row(Method::GET, "/", Public, Handler::Page),
        row(Method::GET, "/dashboard", Public, Handler::Page),
        row(Method::GET, "/web/{id}", Public, Handler::PageFile),
        row(Method::GET, "/internal/stats", Keyed, Handler::Stats),
        row(Method::GET, "/internal/requests", Keyed, Handler::Requests),
        row(
            Method::DELETE,
            "/internal/requests/{id}",
            Keyed,
            Handler::CancelRequest,
        ),
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
        // Ollama's clients look with it for what they would send.
        let has_head = route.method == Method::GET || route.handler == Handler::NotBuilt;
        if route.method == *method || (*method == Method::HEAD && has_head) {
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
        Handler::Responses => responses::create(call).await,
        Handler::Messages => messages::create(call).await,
        Handler::CountTokens => messages::count_tokens(call).await,
        Handler::OllamaChat => ollama::chat(call).await,
        Handler::OllamaGenerate => ollama::generate(call).await,
        Handler::OllamaTags => ollama::tags(&call),
        Handler::OllamaShow => ollama::show(&call),
        Handler::OllamaPs => ollama::ps(&call),
        Handler::OllamaVersion => Ok(ollama::version()),
        Handler::Models => models::list(&call),
        Handler::Model => models::one(&call),
        Handler::Tokenize => text::tokenize(call).await,
        Handler::Detokenize => text::detokenize(call).await,
        Handler::TokenizerInfo => text::info(call).await,
        Handler::ApplyTemplate => text::apply_template(call).await,
        Handler::Props => models::props(&call),
        Handler::Slots => models::slots(&call),
        Handler::Health => Ok(health::health(&call)),
        Handler::Ready => health::ready(&call),
        Handler::Metrics => Ok(health::metrics(&call)),
        Handler::OpenApi => Ok(Body::whole("application/json", OPENAPI)),
        Handler::Page => web::page(&call),
        Handler::PageFile => web::named(&call),
        Handler::Stats => Ok(stats::stats(&call)),
        Handler::Requests => Ok(stats::requests(&call)),
        Handler::CancelRequest => stats::cancel(&call),
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn the_description_lists_the_routes_and_no_others() {
        let described: Value = serde_json::from_str(OPENAPI).unwrap();
        let described: BTreeSet<(String, String)> = described["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, item)| {
                let methods = item.as_object().unwrap().keys();
                methods.map(|method| (path.clone(), method.to_uppercase()))
            })
            .collect();
        let routes: BTreeSet<(String, String)> = ROUTES
            .iter()
            .map(|route| (route.path.to_owned(), route.method.to_string()))
            .collect();
        assert_eq!(described, routes);
    }

    #[test]
    fn a_path_has_one_row_since_it_names_a_series_of_the_metrics() {
        let paths: BTreeSet<&str> = ROUTES.iter().map(|route| route.path).collect();
        assert_eq!(paths.len(), ROUTES.len());
    }
}
