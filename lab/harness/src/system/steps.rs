//! A guest that executes steps typed on its console, so that counts from outside can be taken
//! between two of its steps.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::guest::{Guest, Outcome, RunningGuest};
use super::host::Host;

/// Script of the guest: each line that it reads is a script for a shell of its own, until the last.
/// Kernel messages stay in the kernel's log.
pub const SCRIPT: &str = "stty -echo; dmesg -n 1; n=0; echo step $n ended with 0; \
     while read -r line && [ \"$line\" != end ]; do sh -c \"$line\" </dev/null; \
     s=$?; n=$((n + 1)); echo step $n ended with $s; done";

/// Longest time of a step on an idle machine, and between two polls for its end.
const LIMIT: Duration = Duration::from_secs(600);
const TURN: Duration = Duration::from_millis(100);

/// Longest line of a terminal, without its end.
const LINE_MAX: usize = 4000;

/// A running guest that executes one step after the other.
pub struct Steps<'a> {
    guest: RunningGuest<'a>,
    /// Number of steps begun.
    steps: u32,
    /// Bytes of the console when the last step had ended.
    seen: usize,
}

impl<'a> Steps<'a> {
    /// Starts a guest, whose script is [`SCRIPT`], and waits until it accepts steps.
    ///
    /// # Errors
    /// It does not get that far.
    pub fn begin(host: &'a Host, guest: &Guest) -> Result<Self> {
        let mut this = Self {
            guest: guest.spawn(host)?,
            steps: 0,
            seen: 0,
        };
        this.ended()?;
        Ok(this)
    }

    /// Executes a step, which must succeed. Returns its output.
    ///
    /// # Errors
    /// It ended with another status than 0; the guest ended, or ran out of time.
    pub fn run(&mut self, script: &str) -> Result<String> {
        self.start(script)?;
        self.finish()
    }

    /// Begins a step, and returns while it runs.
    ///
    /// # Errors
    /// The script does not fit a line; the guest has ended.
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

    /// Returns the output of the step begun last, and its status: the console's output since the
    /// step before. A guest of the same machine that was started again counts from 0, too.
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
            // No output has this byte: the call waits, and fails if the guest has ended.
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

    /// Waits for the guest of a machine that was started again, and counts steps from 0.
    ///
    /// # Errors
    /// It does not start.
    pub fn begin_again(&mut self) -> Result<()> {
        self.steps = 0;
        self.ended().map(drop)
    }

    /// Returns the running guest.
    pub fn guest(&mut self) -> &mut RunningGuest<'a> {
        &mut self.guest
    }

    /// Makes the guest power off, and waits for that.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn end(mut self) -> Result<Outcome> {
        // If it has ended already, the wait reports the reason.
        let _ = self.guest.type_in("end\n");
        self.wait()
    }

    /// Waits for the end of a guest that ends by itself, or was ended. Its status is in the
    /// outcome.
    ///
    /// # Errors
    /// The lab has died, or the guest ran out of time.
    pub fn wait(self) -> Result<Outcome> {
        self.guest.wait()
    }
}
