//! Runs inside the lab's emulated host; see `lab::agent`.

use std::process::ExitCode;

fn main() -> ExitCode {
    match lab::agent::serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
