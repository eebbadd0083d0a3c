//! Defences against a hostile guest, and sets of those that are on.
//!
//! Each has a switch of its own, so that a test can turn one off and show that exactly the attacks
//! against which it is directed succeed. The switches are for tests: a hypervisor in use has them
//! all on.

/// Defence that contains a part of the actions of a hostile guest ([`surface`](crate::surface)
/// lists them).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Defence {
    /// A tick that cannot be masked ([`watchdog`](crate::watchdog)), and its findings.
    Watchdog,
    /// Every exit takes the pending interrupts of the host, not only the exits for interrupts.
    Window,
    /// An event whose delivery faults is combined with the fault as the processor would do it; the
    /// third fault ends the guest.
    Combine,
    /// #DB and #AC exit, so that their delivery cannot repeat itself in the processor.
    Recurring,
    /// EFER, CR0 and CR4 by the architecture's rules; the shadow is re-checked whenever they
    /// change.
    Modes,
    /// Messages and I/O APIC entries are made by the hypervisor: own processor, fixed, edge; no
    /// interrupt of the guest's has a vector of the host's class at the real local APIC.
    Messages,
    /// The limit of the guest's table ends before the host's class.
    Limit,
    /// An interrupt that the guest holds in service for too long is ended for it; direct mode is
    /// off until the guest has completed it.
    Service,
    /// A guest that masks interrupts for too large a part of the time is in injection mode for a
    /// while.
    Masking,
    /// Task priority never blocks the host's class.
    Priority,
    /// INT instructions and the guest's own absent gates are distinguished from interrupts.
    Reflection,
    /// Interrupt commands reach the guest's own processor alone.
    Commands,
    /// Registers of local APICs in memory are withheld.
    Pages,
    /// Entries of the local vector table are fixed or masked.
    Lvt,
    /// A timer's period has a lower bound.
    Period,
    /// Ports that are not on the list do not reach the machine.
    Ports,
    /// Configuration space is the assigned device's alone, and moves nothing.
    Config,
    /// Model-specific registers that are not on the list do not reach the processor.
    Msrs,
    /// Instructions that would take something of the host's: INVD, task switches, RSM, MWAIT.
    Instructions,
    /// The guest's end is not the machine's.
    End,
    /// The assigned device reaches the guest's memory and nothing else, and its messages are those
    /// of a table.
    Dma,
    /// The block function reaches the guest's memory and nothing else.
    Ring,
}

impl Defence {
    /// All of them, in the order of the table.
    pub const ALL: [Self; 22] = [
        Self::Watchdog,
        Self::Window,
        Self::Combine,
        Self::Recurring,
        Self::Modes,
        Self::Messages,
        Self::Limit,
        Self::Service,
        Self::Masking,
        Self::Priority,
        Self::Reflection,
        Self::Commands,
        Self::Pages,
        Self::Lvt,
        Self::Period,
        Self::Ports,
        Self::Config,
        Self::Msrs,
        Self::Instructions,
        Self::End,
        Self::Dma,
        Self::Ring,
    ];

    /// The name of its switch.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Watchdog => "watchdog",
            Self::Window => "window",
            Self::Combine => "combine",
            Self::Recurring => "recurring",
            Self::Modes => "modes",
            Self::Messages => "messages",
            Self::Limit => "limit",
            Self::Service => "service",
            Self::Masking => "masking",
            Self::Priority => "priority",
            Self::Reflection => "reflection",
            Self::Commands => "commands",
            Self::Pages => "pages",
            Self::Lvt => "lvt",
            Self::Period => "period",
            Self::Ports => "ports",
            Self::Config => "config",
            Self::Msrs => "msrs",
            Self::Instructions => "instructions",
            Self::End => "end",
            Self::Dma => "dma",
            Self::Ring => "ring",
        }
    }

    const fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// The defences that are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defences(u32);

impl Default for Defences {
    fn default() -> Self {
        Self::ALL
    }
}

impl Defences {
    /// All.
    pub const ALL: Self = Self((1 << Defence::ALL.len()) - 1);
    /// None.
    pub const NONE: Self = Self(0);

    /// Parses a switch's value: `on`, `off`, or names with a minus before each, separated by
    /// commas: all but those.
    ///
    /// `None` for anything else.
    #[must_use]
    pub fn parse(value: &str) -> Option<Self> {
        match value {
            "on" => Some(Self::ALL),
            "off" => Some(Self::NONE),
            _ => value.split(',').try_fold(Self::ALL, |on, word| {
                let name = word.strip_prefix('-')?;
                let defence = Defence::ALL
                    .into_iter()
                    .find(|known| known.name() == name)?;
                Some(on.without(defence))
            }),
        }
    }

    /// These, less one.
    #[must_use]
    pub const fn without(self, defence: Defence) -> Self {
        Self(self.0 & !defence.bit())
    }

    /// Whether `defence` is on.
    #[must_use]
    pub const fn has(self, defence: Defence) -> bool {
        self.0 & defence.bit() != 0
    }

    /// Those that are off.
    pub fn missing(self) -> impl Iterator<Item = Defence> {
        Defence::ALL
            .into_iter()
            .filter(move |defence| !self.has(*defence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_leaves_out_what_it_names_and_nothing_else() {
        assert_eq!(Defences::parse("on"), Some(Defences::ALL));
        assert_eq!(Defences::parse("off"), Some(Defences::NONE));
        for defence in Defence::ALL {
            let on = Defences::parse(&format!("-{}", defence.name())).unwrap();
            assert!(!on.has(defence));
            assert_eq!(on.missing().collect::<Vec<_>>(), [defence]);
        }
        let two = Defences::parse("-limit,-end").unwrap();
        assert_eq!(
            two,
            Defences::ALL.without(Defence::Limit).without(Defence::End)
        );
        for bad in [
            "",
            "limit",
            "-",
            "-limits",
            "-limit,",
            "on,-limit",
            "-limit,off",
        ] {
            assert_eq!(Defences::parse(bad), None, "{bad:?}");
        }
        assert_eq!(Defences::default(), Defences::ALL);
    }
}
