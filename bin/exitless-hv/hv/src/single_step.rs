//! A single step: one instruction of the guest that runs with a protection dropped, instead of
//! being decoded.
//!
//! ```text
//!   idle ── begin: interrupts masked, trap flag set, every exception exits ─▶ under way
//!   under way ── finish: the guest's flags, and the usual intercepts ─▶ idle
//!                   at the trap behind the instruction, at an exception of it, at a second
//!                   protected page, or before the next begin, if it cleared the trap flag
//! ```
//! [`Intercepts`] are the usual ones: a step begins with one of them dropped, and each ends with
//! all of them.

use crate::vmcb::{self, FLAG_INTERRUPTS, FLAG_TRAP, Vmcb, intercept};

/// Access for which a protection is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protected {
    /// SIDT, or LIDT.
    Table(bool),
    /// A write to the page of the interrupt descriptor table.
    Gate(u64),
    /// A write to the guest's view of the message table.
    Message,
    /// An access to the I/O APIC: the offset, and whether it is a write.
    IoApic(u64, bool),
    /// An access to CR8.
    Cr8(bool),
    /// A write to CR0: the guest may leave long mode, in which gates have 16 bytes.
    Cr0,
}

/// Intercepts outside of steps, by the command line.
#[derive(Clone, Copy, Debug)]
pub struct Intercepts {
    /// Interrupts are delivered without an exit, so the table that they go by is looked after.
    pub delivery: bool,
    /// The task priority is looked after.
    pub priority: bool,
}

impl Intercepts {
    /// Sets the control block so.
    pub fn restore(self, vmcb: &mut Vmcb) {
        // #GP in every mode, for what QEMU raises by mistake (`run.s`).
        const NOT_PRESENT: u32 = 1 << 11;
        const PROTECTION: u32 = 1 << 13;
        let tables = intercept::IDTR_READ | intercept::IDTR_WRITE | intercept::CR0_WRITE;
        vmcb.put(vmcb::INTERCEPTS, tables, self.delivery);
        vmcb.put(vmcb::CR, intercept::CR8, self.priority);
        let gates = if self.delivery { NOT_PRESENT } else { 0 };
        vmcb.set(vmcb::EXCEPTIONS, PROTECTION | gates);
    }
}

/// The step under way, if there is one.
#[derive(Debug)]
pub struct SingleStep {
    intercepts: Intercepts,
    /// The access, and the guest's flags.
    under_way: Option<(Protected, u64)>,
}

impl SingleStep {
    /// None.
    pub fn new(intercepts: Intercepts) -> Self {
        Self {
            intercepts,
            under_way: None,
        }
    }

    /// Intercepts outside of steps.
    pub fn intercepts(&self) -> Intercepts {
        self.intercepts
    }

    /// Whether one is under way.
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Begins a step. The one before has been finished.
    pub fn begin(&mut self, vmcb: &mut Vmcb, access: Protected) {
        const ALL: u32 = u32::MAX;
        let flags = vmcb.get(vmcb::RFLAGS);
        self.under_way = Some((access, flags));
        vmcb.set(vmcb::RFLAGS, flags & !FLAG_INTERRUPTS | FLAG_TRAP);
        // Behind a load of SS the trap would come one instruction later.
        vmcb.set(vmcb::SHADOW, 0);
        // Any other exception means that the instruction did not run: nothing must see it with
        // these flags.
        vmcb.set(vmcb::EXCEPTIONS, ALL);
    }

    /// Finishes the step under way. Returns the access, whose page the caller protects again.
    pub fn finish(&mut self, vmcb: &mut Vmcb) -> Option<Protected> {
        const KEPT: u64 = FLAG_INTERRUPTS | FLAG_TRAP;
        const DEBUG_STATUS_STEP: u64 = 1 << 14;
        let (access, own) = self.under_way.take()?;
        let flags = vmcb.get(vmcb::RFLAGS) & !KEPT | own & KEPT;
        vmcb.set(vmcb::RFLAGS, flags);
        let status = vmcb.get(vmcb::DR6) & !DEBUG_STATUS_STEP;
        vmcb.set(vmcb::DR6, status);
        self.intercepts.restore(vmcb);
        Some(access)
    }
}
