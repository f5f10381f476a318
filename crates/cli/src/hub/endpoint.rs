//! Addresses: the hub's base address, what lies below it, and where it may send us.
//!
//! Everything travels over https. The exception is a hub on this very machine (a mirror, or a test), which may speak
//! http and redirect to http on this machine only.

use std::{fmt, net::IpAddr};

use anyhow::{Context, Result, bail, ensure};
use ureq::http::{Uri, uri::Scheme};

/// The public hub.
pub(crate) const PUBLIC_HUB: &str = "https://huggingface.co";

/// A hub to ask, by base address.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    base: Address,
    /// As given, without a slash at the end.
    text: String,
}

/// An absolute address with a scheme and a host.
#[derive(Clone, Debug)]
pub(super) struct Address(Uri);

impl Address {
    fn new(text: &str) -> Result<Address> {
        let uri: Uri = text
            .parse()
            .with_context(|| format!("{text:?} is not an address"))?;
        ensure!(
            uri.scheme().is_some() && uri.authority().is_some(),
            "{text:?} is not a full address"
        );
        Ok(Address(uri))
    }

    pub(super) fn uri(&self) -> &Uri {
        &self.0
    }

    /// Scheme, host and port: what may be shown of an address whose query is a signature.
    pub(super) fn origin(&self) -> String {
        let (scheme, authority) = (self.0.scheme_str(), self.0.authority());
        format!(
            "{}://{}",
            scheme.unwrap_or_default(),
            authority.map_or("", |authority| authority.as_str())
        )
    }

    fn is_https(&self) -> bool {
        self.0.scheme() == Some(&Scheme::HTTPS)
    }

    fn is_loopback_http(&self) -> bool {
        let host = self.0.host().unwrap_or_default();
        let this_machine = host == "localhost"
            || host
                .trim_matches(['[', ']'])
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback());
        self.0.scheme() == Some(&Scheme::HTTP) && this_machine
    }
}

impl Endpoint {
    pub(crate) fn new(base: &str) -> Result<Endpoint> {
        let text = base.trim_end_matches('/');
        let base = Address::new(text)?;
        ensure!(
            base.is_https() || base.is_loopback_http(),
            "the hub address {text} must begin with https://"
        );
        Ok(Endpoint {
            base,
            text: text.to_owned(),
        })
    }

    pub(super) fn is_loopback(&self) -> bool {
        self.base.is_loopback_http()
    }

    /// Whether an address belongs to the hub itself, so that the token may go there.
    pub(super) fn owns(&self, address: &Address) -> bool {
        address.origin().eq_ignore_ascii_case(&self.base.origin())
    }

    /// The address of a path below the base; its parts are joined by slashes and escaped.
    pub(super) fn join(&self, parts: &[&str]) -> Address {
        let mut text = self.text.clone();
        for part in parts {
            text.push('/');
            for byte in part.bytes() {
                if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                    text.push(char::from(byte));
                } else {
                    text.push('%');
                    text.extend(
                        [byte >> 4, byte & 15]
                            .map(|digit| char::from(b"0123456789ABCDEF"[digit as usize])),
                    );
                }
            }
        }
        Address::new(&text).expect("an escaped path below a valid base is valid")
    }

    /// The target of a redirect from `from`, if it may be followed.
    pub(super) fn redirect(&self, from: &Address, location: &str) -> Result<Address> {
        let target = if location.starts_with("//") {
            let scheme = from.uri().scheme_str().unwrap_or("https");
            Address::new(&format!("{scheme}:{location}"))?
        } else if location.starts_with('/') {
            Address::new(&format!("{}{location}", from.origin()))?
        } else {
            Address::new(location)
                .with_context(|| format!("{} redirects somewhere odd", from.origin()))?
        };
        if target.is_https() || (self.is_loopback() && target.is_loopback_http()) {
            return Ok(target);
        }
        bail!(
            "{self} redirects to {}, which is not https; refusing to follow",
            target.origin()
        )
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_may_speak_http() {
        for good in [
            PUBLIC_HUB,
            "https://mirror.example/hf/",
            "http://127.0.0.1:80",
            "http://[::1]:1",
            "http://localhost",
        ] {
            assert!(Endpoint::new(good).is_ok(), "{good}");
        }
        for bad in [
            "http://example.org",
            "ftp://127.0.0.1",
            "huggingface.co",
            "",
            "http://127.0.0.1.example.org",
        ] {
            assert!(Endpoint::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_are_escaped() {
        let endpoint = Endpoint::new("https://h/base/").unwrap();
        let address = endpoint.join(&["o/r", "resolve", "abc", "a b#ü?.gguf"]);
        assert_eq!(
            address.uri().to_string(),
            "https://h/base/o/r/resolve/abc/a%20b%23%C3%BC%3F.gguf"
        );
    }

    #[test]
    fn redirects_stay_on_https() {
        let endpoint = Endpoint::new("https://h").unwrap();
        let from = endpoint.join(&["x"]);
        let to = |location: &str| {
            endpoint
                .redirect(&from, location)
                .map(|address| address.uri().to_string())
        };
        assert_eq!(to("/y?z").unwrap(), "https://h/y?z");
        assert_eq!(to("//cdn/y").unwrap(), "https://cdn/y");
        assert_eq!(to("https://cdn/y").unwrap(), "https://cdn/y");
        for bad in [
            "http://h/y",
            "http://127.0.0.1/y",
            "y",
            "file:///etc/passwd",
            "",
        ] {
            assert!(to(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_token_belongs_to_one_origin() {
        let endpoint = Endpoint::new("https://h").unwrap();
        let owns = |address: &str| endpoint.owns(&Address::new(address).unwrap());
        assert!(owns("https://h/x") && owns("https://H/x"));
        assert!(
            !owns("https://h:444/x")
                && !owns("http://h/x")
                && !owns("https://h.evil/x")
                && !owns("https://h@evil/x")
        );
    }
}
