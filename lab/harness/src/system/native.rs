//! `exitless` as a child of this process, under `timeout`: the native counterpart of the lab's
//! agent.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::{LabError, Output};

/// A child whose outputs are being read.
pub struct NativeProgram {
    child: Child,
    stdin: ChildStdin,
    stdout: Vec<u8>,
    chunks: Receiver<Vec<u8>>,
    stderr: JoinHandle<io::Result<Vec<u8>>>,
}

impl NativeProgram {
    /// Starts `timeout GUARD PROGRAM ARGS`; timeout(1) makes a process group of its own.
    pub fn start(guard: &[String], program: &Path, args: &[String]) -> Result<Self> {
        let mut child = Command::new("timeout")
            .args(guard)
            .arg(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting exitless under timeout(1)")?;
        let stdin = child.stdin.take().context("no pipe for its input")?;
        let mut stdout = child.stdout.take().context("no pipe for its output")?;
        let mut stderr = child.stderr.take().context("no pipe for its errors")?;
        let (send, chunks) = channel();
        // Both threads end with the child, which closes the pipes.
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut buffer) {
                if send.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        let stderr = thread::spawn(move || {
            let mut text = Vec::new();
            stderr.read_to_end(&mut text).map(|_| text)
        });
        Ok(Self {
            child,
            stdin,
            stdout: Vec::new(),
            chunks,
            stderr,
        })
    }

    /// Waits until `is_there` is true of its standard output.
    ///
    /// # Errors
    /// It ended before; [`LabError::Timeout`], as in the lab, after `limit`.
    pub fn wait_until(&mut self, limit: Duration, is_there: impl Fn(&str) -> bool) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !is_there(&String::from_utf8_lossy(&self.stdout)) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.chunks.recv_timeout(left) {
                Ok(chunk) => self.stdout.extend(chunk),
                Err(RecvTimeoutError::Disconnected) => bail!("it ended before it wrote that"),
                Err(RecvTimeoutError::Timeout) => bail!(LabError::Timeout {
                    during: "exitless".into(),
                    seconds: limit.as_secs(),
                    console: self.so_far(),
                }),
            }
        }
        Ok(())
    }

    /// Writes to its standard input.
    pub fn type_in(&mut self, text: &str) -> Result<()> {
        let typed = self.stdin.write_all(text.as_bytes());
        typed.context("typing on the console of a guest")
    }

    /// Returns its output so far.
    pub fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Signals the whole group.
    pub fn signal(&self, signal: i32) -> Result<()> {
        // The standard library has no kill(2); the shell of every Debian has it.
        let group = self.child.id();
        let status = Command::new("sh")
            .args(["-c", &format!("kill -{signal} -{group}")])
            .status()
            .context("starting sh")?;
        ensure!(status.success(), "kill -{signal} -{group}: {status}");
        Ok(())
    }

    /// Sends SIGTERM to the program, and not to `timeout`, which would kill the program some time
    /// after it received one.
    pub fn terminate(&self) -> Result<()> {
        let parent = self.child.id().to_string();
        let status = Command::new("pkill")
            .args(["-TERM", "-P", &parent])
            .status()
            .context("starting pkill")?;
        ensure!(status.success(), "pkill -TERM -P {parent}: {status}");
        Ok(())
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Result<Output> {
        drop(self.stdin);
        while let Ok(chunk) = self.chunks.recv() {
            self.stdout.extend(chunk);
        }
        let status = self.child.wait().context("waiting for exitless")?;
        let stderr = self.stderr.join();
        Ok(Output {
            status: status
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .unwrap_or(u8::MAX),
            stdout: self.stdout,
            stderr: stderr
                .expect("the thread that reads a pipe does not panic")
                .context("reading the errors of exitless")?,
        })
    }
}

#[cfg(test)]
mod tests;
