//! A program inside the lab: its preparation, its run and its end.

use std::time::Duration;

use super::{DEFAULT_LIMIT, Lab, Route};
use crate::LabError;
use crate::patience::Limit;
use crate::protocol::{MAX_PAYLOAD, Message, Spawn};

const SIGKILL: i32 = 9;

/// Bytes of a program's output that an error quotes.
const QUOTED: usize = 2000;

/// Output stream of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Exit status of a program in the lab, and its output.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// Exit status; 128 + n when signal n ended it.
    pub status: u8,
    /// All of standard output.
    pub stdout: Vec<u8>,
    /// All of standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Returns whether the status is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.status == 0
    }

    /// Returns standard output as text; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns standard error as text; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    fn add(&mut self, stream: Stream, data: &[u8]) {
        match stream {
            Stream::Stdout => self.stdout.extend_from_slice(data),
            Stream::Stderr => self.stderr.extend_from_slice(data),
        }
    }
}

/// A program to be run in the lab.
#[derive(Debug, Clone)]
pub struct LabCommand<'a> {
    lab: &'a Lab,
    spawn: Spawn,
    stdin: Option<Vec<u8>>,
    limit: Duration,
}

impl<'a> LabCommand<'a> {
    pub(super) fn new(lab: &'a Lab, program: &str) -> Self {
        let spawn = Spawn {
            argv: vec![program.to_owned()],
            ..Spawn::default()
        };
        Self {
            lab,
            spawn,
            stdin: None,
            limit: DEFAULT_LIMIT,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<I, S>(mut self, args: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        self.spawn.argv.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.spawn.env.push(format!("{name}={value}"));
        self
    }

    /// Sets the working directory (default `/root`).
    #[must_use]
    pub fn current_dir(mut self, dir: &str) -> Self {
        dir.clone_into(&mut self.spawn.cwd);
        self
    }

    /// Sets the program's standard input, followed by end of file (default: end of file at once).
    #[must_use]
    pub fn stdin(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(data.into());
        self
    }

    /// Limits the program's time (default 300 s; more on a busy machine, see
    /// [`patience`](crate::patience)). At the limit it is killed.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Connects the program to the lab's terminal ([`Lab::take_terminal`]) instead of to
    /// [`Output`].
    #[must_use]
    pub fn on_terminal(mut self) -> Self {
        self.spawn.tty = true;
        self
    }

    /// Runs the program to its end.
    ///
    /// # Errors
    /// [`LabError::Inside`] if it could not be started; [`LabError::Timeout`] if it did not end in
    /// time; [`LabError::Died`] if the emulated host ended meanwhile. An exit status other than 0
    /// is no error.
    pub fn output(self) -> Result<Output, LabError> {
        self.stream(|_, _| {})
    }

    /// Runs the program to its end and passes its output to `on_output` as it appears.
    ///
    /// # Errors
    /// As [`LabCommand::output`].
    pub fn stream(mut self, on_output: impl FnMut(Stream, &[u8])) -> Result<Output, LabError> {
        let input = self.stdin.take().unwrap_or_default();
        let limit = self.limit;
        let running = self.spawn()?;
        running.write_stdin(&input)?;
        running.close_stdin()?;
        running.wait(limit, on_output)
    }

    /// Starts the program and returns at once; its standard input stays open.
    ///
    /// # Errors
    /// [`LabError::Died`]. A program that cannot be started is reported by [`Running::wait`].
    pub fn spawn(self) -> Result<Running<'a>, LabError> {
        let route = self.lab.shared.route()?;
        let name = self.spawn.argv.join(" ");
        self.lab.shared.send(route.id, Message::Spawn(self.spawn))?;
        Ok(Running {
            lab: self.lab,
            route,
            name,
            output: Output::default(),
            has_ended: false,
        })
    }
}

/// A program that runs in the lab.
#[derive(Debug)]
pub struct Running<'a> {
    lab: &'a Lab,
    route: Route,
    name: String,
    /// Its output so far, and its exit status once it has ended.
    output: Output,
    has_ended: bool,
}

impl Running<'_> {
    /// Sends bytes to its standard input.
    ///
    /// # Errors
    /// [`LabError::Died`].
    pub fn write_stdin(&self, data: &[u8]) -> Result<(), LabError> {
        self.stdin_writer()(data)
    }

    /// Closes its standard input.
    ///
    /// # Errors
    /// [`LabError::Died`].
    pub fn close_stdin(&self) -> Result<(), LabError> {
        self.lab
            .shared
            .send(self.route.id, Message::Stdin(Vec::new()))
    }

    /// Returns a function that acts like [`Running::write_stdin`], for use by another thread.
    pub fn stdin_writer(&self) -> impl Fn(&[u8]) -> Result<(), LabError> + Send + 'static {
        let (shared, id) = (self.lab.shared.clone(), self.route.id);
        move |data| {
            data.chunks(MAX_PAYLOAD)
                .try_for_each(|chunk| shared.send(id, Message::Stdin(chunk.to_vec())))
        }
    }

    /// Sends a signal to the program and its children.
    ///
    /// # Errors
    /// [`LabError::Died`].
    pub fn signal(&self, signal: i32) -> Result<(), LabError> {
        self.lab.shared.send(self.route.id, Message::Signal(signal))
    }

    /// Returns the output that was received by earlier waits.
    #[must_use]
    pub fn so_far(&self) -> &Output {
        &self.output
    }

    /// Waits until `is_there` returns true for the program's output so far.
    ///
    /// # Errors
    /// [`LabError::Inside`] if it ended before that; otherwise as [`LabCommand::output`]. After a
    /// [`LabError::Timeout`] the program continues to run.
    pub fn wait_until(
        &mut self,
        limit: Duration,
        is_there: impl Fn(&Output) -> bool,
    ) -> Result<(), LabError> {
        let mut left = Limit::new(limit);
        while !is_there(&self.output) {
            if self.has_ended {
                let status = self.output.status;
                return Err(LabError::Inside(format!(
                    "{} ended with status {status} before it wrote what was waited for",
                    self.name
                )));
            }
            let next = self.next((&mut left, limit));
            next.map_err(|error| with_last_words(error, &self.output))?;
        }
        Ok(())
    }

    /// Waits for its end, and passes its output to `on_output` as it appears.
    ///
    /// # Errors
    /// As [`LabCommand::output`]. At the limit the program is killed.
    pub fn wait(
        mut self,
        limit: Duration,
        mut on_output: impl FnMut(Stream, &[u8]),
    ) -> Result<Output, LabError> {
        let mut left = Limit::new(limit);
        while !self.has_ended {
            match self.next((&mut left, limit)) {
                Ok(Some((stream, data))) => on_output(stream, &data),
                Ok(None) => {}
                Err(error) => {
                    if matches!(error, LabError::Timeout { .. }) {
                        // If the lab has died too, the first error suffices.
                        let _ = self.signal(SIGKILL);
                    }
                    return Err(with_last_words(error, &self.output));
                }
            }
        }
        Ok(self.output)
    }

    /// Processes the next message from the lab. Returns output, or `None` at the program's end.
    fn next(
        &mut self,
        limit: (&mut Limit, Duration),
    ) -> Result<Option<(Stream, Vec<u8>)>, LabError> {
        let answer = self
            .lab
            .shared
            .answer_within(&self.route, limit, &self.name);
        let (stream, data) = match answer? {
            Message::Stdout(data) => (Stream::Stdout, data),
            Message::Stderr(data) => (Stream::Stderr, data),
            Message::Exit(status) => {
                self.output.status = status;
                self.has_ended = true;
                return Ok(None);
            }
            other => return Err(LabError::Inside(format!("unexpected answer {other:?}"))),
        };
        self.output.add(stream, &data);
        Ok(Some((stream, data)))
    }
}

/// Appends the last output of the program to an error about its time or its lab.
fn with_last_words(mut error: LabError, output: &Output) -> LabError {
    if let LabError::Timeout { console, .. } | LabError::Died { console, .. } = &mut error {
        for (name, bytes) in [("output", &output.stdout), ("error output", &output.stderr)] {
            if !bytes.is_empty() {
                let tail = &bytes[bytes.len().saturating_sub(QUOTED)..];
                console.push_str(&format!("\nthe end of the program's {name}:\n"));
                console.push_str(&String::from_utf8_lossy(tail));
            }
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_quote_the_programs_last_words() {
        let output = Output {
            stdout: vec![b'x'; 5000],
            ..Output::default()
        };
        let error = LabError::Timeout {
            during: "p".into(),
            seconds: 7,
            console: "c".into(),
        };
        let text = with_last_words(error, &output).to_string();
        assert!(text.contains(&"x".repeat(QUOTED)) && !text.contains(&"x".repeat(QUOTED + 1)));
        assert!(!text.contains("error output"));
    }
}
