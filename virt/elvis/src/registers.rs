//! The common configuration structure (virtio 1.2, §4.1.4.3), of a device with one queue.
//!
//! The hypervisor does not decode the guest's instruction: it [shows](Registers::shown) the
//! structure in a page, lets the instruction run on that, and passes the page's content back
//! ([`written`](Registers::written)). So widths are not known; every field at the access, and every
//! one that differs, counts as written, in the structure's order.
//!
//! ```text
//!   reset ── features, FEATURES_OK (refused: cleared) ─▶ negotiated
//!   negotiated ── queue enabled, DRIVER_OK ─▶ live
//!   each ── 0 in the status ─▶ reset          live ── a broken ring: NEEDS_RESET ─▶ until a reset
//! ```

use address::Iova;
use virtqueue::{QueueConfig, feature};

use crate::messages::ENTRIES;
use crate::poller::QUEUE_MAX;
use crate::request;

/// Bytes of the structure.
pub const LEN: usize = 0x38;
/// "No vector": value of an unset or refused vector register.
pub const NO_VECTOR: u16 = 0xffff;
/// Features that are offered: virtio 1, event indices, a bound on segments and on their size.
pub const OFFERED: u64 =
    feature::VERSION_1 | feature::EVENT_IDX | request::SIZE_MAX_FEATURE | request::SEG_MAX_FEATURE;

/// Device status bits (§2.1).
mod status {
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 64;
}

/// Field that may be written: offset and bytes.
type Field = (usize, usize);

const DEVICE_FEATURE_SELECT: usize = 0x00;
const DRIVER_FEATURE_SELECT: usize = 0x08;
const DRIVER_FEATURE: usize = 0x0c;
const CONFIG_VECTOR: usize = 0x10;
const DEVICE_STATUS: usize = 0x14;
const QUEUE_SELECT: usize = 0x16;
const QUEUE_SIZE: usize = 0x18;
const QUEUE_VECTOR: usize = 0x1a;
const QUEUE_ENABLE: usize = 0x1c;
const QUEUE_DESC: usize = 0x20;
const QUEUE_DRIVER: usize = 0x28;
const QUEUE_DEVICE: usize = 0x30;

const FIELDS: [Field; 15] = [
    (DEVICE_FEATURE_SELECT, 4),
    (DRIVER_FEATURE_SELECT, 4),
    (DRIVER_FEATURE, 4),
    (CONFIG_VECTOR, 2),
    (DEVICE_STATUS, 1),
    (QUEUE_SELECT, 2),
    (QUEUE_SIZE, 2),
    (QUEUE_VECTOR, 2),
    (QUEUE_ENABLE, 2),
    (QUEUE_DESC, 4),
    (QUEUE_DESC + 4, 4),
    (QUEUE_DRIVER, 4),
    (QUEUE_DRIVER + 4, 4),
    (QUEUE_DEVICE, 4),
    (QUEUE_DEVICE + 4, 4),
];

#[derive(Clone, Debug)]
struct Queue {
    size: u16,
    vector: u16,
    is_enabled: bool,
    desc: u64,
    driver: u64,
    device: u64,
}

impl Queue {
    const RESET: Self = Self {
        size: QUEUE_MAX,
        vector: NO_VECTOR,
        is_enabled: false,
        desc: 0,
        driver: 0,
        device: 0,
    };
}

/// The registers.
#[derive(Clone, Debug)]
pub struct Registers {
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    queue_select: u16,
    queue: Queue,
    /// Resets so far.
    epoch: u32,
}

impl Default for Registers {
    fn default() -> Self {
        Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: 0,
            queue_select: 0,
            queue: Queue::RESET,
            epoch: 0,
        }
    }
}

impl Registers {
    /// Returns the number of resets so far: a setup from before a reset is void.
    #[must_use]
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Features that the driver accepted.
    #[must_use]
    pub const fn features(&self) -> u64 {
        self.driver_features
    }

    /// Entry of the message table for changed configuration.
    #[must_use]
    pub fn config_entry(&self) -> Option<usize> {
        Some(usize::from(self.config_vector)).filter(|entry| *entry < ENTRIES)
    }

    /// Entry of the message table for the queue.
    #[must_use]
    pub fn queue_entry(&self) -> Option<usize> {
        Some(usize::from(self.queue.vector)).filter(|entry| *entry < ENTRIES)
    }

    /// The queue, if it is to be served.
    #[must_use]
    pub fn queue(&self) -> Option<QueueConfig> {
        let is_live = self.status & status::DRIVER_OK != 0 && self.queue.is_enabled;
        is_live.then_some(QueueConfig {
            index: 0,
            size: self.queue.size,
            desc: Iova::new(self.queue.desc),
            avail: Iova::new(self.queue.driver),
            used: Iova::new(self.queue.device),
        })
    }

    /// Marks that the device cannot continue without a reset (§2.1.2).
    pub fn set_needs_reset(&mut self) {
        if self.status & status::DRIVER_OK != 0 {
            self.status |= status::NEEDS_RESET;
        }
    }

    /// The structure as the guest reads it.
    #[must_use]
    pub fn shown(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let half = |features: u64, select: u32| match select {
            0 => features as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        put(
            DEVICE_FEATURE_SELECT,
            &self.device_feature_select.to_le_bytes(),
        );
        put(
            0x04,
            &half(OFFERED, self.device_feature_select).to_le_bytes(),
        );
        put(
            DRIVER_FEATURE_SELECT,
            &self.driver_feature_select.to_le_bytes(),
        );
        let accepted = half(self.driver_features, self.driver_feature_select);
        put(DRIVER_FEATURE, &accepted.to_le_bytes());
        put(CONFIG_VECTOR, &self.config_vector.to_le_bytes());
        // Number of queues. The generation behind the status stays 0: nothing of the configuration
        // changes.
        put(0x12, &1_u16.to_le_bytes());
        put(DEVICE_STATUS, &[self.status]);
        put(QUEUE_SELECT, &self.queue_select.to_le_bytes());
        if self.queue_select == 0 {
            let queue = &self.queue;
            put(QUEUE_SIZE, &queue.size.to_le_bytes());
            put(QUEUE_VECTOR, &queue.vector.to_le_bytes());
            put(QUEUE_ENABLE, &u16::from(queue.is_enabled).to_le_bytes());
            put(QUEUE_DESC, &queue.desc.to_le_bytes());
            put(QUEUE_DRIVER, &queue.driver.to_le_bytes());
            put(QUEUE_DEVICE, &queue.device.to_le_bytes());
        } else {
            put(QUEUE_VECTOR, &NO_VECTOR.to_le_bytes());
        }
        bytes
    }

    /// Takes a write whose first byte is at `offset`, after which the structure has `bytes`.
    pub fn written(&mut self, offset: usize, bytes: &[u8; LEN]) {
        let old = self.shown();
        for (at, len) in FIELDS {
            let is_at = (at..at + len).contains(&offset);
            if is_at || old[at..at + len] != bytes[at..at + len] {
                let mut value = [0; 4];
                value[..len].copy_from_slice(&bytes[at..at + len]);
                self.write(at, u32::from_le_bytes(value));
            }
        }
    }

    fn write(&mut self, field: usize, value: u32) {
        match field {
            DEVICE_FEATURE_SELECT => self.device_feature_select = value,
            DRIVER_FEATURE_SELECT => self.driver_feature_select = value,
            DRIVER_FEATURE => self.write_features(value),
            CONFIG_VECTOR => self.config_vector = vector(value),
            DEVICE_STATUS => self.write_status(value as u8),
            QUEUE_SELECT => self.queue_select = value as u16,
            _ if self.queue_select == 0 => self.write_queue(field, value),
            _ => {}
        }
    }

    fn write_features(&mut self, value: u32) {
        let shift = match self.driver_feature_select {
            _ if self.status & status::FEATURES_OK != 0 => return,
            0 => 0,
            1 => 32,
            _ => return,
        };
        let kept = self.driver_features & !(0xffff_ffff << shift);
        self.driver_features = kept | u64::from(value) << shift;
    }

    fn write_status(&mut self, value: u8) {
        if value == 0 {
            *self = Self {
                epoch: self.epoch.wrapping_add(1),
                ..Self::default()
            };
            return;
        }
        // A driver sets bits, and clears none but by a reset; NEEDS_RESET is the device's.
        let mut new = self.status | value & !status::NEEDS_RESET;
        let accepted = self.driver_features;
        let is_good = accepted & !OFFERED == 0 && accepted & feature::VERSION_1 != 0;
        if !is_good {
            // §3.1.1, step 6: the bit stays clear.
            new &= !status::FEATURES_OK;
        }
        if new & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        self.status = new;
    }

    fn write_queue(&mut self, field: usize, value: u32) {
        let queue = &mut self.queue;
        if field == QUEUE_VECTOR {
            queue.vector = vector(value);
            return;
        }
        if queue.is_enabled {
            return;
        }
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match field {
            QUEUE_SIZE => {
                let size = value as u16;
                if size.is_power_of_two() && size <= QUEUE_MAX {
                    queue.size = size;
                }
            }
            QUEUE_ENABLE => queue.is_enabled = value == 1,
            QUEUE_DESC => queue.desc = low(queue.desc),
            QUEUE_DRIVER => queue.driver = low(queue.driver),
            QUEUE_DEVICE => queue.device = low(queue.device),
            _ if field == QUEUE_DESC + 4 => queue.desc = high(queue.desc),
            _ if field == QUEUE_DRIVER + 4 => queue.driver = high(queue.driver),
            _ if field == QUEUE_DEVICE + 4 => queue.device = high(queue.device),
            _ => {}
        }
    }
}

/// A vector register's content: an entry of the table, or none.
fn vector(value: u32) -> u16 {
    let value = value as u16;
    if usize::from(value) < ENTRIES {
        value
    } else {
        NO_VECTOR
    }
}

#[cfg(test)]
mod tests;
