//! Exitless interrupts: every decision of ELI (Amit et al., ASPLOS 2012; Amit's thesis, chapter 3),
//! without the instructions that carry it out.
//!
//! **Principle.** Interrupts of a device that is assigned to a guest go straight to that guest
//! through a *shadow* of its interrupt descriptor table (IDT), and the guest completes them at the
//! real local APIC: no exit either way. For all other interrupts the gate in the shadow is marked
//! not present, or lies behind the limit that the guest runs with, so the processor faults, the
//! fault exits, and the host reads the vector from it (§3.5.1).
//!
//! **Flow.** A hypervisor, `bin/exitless-hv` for one, owns a [`Core`] for its guest's processor and
//! carries out its decisions:
//! ```text
//! exit ─▶ Core::reflect   classify a fault: a real interrupt, the guest's own, or its INT instruction
//!      ─▶ Core::took      acknowledged vectors: owner, and whether an end of interrupt (EOI) is due
//!      ─▶ Core::guest_eoi EOI of the guest: which vector ends, and whether at the real local APIC
//! entry ◀─ Core::plan     direct or by injection, the event to inject, EOI exits, the IDT limit
//! ```
//! * [`Core`]: the mode machine, and the model of the requested and in-service vectors, both real
//!   and virtual.
//! * [`gate`]: shadow gates from the guest's. [`event`]: the event that an exit interrupted.
//! * [`policy`]: the writes to the local APIC, to interrupt messages and to the legacy controllers
//!   that are allowed.
//! * [`hosts`]: the host's own vectors. [`alias`]: the vector at the real local APIC for a vector
//!   of the guest's that the host uses too (§3.5.3).
//! * [`watchdog`]: the findings of an unmaskable tick, and their consequences. [`clock`]: the time,
//!   and the time since the host's last tick.
//! * [`surface`]: everything that a guest can use, the harm that it could do by it, and its
//!   containment, as data; [`defence`]: the switches.
//!
//! **Ownership.** In *direct mode* the real local APIC holds the guest's interrupts, in service and
//! requested, and nothing is virtual. In *injection mode* every interrupt exits; an acknowledged
//! interrupt is requested virtually, and injected by priority. Direct mode is entered when nothing
//! is virtual any more: while a virtual vector is in service, the guest's next EOI ends that one,
//! and must exit (§3.5.1).
//!
//! A guest with several processors has a [`Core`] for each; [`policy::Processors`] resolves
//! destinations among them.
//!
//! **Left out.** Instructions, registers and memory: `bin/exitless-hv` has them. Requests between
//! processors; devices whose interrupts cannot be distinguished by vector. Containment of the
//! device's own DMA, by which it can forge any message: that needs an IOMMU.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod alias;
pub mod clock;
pub mod defence;
pub mod event;
pub mod gate;
pub mod hosts;
mod mode;
pub mod policy;
pub mod surface;
mod vectors;
pub mod watchdog;

pub use mode::{
    Acknowledged, Completed, Core, Counts, Cpu, DirectModes, Disposition, EntryControls,
    EoiOutcome, Fault, Injection, Reflection,
};
pub use vectors::{Vector, VectorSet};
