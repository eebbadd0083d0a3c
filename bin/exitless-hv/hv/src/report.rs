//! Exits, counted by what exited and on whose account.

use core::fmt;

/// What exited.
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

/// On whose account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Interrupts of the assigned device.
    Device,
    /// The guest's local APIC timer.
    Timer,
    /// The host's own interrupts.
    Host,
    /// The watchdog.
    Watchdog,
    /// What else the guest does.
    Guest,
}

const CAUSES: [(Cause, &str); 5] = [
    (Cause::Device, "device"),
    (Cause::Timer, "timer"),
    (Cause::Host, "host"),
    (Cause::Watchdog, "watchdog"),
    (Cause::Guest, "guest"),
];

/// Counts since the start.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// VMRUNs.
    pub runs: u64,
    /// Cycles of the time-stamp counter between entries and exits.
    pub guest_cycles: u64,
    exits: [[u64; CAUSES.len()]; KINDS.len()],
    /// The host's ticks that it handled.
    pub ticks: u64,
    /// Unmaskable interrupts that it took.
    pub nmis: u64,
    /// Device interrupts that were acknowledged on the guest's behalf: by an INTR exit, and by a fault.
    pub device_caught: u64,
    /// Exits on account of assigned interrupts that came in direct mode, for delivery or completion: there must be none.
    pub device_exits_direct: u64,
    /// Device interrupts injected.
    pub device_injected: u64,
    /// EOIs of directly delivered device interrupts that exited.
    pub device_completed: u64,
    /// Local APIC timer interrupts on the guest's behalf.
    pub timer_caught: u64,
    /// Writes that policy did not let through.
    pub refused: u64,
    /// Times a mode began.
    pub turns_direct: u64,
}

impl Counts {
    /// None.
    pub const ZERO: Self = Self {
        runs: 0,
        guest_cycles: 0,
        exits: [[0; CAUSES.len()]; KINDS.len()],
        ticks: 0,
        nmis: 0,
        device_caught: 0,
        device_exits_direct: 0,
        device_injected: 0,
        device_completed: 0,
        timer_caught: 0,
        refused: 0,
        turns_direct: 0,
    };

    /// An exit.
    pub fn add(&mut self, kind: Kind, cause: Cause) {
        self.exits[kind as usize][cause as usize] += 1;
    }

    /// All exits.
    pub fn sum(&self) -> u64 {
        self.exits.iter().flatten().sum()
    }

    /// What was added since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let mut exits = self.exits;
        for (row, old) in exits.iter_mut().zip(&before.exits) {
            for (count, old) in row.iter_mut().zip(old) {
                *count -= old;
            }
        }
        Self {
            runs: self.runs - before.runs,
            guest_cycles: self.guest_cycles - before.guest_cycles,
            exits,
            ticks: self.ticks - before.ticks,
            nmis: self.nmis - before.nmis,
            device_caught: self.device_caught - before.device_caught,
            device_exits_direct: self.device_exits_direct - before.device_exits_direct,
            device_injected: self.device_injected - before.device_injected,
            device_completed: self.device_completed - before.device_completed,
            timer_caught: self.timer_caught - before.timer_caught,
            refused: self.refused - before.refused,
            turns_direct: self.turns_direct - before.turns_direct,
        }
    }

    /// As keys of a JSON object, with a comma behind each.
    pub fn keys(&self, out: &mut impl fmt::Write) -> fmt::Result {
        for (key, value) in [
            ("runs", self.runs),
            ("guest_cycles", self.guest_cycles),
            ("exits", self.sum()),
            ("host_ticks", self.ticks),
            ("nmis", self.nmis),
            ("device_caught", self.device_caught),
            ("device_exits_direct", self.device_exits_direct),
            ("device_injected", self.device_injected),
            ("device_completed", self.device_completed),
            ("timer_caught", self.timer_caught),
            ("refused", self.refused),
            ("turns_direct", self.turns_direct),
        ] {
            write!(out, "\"{key}\":{value},")?;
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
