//! Counters of the mode machine.

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Entries in direct mode.
    pub entries_direct: u64,
    /// Interrupts that were acknowledged for the guest, and requested virtually.
    pub caught: u64,
    /// Those of 8259s.
    pub caught_external: u64,
    /// The host's own.
    pub hosts: u64,
    /// Interrupts injected.
    pub injected: u64,
    /// Faults that were interrupts.
    pub reflected: u64,
    /// INT instructions whose gate was hidden.
    pub software: u64,
    /// Interrupts that met the guest's own absent gate.
    pub own_gates: u64,
    /// EOIs that exited and ended a virtual one.
    pub completed_virtual: u64,
    /// EOIs that exited and ended a real one.
    pub completed_real: u64,
    /// Times that the interrupts that the guest had in service were ended for it.
    pub forced: u64,
    /// Times that it was suspended for delaying the host's interrupts.
    pub suspended: u64,
    /// Times that direct mode came back after either.
    pub returned: u64,
    /// Interrupts of the host's found in the guest's service.
    pub stolen: u64,
}
