//! A guest with assigned devices that executes one step after the other.

use anyhow::{Context, Result};

use super::{AssignLab, AssignedRun, LockedWatch};
use crate::system::guest::{Guest, Outcome, RunningGuest};
use crate::system::steps::Steps;

/// A running guest with assigned devices that executes steps.
pub struct Session<'a> {
    lab: &'a AssignLab,
    steps: Steps<'a>,
    watch: LockedWatch<'a>,
}

impl<'a> Session<'a> {
    /// Starts a guest, whose script is that of [`Steps`], and waits until it accepts steps.
    pub(super) fn begin(lab: &'a AssignLab, guest: &Guest) -> Result<Self> {
        let watch = lab.watch_run(guest)?;
        let steps = Steps::begin(lab.host(), guest)?;
        Ok(Self { lab, steps, watch })
    }

    /// Executes a step, which must succeed. Returns its output.
    ///
    /// # Errors
    /// As `Steps::run`.
    pub fn run(&mut self, script: &str) -> Result<String> {
        self.steps.run(script)
    }

    /// Begins a step, and returns while it runs.
    ///
    /// # Errors
    /// As `Steps::start`.
    pub fn start(&mut self, script: &str) -> Result<()> {
        self.steps.start(script)
    }

    /// Waits for the end of the step begun last.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn finish(&mut self) -> Result<String> {
        self.steps.finish()
    }

    /// Waits for the guest of a machine that was started again, and counts steps from 0.
    ///
    /// # Errors
    /// It does not start.
    pub fn begin_again(&mut self) -> Result<()> {
        self.steps.begin_again()
    }

    /// Returns the running guest.
    pub fn guest(&mut self) -> &mut RunningGuest<'a> {
        self.steps.guest()
    }

    /// Returns the memory that its program has locked now, KiB.
    ///
    /// # Errors
    /// The program has ended.
    pub fn locked(&self) -> Result<u64> {
        let script =
            "sed -n 's/^VmLck:[^0-9]*\\([0-9]*\\) kB/\\1/p' /proc/$(pidof exitless)/status";
        let text = self.lab.host().script(script)?;
        text.trim()
            .parse()
            .with_context(|| format!("{text:?} is no number of KiB"))
    }

    /// Makes the guest power off, and waits for that.
    ///
    /// # Errors
    /// The run could not be watched. Its status is in its outcome.
    pub fn end(self) -> Result<AssignedRun> {
        let outcome = self.steps.end()?;
        finish(self.lab, self.watch, outcome)
    }

    /// Waits for the end of a guest that ends by itself, or was ended.
    ///
    /// # Errors
    /// As [`end`](Self::end).
    pub fn wait(self) -> Result<AssignedRun> {
        let outcome = self.steps.wait()?;
        finish(self.lab, self.watch, outcome)
    }
}

fn finish(lab: &AssignLab, watch: LockedWatch<'_>, outcome: Outcome) -> Result<AssignedRun> {
    let locked = watch
        .finish()
        .with_context(|| format!("sampling VmLck of a run: {}", outcome.tail()))?;
    Ok(AssignedRun {
        outcome,
        locked,
        faults: lab.take_faults()?,
    })
}
