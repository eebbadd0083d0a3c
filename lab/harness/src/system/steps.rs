//! A guest that is told on its console what to do next, so that what is seen of it from outside
//! lies between two of its steps.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::guest::{Guest, Outcome, RunningGuest};
use super::host::Host;

/// The guest's script: each line that it reads is a script of a shell of its own, until the last.
/// Kernel messages stay in the kernel's log.
pub const SCRIPT: &str = "stty -echo; dmesg -n 1; n=0; echo step $n ended with 0; \
     while read -r line && [ \"$line\" != end ]; do sh -c \"$line\" </dev/null; \
     s=$?; n=$((n + 1)); echo step $n ended with $s; done";

/// Longest time that a step may take on an idle machine, and between two looks for its end.
const LIMIT: Duration = Duration::from_secs(600);
const TURN: Duration = Duration::from_millis(100);

/// Longest line of a terminal, less its end.
const LINE_MAX: usize = 4000;

/// A running guest that takes one step after the other.
pub struct Steps<'a> {
    guest: RunningGuest<'a>,
    /// Steps begun.
    steps: u32,
    /// Bytes of the console that were there when the last step had ended.
    seen: usize,
}

impl<'a> Steps<'a> {
    /// Starts a guest, whose script is [`SCRIPT`], and waits until it takes steps.
    ///
    /// # Errors
    /// It does not come so far.
    pub fn begin(host: &'a Host, guest: &Guest) -> Result<Self> {
        let mut this = Self {
            guest: guest.spawn(host)?,
            steps: 0,
            seen: 0,
        };
        this.ended()?;
        Ok(this)
    }

    /// Takes a step, which has to succeed; its output.
    ///
    /// # Errors
    /// It ended with another status than 0; the guest ended, or ran out of time.
    pub fn run(&mut self, script: &str) -> Result<String> {
        self.start(script)?;
        self.finish()
    }

    /// Begins a step, which goes on while this returns.
    ///
    /// # Errors
    /// The script is no line; the guest has ended.
    pub fn start(&mut self, script: &str) -> Result<()> {
        ensure!(
            script.len() <= LINE_MAX && !script.contains('\n'),
            "a step of {} bytes is no line of a terminal",
            script.len()
        );
        self.steps += 1;
        self.guest.type_in(&format!("{script}\n"))
    }

    /// Waits for the end of the step begun last.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn finish(&mut self) -> Result<String> {
        let (output, status) = self.ended()?;
        ensure!(
            status == "0",
            "step {} ended with {status}:\n{output}",
            self.steps
        );
        Ok(output)
    }

    /// Output of the step begun last, and its status: what the console has shown since the one
    /// before. A guest of the same machine that was started again counts from 0, too.
    fn ended(&mut self) -> Result<(String, String)> {
        let key = format!("step {} ended with ", self.steps);
        let began = Instant::now();
        loop {
            let console = self.guest.so_far();
            let new = &console[self.seen..];
            if let Some((output, rest)) = new.split_once(&key)
                && let Some((status, _)) = rest.split_once('\n')
            {
                let (output, status) = (output.replace('\r', ""), status.trim().to_owned());
                self.seen = console.len();
                return Ok((output, status));
            }
            ensure!(
                began.elapsed() < LIMIT.mul_f64(lab::patience::stretch()),
                "no end of step {}:\n{new}",
                self.steps
            );
            // Nothing writes this: it waits, and fails if the guest has ended.
            let waited = self.guest.writes_within(TURN, "\0");
            waited.with_context(|| {
                format!(
                    "step {}, after {:?}",
                    self.steps,
                    &self.guest.so_far()[self.seen..]
                )
            })?;
        }
    }

    /// A machine that was started again: its guest is waited for, and steps begin anew.
    ///
    /// # Errors
    /// It does not come.
    pub fn begin_again(&mut self) -> Result<()> {
        self.steps = 0;
        self.ended().map(drop)
    }

    /// The running guest.
    pub fn guest(&mut self) -> &mut RunningGuest<'a> {
        &mut self.guest
    }

    /// Has the guest power off, and waits for that.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn end(mut self) -> Result<Outcome> {
        // One that has ended already says why.
        let _ = self.guest.type_in("end\n");
        self.wait()
    }

    /// Waits for the end of a guest that ends by itself, or was ended. How it ended is in its
    /// outcome.
    ///
    /// # Errors
    /// The lab has died, or the guest ran out of time.
    pub fn wait(self) -> Result<Outcome> {
        self.guest.wait()
    }
}
