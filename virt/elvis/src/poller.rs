//! The part of the device that the I/O core runs: its settings, the queue that it polls, and the
//! interrupts to send.
//!
//! ```text
//!   Settings ── configure ─▶ Poller ◀─┐
//!                              │ poll: at most one request
//!                              └──────┴─▶ Outcome: vectors to send, a queue that has stopped
//! ```
//! With another epoch the poller begins anew; with the same it continues where it was. An interrupt
//! whose table entry is masked stays pending, and is sent when the entry is unmasked.

use virtqueue::{FixedChain, Memory, OutOfReach, PolledQueue, QueueConfig, QueueStop};

use crate::Vector;
use crate::messages::ENTRIES;
use crate::request;

/// Largest number of queue entries, and so of descriptors in a chain.
pub const QUEUE_MAX: u16 = 128;

/// Settings of the function that determine what the I/O core does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Number of resets so far.
    pub epoch: u32,
    /// The queue, if it is to be served.
    pub queue: Option<QueueConfig>,
    /// Features that the driver accepted.
    pub features: u64,
    /// MSI-X table entry for the queue.
    pub queue_entry: Option<usize>,
    /// MSI-X table entry for configuration changes.
    pub config_entry: Option<usize>,
    /// Vector that each entry sends; `None`: it is masked.
    pub vectors: [Option<Vector>; ENTRIES],
}

impl Settings {
    /// Settings with which nothing is served.
    pub const NONE: Self = Self {
        epoch: 0,
        queue: None,
        features: 0,
        queue_entry: None,
        config_entry: None,
        vectors: [None; ENTRIES],
    };
}

/// Result of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// A request was served.
    pub has_served: bool,
    /// Vectors to send now, by entry.
    pub send: [Option<Vector>; ENTRIES],
    /// The queue was stopped in this step, for this reason.
    pub stopped: Option<QueueStop>,
}

/// The I/O core's state.
#[derive(Clone, Debug, Default)]
pub struct Poller {
    settings: Settings,
    queue: Option<PolledQueue>,
    /// The queue is stopped until the next reset.
    has_stopped: bool,
    chain: FixedChain<{ QUEUE_MAX as usize }>,
    pending: [bool; ENTRIES],
}

impl Poller {
    /// Applies new settings.
    pub fn configure(&mut self, settings: Settings, memory: &impl Memory) -> Outcome {
        let old = core::mem::replace(&mut self.settings, settings);
        let mut outcome = Outcome::default();
        if old.epoch != settings.epoch {
            self.pending = [false; ENTRIES];
            self.queue = None;
            self.has_stopped = false;
        }
        match settings.queue {
            // Bus mastering may be off for a while: the queue continues afterwards.
            None => {}
            Some(_) if self.queue.is_some() || self.has_stopped => {}
            Some(config) => self.start(&config, memory, &mut outcome),
        }
        for entry in 0..ENTRIES {
            if core::mem::take(&mut self.pending[entry]) {
                self.interrupt(Some(entry), &mut outcome);
            }
        }
        outcome
    }

    fn start(&mut self, config: &QueueConfig, memory: &impl Memory, outcome: &mut Outcome) {
        match PolledQueue::new(config, QUEUE_MAX, self.settings.features) {
            Ok(mut queue) => {
                let started = queue.start(memory);
                self.queue = Some(queue);
                if let Err(why) = started {
                    self.stop(why, outcome);
                }
            }
            Err(_) => self.stop(OutOfReach(config.desc).into(), outcome),
        }
    }

    /// Serves one request, if there is one.
    pub fn poll(&mut self, memory: &impl Memory, disk: &mut [u8]) -> Outcome {
        let mut outcome = Outcome::default();
        let is_served = self.settings.queue.is_some() && !self.has_stopped;
        let Some(queue) = self.queue.as_mut().filter(|_| is_served) else {
            return outcome;
        };
        match serve(queue, &mut self.chain, memory, disk) {
            Ok(None) => {}
            Ok(Some(wants_interrupt)) => {
                outcome.has_served = true;
                if wants_interrupt {
                    self.interrupt(self.settings.queue_entry, &mut outcome);
                }
            }
            Err(why) => self.stop(why, &mut outcome),
        }
        outcome
    }

    /// Returns the number of resets in the current settings.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.settings.epoch
    }

    /// Returns which entries have a pending interrupt.
    #[must_use]
    pub fn pending(&self) -> [bool; ENTRIES] {
        self.pending
    }

    /// Stops the queue, and notifies the driver of the changed status.
    #[cold]
    fn stop(&mut self, why: QueueStop, outcome: &mut Outcome) {
        self.has_stopped = true;
        outcome.stopped = Some(why);
        self.interrupt(self.settings.config_entry, outcome);
    }

    fn interrupt(&mut self, entry: Option<usize>, outcome: &mut Outcome) {
        let Some(entry) = entry.filter(|entry| *entry < ENTRIES) else {
            return;
        };
        match self.settings.vectors[entry] {
            Some(vector) => outcome.send[entry] = Some(vector),
            None => self.pending[entry] = true,
        }
    }
}

/// Takes a request, serves it, and completes it. Returns whether the driver wants an interrupt, if
/// there was a request.
fn serve<const N: usize>(
    queue: &mut PolledQueue,
    chain: &mut FixedChain<N>,
    memory: &impl Memory,
    disk: &mut [u8],
) -> Result<Option<bool>, QueueStop> {
    if !queue.next(memory, chain)? {
        return Ok(None);
    }
    let written = request::serve(memory, chain, disk)?;
    queue.complete(memory, chain.head(), written).map(Some)
}

#[cfg(test)]
mod tests;
