//! Exits, counted by kind and cause.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::core1;
use crate::hpet::Clock;

/// Kind of an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A physical interrupt.
    Intr,
    /// A non-maskable one.
    Nmi,
    /// The guest can take an interrupt that waits.
    Vintr,
    /// #NP.
    NotPresent,
    /// #GP.
    Protection,
    /// A write to the local APIC's EOI register.
    Eoi,
    /// Its timer's count registers.
    Timer,
    /// Its others.
    Apic,
    /// Another model-specific register.
    Msr,
    /// CR8.
    Cr8,
    /// CPUID.
    Cpuid,
    /// A port.
    Io,
    /// The nested page tables.
    NestedFault,
    /// LIDT, SIDT.
    Table,
    /// The end of a single step.
    Step,
    /// Anything else.
    Other,
}

const KINDS: [(Kind, &str); 16] = [
    (Kind::Intr, "intr"),
    (Kind::Nmi, "nmi"),
    (Kind::Vintr, "vintr"),
    (Kind::NotPresent, "np"),
    (Kind::Protection, "gp"),
    (Kind::Eoi, "eoi"),
    (Kind::Timer, "timer"),
    (Kind::Apic, "apic"),
    (Kind::Msr, "msr"),
    (Kind::Cr8, "cr8"),
    (Kind::Cpuid, "cpuid"),
    (Kind::Io, "io"),
    (Kind::NestedFault, "npf"),
    (Kind::Table, "idtr"),
    (Kind::Step, "step"),
    (Kind::Other, "other"),
];

/// Cause to which an exit is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Interrupts of the assigned device.
    Device,
    /// Interrupts of the block function.
    Paravirtual,
    /// The guest's local APIC timer.
    Timer,
    /// The host's own interrupts.
    Host,
    /// The watchdog.
    Watchdog,
    /// Anything else that the guest does.
    Guest,
}

const CAUSES: [(Cause, &str); 6] = [
    (Cause::Device, "device"),
    (Cause::Paravirtual, "pv"),
    (Cause::Timer, "timer"),
    (Cause::Host, "host"),
    (Cause::Watchdog, "watchdog"),
    (Cause::Guest, "guest"),
];

/// Counters beside those of exits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// VMRUNs.
    Runs,
    /// Cycles of the time-stamp counter between entries and exits.
    GuestCycles,
    /// The host's ticks that it handled.
    Ticks,
    /// Unmaskable interrupts that it took, at the first of the guest's processors.
    Nmis,
    /// Ticks of the watchdog that the first of the guest's processors sent to others.
    NmisSent,
    /// Unmaskable interrupts at random moments, which sample a guest that masks others.
    Samples,
    /// Device interrupts that were acknowledged on the guest's behalf: by an INTR exit, and by a
    /// fault.
    DeviceCaught,
    /// Exits on account of assigned interrupts that came in direct mode, for delivery or
    /// completion: there must be none.
    DeviceExitsDirect,
    /// Device interrupts injected.
    DeviceInjected,
    /// EOIs of directly delivered device interrupts that exited.
    DeviceCompleted,
    /// Local APIC timer interrupts on the guest's behalf.
    TimerCaught,
    /// Writes that policy did not allow.
    Refused,
    /// Times a mode began.
    TurnsDirect,
    /// Accesses of devices to memory that the IOMMU blocked and recorded.
    DmaFaults,
    /// Messages of devices, likewise.
    IrqBlocked,
    /// Times that it could not record one.
    DmaFaultsLost,
}

const COUNTS: [(Count, &str); 16] = [
    (Count::Runs, "runs"),
    (Count::GuestCycles, "guest_cycles"),
    (Count::Ticks, "host_ticks"),
    (Count::Nmis, "nmis"),
    (Count::NmisSent, "nmis_sent"),
    (Count::Samples, "samples"),
    (Count::DeviceCaught, "device_caught"),
    (Count::DeviceExitsDirect, "device_exits_direct"),
    (Count::DeviceInjected, "device_injected"),
    (Count::DeviceCompleted, "device_completed"),
    (Count::TimerCaught, "timer_caught"),
    (Count::Refused, "refused"),
    (Count::TurnsDirect, "turns_direct"),
    (Count::DmaFaults, "dma_faults"),
    (Count::IrqBlocked, "irq_blocked"),
    (Count::DmaFaultsLost, "dma_faults_lost"),
];

/// Counts since some moment.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    exits: [[u64; CAUSES.len()]; KINDS.len()],
    others: [u64; COUNTS.len()],
}

impl Counts {
    /// None.
    pub const ZERO: Self = Self {
        exits: [[0; CAUSES.len()]; KINDS.len()],
        others: [0; COUNTS.len()],
    };

    /// Adds to one of the others.
    pub fn add(&mut self, count: Count, by: u64) {
        self.others[count as usize] += by;
    }

    /// Returns the sum of these and `others`.
    pub fn plus(mut self, others: &Self) -> Self {
        let counts = self.exits.iter_mut().flatten().chain(&mut self.others);
        let added = others.exits.iter().flatten().chain(&others.others);
        counts.zip(added).for_each(|(count, by)| *count += by);
        self
    }

    /// Returns the number of all exits.
    pub fn sum(&self) -> u64 {
        self.exits.iter().flatten().sum()
    }

    /// Returns what was added since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut since = *self;
        let counts = since.exits.iter_mut().flatten().chain(&mut since.others);
        let old = before.exits.iter().flatten().chain(&before.others);
        counts.zip(old).for_each(|(count, old)| *count -= old);
        since
    }

    /// Writes them as keys of a JSON object, with a comma behind each.
    pub fn keys(&self, out: &mut impl fmt::Write) -> fmt::Result {
        write!(out, "\"exits\":{},", self.sum())?;
        for (count, name) in COUNTS {
            write!(out, "\"{name}\":{},", self.others[count as usize])?;
        }
        for (kind, kind_name) in KINDS {
            for (cause, cause_name) in CAUSES {
                let count = self.exits[kind as usize][cause as usize];
                if count != 0 {
                    write!(out, "\"{kind_name}_{cause_name}\":{count},")?;
                }
            }
        }
        Ok(())
    }
}

/// Counts of one processor of the guest's: its core adds, any core reads.
pub struct Counters {
    clock: Option<Clock>,
    exits: [[AtomicU64; CAUSES.len()]; KINDS.len()],
    others: [AtomicU64; COUNTS.len()],
    /// Counts of the mode machine, by [`TOTALS`].
    totals: [AtomicU64; TOTALS.len()],
}

/// A count of the mode machine: its name, and where it is.
type Total = (&'static str, fn(&eli::Core) -> u64);

/// Counts of the mode machine that are reported.
pub const TOTALS: [Total; 9] = [
    ("injected", |core| core.counts().injected),
    ("reflected", |core| core.counts().reflected),
    ("software", |core| core.counts().software),
    ("own_gates", |core| core.counts().own_gates),
    ("stolen", |core| core.counts().stolen),
    ("forced", |core| core.counts().forced),
    ("suspended", |core| core.counts().suspended),
    ("returned", |core| core.counts().returned),
    ("aliased", |core| core.aliased().into()),
];

impl Counters {
    /// Creates counters without a clock.
    pub const fn new() -> Self {
        Self {
            clock: None,
            exits: [const { [const { AtomicU64::new(0) }; CAUSES.len()] }; KINDS.len()],
            others: [const { AtomicU64::new(0) }; COUNTS.len()],
            totals: [const { AtomicU64::new(0) }; TOTALS.len()],
        }
    }

    /// Sets the clock from now on, by which gaps between the host's ticks are measured.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = Some(clock);
    }

    /// Counts an exit.
    pub fn exit(&self, kind: Kind, cause: Cause) {
        Self::increase(&self.exits[kind as usize][cause as usize], 1);
    }

    /// Adds to one of the others.
    pub fn add(&self, count: Count, by: u64) {
        Self::increase(&self.others[count as usize], by);
        if count == Count::Ticks
            && by != 0
            && let Some(clock) = self.clock
        {
            core1::TICKS.taken(clock.now());
        }
    }

    /// Returns what has been counted so far. Not at one moment, while the processor runs.
    pub fn read(&self) -> Counts {
        Counts {
            exits: self
                .exits
                .each_ref()
                .map(|causes| causes.each_ref().map(Self::value)),
            others: self.others.each_ref().map(Self::value),
        }
    }

    /// Takes what the mode machine has done so far.
    pub fn set_totals(&self, core: &eli::Core) {
        for (slot, (_, total)) in self.totals.iter().zip(TOTALS) {
            slot.store(total(core), Ordering::Relaxed);
        }
    }

    /// Returns one of these: its place in [`TOTALS`].
    pub fn total(&self, index: usize) -> u64 {
        Self::value(&self.totals[index])
    }

    // Relaxed, both: a number, of which one core is the only writer.
    fn increase(count: &AtomicU64, by: u64) {
        count.store(count.load(Ordering::Relaxed) + by, Ordering::Relaxed);
    }

    fn value(count: &AtomicU64) -> u64 {
        count.load(Ordering::Relaxed)
    }
}
