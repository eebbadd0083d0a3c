//! Policy for a guest that has real interrupt hardware: its writes that are allowed (§3.7.2, and
//! the additions of x2APIC).
//!
//! Each function checks one write and returns the value that the real register may hold: the same,
//! a masked version, or nothing. The guest reads back the value that it wrote; the hypervisor keeps
//! it. A vector below 32 is never allowed, since the host would take it for an exception of its
//! own; a vector of the host's class has an alias at the real local APIC
//! ([`alias`](crate::alias)). Interrupts from outside of the processor, [`Message`] and [`Pin`],
//! are composed anew from the few fields that the guest may choose.

pub mod control;
mod messages;
mod processors;
pub mod timer;

pub use messages::{Message, Pin, message};
pub use processors::{PROCESSORS_MAX, Processors, Targets};

pub mod config;
pub mod list;
pub mod msrs;
pub mod pit;
pub mod ports;

use crate::Vector;
use crate::gate::FIRST_INTERRUPT;

/// Reason why a write was changed or refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenyReason {
    /// A delivery mode that is not the guest's to use: NMI, SMI, INIT, start-up, or ExtINT where
    /// there is no such line.
    DeliveryMode(u8),
    /// Another processor.
    Destination(u32),
    /// A vector that is an exception's.
    Exception(Vector),
}

impl core::fmt::Display for DenyReason {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::DeliveryMode(mode) => {
                let name = match mode {
                    2 => "SMI",
                    4 => "NMI",
                    5 => "INIT",
                    6 => "start-up",
                    7 => "ExtINT",
                    _ => "reserved",
                };
                write!(f, "delivery mode {mode} ({name})")
            }
            Self::Destination(to) => write!(f, "destination {to:#x} is another processor"),
            Self::Exception(vector) => write!(f, "vector {vector:#x} is an exception's"),
        }
    }
}

const FIXED: u8 = 0;
const LOWEST_PRIORITY: u8 = 1;
const EXT_INT: u8 = 7;

const fn delivery_mode(word: u32) -> u8 {
    (word >> 8 & 7) as u8
}

/// An entry of the local vector table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lvt {
    /// The timer: always fixed.
    Timer,
    /// The 8259s' line: fixed or ExtINT.
    Lint0,
    /// The NMI line: allowed only as fixed, since it would be an NMI otherwise.
    Lint1,
    /// Thermal sensor.
    Thermal,
    /// Performance counters: as NMIs they would be the watchdog's.
    Performance,
    /// Errors of the local APIC.
    Error,
}

/// Masked, in a local vector table's entry.
pub const LVT_MASKED: u32 = 1 << 16;

/// Write to the real entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LvtWrite {
    /// The value for it, with the guest's vector.
    pub real: u32,
    /// The vector that the guest wants for its own, as it is at the real local APIC.
    pub wants: Option<Vector>,
    /// Reason why it is masked, if the guest did not mask it.
    pub reason: Option<DenyReason>,
}

/// A write to the local vector table.
#[must_use]
pub fn lvt(entry: Lvt, value: u32) -> LvtWrite {
    let vector = value as Vector;
    if value & LVT_MASKED != 0 {
        // A masked entry's vector is not used; one below 16 would be noted as an error of the local
        // APIC.
        return LvtWrite {
            real: value,
            wants: None,
            reason: None,
        };
    }
    let masked = |reason| LvtWrite {
        real: LVT_MASKED,
        wants: None,
        reason: Some(reason),
    };
    let mode = match entry {
        // It has no delivery mode; those bits are reserved.
        Lvt::Timer => FIXED,
        Lvt::Error if delivery_mode(value) == FIXED => FIXED,
        _ => delivery_mode(value),
    };
    match mode {
        EXT_INT if entry == Lvt::Lint0 => LvtWrite {
            real: value,
            wants: None,
            reason: None,
        },
        FIXED if vector < FIRST_INTERRUPT => masked(DenyReason::Exception(vector)),
        FIXED => LvtWrite {
            real: value,
            wants: Some(vector),
            reason: None,
        },
        other => masked(DenyReason::DeliveryMode(other)),
    }
}

/// Effect of an interrupt command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// An interrupt of this vector, to each of these.
    Fixed(Targets, Vector),
    /// A non-maskable interrupt, to each of these: injected, never sent.
    Nmi(Targets),
    /// These wait for a start-up from here on: emulated.
    Init(Targets),
    /// Those of these that wait begin in real mode at this page: emulated.
    StartUp(Targets, u8),
    /// No processor is meant, or nothing: "all but self" with one processor, a de-assert.
    ToNobody,
    /// Refused.
    Refused(DenyReason),
}

/// A write to the interrupt command register of the guest's processor `own`, an x2APIC.
///
/// Any destination means the guest's processors only. Its first processor takes no INIT: it would
/// not wait for a start-up.
#[must_use]
pub fn command(value: u64, own: usize, guests: &Processors) -> Command {
    const LOGICAL: u64 = 1 << 11;
    const NMI: u8 = 4;
    const INIT: u8 = 5;
    const START_UP: u8 = 6;
    const FIRST: usize = 0;
    let low = value as u32;
    let (mode, vector, to) = (delivery_mode(low), low as Vector, (value >> 32) as u32);
    if mode == INIT && low >> 14 & 1 == 0 && low >> 15 & 1 == 1 {
        return Command::ToNobody;
    }
    let mut targets = match low >> 18 & 3 {
        0 => guests.of_word(to, value & LOGICAL != 0),
        1 => Targets::one(own),
        2 => guests.all(),
        _ => guests.all().without(own),
    };
    match mode {
        FIXED | LOWEST_PRIORITY | NMI | START_UP => {}
        INIT => {
            let meant = targets;
            targets = targets.without(FIRST);
            if targets.is_empty() && !meant.is_empty() {
                return Command::Refused(DenyReason::DeliveryMode(mode));
            }
        }
        other => return Command::Refused(DenyReason::DeliveryMode(other)),
    }
    if targets.is_empty() {
        return match low >> 18 & 3 {
            0 => Command::Refused(DenyReason::Destination(to)),
            _ => Command::ToNobody,
        };
    }
    match mode {
        NMI => Command::Nmi(targets),
        INIT => Command::Init(targets),
        START_UP => Command::StartUp(targets, vector),
        _ if vector < FIRST_INTERRUPT => Command::Refused(DenyReason::Exception(vector)),
        LOWEST_PRIORITY => Command::Fixed(Targets::one(targets.first().unwrap_or(own)), vector),
        _ => Command::Fixed(targets, vector),
    }
}

/// The task priority that the real register may have: the guest's, but never so high that the
/// host's class is blocked.
///
/// The model keeps the guest's higher value: no interrupt of the guest's own reaches it then
/// ([`Core`](crate::Core)).
#[must_use]
pub const fn real_task_priority(guests: u8) -> u8 {
    const HIGHEST: u8 = (crate::hosts::CRITICAL >> 4) - 1;
    if guests >> 4 > HIGHEST {
        HIGHEST << 4
    } else {
        guests
    }
}

/// A pair of 8259s, with regard to their vectors: writes to the ports of either are checked before
/// they are forwarded.
///
/// Left to itself firmware puts them at vectors 8 to 15, and a guest could again: an interrupt that
/// the host takes there would look like a double fault of its own.
#[derive(Clone, Debug, Default)]
pub struct Pics([Initialising; 2]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Initialising {
    #[default]
    No,
    /// The next byte to the data port is the base vector; this one, which began it, has been held
    /// back.
    Base(u8),
    /// The wiring of the cascade.
    Cascade(u8),
    /// The mode.
    Mode,
}

/// Writes to the real one, in order: the byte to its command port that was held back, and this byte
/// to the port to which it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PicWrites {
    /// To the command port.
    pub first: Option<u8>,
    /// To the port that was written.
    pub then: Option<u8>,
}

impl Pics {
    /// A byte that the guest writes to `port` (0x20, 0x21, 0xa0, 0xa1).
    ///
    /// The first byte of an initialisation is held back until the base vector is known: between the
    /// two QEMU's has base 0 and no mask. That the chip ends interrupts for itself is taken out of
    /// the last: a level would never end then.
    ///
    /// # Errors
    /// A base that is an exception's, or in the host's class. Nothing is written.
    pub fn write(&mut self, port: u16, value: u8) -> Result<PicWrites, DenyReason> {
        const INITIALISE: u8 = 1 << 4;
        const HAS_MODE: u8 = 1;
        const SINGLE: u8 = 1 << 1;
        const AUTOMATIC_EOI: u8 = 1 << 1;
        let state = &mut self.0[usize::from(port >> 7 & 1)];
        let plain = PicWrites {
            first: None,
            then: Some(value),
        };
        if port & 1 == 0 {
            if value & INITIALISE == 0 {
                return Ok(plain);
            }
            *state = Initialising::Base(value);
            return Ok(PicWrites {
                first: None,
                then: None,
            });
        }
        match *state {
            Initialising::No => Ok(plain),
            Initialising::Base(begun) => {
                let base = value & 0xf8;
                if !(FIRST_INTERRUPT..crate::hosts::CRITICAL).contains(&base) {
                    return Err(DenyReason::Exception(base));
                }
                *state = match begun {
                    begun if begun & SINGLE == 0 => Initialising::Cascade(begun),
                    begun if begun & HAS_MODE != 0 => Initialising::Mode,
                    _ => Initialising::No,
                };
                Ok(PicWrites {
                    first: Some(begun),
                    then: Some(value),
                })
            }
            Initialising::Cascade(begun) => {
                *state = if begun & HAS_MODE != 0 {
                    Initialising::Mode
                } else {
                    Initialising::No
                };
                Ok(plain)
            }
            Initialising::Mode => {
                *state = Initialising::No;
                Ok(PicWrites {
                    first: None,
                    then: Some(value & !AUTOMATIC_EOI),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e9_entries_of_the_local_vector_table_are_fixed_or_masked() {
        let of = |vector: u32, mode: u32| vector | mode << 8;
        for entry in [
            Lvt::Lint0,
            Lvt::Lint1,
            Lvt::Thermal,
            Lvt::Performance,
            Lvt::Error,
        ] {
            for (mode, is_through) in [
                (0, true),
                (2, false),
                (4, false),
                (5, false),
                (7, entry == Lvt::Lint0),
            ] {
                let write = lvt(entry, of(0x51, mode));
                assert_eq!(
                    write.real & LVT_MASKED == 0,
                    is_through,
                    "{entry:?} mode {mode}"
                );
                assert_eq!(write.reason.is_none(), is_through, "{entry:?} mode {mode}");
            }
            assert_eq!(lvt(entry, of(0x51, 0)).wants, Some(0x51));
            // A masked entry may hold any value.
            assert_eq!(lvt(entry, of(0x51, 4) | LVT_MASKED).reason, None);
        }
        // A vector of the host's class is wanted like any other: it gets an alias.
        assert_eq!(lvt(Lvt::Timer, 0xf1 | 1 << 17).wants, Some(0xf1));
        assert_eq!(
            lvt(Lvt::Timer, 0x0e).reason,
            Some(DenyReason::Exception(0x0e))
        );
        assert_eq!(lvt(Lvt::Lint1, of(0, 4)).real, LVT_MASKED);
    }

    #[test]
    fn e8_commands_reach_nobody_else() {
        let guests = Processors::new([0]);
        let to = |id: u64, low: u64| command(id << 32 | low, 0, &guests);
        let own = Command::Fixed(Targets::one(0), 0x41);
        assert_eq!(to(0, 0x41), own);
        assert_eq!(to(0, 0x41 | 1 << 18), own);
        assert_eq!(to(7, 0x41 | 2 << 18), own);
        assert_eq!(to(1, 0x41 | 1 << 11), own);
        assert_eq!(
            to(2, 0x41 | 1 << 11),
            Command::Refused(DenyReason::Destination(2))
        );
        assert_eq!(to(1, 0x41), Command::Refused(DenyReason::Destination(1)));
        assert_eq!(to(0, 0x41 | 3 << 18), Command::ToNobody);
        for (low, mode) in [(0x4500, 5), (0x200, 2), (0x700, 7)] {
            for id in [0, 0xffff_ffff] {
                assert_eq!(
                    to(id, low),
                    Command::Refused(DenyReason::DeliveryMode(mode)),
                    "{low:#x} to {id}"
                );
            }
        }
        for low in [0x4500, 0x400, 0x608] {
            assert_eq!(to(1, low), Command::Refused(DenyReason::Destination(1)));
            assert_eq!(to(1, low | 3 << 18), Command::ToNobody);
        }
        // An NMI to itself is injected.
        assert_eq!(to(0, 0x400), Command::Nmi(Targets::one(0)));
        // The de-assert that Linux sends after INIT means no processor.
        assert_eq!(to(1, 0x8500), Command::ToNobody);
        assert_eq!(to(0, 8), Command::Refused(DenyReason::Exception(8)));
    }

    #[test]
    fn commands_between_two_processors_reach_these_two_and_no_third() {
        let guests = Processors::new([0, 1]);
        let from = |own: usize, id: u64, low: u64| command(id << 32 | low, own, &guests);
        let (first, second) = (Targets::one(0), Targets::one(1));
        assert_eq!(from(0, 1, 0xf1), Command::Fixed(second, 0xf1));
        assert_eq!(from(0, 1, 0x41 | 3 << 18), Command::Fixed(second, 0x41));
        assert_eq!(from(1, 0, 0x41 | 3 << 18), Command::Fixed(first, 0x41));
        assert_eq!(
            from(1, 9, 0x41 | 2 << 18),
            Command::Fixed(guests.all(), 0x41)
        );
        assert_eq!(from(0, 0xffff, 0x941), Command::Fixed(first, 0x41));
        assert_eq!(from(0, 1, 0x400), Command::Nmi(second));
        assert_eq!(from(0, 1, 0x4500), Command::Init(second));
        assert_eq!(from(0, 1, 0x4600 | 0x99), Command::StartUp(second, 0x99));
        assert_eq!(
            from(1, 0, 0x4500),
            Command::Refused(DenyReason::DeliveryMode(5))
        );
        assert_eq!(from(1, 0, 0x4500 | 2 << 18), Command::Init(second));
        assert_eq!(
            from(0, 1, 0x200),
            Command::Refused(DenyReason::DeliveryMode(2))
        );
        // The core that watches, and one that there is not.
        for id in [2, 3, 0x1_0001, 0x7fff_ffff] {
            for low in [0x41, 0xf1, 0x400, 0x4500, 0x4608, 0x541] {
                let is_logical = id == 0x1_0001;
                let low = low | u64::from(is_logical) << 11;
                assert!(
                    matches!(from(0, id, low), Command::Refused(_)),
                    "{low:#x} to {id:#x}"
                );
            }
        }
    }

    #[test]
    fn e7_the_real_task_priority_leaves_the_hosts_class_open() {
        assert_eq!(real_task_priority(0xff), 0xe0);
        assert_eq!(real_task_priority(0xf0), 0xe0);
        assert_eq!(real_task_priority(0xe5), 0xe5);
        assert_eq!(real_task_priority(0x10), 0x10);
    }

    #[test]
    fn bug_1_the_8259s_never_have_vectors_of_exceptions() {
        let mut pics = Pics::default();
        let plain = |value| {
            Ok(PicWrites {
                first: None,
                then: Some(value),
            })
        };
        let held = Ok(PicWrites {
            first: None,
            then: None,
        });
        // Linux: initialise, base 0x30, cascade, mode, mask.
        assert_eq!(pics.write(0x20, 0x11), held);
        assert_eq!(
            pics.write(0x21, 0x30),
            Ok(PicWrites {
                first: Some(0x11),
                then: Some(0x30)
            })
        );
        for (port, value) in [(0x21, 4), (0x21, 1), (0x21, 0xfb), (0x20, 0x60)] {
            assert_eq!(pics.write(port, value), plain(value));
        }
        // Firmware's way, and the host's class.
        assert_eq!(pics.write(0xa0, 0x11), held);
        assert_eq!(pics.write(0xa1, 0x08), Err(DenyReason::Exception(8)));
        assert_eq!(pics.write(0xa1, 0xf0), Err(DenyReason::Exception(0xf0)));
        assert_eq!(
            pics.write(0xa1, 0x38),
            Ok(PicWrites {
                first: Some(0x11),
                then: Some(0x38)
            })
        );
        assert_eq!(pics.write(0xa1, 2), plain(2));
        // A level that no processor ends interrupts for ever.
        assert_eq!(pics.write(0xa1, 3), plain(1));
        // A mask is no base.
        assert_eq!(pics.write(0xa1, 0x08), plain(8));
    }
}
