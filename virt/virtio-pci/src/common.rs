//! The common configuration structure of virtio over PCI (Virtio 1.2, §4.1.4.3), without the device
//! behind it.
//!
//! Values that the driver writes are kept here and handed to the device in one piece at DRIVER_OK.
//! Writes of registers that trigger an action (device status, queue enable) return an [`Effect`]
//! for the transport.

use guest_mem::Iova;
use vio::QueueConfig;

/// "No vector": what an unset or refused MSI-X vector register reads.
pub const NO_VECTOR: u16 = 0xffff;

/// Device status bits (§2.1).
pub mod status {
    /// The driver is ready; the device may use its queues.
    pub const DRIVER_OK: u8 = 4;
    /// Feature negotiation is complete.
    pub const FEATURES_OK: u8 = 8;
    /// The device has met an error it cannot recover from.
    pub const NEEDS_RESET: u8 = 64;
}

/// Action that the transport must take after a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing beyond the register.
    None,
    /// Status was written zero: stop, drain, then reset.
    Reset,
    /// DRIVER_OK has been set: activate the device.
    Start,
}

#[derive(Clone, Copy)]
struct QueueRegs {
    max_size: u16,
    size: u16,
    vector: u16,
    enabled: bool,
    desc: u64,
    driver: u64,
    device: u64,
}

/// The registers, from `device_feature_select` to `queue_device`.
pub struct CommonConfig {
    offered: u64,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    generation: u8,
    queue_select: u16,
    queues: Vec<QueueRegs>,
    vectors: u16,
    resetting: bool,
}

impl CommonConfig {
    /// Reset state of a device offering `features`, with one queue for each maximum size.
    pub fn new(features: u64, queue_sizes: &[u16], vectors: u16) -> Self {
        let queues = queue_sizes
            .iter()
            .map(|&max_size| QueueRegs {
                max_size,
                size: max_size,
                vector: NO_VECTOR,
                enabled: false,
                desc: 0,
                driver: 0,
                device: 0,
            })
            .collect();
        Self {
            offered: features,
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: 0,
            generation: 0,
            queue_select: 0,
            queues,
            vectors,
            resetting: false,
        }
    }

    /// Returns to the reset state, which the driver reads as status zero.
    pub fn reset(&mut self) {
        let sizes: Vec<u16> = self.queues.iter().map(|q| q.max_size).collect();
        *self = Self::new(self.offered, &sizes, self.vectors);
    }

    /// A reset has been asked for and is draining: status reads non-zero until
    /// [`reset`](Self::reset).
    pub fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Device status as written by the driver, with the bits the device sets.
    #[cfg(test)]
    pub fn status(&self) -> u8 {
        self.status
    }

    /// Sets NEEDS_RESET. Returns true if it was not set before, so that a configuration interrupt
    /// is due.
    pub fn set_needs_reset(&mut self) -> bool {
        let fresh = self.status & status::NEEDS_RESET == 0;
        self.status |= status::NEEDS_RESET;
        fresh
    }

    /// Sets the value of `config_generation`: the device's, which changes with its configuration
    /// space.
    pub fn set_generation(&mut self, generation: u8) {
        self.generation = generation;
    }

    /// Features the driver accepted.
    pub fn driver_features(&self) -> u64 {
        self.driver_features
    }

    /// MSI-X vector for configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config_vector
    }

    /// MSI-X vector of one queue; [`NO_VECTOR`] for a queue that does not exist.
    pub fn queue_vector(&self, queue: u16) -> u16 {
        self.queues
            .get(usize::from(queue))
            .map_or(NO_VECTOR, |q| q.vector)
    }

    /// The enabled queues as the device takes them.
    pub fn queue_configs(&self) -> Vec<QueueConfig> {
        self.queues
            .iter()
            .enumerate()
            .filter(|(_, q)| q.enabled)
            .map(|(index, q)| QueueConfig {
                index: u16::try_from(index).expect("at most 65536 queues"),
                size: q.size,
                desc: Iova::new(q.desc),
                avail: Iova::new(q.driver),
                used: Iova::new(q.device),
            })
            .collect()
    }

    /// Reads 1, 2, 4 or 8 bytes at `offset`; bytes outside read as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = offset.saturating_add(i as u64);
            let (base, word) = self.dword(at & !3);
            *byte = if base {
                word.to_le_bytes()[(at & 3) as usize]
            } else {
                0
            };
        }
    }

    /// The aligned four bytes at `offset` (§4.1.4.3's layout), and whether they exist.
    fn dword(&self, offset: u64) -> (bool, u32) {
        let queue = self.queues.get(usize::from(self.queue_select));
        let lo = |v: u64| v as u32;
        let hi = |v: u64| (v >> 32) as u32;
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let select = |features: u64, which: u32| match which {
            0 => lo(features),
            1 => hi(features),
            _ => 0,
        };
        let word = match offset {
            0x00 => self.device_feature_select,
            0x04 => select(self.offered, self.device_feature_select),
            0x08 => self.driver_feature_select,
            0x0c => select(self.driver_features, self.driver_feature_select),
            0x10 => pair(self.config_vector, self.queues.len() as u16),
            0x14 => {
                u32::from(self.status)
                    | u32::from(self.generation) << 8
                    | u32::from(self.queue_select) << 16
            }
            0x18 => queue.map_or(0, |q| pair(q.size, q.vector)),
            0x1c => queue.map_or(0, |q| pair(u16::from(q.enabled), self.queue_select)),
            0x20 => queue.map_or(0, |q| lo(q.desc)),
            0x24 => queue.map_or(0, |q| hi(q.desc)),
            0x28 => queue.map_or(0, |q| lo(q.driver)),
            0x2c => queue.map_or(0, |q| hi(q.driver)),
            0x30 => queue.map_or(0, |q| lo(q.device)),
            0x34 => queue.map_or(0, |q| hi(q.device)),
            _ => return (false, 0),
        };
        (true, word)
    }

    /// A write. Widths and offsets the specification does not have are ignored, as are queue
    /// registers of an enabled queue and everything but the status while a reset drains.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let value = match *data {
            [a] => u64::from(a),
            [a, b] => u64::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => return Effect::None,
        };
        if self.resetting {
            return Effect::None;
        }
        match (offset, data.len()) {
            (0x00, 4) => self.device_feature_select = value as u32,
            (0x08, 4) => self.driver_feature_select = value as u32,
            (0x0c, 4) => self.write_driver_features(value as u32),
            (0x10, 2) => self.config_vector = self.checked_vector(value as u16),
            (0x14, 1) => return self.write_status(value as u8),
            (0x16, 2) => self.queue_select = value as u16,
            _ => self.write_queue(offset, data.len(), value),
        }
        Effect::None
    }

    fn write_driver_features(&mut self, value: u32) {
        if self.status & status::FEATURES_OK != 0 {
            return;
        }
        let shift = match self.driver_feature_select {
            0 => 0,
            1 => 32,
            _ => return,
        };
        self.driver_features =
            self.driver_features & !(0xffff_ffff << shift) | u64::from(value) << shift;
    }

    fn write_status(&mut self, value: u8) -> Effect {
        if value == 0 {
            // A device whose status is zero already has nothing to reset.
            self.resetting = self.status != 0;
            return if self.resetting {
                Effect::Reset
            } else {
                Effect::None
            };
        }
        let started = self.status & status::DRIVER_OK != 0;
        // The driver sets bits and never clears one but by reset; NEEDS_RESET is the device's.
        let mut new = self.status | value & !status::NEEDS_RESET;
        let version_1 = 1_u64 << 32;
        if new & status::FEATURES_OK != 0
            && (self.driver_features & !self.offered != 0 || self.driver_features & version_1 == 0)
        {
            // Features that were not offered, or a legacy driver: §3.1.1 step 6, the bit stays
            // clear.
            new &= !status::FEATURES_OK;
        }
        if new & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        self.status = new;
        if !started && new & status::DRIVER_OK != 0 {
            Effect::Start
        } else {
            Effect::None
        }
    }

    fn checked_vector(&self, vector: u16) -> u16 {
        if vector < self.vectors {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn write_queue(&mut self, offset: u64, len: usize, value: u64) {
        let vector = self.checked_vector(value as u16);
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if (offset, len) == (0x1a, 2) {
            queue.vector = vector;
            return;
        }
        if queue.enabled {
            return;
        }
        let set_lo = |field: &mut u64| *field = *field & !0xffff_ffff | value & 0xffff_ffff;
        let set_hi = |field: &mut u64| *field = *field & 0xffff_ffff | value << 32;
        match (offset, len) {
            (0x18, 2) => {
                let size = value as u16;
                if size.is_power_of_two() && size <= queue.max_size {
                    queue.size = size;
                }
            }
            (0x1c, 2) => queue.enabled = value == 1,
            (0x20, 8) => queue.desc = value,
            (0x28, 8) => queue.driver = value,
            (0x30, 8) => queue.device = value,
            (0x20, 4) => set_lo(&mut queue.desc),
            (0x24, 4) => set_hi(&mut queue.desc),
            (0x28, 4) => set_lo(&mut queue.driver),
            (0x2c, 4) => set_hi(&mut queue.driver),
            (0x30, 4) => set_lo(&mut queue.device),
            (0x34, 4) => set_hi(&mut queue.device),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
