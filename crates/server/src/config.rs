//! Settings of an operator.

use std::{net::IpAddr, time::Duration};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Of a server. [`Config::default`] serves this machine alone, without keys.
#[derive(Clone, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "switches of an operator, one flag each"
)]
pub struct Config {
    /// Keys that may ask; everybody who reaches the server where there is none.
    pub keys: Vec<Key>,
    /// Addresses the server is bound to: their names in `Host` are right.
    pub bound: Option<IpAddr>,
    /// Further names by which clients reach the server.
    pub allowed_hosts: Vec<String>,
    /// Web pages of other origins that may ask.
    pub cors_origins: Vec<String>,
    /// Parties that take turns.
    pub lanes: Lanes,
    /// Answers of a lane that may wait to be started; `None` leaves it to the queue's length where there may be several lanes, and
    /// sets no limit where there is one.
    pub lane_queue: Option<usize>,
    /// Whether those with different keys continue from each other's prompts: faster, but timing then tells what others asked.
    pub share_prefixes: bool,
    /// Whether a request for another model is refused.
    pub strict_model: bool,
    /// Whether tool calls are held to their schemas while they are generated.
    pub tool_grammar: bool,
    /// Prefix of the names of metrics.
    pub metrics_prefix: String,
    /// Whether `/metrics` is shown without a key.
    pub metrics_public: bool,
    /// The largest body of a request.
    pub max_body: usize,
    /// The longest a body may take to arrive.
    pub body_timeout: Duration,
    /// The longest a request's head may take to arrive.
    pub header_timeout: Duration,
    /// The longest a client may take no byte of an answer that waits for it.
    pub write_timeout: Duration,
    /// The most connections at a time; more wait to be accepted.
    pub max_connections: usize,
    /// Silence after which a stream says that it is alive.
    pub ping: Duration,
    /// The longest a request may wait to be started; `None` lets it.
    pub queue_timeout: Option<Duration>,
    /// The longest a request may take; `None` lets it.
    pub request_timeout: Option<Duration>,
    /// Time that requests under way have at the end.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            keys: Vec::new(),
            bound: None,
            allowed_hosts: Vec::new(),
            cors_origins: Vec::new(),
            lanes: Lanes::Key,
            lane_queue: None,
            share_prefixes: false,
            strict_model: false,
            tool_grammar: true,
            metrics_prefix: "carat:".to_owned(),
            metrics_public: false,
            max_body: 32 << 20,
            body_timeout: Duration::from_secs(30),
            header_timeout: Duration::from_secs(10),
            write_timeout: Duration::from_mins(1),
            max_connections: 4096,
            ping: Duration::from_secs(10),
            queue_timeout: Some(Duration::from_mins(2)),
            request_timeout: None,
            drain: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// Whether requests may be in different lanes.
    pub(crate) fn has_lanes(&self) -> bool {
        self.lanes == Lanes::User || self.keys.len() > 1
    }
}

/// By what requests are sorted into lanes, which are served in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lanes {
    /// The key they came with.
    #[default]
    Key,
    /// The user they say they are from, else the key.
    User,
}

/// Somebody who may ask. The key itself is not kept.
#[derive(Clone)]
pub struct Key {
    name: String,
    digest: [u8; 32],
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({})", self.name)
    }
}

impl Key {
    /// `NAME=KEY`, or a key alone.
    pub fn parse(text: &str) -> Result<Key, String> {
        let (name, key) = text.split_once('=').unwrap_or(("default", text));
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
            return Err(
                "the name before `=` must be 1 to 64 letters, digits, `_`, `-` or `.`".to_owned(),
            );
        }
        if key.len() < 8 || !key.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(format!(
                "the key of `{name}` must be at least 8 visible ASCII characters"
            ));
        }
        Ok(Key {
            name: name.to_owned(),
            digest: Sha256::digest(key.as_bytes()).into(),
        })
    }

    /// Name of its owner.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Finds the key that was given. Takes as long for a wrong one as for a right one.
pub(crate) fn find<'a>(keys: &'a [Key], given: &str) -> Option<&'a Key> {
    let digest: [u8; 32] = Sha256::digest(given.as_bytes()).into();
    let mut found = None;
    for key in keys {
        if bool::from(key.digest.ct_eq(&digest)) {
            found = Some(key);
        }
    }
    found
}
