//! Reasons for which vCPUs left the guest, from the counts of tracepoints in a window: each exit
//! under one reason, and the overlap, which two sources claim.
//!
//! Every count here only grows. A window is the difference of two readings, and one count is
//! subtracted from another only in a window. Where more is claimed of a kind of exit than there
//! were, the excess is [`Split::overlap`]; where less is, the rest has [`Reason::Unnamed`]. One
//! does not offset the other.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::counts::counts;

/// Vector of the local APIC timer in Linux guests (`LOCAL_TIMER_VECTOR`). Another guest's timer
/// interrupts are counted as interrupt delivery.
pub(crate) const TIMER_VECTOR: u64 = 0xec;
/// `isa` of VMX in `kvm_exit`.
pub(crate) const ISA_VMX: u64 = 1;
pub(crate) const MSR_TSC_DEADLINE: u64 = 0x6e0;
pub(crate) const MSR_X2APIC: RangeInclusive<u64> = 0x800..=0x8ff;
pub(crate) const MSR_EOI: u64 = 0x80b;
pub(crate) const MSR_INITIAL_COUNT: u64 = 0x838;
/// Exit reasons of an interrupt window: SVM's virtual interrupt, VMX's window.
pub(crate) const WINDOWS: [u64; 2] = [0x64, 7];

/// Reason for which a vCPU left the guest, as far as tracepoints say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A host interrupt, or the window for one of the guest's.
    Interrupt,
    /// `hlt`.
    Hlt,
    /// The guest programmed its timer, or the timer of the host that stands in for it fired.
    Timer,
    /// A spinning `pause`.
    Pause,
    /// Another write to the local APIC: end of interrupt, inter-processor interrupt.
    Apic,
    /// Second-level page fault: memory, or a device. Which, the ledger says by address.
    PageFault,
    /// Access to a device's memory that the processor distinguishes from a page fault: Intel's EPT
    /// misconfiguration.
    Misconfiguration,
    /// Port I/O.
    Io,
    /// Anything else: CPUID, other MSRs, control registers, hypercalls.
    Other,
    /// An access to an MSR, or an end of interrupt, that no tracepoint identified.
    Unnamed,
}

/// Counts by reason.
pub type Reasons = BTreeMap<Reason, u64>;

counts! {
    /// Events that tracepoints counted of the vCPUs' threads.
    Traced {
        /// Exits for a host interrupt.
        interrupts,
        /// Exits for the window of one of the guest's.
        windows,
        /// Exits for `hlt`.
        hlts,
        /// Exits for a spinning `pause`.
        pauses,
        /// Exits for the timer, where it has a reason of its own.
        timers,
        /// Exits for the local APIC, where it has a reason of its own.
        apic,
        /// Exits for a second-level page fault.
        page_faults,
        /// Exits for a device's memory that is known as such.
        misconfigurations,
        /// Exits for port I/O.
        io,
        /// Exits for MSRs.
        msrs,
        /// All other exits.
        others,
        /// Accesses to the timer's MSRs.
        timer_msrs,
        /// Writes to the MSR that ends an interrupt.
        eoi_msrs,
        /// Accesses to other MSRs of the local APIC.
        apic_msrs,
        /// Accesses to any other MSR.
        other_msrs,
        /// Ends of the timer's interrupts.
        timer_eois,
        /// Those that were paravirtual: no exit.
        timer_pv_eois,
        /// Ends of other interrupts.
        other_eois,
        /// Those that were paravirtual.
        other_pv_eois,
        /// Exits for an interrupt that was the host's tick.
        ticks,
        /// Exits for an interrupt that was another.
        other_interrupts,
        /// Windows that ended in the timer's injection.
        timer_windows,
        /// Windows that ended in another's.
        other_windows,
    }
}

impl Traced {
    /// Returns the number of all exits.
    pub fn exits(&self) -> u64 {
        self.interrupts
            + self.windows
            + self.hlts
            + self.pauses
            + self.timers
            + self.apic
            + self.page_faults
            + self.misconfigurations
            + self.io
            + self.msrs
            + self.others
    }
}

/// Exits by reason: together they are [`Traced::exits`] and the overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Each exit, once, but for the overlap.
    pub reasons: Reasons,
    /// Exits claimed beyond those that there were.
    pub overlap: u64,
}

impl Split {
    /// Returns the exits of one reason.
    pub fn of(&self, reason: Reason) -> u64 {
        self.reasons.get(&reason).copied().unwrap_or(0)
    }
}

/// Returns those of `exits` that `claimed` does not claim, and the claims beyond them.
pub(crate) fn settle(exits: u64, claimed: u64) -> (u64, u64) {
    (exits.saturating_sub(claimed), claimed.saturating_sub(exits))
}

/// Returns the exits of a window by reason.
pub fn combine(traced: &Traced) -> Split {
    let mut overlap = 0;
    let mut rest = |exits, claimed| {
        let (rest, beyond) = settle(exits, claimed);
        overlap += beyond;
        rest
    };
    // An exit for an interrupt whose handler has no tracepoint is one all the same, and so is a
    // window that ended in no injection.
    let no_handler = rest(traced.interrupts, traced.ticks + traced.other_interrupts);
    let no_injection = rest(traced.windows, traced.timer_windows + traced.other_windows);
    let interrupt = no_handler + traced.other_interrupts + no_injection + traced.other_windows;
    // Which register: every access to an MSR that exits is traced.
    let named = traced.timer_msrs + traced.eoi_msrs + traced.apic_msrs + traced.other_msrs;
    let mut unnamed = rest(traced.msrs, named);
    // Which interrupt: an end that is neither paravirtual nor the hardware's is a write to the MSR,
    // where the guest uses it.
    let (mut timer_eois, mut other_eois) = (0, 0);
    if traced.eoi_msrs > 0 {
        let mut beyond = 0;
        let mut explicit = |all, paravirtual| {
            let (rest, more) = settle(all, paravirtual);
            beyond += more;
            rest
        };
        timer_eois = explicit(traced.timer_eois, traced.timer_pv_eois);
        other_eois = explicit(traced.other_eois, traced.other_pv_eois);
        // More paravirtual ends than ends are no exits: two sources are at odds, and both rows say
        // so.
        unnamed += rest(traced.eoi_msrs, timer_eois + other_eois) + beyond;
        overlap += beyond;
    }
    let timer =
        traced.timers + traced.timer_msrs + timer_eois + traced.ticks + traced.timer_windows;
    let reasons = Reasons::from([
        (Reason::Interrupt, interrupt),
        (Reason::Hlt, traced.hlts),
        (Reason::Timer, timer),
        (Reason::Pause, traced.pauses),
        (Reason::Apic, traced.apic + traced.apic_msrs + other_eois),
        (Reason::PageFault, traced.page_faults),
        (Reason::Misconfiguration, traced.misconfigurations),
        (Reason::Io, traced.io),
        (Reason::Other, traced.others + traced.other_msrs),
        (Reason::Unnamed, unnamed),
    ]);
    Split { reasons, overlap }
}

/// Kind of exit that the hardware's code names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Interrupt,
    Window,
    Hlt,
    Pause,
    Timer,
    Apic,
    PageFault,
    Misconfiguration,
    Io,
    Msr,
    Other,
}

/// Classifies exit codes of AMD's APM volume 2, appendix C.
pub(crate) fn svm_kind(code: u64) -> Kind {
    match code {
        0x060 => Kind::Interrupt,
        0x064 => Kind::Window,
        0x077 => Kind::Pause,
        0x078 => Kind::Hlt,
        0x07b => Kind::Io,
        0x07c => Kind::Msr,
        0x400 => Kind::PageFault,
        0x401 | 0x402 => Kind::Apic,
        _ => Kind::Other,
    }
}

/// Classifies basic exit reasons of Intel's SDM volume 3, appendix C.
pub(crate) fn vmx_kind(code: u64) -> Kind {
    match code {
        1 => Kind::Interrupt,
        7 => Kind::Window,
        12 => Kind::Hlt,
        30 => Kind::Io,
        31 | 32 => Kind::Msr,
        40 => Kind::Pause,
        44 | 45 | 56 => Kind::Apic,
        48 => Kind::PageFault,
        49 => Kind::Misconfiguration,
        52 => Kind::Timer,
        _ => Kind::Other,
    }
}
