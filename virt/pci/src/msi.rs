//! MSI without X (PCI Local Bus 3.0, §6.8.1): one message for a block of 1 to 32 vectors.
//!
//! [`MsiLayout`] and [`MsiRegisters`] are the capability in configuration space. [`Msi`] is the
//! delivery by the function, plain data of the owner of the function, like
//! [`MsixTable`](crate::msix::MsixTable): a vector that is masked, or raised while the function may
//! not write to memory, stays pending and is delivered once when it may.
//!
//! A function that was allocated `2^n` vectors replaces the low `n` bits of the message's data by
//! the vector's number (§6.8.1.6). Vectors that were not allocated have no message.
//!
//! **Left out.** Extended message data (an engineering change of PCI Express 3.1): data has 16
//! bits.

use platform::interrupt::Message;

/// Most vectors that a function may have, as a power of two.
const MOST_LOG2: u8 = 5;
/// Message control bit 0: MSI is on.
const ENABLE: u16 = 1;
/// Message control bit 7: addresses have 64 bits.
const WIDE: u16 = 1 << 7;
/// Message control bit 8: each vector has a mask bit and a pending bit.
const MASKS: u16 = 1 << 8;

/// Read-only part of an MSI capability: which registers there are, and for how many vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiLayout {
    /// Number of vectors asked for, as a power of two: 0 to 5 (Multiple Message Capable).
    vectors_log2: u8,
    /// Addresses have 64 bits.
    pub is_wide: bool,
    /// Each vector has a mask bit and a pending bit.
    pub has_masks: bool,
}

impl MsiLayout {
    /// The layout for `2^vectors_log2` vectors, at most 32.
    pub fn new(vectors_log2: u8, is_wide: bool, has_masks: bool) -> Self {
        Self {
            vectors_log2: vectors_log2.min(MOST_LOG2),
            is_wide,
            has_masks,
        }
    }

    /// The layout that a message control register describes; the two reserved codes for vectors
    /// mean 32.
    pub fn of_control(control: u16) -> Self {
        let vectors_log2 = (control >> 1 & 7) as u8;
        Self::new(vectors_log2, control & WIDE != 0, control & MASKS != 0)
    }

    /// Number of vectors: 1 to 32, a power of two.
    pub fn vectors(self) -> u8 {
        1 << self.vectors_log2
    }

    /// Bytes of the capability: 10, 14, 20 or 24.
    #[expect(clippy::len_without_is_empty, reason = "no capability is empty")]
    pub fn len(self) -> u16 {
        match self.has_masks {
            true => self.pending() + 4,
            false => self.data() + 2,
        }
    }

    /// Offset of the data register in the capability.
    fn data(self) -> u16 {
        if self.is_wide { 12 } else { 8 }
    }

    /// Offset of the mask bits, where there are any.
    fn mask(self) -> u16 {
        self.data() + 4
    }

    /// Offset of the pending bits, where there are any (see `has_masks`).
    pub fn pending(self) -> u16 {
        self.data() + 8
    }

    /// One bit for each vector.
    pub fn vector_bits(self) -> u32 {
        u32::MAX >> (32 - u32::from(self.vectors()))
    }

    /// The capability behind id and link, as reset.
    pub(crate) fn body(self) -> Vec<u8> {
        let mut body = vec![0; usize::from(self.len()) - 2];
        let flags = if self.is_wide { WIDE } else { 0 } | if self.has_masks { MASKS } else { 0 };
        let control = u16::from(self.vectors_log2) << 1 | flags;
        body[..2].copy_from_slice(&control.to_le_bytes());
        body
    }

    /// Offset and mask of the bits a guest may change, by register.
    pub(crate) fn writable(self) -> Vec<(u16, u32)> {
        // Enable, and Multiple Message Enable. The word with them has id and link in its lower
        // half.
        let mut writable = vec![(0, 0x0071 << 16), (4, !3)];
        if self.is_wide {
            writable.push((8, u32::MAX));
        }
        // The upper half of the word with the data is reserved; without mask bits it is no part of
        // the capability.
        writable.push((self.data(), 0xffff));
        if self.has_masks {
            writable.push((self.mask(), self.vector_bits()));
        }
        writable
    }

    /// The registers in `bytes`, which are the whole capability.
    pub(crate) fn registers(self, bytes: &[u8]) -> MsiRegisters {
        let half = |at: u16| {
            let at = usize::from(at);
            u16::from_le_bytes([bytes[at], bytes[at + 1]])
        };
        let word = |at: u16| u32::from(half(at + 2)) << 16 | u32::from(half(at));
        let high = if self.is_wide { word(8) } else { 0 };
        let control = half(2);
        MsiRegisters {
            is_enabled: control & ENABLE != 0,
            allocated_log2: ((control >> 4 & 7) as u8).min(self.vectors_log2),
            address: u64::from(high) << 32 | u64::from(word(4)),
            data: half(self.data()),
            mask: if self.has_masks { word(self.mask()) } else { 0 },
        }
    }
}

/// Registers of an MSI capability that a guest writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiRegisters {
    /// MSI Enable.
    pub is_enabled: bool,
    /// Number of vectors allocated, as a power of two, at most as many as asked for (Multiple
    /// Message Enable).
    pub allocated_log2: u8,
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u16,
    /// Mask bits, one for each vector; 0 where there are none.
    pub mask: u32,
}

/// The messages of one function, its pending vectors, and whether it may send.
pub struct Msi {
    layout: MsiLayout,
    registers: MsiRegisters,
    pending: u32,
    /// The function may write to memory, and a message is a write.
    is_master: bool,
    sent: u64,
}

impl Msi {
    /// MSI off, with nothing pending.
    pub fn new(layout: MsiLayout) -> Self {
        Self {
            layout,
            registers: MsiRegisters::default(),
            pending: 0,
            is_master: false,
            sent: 0,
        }
    }

    /// Number of vectors allocated: 1 to 32, a power of two.
    pub fn allocated(&self) -> u8 {
        1 << self.registers.allocated_log2
    }

    /// One bit for each vector that is pending.
    pub fn pending(&self) -> u32 {
        self.pending
    }

    /// Messages delivered since the machine started.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// The capability's registers were written. A vector that is not allocated any more is not
    /// pending either.
    pub fn set_registers(&mut self, registers: &MsiRegisters, out: &mut Vec<Message>) {
        self.registers = MsiRegisters {
            allocated_log2: registers.allocated_log2.min(self.layout.vectors_log2),
            address: registers.address & !3,
            mask: match self.layout.has_masks {
                true => registers.mask,
                false => 0,
            },
            ..*registers
        };
        self.pending &= u32::MAX >> (32 - u32::from(self.allocated()));
        self.deliver_pending(out);
    }

    /// Sets Bus Master. A vector that is raised while it is off stays pending.
    pub fn set_bus_master(&mut self, on: bool, out: &mut Vec<Message>) {
        self.is_master = on;
        self.deliver_pending(out);
    }

    /// Raises a vector. One that was not allocated, or any while MSI is off, is silence.
    pub fn raise(&mut self, vector: u8, out: &mut Vec<Message>) {
        if self.registers.is_enabled && vector < self.allocated() {
            self.pending |= 1 << vector;
            self.deliver_pending(out);
        }
    }

    /// The message that raising `vector` would send now; `None` where it would be kept back, or has
    /// none.
    pub fn message(&self, vector: u8) -> Option<Message> {
        let registers = &self.registers;
        let is_open = registers.is_enabled
            && self.is_master
            && vector < self.allocated()
            && registers.mask & 1 << vector == 0;
        let low = u16::from(self.allocated()) - 1;
        is_open.then(|| Message {
            address: registers.address,
            data: u32::from(registers.data & !low | u16::from(vector)),
        })
    }

    fn deliver_pending(&mut self, out: &mut Vec<Message>) {
        for vector in 0..self.allocated() {
            if self.pending & 1 << vector != 0
                && let Some(message) = self.message(vector)
            {
                self.pending &= !(1 << vector);
                self.sent += 1;
                out.push(message);
            }
        }
    }
}

#[cfg(test)]
mod tests;
