//! A driver of either layout.

use guest_mem::{Gpa, PhysMem};

use super::{Buffer, EVENT_IDX, FakeDriver, FakePacked, IN_ORDER, Position, RING_PACKED, Rings};

/// A driver of either layout, by the features it accepted.
#[expect(missing_docs, reason = "as they say")]
pub enum AnyDriver<M, Q = Rings> {
    Split(FakeDriver<M, Q>),
    Packed(FakePacked<M, Q>),
}

macro_rules! each {
    ($self:ident, $driver:ident => $then:expr) => {
        match $self {
            AnyDriver::Split($driver) => $then,
            AnyDriver::Packed($driver) => $then,
        }
    };
}

impl<M: PhysMem, Q: From<Rings>> AnyDriver<M, Q> {
    /// A queue at `base`, packed and in order if the features say so.
    pub fn new(mem: M, base: Gpa, index: u16, size: u16, features: u64) -> Self {
        let in_order = features & IN_ORDER != 0;
        if features & RING_PACKED != 0 {
            let mut driver = FakePacked::new(mem, base, index, size);
            if in_order {
                driver.set_in_order();
            }
            return Self::Packed(driver);
        }
        let mut driver = FakeDriver::new(mem, base, index, size);
        if in_order {
            driver.set_in_order();
        }
        if features & EVENT_IDX == 0 {
            driver.set_flags_only();
        }
        Self::Split(driver)
    }

    /// Sets the ring's position to `position` (packed: modulo the size, the wrap counter in bit
    /// 15), with everything used; returns the position at which the device has to start. To be
    /// called before the first chain.
    pub fn start_at(&mut self, position: u16) -> Position {
        match self {
            Self::Split(driver) => {
                driver.start_at(position);
                Position::Split(position)
            }
            Self::Packed(driver) => {
                let (idx, wrap) = ((position & 0x7fff) % driver.size(), position >> 15 != 0);
                driver.start_at(idx, wrap);
                Position::Packed(idx, wrap)
            }
        }
    }

    /// The queue as the transport would hand it to the device.
    pub fn config(&self) -> Q {
        each!(self, driver => driver.config())
    }

    /// The memory.
    pub fn mem(&self) -> &M {
        each!(self, driver => driver.mem())
    }

    /// Writes guest memory; panics outside RAM.
    pub fn put(&self, gpa: u64, bytes: &[u8]) {
        each!(self, driver => driver.put(gpa, bytes));
    }

    /// Entries.
    pub fn size(&self) -> u16 {
        each!(self, driver => driver.size())
    }

    /// Descriptors not in a chain.
    pub fn free(&self) -> usize {
        each!(self, driver => driver.free())
    }

    /// A chain of these buffers, not published; answers its head or buffer id. Panics when the
    /// table is full.
    pub fn stage(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        each!(self, driver => driver.stage(readable, writable))
    }

    /// Like [`stage`](Self::stage), with the descriptors in an indirect table at `table`.
    pub fn stage_indirect(&mut self, table: Gpa, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        each!(self, driver => driver.stage_indirect(table, readable, writable))
    }

    /// Shows the device everything staged; whether it wants a doorbell for that.
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(driver) => driver.publish_and_ask(),
            Self::Packed(driver) => driver.publish(),
        }
    }

    /// [`stage`](Self::stage) and [`publish`](Self::publish).
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer]) -> u16 {
        let id = self.stage(readable, writable);
        self.publish();
        id
    }

    /// Takes the next chain returned: head or buffer id, and bytes written.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        each!(self, driver => driver.used())
    }
}
