//! One request from its head to its response: route, guard, body, answer, log.

use std::{
    future::Future,
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::{
    app::App,
    ask,
    attend::{Sign, Waits, attend},
    body::Body,
    cache::CacheNote,
    elements,
    error::{ApiError, Dialect, Kind},
    guard::{self, Access},
    ids,
    models::Use,
    routes::{self, Handler, ROUTES},
};

/// Of a request's head.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;

/// A request that was let in, with its body.
pub(crate) struct Call {
    pub(crate) app: Arc<App>,
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
    pub(crate) arrived: Instant,
    pub(crate) request_id: String,
    /// Name of the key it came with.
    pub(crate) key: Option<String>,
    /// Its path in the table of routes.
    pub(crate) route: &'static str,
    /// For the head of the response.
    pub(crate) cache: CacheNote,
    waits: Waits,
}

impl Call {
    /// The model that the request names, in memory. It may have to be loaded first; a stream gives signs of life meanwhile.
    pub(crate) async fn model(
        &self,
        name: Option<&str>,
        sign: Option<Sign>,
    ) -> Result<Use, ApiError> {
        let later = || {
            if let Some(sign) = sign {
                self.waits.begin(sign);
            }
        };
        self.app.model(name, self.key.as_deref(), later).await
    }

    /// The value of a parameter after the `?`.
    pub(crate) fn query(&self, name: &str) -> Option<String> {
        let mut pairs = self.parts.uri.query()?.split('&');
        let value = pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
        Some(unescaped(value))
    }

    /// Refuses more messages than there may be, before they are read.
    pub(crate) fn check_messages(&self) -> Result<(), ApiError> {
        // An element and its comma are two bytes at least.
        if self.body.len() < 2 * ask::MAX_MESSAGES {
            return Ok(());
        }
        let messages = elements::count(&self.body, "messages");
        ask::at_most("messages", messages, ask::MAX_MESSAGES)
    }

    /// The body as JSON. What does not fit is told with its path.
    pub(crate) fn json<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        // Following the path takes several times as long as reading: it is done again for those that do not fit.
        if let Ok(value) = serde_json::from_slice(&self.body) {
            return Ok(value);
        }
        let mut reader = serde_json::Deserializer::from_slice(&self.body);
        let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
            let path = error.path().to_string();
            let message = match path.as_str() {
                "." => format!(
                    "the body is not the JSON this route takes: {}",
                    error.inner()
                ),
                path => format!("{path}: {}", error.inner()),
            };
            ApiError {
                param: (path != ".").then_some(path),
                ..ApiError::new(Kind::InvalidValue, message)
            }
        })?;
        reader.end().map_err(|error| {
            ApiError::new(
                Kind::InvalidValue,
                format!("the body goes on after its JSON: {error}"),
            )
        })?;
        Ok(value)
    }
}

/// Answers a request.
pub async fn handle<B>(app: Arc<App>, request: Request<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let request_id = request_id(&parts.headers);
    let path = parts.uri.path().to_owned();
    let method = parts.method.clone();
    let dialect = Dialect::of_path(&path);
    let origin = parts.headers.get(header::ORIGIN).cloned();
    let route = routes::find(&method, &path);
    let number = match &route {
        Ok(number) => *number,
        Err(_) => ROUTES.len(),
    };
    let cache = CacheNote::default();
    let its = (request_id.as_str(), cache.clone());
    let respond = pin!(respond(&app, parts, body, route, arrived, its));
    let answered = Unwound(respond).await.unwrap_or_else(|| Err(mistake()));
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(request = request_id, error = error.message, "refused");
            error.note(&app);
            error.response(dialect, &request_id)
        }
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&request_id) {
        headers.insert("x-request-id", id.clone());
        headers.insert("request-id", id);
    }
    if let Some(told) = cache.header() {
        headers.insert("x-carat-cache", told);
    }
    if let Some(key) = cache.affinity_header() {
        headers.insert("x-carat-prefix", key);
    }
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    if let Some(origin) = origin
        && origin
            .to_str()
            .is_ok_and(|origin| guard::allowed_origin(&app.config, origin))
    {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("Origin"));
        let exposed =
            "x-request-id, request-id, retry-after, x-carat-ignored, x-carat-cache, x-carat-prefix";
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static(exposed),
        );
    }
    app.metrics.answered(number, response.status());
    tracing::info!(
        request = request_id,
        method = %method,
        route = ROUTES.get(number).map_or("other", |route| route.path),
        status = response.status().as_u16(),
        millis = arrived.elapsed().as_millis() as u64,
        "answered"
    );
    response
}

async fn respond<B>(
    app: &Arc<App>,
    parts: Parts,
    body: B,
    route: Result<usize, Vec<Method>>,
    arrived: Instant,
    (request_id, cache): (&str, CacheNote),
) -> Result<Response<Body>, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    head_size(&parts)?;
    let access = route.as_ref().map_or(Access::Public, |n| ROUTES[*n].access);
    let key = guard::check(&app.config, &parts, access)?;
    if parts.method == Method::OPTIONS {
        return Ok(preflight());
    }
    let route = match route {
        Ok(number) => &ROUTES[number],
        Err(others) => return wrong_route(&parts, &others),
    };
    let takes_body = parts.method == Method::POST;
    let body = if takes_body && !matches!(route.handler, Handler::NotBuilt) {
        media_type(&parts)?;
        read(app, &parts, body).await?
    } else {
        Bytes::new()
    };
    let (waits, waiting) = Waits::new();
    let dialect = Dialect::of_path(parts.uri.path());
    let call = Call {
        app: Arc::clone(app),
        waits,
        parts,
        body,
        arrived,
        request_id: request_id.to_owned(),
        key,
        route: route.path,
        cache,
    };
    let work = Box::pin(routes::dispatch(route.handler, call));
    attend(app, dialect, waiting, work).await
}

/// The reader of heads stops at one buffer more than its limit; this is the limit itself.
fn head_size(parts: &Parts) -> Result<(), ApiError> {
    let lines = parts.headers.iter();
    let headers: usize = lines
        .map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum();
    let path = parts
        .uri
        .path_and_query()
        .map_or(0, |path| path.as_str().len());
    let bytes = headers + path;
    if bytes <= MAX_HEAD_BYTES {
        return Ok(());
    }
    Err(ApiError::new(
        Kind::HeadTooLarge,
        format!("the request's head has {bytes} bytes; at most {MAX_HEAD_BYTES} are taken"),
    ))
}

fn wrong_route(parts: &Parts, others: &[Method]) -> Result<Response<Body>, ApiError> {
    let path: String = parts.uri.path().chars().take(128).collect();
    let path = path.escape_debug();
    if others.is_empty() {
        return Err(ApiError::new(
            Kind::UnknownRoute,
            format!("there is no `{path}` here; GET /openapi.json lists what there is"),
        ));
    }
    let list: Vec<&str> = others.iter().map(Method::as_str).collect();
    Err(ApiError::new(
        Kind::WrongMethod,
        format!("`{path}` takes {}, not {}", list.join(" or "), parts.method),
    ))
}

/// Only pages of allowed origins get this far with an `Origin`; [`handle`] adds which it was.
fn preflight() -> Response<Body> {
    let mut response = Response::new(Body::Whole(None));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, OPTIONS");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let allowed = HeaderValue::from_static(
        "authorization, content-type, x-api-key, api-key, anthropic-version, anthropic-beta, x-request-id",
    );
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    let seconds = HeaderValue::from_static("600");
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, seconds);
    response
}

fn media_type(parts: &Parts) -> Result<(), ApiError> {
    let Some(given) = parts.headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let given = given.to_str().unwrap_or("");
    let kind = given
        .split(';')
        .next()
        .unwrap_or("")
        .trim()
        .to_ascii_lowercase();
    // What `curl -d` says if nobody tells it otherwise; Ollama's own documentation leaves it so.
    let is_curl = kind == "application/x-www-form-urlencoded"
        && Dialect::of_path(parts.uri.path()) == Dialect::Ollama;
    if kind == "application/json" || kind.ends_with("+json") || is_curl {
        return Ok(());
    }
    let shown: String = given.chars().take(80).collect();
    Err(ApiError::new(
        Kind::MediaType,
        format!(
            "a body of type `{}`; send JSON, with the header `Content-Type: application/json`",
            shown.escape_debug()
        ),
    ))
}

/// The whole body, if it comes in time and is no larger than allowed.
async fn read<B>(app: &App, parts: &Parts, body: B) -> Result<Bytes, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let most = app.config.max_body;
    let too_large = || {
        ApiError::new(
            Kind::BodyTooLarge,
            format!("the body is larger than {most} bytes, the most that is taken (--max-body)"),
        )
    };
    let length = parts.headers.get(header::CONTENT_LENGTH);
    let length: Option<u64> = length.and_then(|l| l.to_str().ok()?.parse().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_large());
    }
    let collected = Limited::new(body, most).collect();
    match tokio::time::timeout(app.config.body_timeout, collected).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(ApiError::new(
            Kind::InvalidValue,
            format!("the body broke off: {error}"),
        )),
        Err(_) => Err(ApiError::new(
            Kind::InvalidValue,
            format!(
                "the body did not arrive within {} s",
                app.config.body_timeout.as_secs()
            ),
        )),
    }
}

/// The client's name for the request, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let usable =
        |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic());
    given
        .filter(usable)
        .map_or_else(|| ids::id("req_"), str::to_owned)
}

/// Text with its `%20`s read; what is no such escape stays as it is.
pub(crate) fn unescaped(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = text.get(at + 1..at + 3).filter(|digits| {
            bytes[at] == b'%' && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        });
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        out.push(escaped.unwrap_or(bytes[at]));
        at += if escaped.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A future that gives `None` if it panics.
pub(crate) struct Unwound<F>(pub(crate) F);

impl<F: Future + Unpin> Future for Unwound<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let future = &mut self.0;
        match std::panic::catch_unwind(AssertUnwindSafe(|| Pin::new(future).poll(context))) {
            Ok(Poll::Ready(value)) => Poll::Ready(Some(value)),
            Ok(Poll::Pending) => Poll::Pending,
            Err(_) => Poll::Ready(None),
        }
    }
}

/// The error that a client hears of a panic.
pub(crate) fn mistake() -> ApiError {
    ApiError::new(
        Kind::EngineFailed,
        "this request ran into a mistake in the server; its log says more",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_read_and_nothing_else() {
        for (text, read) in [
            ("a%20b%3Dc", "a b=c"),
            ("%c3%a9", "\u{e9}"),
            ("100%", "100%"),
            ("%zz%+1%2", "%zz%+1%2"),
            ("\u{e9}%", "\u{e9}%"),
        ] {
            assert_eq!(unescaped(text), read);
        }
    }
}
