//! Payloads: each one's sign, the modes in which it succeeds without its defences, and its end. The
//! defences that contain it are listed in `eli::surface`.

use eli::surface::{Row, row_of};

use crate::eli::modes::Mode;

/// Sign by which an attack is seen to have succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The host's ticks are fewer than this part of those of the calm run, percent.
    Starved(u64),
    /// The machine is gone, or hangs, and its hypervisor did not report the reason.
    Gone,
    /// The emulator itself ended.
    Emulator,
    /// The other core reports that the first does not exit any more.
    Lost,
    /// The hypervisor ended the guest, with this text in its log.
    Stopped(&'static str),
    /// More than 1,000 of these exits: one event causes itself again and again.
    Repeated(&'static str),
    /// The payload prints a number above 0 with this name.
    Said(&'static str),
    /// More of the host's ticks were taken than made.
    Forged,
    /// More NMIs than the watchdog's.
    ForgedNmi,
    /// Interrupts, NMIs, or spurious beats on the other core.
    OtherCore,
    /// The other core's beats stopped.
    OtherCoreStopped,
    /// The payload's lower vector was never acknowledged.
    Blocked,
    /// Instructions reached the processor: the payload ran more of them than there were of these
    /// exits.
    Reached(&'static str),
    /// The work of the other core ended with the guest.
    Ended,
    /// A page of the hypervisor was changed.
    Overwritten,
}

/// A payload that attacks.
#[derive(Clone, Copy, Debug)]
pub struct Attack {
    /// Its name.
    pub name: &'static str,
    /// See [`Sign`].
    pub sign: Sign,
    /// Modes in which it succeeds without its defences; none where the architecture alone contains
    /// it.
    pub bites: &'static [Mode],
    /// Whether it needs the controller.
    pub nvme: bool,
    /// Whether it also needs an IOMMU before the controller; the others are contained without.
    pub iommu: bool,
    /// Number of the guest's processors.
    pub cpus: u32,
    /// Whether it drives the block function: in the modes in which a core polls.
    pub polls: bool,
    /// Whether it does not end by itself when contained.
    pub spins: bool,
    /// Whether the guest ends when it is contained, by a fault or on its own request.
    pub ends: bool,
}

const ALL: &[Mode] = &Mode::ALL;
const NONE: &[Mode] = &[];
/// Modes with direct delivery.
const DIRECT: &[Mode] = &[Mode::Delivery, Mode::Eli, Mode::EliTimer];

const fn attack(name: &'static str, sign: Sign, bites: &'static [Mode]) -> Attack {
    Attack {
        name,
        sign,
        bites,
        nvme: false,
        iommu: false,
        cpus: 1,
        polls: false,
        spins: false,
        ends: false,
    }
}

impl Attack {
    const fn spins(self) -> Self {
        Self {
            spins: true,
            ..self
        }
    }

    const fn ends(self) -> Self {
        Self { ends: true, ..self }
    }

    const fn on_two(self) -> Self {
        Self { cpus: 2, ..self }
    }

    const fn polls(self) -> Self {
        Self {
            polls: true,
            ..self
        }
    }

    const fn with_nvme(self) -> Self {
        Self { nvme: true, ..self }
    }

    const fn behind_iommu(self) -> Self {
        Self {
            nvme: true,
            iommu: true,
            ..self
        }
    }

    /// Returns its row of the surface's table.
    pub fn row(&self) -> &'static Row {
        row_of(self.name).expect("every attack tests a row (a test of this module)")
    }

    /// Returns the value of the hypervisor's switch that leaves out the defences against it, and no
    /// others.
    pub fn without_defences(&self) -> String {
        let names = self.row().defences().iter();
        names
            .map(|defence| format!("-{}", defence.name()))
            .collect::<Vec<_>>()
            .join(",")
    }
}

/// All attacks, in the order of the surface's table.
pub const ATTACKS: &[Attack] = &[
    attack("e2", Sign::Lost, DIRECT).spins(),
    attack("e2shadow", Sign::Lost, DIRECT).spins(),
    attack("e2halt", Sign::Lost, DIRECT).spins(),
    attack("e2turns", Sign::Starved(75), DIRECT),
    attack("e2phase", Sign::Starved(75), DIRECT),
    attack("e7", Sign::Starved(10), DIRECT),
    attack("e7tpr", Sign::Starved(10), ALL),
    attack("modes_efer", Sign::Said("stolen"), DIRECT),
    attack("modes_compat", Sign::Said("stolen"), DIRECT),
    attack("msr_debugctl", Sign::Reached("msr"), ALL),
    attack("msr_syscfg", Sign::Reached("msr"), ALL),
    attack("msr_mtrr", Sign::Reached("msr"), ALL),
    attack("msr_tsc", Sign::Reached("msr"), ALL),
    attack("e1stack", Sign::Starved(20), ALL).ends(),
    attack("e1gate", Sign::Starved(20), ALL).ends(),
    attack("e1tables", Sign::Starved(20), ALL).ends(),
    attack("e3", Sign::Said("stolen"), DIRECT),
    attack("e6", Sign::Forged, DIRECT),
    attack("gate", Sign::Repeated("np_guest"), DIRECT),
    attack("triple", Sign::Ended, ALL).ends(),
    attack("db", Sign::Emulator, ALL),
    attack("halts", Sign::Starved(75), NONE),
    attack("invd", Sign::Reached("other"), ALL),
    attack("mwait", Sign::Reached("other"), ALL),
    attack("e8init", Sign::OtherCoreStopped, ALL),
    attack("e8nmi", Sign::OtherCore, ALL),
    attack("ipi_watcher", Sign::OtherCore, ALL).on_two(),
    attack("ipi_init", Sign::OtherCoreStopped, ALL).on_two(),
    attack("ipi_other", Sign::Forged, ALL).on_two(),
    attack("e8memory", Sign::OtherCore, ALL),
    attack("class_self", Sign::Starved(75), NONE),
    attack("e9lint0", Sign::ForgedNmi, ALL),
    attack("e9timer", Sign::Forged, ALL),
    attack("class_lvt", Sign::Starved(75), NONE),
    attack("pic", Sign::Starved(75), NONE),
    attack("period", Sign::Starved(75), ALL),
    // It starves the host if the emulator has no processor of its own for its timers: 22 of 315
    // ticks on a loaded machine, all of them on an idle one.
    attack("period_chip", Sign::Starved(75), NONE),
    attack("level_pin", Sign::Starved(10), ALL),
    attack("broadcast_pin", Sign::OtherCore, ALL),
    attack("broadcast_beat", Sign::OtherCore, ALL),
    attack("level_message", Sign::Starved(10), ALL).with_nvme(),
    attack("e10vector", Sign::Forged, ALL).with_nvme(),
    attack("e10cpu", Sign::OtherCore, ALL).with_nvme(),
    attack("broadcast_message", Sign::OtherCore, ALL).with_nvme(),
    attack("e4", Sign::Blocked, DIRECT),
    attack("e4turns", Sign::Blocked, DIRECT),
    // In the baseline the firmware's handler takes no exit, and returns.
    attack(
        "smi",
        Sign::Stopped("an exit that nothing is done about"),
        DIRECT,
    ),
    attack("fastreset", Sign::Gone, ALL).ends(),
    attack("resetport", Sign::Gone, ALL).ends(),
    attack("kbd", Sign::Gone, ALL).ends(),
    attack("a20", Sign::OtherCore, ALL),
    attack("fwcfg", Sign::Gone, ALL),
    attack("poweroff", Sign::Ended, ALL).ends(),
    attack("ecam", Sign::Gone, ALL),
    attack("powerbase", Sign::Gone, ALL),
    attack("bar", Sign::OtherCore, ALL).with_nvme(),
    attack("otherdevice", Sign::OtherCore, ALL),
    attack("e11", Sign::Overwritten, ALL).behind_iommu(),
    attack("e12", Sign::OtherCore, ALL).behind_iommu(),
    attack("ring_memory", Sign::Overwritten, &Mode::POLLING).polls(),
];

/// An honest payload, the text that it must print, and whether it may take no more exits than its
/// calm form in its last window.
#[derive(Clone, Copy, Debug)]
pub struct Honest {
    /// Its name.
    pub name: &'static str,
    /// Word of the text that it prints.
    pub says: &'static str,
    /// Whether delivery must be direct again within a second.
    pub returns: bool,
    /// Number of the guest's processors.
    pub cpus: u32,
    /// Whether it drives the block function: in the modes in which a core polls.
    pub polls: bool,
}

/// All honest payloads.
pub const HONEST: &[Honest] = &[
    Honest {
        name: "legacy",
        says: "stolen=0 after=100",
        returns: false,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "fixed",
        says: "wrong=0b0",
        returns: false,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "e1",
        says: "delivered=1000",
        returns: false,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "e5",
        says: "order=41,61,31",
        returns: false,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "moved",
        says: "ran=100",
        returns: false,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "ipi",
        says: "ran=100 nmis=100",
        returns: false,
        cpus: 2,
        polls: false,
    },
    Honest {
        name: "longhandler",
        says: "delivered=1000",
        returns: true,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "busyhandler",
        says: "delivered=1000",
        returns: true,
        cpus: 1,
        polls: false,
    },
    Honest {
        name: "ring_bounds",
        says: "stopped=15 of=15 served=15",
        returns: false,
        cpus: 1,
        polls: true,
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use eli::surface::ROWS;

    use super::*;

    #[test]
    fn every_test_of_the_surface_is_run_and_no_other() {
        let of = |is_wanted: &dyn Fn(&&Row) -> bool| -> BTreeSet<&str> {
            ROWS.iter()
                .filter(is_wanted)
                .flat_map(|row| row.tests)
                .copied()
                .collect()
        };
        let mut names: BTreeSet<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
        assert_eq!(names.len(), ATTACKS.len());
        assert!(names.is_superset(&of(&|row| !row.defences().is_empty())));
        names.extend(HONEST.iter().map(|honest| honest.name));
        assert_eq!(names.len(), ATTACKS.len() + HONEST.len());
        assert_eq!(names, of(&|_| true));
    }

    #[test]
    fn an_attack_bites_exactly_where_a_defence_can_be_left_out() {
        for attack in ATTACKS {
            let bites = !attack.bites.is_empty();
            assert_eq!(
                attack.without_defences().starts_with('-'),
                bites,
                "{attack:?}"
            );
        }
    }
}
