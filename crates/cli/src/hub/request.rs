//! One request and what becomes of it: redirects, repetitions, and words for what cannot be reached.
//!
//! Redirects are followed here rather than by `ureq`, for two reasons: the description of a large file stands in the
//! headers of the redirect itself, and the token must go to the hub and to nobody else. Busy answers and broken
//! connections are tried again a few times; what cannot be reached at all fails at once.

use std::{io, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use ureq::{
    Body,
    http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header},
};

use super::{
    endpoint::{Address, Endpoint},
    names::RepoId,
    progress::{Progress, Watch, pause},
};

const MAX_REDIRECTS: usize = 5;
/// No server may make the user wait longer than this between two attempts.
const MAX_WAIT: Duration = Duration::from_mins(1);

/// Identifies a large file's content, on the redirect that leads to it.
pub(super) const LINKED_ETAG: &str = "x-linked-etag";

/// Number of times a request is sent before giving up, and the first pause; each further one doubles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retry {
    pub(crate) attempts: u32,
    pub(crate) first_wait: Duration,
}

impl Default for Retry {
    fn default() -> Retry {
        Retry {
            attempts: 5,
            first_wait: Duration::from_secs(1),
        }
    }
}

impl Retry {
    /// The pause after the attempt numbered from zero.
    pub(super) fn wait(self, attempt: u32) -> Duration {
        self.first_wait
            .saturating_mul(1 << attempt.min(16))
            .min(MAX_WAIT)
    }
}

/// Sends requests to one hub.
pub(super) struct Sender {
    agent: ureq::Agent,
    endpoint: Endpoint,
    authorization: Option<HeaderValue>,
    retry: Retry,
}

pub(super) struct Query<'a> {
    /// For messages.
    pub(super) repo: &'a RepoId,
    pub(super) method: Method,
    pub(super) address: Address,
    /// First byte wanted.
    pub(super) from: u64,
}

/// Reason a request has no answer.
enum Unanswered {
    Transport { origin: String, error: ureq::Error },
    BadRedirect(anyhow::Error),
}

impl Sender {
    pub(super) fn new(endpoint: Endpoint, token: Option<&str>, retry: Retry) -> Result<Sender> {
        let authorization = token
            .map(|token| HeaderValue::from_str(&format!("Bearer {token}")))
            .transpose()
            .context("the hub token holds characters no token has; check HF_TOKEN")?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        let config = ureq::Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("carat/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(Duration::from_secs(15)))
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_mins(1)))
            .timeout_per_read(Some(Duration::from_mins(1)));
        let config = if endpoint.is_loopback() {
            config.proxy(None) // a proxy has its own idea of what "this machine" is
        } else {
            config
        };
        Ok(Sender {
            agent: config.build().into(),
            endpoint,
            authorization,
            retry,
        })
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    pub(super) fn retry(&self) -> Retry {
        self.retry
    }

    pub(super) fn has_token(&self) -> bool {
        self.authorization.is_some()
    }

    /// Sends a request until it is answered by something other than "later".
    pub(super) fn send(&self, query: &Query<'_>, watch: &mut Watch<'_>) -> Result<Response<Body>> {
        let mut attempt = 0;
        loop {
            let (reason, asked) = match self.follow(query) {
                Ok(response) if is_busy(response.status()) => {
                    let asked = text(response.headers(), header::RETRY_AFTER.as_str())
                        .and_then(|seconds| seconds.parse().ok())
                        .map(Duration::from_secs);
                    (
                        format!("{} answered {}", self.endpoint, response.status()),
                        asked,
                    )
                }
                Ok(response) => return Ok(response),
                Err(Unanswered::BadRedirect(error)) => return Err(error),
                Err(Unanswered::Transport { origin, error }) if is_unreachable(&error) => bail!(
                    "could not reach {origin} ({}): this machine seems to be offline; copy the model file here and pass \
                     its path with -m, or set HF_HUB_CACHE to a cache that already holds hf:{}",
                    plain(&error),
                    query.repo
                ),
                Err(Unanswered::Transport { origin, error }) => {
                    let reason = format!("the connection to {origin} failed ({})", plain(&error));
                    if !is_passing(&error) {
                        bail!("{reason}");
                    }
                    (reason, None)
                }
            };
            attempt += 1;
            if attempt >= self.retry.attempts {
                bail!("{reason}, {attempt} times in a row; try again later");
            }
            let wait = asked.unwrap_or(self.retry.wait(attempt - 1)).min(MAX_WAIT);
            pause(
                wait,
                Progress::Retrying {
                    reason: &reason,
                    wait,
                },
                watch,
            )?;
        }
    }

    /// Sends one request and follows where it leads.
    fn follow(&self, query: &Query<'_>) -> Result<Response<Body>, Unanswered> {
        let mut address = query.address.clone();
        for _ in 0..=MAX_REDIRECTS {
            let transport = |error| Unanswered::Transport {
                origin: address.origin(),
                error,
            };
            let mut request = Request::builder()
                .method(&query.method)
                .uri(address.uri())
                // Compressed transfer would make sizes and ranges mean something else.
                .header(header::ACCEPT_ENCODING, "identity");
            if query.from > 0 {
                request = request.header(header::RANGE, format!("bytes={}-", query.from));
            }
            if let Some(value) = self
                .authorization
                .as_ref()
                .filter(|_| self.endpoint.owns(&address))
            {
                request = request.header(header::AUTHORIZATION, value);
            }
            let request = request.body(()).map_err(|error| transport(error.into()))?;
            let response = self.agent.run(request).map_err(transport)?;
            let described =
                query.method == Method::HEAD && response.headers().contains_key(LINKED_ETAG);
            if !response.status().is_redirection() || described {
                return Ok(response);
            }
            address = text(response.headers(), header::LOCATION.as_str())
                .with_context(|| format!("{} redirects to nowhere", address.origin()))
                .and_then(|location| self.endpoint.redirect(&address, location))
                .map_err(Unanswered::BadRedirect)?;
        }
        Err(Unanswered::BadRedirect(anyhow!(
            "{} redirects in circles",
            self.endpoint
        )))
    }
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Answers that mean "later".
fn is_busy(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

/// No connection came about, which a second attempt will not change.
fn is_unreachable(error: &ureq::Error) -> bool {
    use io::ErrorKind::{
        AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkDown, NetworkUnreachable,
    };
    match error {
        ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => true,
        ureq::Error::Io(error) => {
            matches!(
                error.kind(),
                ConnectionRefused
                    | NetworkUnreachable
                    | HostUnreachable
                    | NetworkDown
                    | AddrNotAvailable
            ) || error.to_string().contains("failed to lookup address") // std gives failed lookups no kind
        }
        _ => false,
    }
}

/// A connection broke that may well hold next time.
fn is_passing(error: &ureq::Error) -> bool {
    match error {
        // What TLS refuses, a wrong certificate above all, arrives as invalid data.
        ureq::Error::Io(error) => error.kind() != io::ErrorKind::InvalidData,
        ureq::Error::Timeout(_) => true,
        _ => false,
    }
}

/// An error without the prefix `ureq` puts before those of the system.
fn plain(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute() {
        let waits = [0, 1, 2, 5, 6, 100].map(|attempt| Retry::default().wait(attempt).as_secs());
        assert_eq!(waits, [1, 2, 4, 32, 60, 60]);
    }

    #[test]
    fn failures_are_told_apart() {
        let lookup =
            io::Error::other("failed to lookup address information: Name or service not known");
        let io = |kind: io::ErrorKind| ureq::Error::Io(kind.into());
        let cases = [
            (ureq::Error::Io(lookup), true, true),
            (io(io::ErrorKind::ConnectionRefused), true, true),
            (ureq::Error::Timeout(ureq::Timeout::Connect), true, true),
            (io(io::ErrorKind::ConnectionReset), false, true),
            (ureq::Error::Timeout(ureq::Timeout::PerRead), false, true),
            (io(io::ErrorKind::InvalidData), false, false),
            (ureq::Error::Tls("no"), false, false),
        ];
        for (error, unreachable, passing) in cases {
            assert_eq!(is_unreachable(&error), unreachable, "{error}");
            assert_eq!(is_passing(&error), passing, "{error}");
        }
    }
}
