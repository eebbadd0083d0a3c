//! The command line.

use eli::defence::{Defence, Defences};
use eli::policy::PROCESSORS_MAX;
use eli::{DirectModes, VectorSet};

use crate::io_core::Completion;

/// Message about a command line that makes no sense.
pub const HELP: &str = "\
exitless-hv: runs one guest, each of its processors on a core, with an assigned device's interrupts delivered and completed without an exit
  mode=baseline|delivery|eli|eli+timer|elvis|poll
                    what goes without an exit; with the last two the second core polls a block function's ring, whose disk is a module,
                    and completes without an exit, or by injection (eli)
  cpus=N            the guest's processors, 1 to 4; with more than one, a core beside them watches (1)
  watchdog=MS       a tick that cannot be masked, 1 to 1000, 0 for none (20)
  tick=MS           an interrupt of the host's own, 1 to 1000, 0 for none (0)
  assign=HEX,...    vectors that are assigned beside the device's (none)
  defend=on|off|-NAME,...
                    what contains a hostile guest: all of it, nothing, or all but these defences, to show that they are needed (on)
  critical=limit|nmi|core
                    how the host's tick keeps clear of the guest: behind the limit of its table, as an NMI, at the other core (limit)
  linger=MS         after the guest's end, what else runs on this machine goes on for so long (0)
  iommu=auto|required
                    without an IOMMU that keeps the assigned device to the guest's memory: the guest starts, or does not (auto)
  until=MS          ends the machine then, 0: never (0)
  trace=N           the first N events of interest are logged (40)
modules: a kernel (bzImage, or a multiboot image with addresses) and its command line; an initrd; with the word `disk`, the block function's";

/// Steps of interrupts that take no exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Nothing.
    Baseline,
    /// Delivery (§3.5.1).
    Delivery,
    /// And completion (§3.5.4).
    Eli,
    /// And the local APIC's timer (§3.9).
    EliTimer,
    /// The same, and requests of a block function that a core polls.
    Elvis,
    /// Those requests alone.
    Poll,
}

impl Mode {
    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Delivery => "delivery",
            Self::Eli => "eli",
            Self::EliTimer => "eli+timer",
            Self::Elvis => "elvis",
            Self::Poll => "poll",
        }
    }

    /// Returns the mode for the mode machine.
    pub const fn direct_modes(self) -> DirectModes {
        DirectModes {
            delivery: !matches!(self, Self::Baseline | Self::Poll),
            completion: matches!(self, Self::Eli | Self::EliTimer | Self::Elvis),
        }
    }

    /// Returns whether the timer of the local APIC is the guest's own.
    pub const fn assigns_timer(self) -> bool {
        matches!(self, Self::EliTimer | Self::Elvis)
    }

    /// Returns the way in which the I/O core completes, if there is one.
    pub const fn completion(self) -> Option<Completion> {
        match self {
            Self::Elvis => Some(Completion::Direct),
            Self::Poll => Some(Completion::Injected),
            _ => None,
        }
    }

    const ALL: [Self; 6] = [
        Self::Baseline,
        Self::Delivery,
        Self::Eli,
        Self::EliTimer,
        Self::Elvis,
        Self::Poll,
    ];
}

/// Means by which a host interrupt that must not be late is kept from the guest (§3.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Critical {
    /// Its vector lies behind the limit of the guest's table.
    Limit,
    /// It is an NMI, the watchdog's.
    Nmi,
    /// It goes to a core on which no guest runs.
    Core,
}

impl Critical {
    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Nmi => "nmi",
            Self::Core => "core",
        }
    }
}

/// The command line.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Steps of interrupts that take no exit.
    pub mode: Mode,
    /// The guest's processors.
    pub cpus: usize,
    /// Milliseconds; 0: none.
    pub watchdog: u32,
    /// Milliseconds; 0: none.
    pub tick: u32,
    /// Assigned beside the device's.
    pub assign: VectorSet,
    /// Defences against a hostile guest that are on.
    pub defend: Defences,
    /// Means by which the host's tick is kept from the guest.
    pub critical: Critical,
    /// Milliseconds that the machine stays on after the guest's end.
    pub linger: u32,
    /// Without an IOMMU nothing starts.
    pub requires_iommu: bool,
    /// Milliseconds after which the machine ends; 0: never.
    pub until: u32,
    /// Events that are still logged.
    pub trace: u32,
}

impl Options {
    /// Parses the words behind the image's name.
    ///
    /// # Errors
    /// The word that is not understood.
    pub fn parse(line: &'static str) -> Result<Self, &'static str> {
        let mut options = Self {
            mode: Mode::Eli,
            cpus: 1,
            watchdog: 20,
            tick: 0,
            assign: VectorSet::EMPTY,
            defend: Defences::ALL,
            critical: Critical::Limit,
            linger: 0,
            requires_iommu: false,
            until: 0,
            trace: 40,
        };
        for word in line.split_ascii_whitespace().skip(1) {
            options.word(word).ok_or(word)?;
        }
        if !options.defend.has(Defence::Watchdog) {
            options.watchdog = 0;
        }
        Ok(options)
    }

    fn word(&mut self, word: &str) -> Option<()> {
        let (key, value) = word.split_once('=')?;
        let milliseconds = || value.parse().ok().filter(|ms| *ms <= 1000);
        match key {
            "mode" => {
                self.mode = Mode::ALL.into_iter().find(|mode| mode.name() == value)?;
            }
            "cpus" => {
                let cpus = 1..=PROCESSORS_MAX;
                self.cpus = value.parse().ok().filter(|count| cpus.contains(count))?;
            }
            "watchdog" => self.watchdog = milliseconds()?,
            "tick" => self.tick = milliseconds()?,
            "iommu" if value == "auto" => self.requires_iommu = false,
            "iommu" if value == "required" => self.requires_iommu = true,
            "until" => self.until = value.parse().ok()?,
            "trace" => self.trace = value.parse().ok()?,
            "defend" => self.defend = Defences::parse(value)?,
            "critical" => {
                let direct_modes = [Critical::Limit, Critical::Nmi, Critical::Core];
                self.critical = direct_modes.into_iter().find(|way| way.name() == value)?;
            }
            "linger" => self.linger = value.parse().ok()?,
            "assign" => {
                for vector in value.split(',') {
                    let vector = u8::from_str_radix(vector, 16).ok().filter(|v| *v >= 32)?;
                    self.assign.insert(vector);
                }
            }
            _ => return None,
        }
        Some(())
    }
}
