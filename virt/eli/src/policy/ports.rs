//! Ports that a guest may use: a list. Accesses to other ports do not reach the machine.
//!
//! A read of a port that is withheld gives all ones, as where nothing is, or a constant that a
//! guest needs to find there; a write to it is dropped. The opposite, a list of ports that a guest
//! may not use, would have to know every chipset: one write to a port of firmware's own (0xb2), of
//! the reset line (0x92, 0xcf9) or of the A20 line ends the machine, or moves memory under the
//! hypervisor.

use super::list::{self, range};

/// A port number's treatment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The guest uses it without an exit.
    Direct,
    /// The index of the real-time clock: bit 7 would mask non-maskable interrupts.
    ClockIndex,
    /// The 8254 timer's first counter, and its control word ([`pit`](super::pit)): read as they
    /// are.
    Timer,
    /// PM1 control: sleep ends the guest, and the bit that would call firmware is cleared.
    Pm1Control,
    /// System control port A: A20 is on, the reset line is the guest's end.
    SystemControl,
    /// The keyboard controller's command: its reset line is the guest's end.
    Keyboard,
    /// The chipset's reset register.
    Reset,
    /// Nothing is there.
    Withheld,
}

/// Ports, their treatment, and why.
pub type Range = list::Range<u16, Rule>;

/// Ports that every machine of this kind has. Some withheld ports are listed for their effect; all
/// ports that are not listed are withheld as well.
pub const FIXED: &[Range] = &[
    range(0x40, 0x40, Rule::Timer, "8254 timer: the counter of IRQ 0"),
    range(0x41, 0x42, Rule::Direct, "8254 timer: the other counters"),
    range(0x43, 0x43, Rule::Timer, "8254 timer: control"),
    range(
        0x61,
        0x61,
        Rule::Direct,
        "gate and output of its third counter",
    ),
    range(0x70, 0x70, Rule::ClockIndex, "real-time clock: index"),
    range(0x71, 0x71, Rule::Direct, "real-time clock: data"),
    range(0x80, 0x80, Rule::Direct, "diagnostic code: a delay"),
    range(0x3f8, 0x3ff, Rule::Direct, "first serial line"),
    range(
        0x00,
        0x1f,
        Rule::Withheld,
        "8237 DMA controller: any memory below 16 MiB",
    ),
    range(
        0x60,
        0x60,
        Rule::Withheld,
        "keyboard controller's data: A20",
    ),
    range(
        0x64,
        0x64,
        Rule::Keyboard,
        "keyboard controller's command: reset, A20",
    ),
    range(0x81, 0x8f, Rule::Withheld, "8237's pages"),
    range(0x92, 0x92, Rule::SystemControl, "fast reset, A20"),
    range(0xb2, 0xb3, Rule::Withheld, "system management interrupt"),
    range(0xc0, 0xdf, Rule::Withheld, "second 8237"),
    range(
        0x4d0,
        0x4d1,
        Rule::Withheld,
        "edge or level of the 8259s' lines",
    ),
    range(
        0x510,
        0x51b,
        Rule::Withheld,
        "firmware's configuration: a DMA that no IOMMU sees",
    ),
    range(0xcd8, 0xcf7, Rule::Withheld, "hot-plugged processors"),
    range(0xcf9, 0xcf9, Rule::Reset, "reset"),
];

/// The same ports differ from machine to machine: firmware's tables have them (ACPI 6.5, §5.2.9). 0
/// is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Firmware {
    /// PM1a and PM1b event blocks, and their length.
    pub events: [u16; 2],
    /// Bytes of each.
    pub events_len: u8,
    /// PM1a and PM1b control.
    pub control: [u16; 2],
    /// The power management timer.
    pub timer: u16,
    /// General-purpose event blocks.
    pub general: [u16; 2],
    /// Bytes of each.
    pub general_len: [u8; 2],
}

/// Ranges of [`Firmware`].
const FIRMWARE_RANGES: usize = 7;

/// The list for one machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ports {
    firmware: [Option<Range>; FIRMWARE_RANGES],
}

/// An access's direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// IN.
    Read,
    /// OUT of this value.
    Write(u32),
}

/// Effect of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The access is made; a write with this value.
    Through(u32),
    /// The guest reads this, or its write is dropped.
    Nothing(u32),
    /// The guest's end: it switches power off.
    PowerOff,
    /// The guest's end: it resets the machine.
    Reset,
}

impl Ports {
    /// Creates the policy with firmware's blocks. A block that does not fit below 64 Ki, or covers
    /// a port of [`FIXED`], is left out.
    #[must_use]
    pub fn new(firmware: &Firmware) -> Self {
        let Firmware {
            events,
            events_len,
            control,
            timer,
            general,
            general_len,
        } = *firmware;
        let block = |first: u16, len: u8, rule, what| {
            let last = first.checked_add(u16::from(len).checked_sub(1)?)?;
            let range = range(first, last, rule, what);
            let is_free = first != 0 && !FIXED.iter().any(|other| other.meets(range));
            is_free.then_some(range)
        };
        let event = |first| block(first, events_len, Rule::Direct, "ACPI: fixed events");
        let sleep = |first| block(first, 2, Rule::Pm1Control, "ACPI: sleep");
        let general = |at: usize| {
            let what = "ACPI: general-purpose events";
            block(general[at], general_len[at], Rule::Direct, what)
        };
        let [a, b] = control.map(sleep);
        Self {
            firmware: [
                // First, so that no block hides them.
                a,
                b,
                event(events[0]),
                event(events[1]),
                block(timer, 4, Rule::Direct, "ACPI: timer"),
                general(0),
                general(1),
            ],
        }
    }

    /// The list.
    pub fn ranges(&self) -> impl Iterator<Item = Range> {
        FIXED
            .iter()
            .copied()
            .chain(self.firmware.into_iter().flatten())
    }

    /// The range of a port that is on the list.
    #[must_use]
    pub fn range(&self, port: u16) -> Option<Range> {
        self.ranges().find(|range| range.contains(port))
    }

    /// The treatment of a port.
    #[must_use]
    pub fn rule(&self, port: u16) -> Rule {
        self.range(port).map_or(Rule::Withheld, |range| range.rule)
    }

    /// Whether accesses to it need no exit.
    #[must_use]
    pub fn is_direct(&self, port: u16) -> bool {
        self.rule(port) == Rule::Direct
    }

    /// Decides about an access of `size` bytes (1, 2 or 4) that exited: at least one of its ports
    /// is not direct.
    #[must_use]
    pub fn decide(&self, port: u16, size: u8, access: Access) -> Answer {
        const FAST_RESET: u32 = 1;
        const A20: u32 = 1 << 1;
        const HARD_RESET: u32 = 1 << 2;
        const CLOCK_INDEX: u32 = 0x7f;
        let Some(Range { first, rule, .. }) = self.range(port) else {
            return Answer::Nothing(ones(size));
        };
        // Whole accesses alone: a wider one would reach the neighbour as well, and a narrower one
        // half of a register.
        let whole = if rule == Rule::Pm1Control {
            (2, first)
        } else {
            (1, port)
        };
        if (size, port) != whole {
            return Answer::Nothing(ones(size));
        }
        match (rule, access) {
            (Rule::Timer | Rule::ClockIndex | Rule::Pm1Control, Access::Read) => Answer::Through(0),
            (Rule::ClockIndex, Access::Write(value)) => Answer::Through(value & CLOCK_INDEX),
            (Rule::Pm1Control, Access::Write(value)) if value & PM1_SLEEP != 0 => Answer::PowerOff,
            (Rule::Pm1Control, Access::Write(value)) => {
                Answer::Through(value & 0xffff & !PM1_GLOBAL_RELEASE)
            }
            (Rule::SystemControl, Access::Read) => Answer::Nothing(A20),
            (Rule::SystemControl, Access::Write(value)) if value & FAST_RESET != 0 => Answer::Reset,
            // Pulses its output lines that are 0 in the lower four bits, of which bit 0 is the
            // processor's reset.
            (Rule::Keyboard, Access::Write(value)) if value & 0xf1 == 0xf0 => Answer::Reset,
            (Rule::Reset, Access::Read) => Answer::Nothing(0),
            (Rule::Reset, Access::Write(value)) if value & HARD_RESET != 0 => Answer::Reset,
            _ => Answer::Nothing(ones(size)),
        }
    }
}

/// In PM1 control: sleep now.
const PM1_SLEEP: u32 = 1 << 13;
/// In PM1 control: calls firmware, by a system management interrupt.
const PM1_GLOBAL_RELEASE: u32 = 1 << 2;

/// Returns the value of `size` bytes where nothing is.
#[must_use]
pub const fn ones(size: u8) -> u32 {
    match size {
        1 => 0xff,
        2 => 0xffff,
        _ => u32::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU's q35.
    const Q35: Firmware = Firmware {
        events: [0x600, 0],
        events_len: 4,
        control: [0x604, 0],
        timer: 0x608,
        general: [0x620, 0],
        general_len: [16, 0],
    };

    const fn of(port: u16, size: u8, access: Access) -> (u16, u8, Access) {
        (port, size, access)
    }

    #[test]
    fn e7_what_is_not_on_the_list_does_not_reach_the_machine() {
        let ports = Ports::new(&Q35);
        // All ports: a guest reaches exactly these without an exit.
        let direct: Vec<u16> = (0..=u16::MAX)
            .filter(|port| ports.is_direct(*port))
            .collect();
        let wanted: Vec<u16> = [
            0x41..=0x42,
            0x61..=0x61,
            0x71..=0x71,
            0x80..=0x80,
            0x3f8..=0x3ff,
            0x600..=0x603,
            0x608..=0x60b,
            0x620..=0x62f_u16,
        ]
        .into_iter()
        .flatten()
        .collect();
        assert_eq!(direct, wanted);
        for port in (0..=u16::MAX).filter(|port| !direct.contains(port)) {
            for size in [1, 2, 4] {
                let answers = [
                    ports.decide(port, size, Access::Read),
                    ports.decide(port, size, Access::Write(u32::MAX)),
                    ports.decide(port, size, Access::Write(0)),
                ];
                let reaches = answers
                    .iter()
                    .any(|answer| matches!(answer, Answer::Through(_)));
                let may = [(0x40, 1), (0x43, 1), (0x70, 1), (0x604, 2)].contains(&(port, size));
                assert_eq!(reaches, may, "{port:#x}, {size} bytes: {answers:?}");
            }
        }
    }

    #[test]
    fn each_hostile_access_gets_its_answer() {
        use Access::{Read, Write};
        use Answer::{Nothing, PowerOff, Reset, Through};
        let ports = Ports::new(&Q35);
        for ((port, size, access), answer) in [
            // Fast reset, and A20 off.
            (of(0x92, 1, Write(3)), Reset),
            (of(0x92, 1, Write(0)), Nothing(0xff)),
            (of(0x92, 1, Read), Nothing(2)),
            (of(0x92, 2, Write(1)), Nothing(0xffff)),
            // The same from the port below.
            (of(0x91, 2, Write(0x100)), Nothing(0xffff)),
            (of(0x90, 4, Write(0x1_0000)), Nothing(u32::MAX)),
            // The keyboard controller: its reset line, its output port with A20.
            (of(0x64, 1, Write(0xfe)), Reset),
            (of(0x64, 1, Write(0xf0)), Reset),
            (of(0x64, 1, Write(0xff)), Nothing(0xff)),
            (of(0x64, 1, Write(0xd1)), Nothing(0xff)),
            (of(0x60, 1, Write(0xdd)), Nothing(0xff)),
            (of(0x64, 1, Read), Nothing(0xff)),
            // System management.
            (of(0xb2, 1, Write(2)), Nothing(0xff)),
            (of(0xb2, 1, Read), Nothing(0xff)),
            (of(0x630, 4, Write(0x21)), Nothing(u32::MAX)),
            (of(0x604, 2, Write(5)), Through(1)),
            // Sleep of any kind, whole or in part.
            (of(0x604, 2, Write(0x2000)), PowerOff),
            (of(0x604, 2, Write(0x3c01)), PowerOff),
            (of(0x605, 1, Write(0x20)), Nothing(0xff)),
            (of(0x604, 4, Write(0x2000)), Nothing(u32::MAX)),
            (of(0x602, 4, Write(0x2000_0000)), Nothing(u32::MAX)),
            // The chipset's reset.
            (of(0xcf9, 1, Write(6)), Reset),
            (of(0xcf9, 1, Write(0xe)), Reset),
            (of(0xcf9, 1, Write(2)), Nothing(0xff)),
            (of(0xcf9, 2, Write(6)), Nothing(0xffff)),
            // Firmware's DMA.
            (of(0x514, 4, Write(0x30)), Nothing(u32::MAX)),
            (of(0x518, 4, Write(0x30)), Nothing(u32::MAX)),
            (of(0x510, 2, Read), Nothing(0xffff)),
            // Non-maskable interrupts masked by the clock's index.
            (of(0x70, 1, Write(0x8f)), Through(0x0f)),
            (of(0x70, 1, Read), Through(0)),
            // The timer's count, whose writes are decided on elsewhere.
            (of(0x40, 1, Write(2)), Nothing(0xff)),
            (of(0x40, 2, Write(2)), Nothing(0xffff)),
            (of(0x70, 2, Write(0x8f)), Nothing(0xffff)),
            // Watchdog of the chipset, hot-plug, ELCR.
            (of(0x660, 2, Write(0)), Nothing(0xffff)),
            (of(0xcd8, 1, Write(0)), Nothing(0xff)),
            (of(0x4d1, 1, Read), Nothing(0xff)),
        ] {
            assert_eq!(
                ports.decide(port, size, access),
                answer,
                "{port:#x}, {size} bytes, {access:x?}"
            );
        }
    }

    #[test]
    fn blocks_of_firmwares_that_would_open_more_are_left_out() {
        let opened = |firmware: Firmware| {
            let ports = Ports::new(&firmware);
            (0..=u16::MAX)
                .filter(|port| ports.rule(*port) != Rule::Withheld)
                .count()
        };
        let none = opened(Firmware::default());
        for firmware in [
            // Over the reset port, over firmware's DMA, beyond the last port, of no length.
            Firmware {
                general: [0xcf0, 0],
                general_len: [16, 0],
                ..Firmware::default()
            },
            Firmware {
                timer: 0x518,
                ..Firmware::default()
            },
            Firmware {
                events: [0xffff, 0xfffe],
                events_len: 4,
                ..Firmware::default()
            },
            Firmware {
                events: [0x600, 0],
                events_len: 0,
                ..Firmware::default()
            },
        ] {
            assert_eq!(opened(firmware), none, "{firmware:x?}");
        }
        // A control register inside of an event block is still checked.
        let ports = Ports::new(&Firmware {
            events: [0x600, 0],
            events_len: 8,
            control: [0x604, 0],
            ..Firmware::default()
        });
        assert_eq!(ports.rule(0x604), Rule::Pm1Control);
    }

    #[test]
    fn no_port_is_on_the_list_twice() {
        let ranges: Vec<Range> = Ports::new(&Q35).ranges().collect();
        for (at, one) in ranges.iter().enumerate() {
            assert!(one.first <= one.last, "{one:x?}");
            for other in &ranges[at + 1..] {
                assert!(!one.meets(*other), "{one:x?} {other:x?}");
            }
        }
    }
}
