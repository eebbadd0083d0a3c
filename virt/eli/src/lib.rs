//! Exitless interrupts: every decision of ELI (Amit et al., ASPLOS 2012; Amit's thesis, chapter 3),
//! and no instruction of it.
//!
//! **What.** Interrupts of a device that is assigned to a guest go straight to that guest through a
//! *shadow* of its interrupt descriptor table (IDT), and the guest completes them at the real local
//! APIC: no exit either way. All other interrupts meet a gate of the shadow that is marked not
//! present, or lies behind the limit that the guest runs with, so the processor faults, the fault
//! exits, and the host sees which vector it was (§3.5.1).
//!
//! **Flow.** A hypervisor, `bin/exitless-hv` for one, owns a [`Core`] for its guest's processor and
//! does what it says:
//! ```text
//! exit ─▶ Core::reflect   a fault: an interrupt in disguise, the guest's own, or an INT instruction of the guest?
//!      ─▶ Core::took      vectors that the processor acknowledged: whose, and is an end of interrupt (EOI) due now?
//!      ─▶ Core::guest_eoi the guest ends one: of whom, and is it one of the real local APIC's?
//! entry ◀─ Core::plan     direct or by injection, what to inject, whether EOI exits, with which IDT limit
//! ```
//! * [`Core`]: the mode machine, and the model of what is requested and in service, really and
//!   virtually.
//! * [`gate`]: shadow gates from the guest's. [`event`]: what an exit says about the event that it
//!   interrupted.
//! * [`policy`]: which writes to the local APIC, to interrupt messages and to the legacy
//!   controllers are let through.
//! * [`hosts`]: which vectors are the host's own. [`alias`]: what a vector is at the real local
//!   APIC that the guest wants too (§3.5.3).
//! * [`watchdog`]: what an unmaskable tick finds, and what follows. [`clock`]: the time, and how
//!   long the host got none of its ticks.
//! * [`surface`]: everything that a guest can use, what it could take by it, and what contains it,
//!   as data; [`defence`]: the switches.
//!
//! **Who owns what.** In *direct mode* the real local APIC holds the guest's interrupts, in service
//! and requested, and nothing is virtual. In *injection mode* every interrupt exits; what was
//! acknowledged is requested virtually, and injected by priority. Direct mode is entered when
//! nothing is virtual any more: with a virtual vector in service the guest's next EOI would be that
//! one's, and must exit (§3.5.1).
//!
//! A guest with several processors has a [`Core`] for each; what a destination means among them is
//! [`policy::Processors`]'.
//!
//! **Left out.** Instructions, registers and memory: `bin/exitless-hv` has them. What one processor
//! asks of another; devices of which the interrupts cannot be told apart by vector. Containing the
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
