//! Access checks: by name of the host, by origin of the page, by key.
//!
//! The host is checked on every request, so that no web page reaches a local server by a name it made point here. The origin is
//! checked on every method, because a form's POST needs no preflight.

use http::{HeaderMap, Method, header, request::Parts};

use crate::{
    config::{self, Config},
    error::{ApiError, Kind},
};

/// Access that a route asks of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Anybody who passes the host check.
    Public,
    /// A key, where there are keys.
    Keyed,
    /// A key, unless the operator shows metrics to all.
    Metrics,
}

/// Lets a request in, with the name of its key, or says why not.
pub(crate) fn check(
    config: &Config,
    parts: &Parts,
    access: Access,
) -> Result<Option<String>, ApiError> {
    host(config, parts)?;
    origin(config, parts)?;
    let needs_key = match access {
        Access::Public => false,
        Access::Keyed => true,
        Access::Metrics => !config.metrics_public,
    };
    if !needs_key || config.keys.is_empty() || parts.method == Method::OPTIONS {
        return Ok(None);
    }
    let Some(given) = key(&parts.headers) else {
        return Err(ApiError::new(
            Kind::WrongKey,
            "this server wants a key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        ));
    };
    match config::find(&config.keys, given) {
        Some(key) => Ok(Some(key.name().to_owned())),
        None => Err(ApiError::new(
            Kind::WrongKey,
            "the key is none of this server's",
        )),
    }
}

fn key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer
        .or_else(|| text("x-api-key"))
        .or_else(|| text("api-key"))
}

fn host(config: &Config, parts: &Parts) -> Result<(), ApiError> {
    let given = parts.headers.get_all(header::HOST);
    let mut given = given.iter().map(|value| value.to_str().unwrap_or(""));
    let host = match (given.next(), given.next(), parts.uri.authority()) {
        (Some(host), None, _) => host,
        (None, _, Some(authority)) => authority.as_str(),
        _ => "",
    };
    let name = host_name(host);
    let is_allowed = name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback() || is_bound(config, ip))
        || config
            .allowed_hosts
            .iter()
            .any(|allowed| allowed.eq_ignore_ascii_case(name));
    if is_allowed {
        return Ok(());
    }
    let shown: String = host.chars().take(80).collect();
    Err(ApiError::new(
        Kind::Forbidden,
        format!(
            "this server is not known as `{}`; start it with --allow-host to make it so",
            shown.escape_debug()
        ),
    ))
}

/// A server bound to all addresses is reached by any of them; by an address only, which no web page can choose.
fn is_bound(config: &Config, ip: std::net::IpAddr) -> bool {
    config
        .bound
        .is_some_and(|bound| bound == ip || bound.is_unspecified())
}

/// Without port and brackets.
fn host_name(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or("");
    }
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    }
}

fn origin(config: &Config, parts: &Parts) -> Result<(), ApiError> {
    let Some(origin) = parts.headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let origin = origin.to_str().unwrap_or("");
    if allowed_origin(config, origin) {
        return Ok(());
    }
    let host = parts
        .headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok());
    let same = origin
        .split_once("://")
        .is_some_and(|(scheme, rest)| matches!(scheme, "http" | "https") && Some(rest) == host);
    if same {
        return Ok(());
    }
    let shown: String = origin.chars().take(80).collect();
    Err(ApiError::new(
        Kind::Forbidden,
        format!(
            "pages of `{}` may not ask here; start the server with --cors-origin to allow them",
            shown.escape_debug()
        ),
    ))
}

pub(crate) fn allowed_origin(config: &Config, origin: &str) -> bool {
    config.cors_origins.iter().any(|allowed| allowed == origin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    fn parts(headers: &[(&'static str, &str)]) -> Parts {
        let mut request = http::Request::builder().uri("/v1/models");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn verdict(config: &Config, headers: &[(&'static str, &str)]) -> Result<Option<String>, Kind> {
        check(config, &parts(headers), Access::Keyed).map_err(|error| error.kind)
    }

    #[test]
    fn only_names_of_this_machine_are_hosts() {
        let mut config = Config::default();
        for host in [
            "localhost",
            "localhost:8080",
            "LOCALHOST",
            "127.0.0.1:1",
            "127.8.9.1",
            "[::1]:80",
        ] {
            assert_eq!(verdict(&config, &[("host", host)]), Ok(None), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "192.168.0.9:8080",
            "",
            "[::2]",
            "127.0.0.1.nip.io",
        ] {
            assert_eq!(
                verdict(&config, &[("host", host)]),
                Err(Kind::Forbidden),
                "{host}"
            );
        }
        assert_eq!(verdict(&config, &[]), Err(Kind::Forbidden));
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(verdict(&config, &two), Err(Kind::Forbidden));
        config.allowed_hosts.push("llm.example".to_owned());
        config.bound = Some([192, 168, 0, 9].into());
        for host in ["llm.example:8080", "192.168.0.9:8080"] {
            assert_eq!(verdict(&config, &[("host", host)]), Ok(None), "{host}");
        }
    }

    #[test]
    fn pages_of_other_origins_may_not_ask() {
        let mut config = Config::default();
        let with = |origin| [("host", "localhost:8080"), ("origin", origin)];
        assert_eq!(verdict(&config, &with("http://localhost:8080")), Ok(None));
        for origin in [
            "http://localhost:3000",
            "https://evil.example",
            "null",
            "file://localhost:8080",
        ] {
            assert_eq!(
                verdict(&config, &with(origin)),
                Err(Kind::Forbidden),
                "{origin}"
            );
        }
        config.cors_origins.push("http://localhost:3000".to_owned());
        assert_eq!(verdict(&config, &with("http://localhost:3000")), Ok(None));
    }

    #[test]
    fn keys_open_by_any_of_three_headers() {
        let config = Config {
            keys: vec![
                Key::parse("alice=wonderland").unwrap(),
                Key::parse("bob=builders1").unwrap(),
            ],
            ..Config::default()
        };
        let with = |name, value| verdict(&config, &[("host", "localhost"), (name, value)]);
        for (name, value) in [
            ("authorization", "Bearer wonderland"),
            ("authorization", "bearer  wonderland"),
            ("x-api-key", "wonderland"),
            ("api-key", "wonderland"),
        ] {
            assert_eq!(with(name, value), Ok(Some("alice".to_owned())), "{name}");
        }
        assert_eq!(with("x-api-key", "builders1"), Ok(Some("bob".to_owned())));
        for (name, value) in [
            ("authorization", "Basic wonderland"),
            ("authorization", "Bearer wonderlan"),
            ("x-api-key", ""),
            ("accept", "wonderland"),
        ] {
            assert_eq!(with(name, value), Err(Kind::WrongKey), "{name}: {value}");
        }
    }
}
