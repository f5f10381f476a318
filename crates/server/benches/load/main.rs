//! Load and fault tests of the server, each against its bar: `load SCENARIO [--seconds N] [--scale F] [--url URL]`.
//!
//! docs/load.md has the bars and how to read the figures. Everything stays on loopback, unless `--url` names a server.

mod scenarios;

use std::{io::Write, process::ExitCode};

use scenarios::{HOST, NAMES, Options, host, run};

fn main() -> ExitCode {
    let mut out = std::io::stdout();
    // `cargo bench` adds an argument of its own.
    let mut args = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .peekable();
    let hosts = args.next_if(|arg| arg == HOST).is_some();
    let (names, options) = match parse(args) {
        Ok(parsed) => parsed,
        Err(complaint) => {
            let usage = format!(
                "{complaint}\nusage: load SCENARIO|all [--seconds N] [--scale F] [--url http://HOST:PORT] [--lenient]\n\
                 scenarios: {}",
                NAMES.join(", ")
            );
            let _ = writeln!(std::io::stderr(), "{usage}");
            return ExitCode::from(2);
        }
    };
    if hosts {
        return host(&names[0], &options);
    }
    let mut missed = 0;
    for name in names {
        let report = run(&name, &options);
        // A reader that has gone away does not change what was missed.
        let _ = write!(out, "{report}");
        let _ = out.flush();
        missed += report.missed().len();
    }
    if missed > 0 {
        let _ = writeln!(out, "{missed} missed");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<(Vec<String>, Options), String> {
    let mut names = Vec::new();
    let mut options = Options::default();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} wants a value"));
        match arg.as_str() {
            "--seconds" => {
                let seconds: u64 = value()?.parse().map_err(|_| "--seconds wants a count")?;
                options.seconds = Some(seconds.clamp(1, 86_400));
            }
            "--scale" => {
                let scale: f64 = value()?.parse().map_err(|_| "--scale wants a number")?;
                if !(scale > 0.0 && scale <= 10.0) {
                    return Err("--scale is above 0 and at most 10".to_owned());
                }
                options.scale = Some(scale);
            }
            "--url" => {
                let url = value()?;
                let address = url.trim_start_matches("http://").trim_end_matches('/');
                let address = address
                    .parse()
                    .map_err(|_| format!("--url wants http://ADDRESS:PORT, not `{url}`"))?;
                options.url = Some(address);
            }
            "--lenient" => options.strict = false,
            "all" => names.extend(NAMES.map(str::to_owned)),
            name if NAMES.contains(&name) => names.push(arg),
            other => return Err(format!("there is no `{other}`")),
        }
    }
    if names.is_empty() {
        return Err("which scenario?".to_owned());
    }
    Ok((names, options))
}
