#[cfg_attr(
    not(test),
    expect(dead_code, unused_imports, reason = "wired by the command line")
)]
mod hub;

fn main() {}
