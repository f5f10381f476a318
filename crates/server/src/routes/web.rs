//! The page and its files: embedded as they lie in `web/`, with the rules that browsers hold them to.
//!
//! Scripts come from this server alone, no markup is made from text, and nothing is loaded from anywhere else. Functions that a
//! reader wrote for tools run in `sandbox.html`, a document without origin, storage and network.

use std::sync::LazyLock;

use http::{HeaderValue, Response, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::{
    body::Body,
    error::{ApiError, Kind},
    http::Call,
};

const PAGE_RULES: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
     frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types 'none'";
const SANDBOX_RULES: &str = "sandbox allow-scripts; default-src 'none'; script-src 'self'; worker-src blob:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'self'";

struct File {
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(File { name: $name, bytes: include_bytes!(concat!("../../web/", $name)) }),*]
    };
}

const FILES: &[File] = files![
    "index.html",
    "dashboard.html",
    "sandbox.html",
    "style.css",
    "icon.svg",
    "answer.js",
    "api.js",
    "app.js",
    "chart.js",
    "dashboard.js",
    "dom.js",
    "highlight.js",
    "inline.js",
    "list.js",
    "markdown.js",
    "message.js",
    "sandbox.js",
    "settings.js",
    "state.js",
    "store.js",
    "tools.js",
    "tree.js",
];

/// Of each file, by its content: a browser asks again and gets 304 until a newer program has another.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let tag = |file: &File| {
        let digest = Sha256::digest(file.bytes);
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        format!("\"{:016x}\"", u64::from_be_bytes(first))
    };
    FILES.iter().map(tag).collect()
});

/// `/` and `/dashboard`.
pub(super) fn page(call: &Call) -> Result<Response<Body>, ApiError> {
    match call.parts.uri.path() {
        "/dashboard" => file(call, "dashboard.html"),
        _ => file(call, "index.html"),
    }
}

/// `/web/{id}`.
pub(super) fn named(call: &Call) -> Result<Response<Body>, ApiError> {
    let path = call.parts.uri.path();
    file(call, path.strip_prefix("/web/").unwrap_or(""))
}

fn file(call: &Call, name: &str) -> Result<Response<Body>, ApiError> {
    let Some(at) = FILES.iter().position(|file| file.name == name) else {
        let shown: String = name.chars().take(80).collect();
        return Err(ApiError::new(
            Kind::UnknownRoute,
            format!("the page has no file `{}`", shown.escape_debug()),
        ));
    };
    let (file, tag) = (&FILES[at], &TAGS[at]);
    let known = call.parts.headers.get(header::IF_NONE_MATCH);
    let is_known = known
        .and_then(|tags| tags.to_str().ok())
        .is_some_and(|tags| {
            tags.split(',')
                .any(|t| t.trim().trim_start_matches("W/") == tag)
        });
    let mut response = if is_known {
        let mut response = Response::new(Body::Whole(None));
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        Body::whole(content_type(name), file.bytes)
    };
    let rules = if name == "sandbox.html" {
        SANDBOX_RULES
    } else {
        PAGE_RULES
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, rules),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(header::ETAG, tag);
    }
    Ok(response)
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    #[test]
    fn the_page_stays_light() {
        let bytes: usize = FILES.iter().map(|file| file.bytes.len()).sum();
        assert!(bytes < 120_000, "{bytes} bytes; the limit is 120 KB");
    }

    #[test]
    fn every_file_of_the_folder_is_served() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("web");
        let there: BTreeSet<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let served: BTreeSet<String> = FILES.iter().map(|file| file.name.to_owned()).collect();
        assert_eq!(there, served);
    }

    #[test]
    fn no_file_makes_markup_from_text_or_reaches_for_another_host() {
        for file in FILES {
            let text = std::str::from_utf8(file.bytes).unwrap();
            for word in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                " style=\"",
                "onclick=\"",
            ] {
                assert!(!text.contains(word), "{} has {word}", file.name);
            }
            let hosts = text.split("://").skip(1);
            let named = hosts.filter(|rest| rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
            for host in named {
                assert!(
                    host.starts_with("www.w3.org/2000/svg"),
                    "{} names the host {host:.40}",
                    file.name
                );
            }
        }
    }
}
