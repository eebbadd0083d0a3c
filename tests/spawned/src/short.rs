//! A child process that ends by itself, or is killed at a time limit.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::program::PATIENCE;

/// Returns a command for `program` with these arguments, in this folder, without the test's own log
/// filter.
pub fn command<S: AsRef<str>>(program: &str, folder: &Path, args: &[S]) -> Command {
    let mut command = Command::new(program);
    command.args(args.iter().map(AsRef::as_ref));
    command.current_dir(folder).env_remove("RUST_LOG");
    command.stdin(Stdio::null());
    command
}

/// Result of a program's run.
#[derive(Debug)]
pub struct RunResult {
    /// Exit status; `None`: killed by a signal.
    pub status: Option<i32>,
    /// Its standard output.
    pub output: String,
    /// Its standard error.
    pub error: String,
}

/// Starts the command with pipes for its outputs.
pub fn start(command: &mut Command) -> Child {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Runs `program` with these arguments, in this folder, until it ends.
pub fn run<S: AsRef<str>>(program: &str, folder: &Path, args: &[S]) -> RunResult {
    end(start(&mut command(program, folder, args)))
}

/// Waits for the child's end. A child that exceeds the time limit is killed; its status is `None`.
pub fn end(mut child: Child) -> RunResult {
    fn read(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut from) = from {
                from.read_to_end(&mut bytes).unwrap();
            }
            bytes
        })
    }
    let (output, error) = (read(child.stdout.take()), read(child.stderr.take()));
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text =
        |read: JoinHandle<Vec<u8>>| String::from_utf8_lossy(&read.join().unwrap()).into_owned();
    RunResult {
        status,
        output: text(output),
        error: text(error),
    }
}
