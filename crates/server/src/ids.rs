//! Random names for requests, answers and calls.

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const LENGTH: usize = 24;

/// `prefix` and 24 random characters.
pub(crate) fn id(prefix: &str) -> String {
    let mut bytes = [0u8; LENGTH];
    fill(&mut bytes);
    let characters = bytes.iter().map(|b| ALPHABET[*b as usize % 62] as char);
    prefix.chars().chain(characters).collect()
}

/// A seed that nobody gave. Within what JSON readers hold exactly, so that it can be given back.
pub(crate) fn seed() -> u64 {
    let mut bytes = [0u8; 8];
    fill(&mut bytes);
    u64::from_le_bytes(bytes) >> 11
}

fn fill(bytes: &mut [u8]) {
    // A machine without randomness is too broken to serve; ids that repeat harm nobody, though.
    if getrandom::fill(bytes).is_err() {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |t| t.as_nanos());
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = (now >> (n % 16)) as u8;
        }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |t| t.as_secs())
}
