#[cfg_attr(
    not(test),
    expect(dead_code, unused_imports, reason = "wired by the command line")
)]
mod hub;
#[expect(dead_code, reason = "wired by the command line")]
mod synth;

fn main() {}
