//! Profile of a block device as its driver sees it: it follows from the configuration and from the
//! back end.
//!
//! The facts are plain numbers, so that a device whose back end is in another process has the
//! same profile as one whose back end is here ([`BlkFacts::from_words`], which trusts nothing).

use super::backend::{BlockIo, Transfer};
use super::request::{self, Limits};
use super::{BlkConfig, BlkError, MAX_QUEUES, SECTOR};
use crate::queue_config::{feature, is_queue_size};

/// Longest discard or write-zeroes request of a disk that does it at once, in sectors: 1 MiB.
const MAX_INLINE_RANGE_SECTORS: u32 = 2048;
/// Largest alignment of discards that is recommended to the driver (`discard_sector_alignment`), in
/// bytes: 1 GiB.
const MAX_DISCARD_BLOCK: u64 = 1 << 30;

/// Properties of the back end that a device depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkFacts {
    /// See [`BlockIo::capacity`].
    pub capacity: u64,
    /// See [`BlockIo::is_read_only`].
    pub is_read_only: bool,
    /// See [`BlockIo::alignment`].
    pub alignment: u32,
    /// See [`BlockIo::discards`].
    pub discards: bool,
    /// See [`BlockIo::discard_block`].
    pub discard_block: u32,
    /// See [`BlockIo::zeroes`].
    pub zeroes: bool,
    /// See [`BlockIo::completes_in_order`].
    pub completes_in_order: bool,
    /// Whether its contents lie in memory, so that discards are done in the device's thread.
    pub is_in_memory: bool,
}

/// Reason why numbers are no facts of a back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fact {number} of a disk is {value:#x}")]
pub struct FactsError {
    /// Which.
    pub number: usize,
    /// Its value.
    pub value: u64,
}

/// Number of words of [`BlkFacts`].
const WORDS: usize = 4;

impl BlkFacts {
    /// Those of `io`.
    pub fn of(io: &dyn BlockIo) -> Self {
        Self {
            capacity: io.capacity(),
            is_read_only: io.is_read_only(),
            alignment: io.alignment(),
            discards: io.discards(),
            discard_block: io.discard_block(),
            zeroes: io.zeroes(),
            completes_in_order: io.completes_in_order(),
            is_in_memory: io.transfer() == Transfer::Memory,
        }
    }

    /// As numbers, for another process.
    pub fn words(&self) -> [u64; WORDS] {
        let bits = [
            self.is_read_only,
            self.discards,
            self.zeroes,
            self.completes_in_order,
            self.is_in_memory,
        ];
        let bits = (0..)
            .zip(bits)
            .map(|(bit, is_set)| u64::from(is_set) << bit);
        [
            self.capacity,
            self.alignment.into(),
            self.discard_block.into(),
            bits.sum(),
        ]
    }

    /// Reads the numbers of another process.
    ///
    /// # Errors
    /// They are impossible. ([`BlkProfile::new`] checks capacity and alignment.)
    pub fn from_words(words: [u64; WORDS]) -> Result<Self, FactsError> {
        let [capacity, alignment, discard_block, bits] = words;
        let error = |number| FactsError {
            number,
            value: words[number],
        };
        let is_block = |value: u64| value.is_power_of_two() && value >= SECTOR;
        if !is_block(alignment) || alignment > MAX_DISCARD_BLOCK {
            return Err(error(1));
        }
        if !is_block(discard_block) || discard_block > MAX_DISCARD_BLOCK {
            return Err(error(2));
        }
        if bits >> 5 != 0 {
            return Err(error(3));
        }
        let bit = |number: u32| bits >> number & 1 != 0;
        Ok(Self {
            capacity,
            is_read_only: bit(0),
            alignment: alignment as u32,
            discards: bit(1),
            discard_block: discard_block as u32,
            zeroes: bit(2),
            completes_in_order: bit(3),
            is_in_memory: bit(4),
        })
    }
}

/// Features and configuration that a driver is shown, and the limits that its requests are checked
/// against.
#[derive(Clone, Debug)]
pub struct BlkProfile {
    /// Offered features.
    pub features: u64,
    /// Maximum size of each queue.
    pub queue_sizes: Vec<u16>,
    /// Configuration space.
    pub space: [u8; 60],
    /// Limits of requests; without features, which a driver accepts later.
    pub limits: Limits,
}

impl BlkProfile {
    /// Of a device with this configuration over a back end with these facts.
    ///
    /// # Errors
    /// There is no such device.
    pub fn new(config: &BlkConfig, facts: &BlkFacts) -> Result<Self, BlkError> {
        let &BlkConfig {
            logical_block,
            queues,
            queue_size,
            packed,
            ..
        } = config;
        if logical_block != 512 && logical_block != 4096 {
            return Err(BlkError::LogicalBlock(logical_block));
        }
        let bytes = facts.capacity;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(logical_block)) {
            return Err(BlkError::Capacity {
                bytes,
                block: logical_block,
            });
        }
        let needed = facts.alignment;
        if !logical_block.is_multiple_of(needed) {
            return Err(BlkError::Alignment {
                needed,
                block: logical_block,
            });
        }
        if queues == 0 || queues > MAX_QUEUES {
            return Err(BlkError::Queues(queues));
        }
        if !is_queue_size(queue_size, 2) {
            return Err(BlkError::QueueSize(queue_size));
        }
        let read_only = facts.is_read_only;
        let sectors = bytes / SECTOR;
        let max_range = match facts.is_in_memory {
            true => MAX_INLINE_RANGE_SECTORS,
            false => request::MAX_RANGE_SECTORS,
        };
        let mut features = feature::COMMON
            | request::feature::SIZE_MAX
            | request::feature::SEG_MAX
            | request::feature::BLK_SIZE
            | request::feature::FLUSH
            | request::feature::MQ;
        for (bit, is_offered) in [
            (request::feature::RO, read_only),
            (request::feature::DISCARD, !read_only && facts.discards),
            (request::feature::WRITE_ZEROES, !read_only && facts.zeroes),
            (feature::RING_PACKED, packed),
            (feature::IN_ORDER, packed && facts.completes_in_order),
        ] {
            features |= if is_offered { bit } else { 0 };
        }
        Ok(Self {
            features,
            queue_sizes: vec![queue_size; usize::from(queues)],
            space: request::config_space(
                sectors,
                logical_block,
                queues,
                max_range,
                facts.discard_block,
            ),
            limits: Limits {
                sectors,
                read_only,
                features: 0,
                max_range,
            },
        })
    }
}
