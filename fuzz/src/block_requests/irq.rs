//! Interrupts of a device, counted.

use vio::Interrupt;

/// Interrupts so far.
#[derive(Clone, Debug, Default)]
pub(super) struct CountIrq {
    /// Interrupts of queues.
    pub(super) queues: u64,
    /// Interrupts of configuration changes.
    pub(super) config: u64,
}

impl Interrupt for CountIrq {
    fn queue(&mut self, _: u16) {
        self.queues += 1;
    }

    fn config(&mut self) {
        self.config += 1;
    }
}
