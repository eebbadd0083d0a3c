//! Hosts that forbid or lack what `serve` and `run` use of the kernel, one thing at a time:
//! docs/host-interfaces.md as a test. Each is done in another way, which real requests then show,
//! or not offered, or refused with an advice that works.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod both;
mod device;
#[expect(dead_code, reason = "shared with tests that need more of it")]
#[path = "../ends/program.rs"]
mod program;
mod run;
mod serve;
#[expect(dead_code, reason = "shared with tests that need more of it")]
#[path = "../requests/storage.rs"]
mod storage;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use denied::Denied;

use program::PATIENCE;

/// The two ways in which hosts deny a call: a filter, and a kernel without the call.
const EITHER: [i32; 2] = [libc::EPERM, libc::ENOSYS];

/// Outcome of a program whose host denies something.
#[derive(Clone, Copy)]
enum Outcome {
    /// It works. If the denial matters, it prints this once.
    Works(Option<&'static str>),
    /// It refuses in one line with these words. With the other arguments, as the line advises, it
    /// works; `None`: the advice is for the host.
    Refuses(&'static [&'static str], Option<&'static [&'static str]>),
}

/// A host.
struct Host {
    name: &'static str,
    denied: fn(i32) -> Denied,
    /// Arguments that need what is denied.
    arguments: &'static [&'static str],
    outcome: Outcome,
}

/// A host where this is denied, and a program that needs it no more than ever.
fn host(name: &'static str, denied: fn(i32) -> Denied, outcome: Outcome) -> Host {
    host_with(name, denied, &[], outcome)
}

/// Likewise, and a program with arguments that need it.
fn host_with(
    name: &'static str,
    denied: fn(i32) -> Denied,
    arguments: &'static [&'static str],
    outcome: Outcome,
) -> Host {
    Host {
        name,
        denied,
        arguments,
        outcome,
    }
}

impl Host {
    /// Checks the output of a program that worked: it must have what it has to print. Lines with
    /// `always` are printed anyway.
    fn check_said(&self, said: &str, always: &str) -> Result<(), String> {
        let Outcome::Works(word) = &self.outcome else {
            return Ok(());
        };
        let lines: Vec<_> = said
            .lines()
            .filter(|line| !line.is_empty() && !line.contains(always))
            .collect();
        match (word, lines.as_slice()) {
            (None, []) => Ok(()),
            (Some(word), [line]) if line.contains(word) => Ok(()),
            _ => Err(format!("it said {said}")),
        }
    }

    /// Checks that a program refuses here in this way; its warnings come before that.
    fn check_refusal(&self, output: &Output) -> Result<(), String> {
        let Outcome::Refuses(words, _) = &self.outcome else {
            return Ok(());
        };
        let said = String::from_utf8_lossy(&output.stderr);
        let is_one_line = said
            .lines()
            .filter(|line| !line.contains("warning: "))
            .count()
            == 1;
        if output.status.code() == Some(2)
            && is_one_line
            && words.iter().all(|word| said.contains(word))
        {
            return Ok(());
        }
        Err(format!("{:?}: {said}", output.status))
    }

    /// Returns the arguments with the advice carried out; `None`: the advice is not for the user of
    /// the program.
    fn advised(&self) -> Option<Vec<&'static str>> {
        match &self.outcome {
            Outcome::Works(_) | Outcome::Refuses(_, None) => None,
            Outcome::Refuses(_, Some(arguments)) => Some(arguments.to_vec()),
        }
    }
}

/// Returns the output of a program that ends by itself. One that does not is killed.
fn ended(mut command: Command) -> Output {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > PATIENCE {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.wait_with_output().unwrap()
}

/// Has `check` try each host, in both ways of denying, and names all that are not as they should
/// be.
fn walk(hosts: &[Host], check: impl Fn(&Host, i32) -> Result<(), String>) {
    let mut wrong = Vec::new();
    for host in hosts {
        if !(host.denied)(libc::EPERM).is_possible() {
            println!(
                "skipped: {}: it takes root, and what is to be forbidden",
                host.name
            );
            continue;
        }
        for errno in EITHER {
            let since = Instant::now();
            let outcome = check(host, errno);
            println!(
                "{} ({errno}): {outcome:?}, {:?}",
                host.name,
                since.elapsed()
            );
            if let Err(what) = outcome {
                wrong.push(format!("{} (errno {errno}): {what}", host.name));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
