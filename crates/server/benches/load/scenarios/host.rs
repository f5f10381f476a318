//! A scenario's server in a process of its own, so that its memory is not its clients'.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::SocketAddr,
    process::{Child, Command, ExitCode, Stdio},
};

use super::{
    held, malformed,
    options::{Failure, Options},
    process, queued,
    server::Server,
    soak, storm,
};

/// The argument that makes this program the server of the scenario behind it.
pub(crate) const HOST: &str = "--host";

/// Serves until standard input ends. The code is 1 if anything panicked.
pub(crate) fn host(name: &str, options: &Options) -> ExitCode {
    process::count_panics();
    let server = match server(name, options) {
        Ok(server) => server,
        Err(error) => {
            let _ = writeln!(io::stderr(), "{name}: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut out = io::stdout();
    let told = writeln!(out, "{}", server.address).and_then(|()| out.flush());
    let waited = told.and_then(|()| io::stdin().read_to_end(&mut Vec::new()));
    drop(server);
    if waited.is_err() || process::panics() > 0 {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn server(name: &str, options: &Options) -> Result<Server, Failure> {
    match name {
        "held" => held::server(options),
        "malformed" => malformed::server(),
        "queued" => queued::server(options),
        "soak" => soak::server(),
        "storm" => storm::server(options),
        other => Err(format!("`{other}` has no server of its own").into()),
    }
}

/// A server in another process: one of ours, or one that runs already.
pub(super) struct Hosted {
    pub(super) address: SocketAddr,
    child: Option<Child>,
}

impl Hosted {
    pub(super) fn new(name: &str, options: &Options) -> Result<Hosted, Failure> {
        if let Some(address) = options.url {
            return Ok(Hosted {
                address,
                child: None,
            });
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.args([HOST, name]).args(options.as_args());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().ok_or("no output of the server")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        let address = line
            .trim()
            .parse()
            .map_err(|_| "the server did not start")?;
        Ok(Hosted {
            address,
            child: Some(child),
        })
    }

    /// Resident memory of the server in KiB; `None` where it is not ours or the system does not tell.
    pub(super) fn resident_kib(&self) -> Option<f64> {
        process::resident_kib(self.child.as_ref()?.id())
    }

    /// Ends the server; whether nothing in it panicked.
    pub(super) fn end(mut self) -> Result<bool, Failure> {
        let Some(mut child) = self.child.take() else {
            return Ok(true);
        };
        drop(child.stdin.take());
        Ok(child.wait()?.success())
    }
}

impl Drop for Hosted {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
