//! MSI-X table of one function (PCI Local Bus 3.0, §6.8.2), plain data of the function's owner.
//!
//! An interrupt is one message: address and data are read from the table entry at the time of
//! delivery, so the table need not be notified when a guest changes a vector. Masked vectors latch
//! a pending bit and deliver once when unmasked. Delivered messages are appended to the caller's
//! list.

use std::ops::Range;

use platform::interrupt::Message;

/// Bytes of one table entry.
pub const ENTRY_SIZE: u64 = 16;
/// Mask bit of an entry's vector control word.
const MASKED: u32 = 1;

/// Locations of a function's table and pending bits: the content of its MSI-X capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixPlace {
    /// Number of vectors, 1 to 2048.
    pub vectors: u16,
    /// Index of the BAR that contains the table.
    pub table_bar: u8,
    /// Offset of the table in that BAR, a multiple of 8.
    pub table: u32,
    /// Index of the BAR that contains the pending-bit array.
    pub pending_bar: u8,
    /// Offset of the array in that BAR, a multiple of 8.
    pub pending: u32,
}

impl MsixPlace {
    /// Returns the range of bytes of the table in its BAR.
    pub fn table_bytes(&self) -> Range<u64> {
        let first = u64::from(self.table);
        first..first + ENTRY_SIZE * u64::from(self.vectors)
    }

    /// Returns the range of bytes of the pending-bit array in its BAR: whole words of 64 bits.
    pub fn pending_bytes(&self) -> Range<u64> {
        let first = u64::from(self.pending);
        first..first + 8 * u64::from(self.vectors).div_ceil(64)
    }
}

#[derive(Clone, Copy)]
struct Entry {
    address_lo: u32,
    address_hi: u32,
    data: u32,
    control: u32,
    pending: bool,
}

/// The table, its pending bits, and the two enables of the capability's message control word.
pub struct MsixTable {
    entries: Vec<Entry>,
    enabled: bool,
    masked: bool,
    /// Bus Master Enable. A message is a write to memory (PCI Local Bus 3.0, §6.8.3.5).
    is_master: bool,
    sent: u64,
}

impl MsixTable {
    /// Creates a table of `vectors` entries, all masked, as after a reset.
    pub fn new(vectors: u16) -> Self {
        let entry = Entry {
            address_lo: 0,
            address_hi: 0,
            data: 0,
            control: MASKED,
            pending: false,
        };
        Self {
            entries: vec![entry; usize::from(vectors)],
            enabled: false,
            masked: false,
            is_master: false,
            sent: 0,
        }
    }

    /// Number of vectors.
    pub fn vectors(&self) -> u16 {
        u16::try_from(self.entries.len()).expect("built from a u16")
    }

    /// Messages delivered since the machine started.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Applies a write to the capability's message control word: MSI-X enable and function mask.
    pub fn set_control(&mut self, enabled: bool, masked: bool, out: &mut Vec<Message>) {
        (self.enabled, self.masked) = (enabled, masked);
        self.deliver_all(out);
    }

    /// Sets Bus Master Enable. A vector that is raised while it is off stays pending.
    pub fn set_bus_master(&mut self, on: bool, out: &mut Vec<Message>) {
        self.is_master = on;
        self.deliver_all(out);
    }

    fn deliver_all(&mut self, out: &mut Vec<Message>) {
        for vector in 0..self.vectors() {
            self.deliver_pending(vector, out);
        }
    }

    /// Reads 4 or 8 bytes of the table; any other access reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !offset.is_multiple_of(4) {
            return;
        }
        for (i, chunk) in data.chunks_exact_mut(4).enumerate() {
            let word = self.word(offset.saturating_add(4 * i as u64)).unwrap_or(0);
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Writes 4 or 8 bytes of the table; any other access is ignored.
    pub fn write(&mut self, offset: u64, data: &[u8], out: &mut Vec<Message>) {
        if !offset.is_multiple_of(4) {
            return;
        }
        for (i, chunk) in data.chunks_exact(4).enumerate() {
            let value = u32::from_le_bytes(chunk.try_into().expect("chunks of four"));
            self.set_word(offset.saturating_add(4 * i as u64), value, out);
        }
    }

    /// Reads the pending-bit array, one bit for each vector.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let first = (offset as usize).saturating_add(i).saturating_mul(8);
            *byte = (0..8)
                .filter(|bit| {
                    self.entries
                        .get(first.saturating_add(*bit))
                        .is_some_and(|e| e.pending)
                })
                .fold(0, |acc, bit| acc | 1 << bit);
        }
    }

    /// Raises a vector. A vector out of range raises nothing; 0xffff means that the guest chose
    /// none.
    pub fn raise(&mut self, vector: u16, out: &mut Vec<Message>) {
        if !self.enabled {
            return;
        }
        if let Some(entry) = self.entries.get_mut(usize::from(vector)) {
            entry.pending = true;
            self.deliver_pending(vector, out);
        }
    }

    fn deliver_pending(&mut self, vector: u16, out: &mut Vec<Message>) {
        let message = self.message(vector);
        let entry = &mut self.entries[usize::from(vector)];
        if let Some(message) = message
            && entry.pending
        {
            entry.pending = false;
            self.sent += 1;
            out.push(message);
        }
    }

    /// Returns the message that raising `vector` would send now; `None` if it would stay pending,
    /// or does not exist.
    pub fn message(&self, vector: u16) -> Option<Message> {
        let entry = self.entries.get(usize::from(vector))?;
        let is_open = self.enabled && !self.masked && self.is_master && entry.control & MASKED == 0;
        let address = u64::from(entry.address_hi) << 32 | u64::from(entry.address_lo);
        let data = entry.data;
        is_open.then_some(Message { address, data })
    }

    fn word(&self, offset: u64) -> Option<u32> {
        let entry = self
            .entries
            .get(usize::try_from(offset / ENTRY_SIZE).ok()?)?;
        Some(match offset % ENTRY_SIZE {
            0 => entry.address_lo,
            4 => entry.address_hi,
            8 => entry.data,
            _ => entry.control,
        })
    }

    fn set_word(&mut self, offset: u64, value: u32, out: &mut Vec<Message>) {
        let Ok(index) = u16::try_from(offset / ENTRY_SIZE) else {
            return;
        };
        let Some(entry) = self.entries.get_mut(usize::from(index)) else {
            return;
        };
        match offset % ENTRY_SIZE {
            0 => entry.address_lo = value & !3,
            4 => entry.address_hi = value,
            8 => entry.data = value,
            _ => {
                entry.control = value & MASKED;
                self.deliver_pending(index, out);
            }
        }
    }
}

#[cfg(test)]
mod tests;
