//! Base address registers: the address ranges that a function decodes (PCI Local Bus 3.0
//! §6.2.5.1).
//!
//! Used twice for each function, with the same writes, hence the same results: in the function's
//! own configuration space, and on the bus, which decodes BAR addresses on vCPU threads without a
//! message to the function's owner.

/// Number of base address registers of an endpoint.
pub const BARS: usize = 6;
/// Offset of the command register.
pub const COMMAND: u16 = 0x04;
/// Command bit 1: the function decodes its memory BARs.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command bit 2: the function may do DMA and send MSIs.
pub const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Command bit 10: the function does not assert its legacy pin.
pub const COMMAND_PIN_OFF: u16 = 1 << 10;
/// Command bits a guest may change.
pub const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_PIN_OFF;
/// Offset of the first BAR.
pub const FIRST_BAR: u16 = 0x10;
/// Bytes from the first BAR to the end of the last.
const BAR_BYTES: u16 = 4 * BARS as u16;

/// Kind and size of one BAR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BarKind {
    /// Not implemented: reads zero.
    #[default]
    Absent,
    /// 32-bit memory of this many bytes, a power of two from 16 to 2^31.
    Memory32(u32),
    /// 64-bit memory of this many bytes, a power of two from 16 to 2^40; takes the next register
    /// too.
    Memory64(u64),
    /// The upper half of the 64-bit BAR before it.
    Upper,
}

impl BarKind {
    fn size(self) -> Option<u64> {
        match self {
            BarKind::Memory32(size) => Some(u64::from(size)),
            BarKind::Memory64(size) => Some(size),
            BarKind::Absent | BarKind::Upper => None,
        }
    }
}

/// The BARs and command register of one function.
#[derive(Clone, Debug, Default)]
pub struct Bars {
    kinds: [BarKind; BARS],
    /// Address bits as written; type bits are added on reading.
    values: [u32; BARS],
    command: u16,
}

impl Bars {
    /// All at address zero, decoding off. Panics on a layout no function may have (a builder's
    /// error).
    pub fn new(kinds: [BarKind; BARS]) -> Self {
        for (index, kind) in kinds.iter().enumerate() {
            if let Some(size) = kind.size() {
                let most = match kind {
                    BarKind::Memory64(_) => 1 << 40,
                    _ => 1 << 31,
                };
                assert!(
                    size.is_power_of_two() && (16..=most).contains(&size),
                    "BAR {index} has {size} bytes, which is no power of two from 16 to {most}"
                );
            }
            let has_upper = kinds.get(index + 1) == Some(&BarKind::Upper);
            let wants_upper = matches!(kind, BarKind::Memory64(_));
            assert!(
                has_upper == wants_upper,
                "BAR {index} and its upper half do not match"
            );
        }
        assert!(kinds[0] != BarKind::Upper, "the first BAR is no upper half");
        Self {
            kinds,
            ..Self::default()
        }
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        self.command
    }

    /// Bytes of BAR `index`, if it is one.
    pub fn size(&self, index: usize) -> Option<u64> {
        self.kinds.get(index)?.size()
    }

    /// Whether BAR `index` takes an address beyond 4 GiB.
    pub fn is_wide(&self, index: usize) -> bool {
        matches!(self.kinds.get(index), Some(BarKind::Memory64(_)))
    }

    /// Returns the programmed address of BAR `index`, whether or not decoding is on.
    pub fn address(&self, index: usize) -> Option<u64> {
        self.size(index)?;
        let high = match self.kinds[index] {
            BarKind::Memory64(_) => u64::from(self.values[index + 1]) << 32,
            _ => 0,
        };
        Some(high | u64::from(self.values[index]))
    }

    /// Returns the decoded address of BAR `index`: its address while memory decoding is on.
    pub fn decoded(&self, index: usize) -> Option<u64> {
        (self.command & COMMAND_MEMORY != 0)
            .then(|| self.address(index))
            .flatten()
    }

    /// Register value of BAR `index` as the guest reads it.
    pub fn read(&self, index: usize) -> u32 {
        self.values[index]
            | match self.kinds[index] {
                BarKind::Memory64(_) => 0b100,
                _ => 0,
            }
    }

    fn mask(&self, index: usize) -> u32 {
        match self.kinds[index] {
            BarKind::Absent => 0,
            BarKind::Memory32(size) => !(size - 1),
            BarKind::Memory64(size) => !(size - 1) as u32,
            BarKind::Upper => match self.kinds[index - 1] {
                BarKind::Memory64(size) => (!(size - 1) >> 32) as u32,
                _ => 0,
            },
        }
    }

    /// Applies the part of a configuration write that falls on the command register or a BAR.
    /// `reg` + `len` ≤ 4096. Returns whether a register that affects decoding was written.
    pub fn write(&mut self, reg: u16, len: u8, value: u32) -> bool {
        let mut touched = false;
        for (at, byte) in (reg..).zip(value.to_le_bytes()).take(usize::from(len)) {
            if at == COMMAND || at == COMMAND + 1 {
                let shift = 8 * (at - COMMAND);
                let mask = COMMAND_WRITABLE & 0xff << shift;
                self.command = self.command & !mask | (u16::from(byte) << shift) & mask;
                touched = true;
            } else if (FIRST_BAR..FIRST_BAR + BAR_BYTES).contains(&at) {
                let index = usize::from((at - FIRST_BAR) / 4);
                let shift = 8 * (at % 4);
                let mask = self.mask(index) & 0xff << shift;
                self.values[index] = self.values[index] & !mask | u32::from(byte) << shift & mask;
                touched = true;
            }
        }
        touched
    }
}

#[cfg(test)]
mod tests;
