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

use eli::event;

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
    /// An access to a page of the block function: the address, and whether it is a write.
    Block(u64, bool),
    /// An access to CR8.
    Cr8(bool),
    /// An access to DR7.
    Dr7,
    /// IRET from the handler of a non-maskable interrupt that was injected.
    Iret,
    /// A write to CR0 or CR4: the guest may leave long mode, in which gates have 16 bytes.
    Mode,
}

/// Intercepts outside of steps, by the command line.
#[derive(Clone, Copy, Debug)]
pub struct Intercepts {
    /// Interrupts are delivered without an exit, so the table that they go by is looked after.
    pub delivery: bool,
    /// The task priority is looked after.
    pub priority: bool,
    /// #DB and #AC exit: either can recur while it is delivered, without an end and without an
    /// interrupt between.
    pub recurring: bool,
    /// The processor's mode is looked after beyond CR0: CR4.
    pub modes: bool,
    /// Data breakpoints are not enabled ([`eli::policy::control`]).
    pub breakpoints: bool,
}

impl Intercepts {
    /// Sets the control block so.
    pub fn restore(self, vmcb: &mut Vmcb) {
        // #GP in every mode, for what QEMU raises by mistake (`run.s`).
        const NOT_PRESENT: u32 = 1 << event::NOT_PRESENT;
        const PROTECTION: u32 = 1 << event::PROTECTION;
        const RECURRING: u32 = 1 << event::DEBUG | 1 << event::ALIGNMENT;
        let tables = intercept::IDTR_READ | intercept::IDTR_WRITE | intercept::CR0_WRITE;
        vmcb.put(vmcb::INTERCEPTS, tables, self.delivery);
        vmcb.put(vmcb::CR, intercept::CR8, self.priority);
        let modes = self.delivery && self.modes;
        vmcb.put(vmcb::CR, intercept::CR4_WRITE, modes);
        vmcb.put(vmcb::DR, intercept::DR7, self.breakpoints);
        let gates = if self.delivery { NOT_PRESENT } else { 0 };
        let recurring = if self.recurring { RECURRING } else { 0 };
        vmcb.set(vmcb::EXCEPTIONS, PROTECTION | gates | recurring);
    }
}

/// In DR6: breakpoints that were met.
const STATUS_BREAKPOINTS: u64 = 0xf;
/// There: a single step's trap.
const STATUS_STEP: u64 = 1 << 14;

/// The step under way: the access, and the guest's own registers.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    access: Protected,
    flags: u64,
    status: u64,
}

/// The step under way, if there is one.
#[derive(Debug)]
pub struct SingleStep {
    intercepts: Intercepts,
    under_way: Option<UnderWay>,
}

impl SingleStep {
    /// Creates the state without a step.
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

    /// Returns whether one is under way.
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Returns whether the #DB that exited is the trap of the step under way: the instruction has
    /// run.
    pub fn has_ended(&self, vmcb: &Vmcb) -> bool {
        self.is_under_way() && vmcb.get(vmcb::DR6) & STATUS_STEP != 0
    }

    /// Returns whether the instruction has run and cleared the trap flag: there will be no trap.
    pub fn has_lapsed(&self, vmcb: &Vmcb) -> bool {
        self.is_under_way() && vmcb.get(vmcb::RFLAGS) & FLAG_TRAP == 0
    }

    /// Returns RFLAGS.IF as the guest has it.
    pub fn guest_interrupts(&self, vmcb: &Vmcb) -> bool {
        let real = vmcb.get(vmcb::RFLAGS);
        let flags = self.under_way.map_or(real, |step| step.flags);
        flags & FLAG_INTERRUPTS != 0
    }

    /// Returns the guest's DR6 for a trap of its own, if the trap that ends the step is one: it
    /// steps itself, or the instruction met a breakpoint.
    pub fn own_trap(&self, vmcb: &Vmcb) -> Option<u64> {
        let step = self.under_way?;
        let met = vmcb.get(vmcb::DR6) & STATUS_BREAKPOINTS;
        let steps = step.flags & FLAG_TRAP != 0;
        let kept = step.status & !STATUS_BREAKPOINTS | met;
        (steps || met != 0).then_some(if steps { kept | STATUS_STEP } else { kept })
    }

    /// Begins a step. The one before has been finished.
    pub fn begin(&mut self, vmcb: &mut Vmcb, access: Protected) {
        const ALL: u32 = u32::MAX;
        let (flags, status) = (vmcb.get(vmcb::RFLAGS), vmcb.get(vmcb::DR6));
        self.under_way = Some(UnderWay {
            access,
            flags,
            status,
        });
        vmcb.set(vmcb::RFLAGS, flags & !FLAG_INTERRUPTS | FLAG_TRAP);
        // What stands there at the end is of this instruction.
        vmcb.set(vmcb::DR6, status & !(STATUS_STEP | STATUS_BREAKPOINTS));
        // Behind a load of SS the trap would come one instruction later.
        vmcb.set(vmcb::SHADOW, 0);
        // Any other exception means that the instruction did not run: nothing must see it with
        // these flags.
        vmcb.set(vmcb::EXCEPTIONS, ALL);
    }

    /// Finishes the step under way. Returns the access, whose page the caller protects again.
    pub fn finish(&mut self, vmcb: &mut Vmcb) -> Option<Protected> {
        const KEPT: u64 = FLAG_INTERRUPTS | FLAG_TRAP;
        let has_lapsed = self.has_lapsed(vmcb);
        let step = self.under_way.take()?;
        // An instruction that cleared the flag loaded others with it, which are the guest's.
        if !has_lapsed {
            let flags = vmcb.get(vmcb::RFLAGS) & !KEPT | step.flags & KEPT;
            vmcb.set(vmcb::RFLAGS, flags);
        }
        let met = vmcb.get(vmcb::DR6) & STATUS_BREAKPOINTS;
        let breakpoints = if met == 0 {
            step.status & STATUS_BREAKPOINTS
        } else {
            met
        };
        vmcb.set(vmcb::DR6, step.status & !STATUS_BREAKPOINTS | breakpoints);
        self.intercepts.restore(vmcb);
        Some(step.access)
    }
}
