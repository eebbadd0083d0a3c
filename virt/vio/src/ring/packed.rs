//! A packed virtqueue as a polling device uses it (virtio 1.2 §2.8).
//!
//! One ring of descriptors, written by both sides in turn; a bit that changes meaning with every
//! lap (the wrap counter) shows whose turn it is. Work flows as [`Ring`](super::Ring) describes;
//! `walk` takes chains, `used` gives them back, `notify` asks for doorbells.
//!
//! `stage` keeps used descriptors here: what they overwrite may be a chain's own descriptors, which
//! a successor wants back if the batch is never published. `publish` writes all but the first, then
//! the first with release: until then the driver sees none of them.
//!
//! Pending and stops: as in [`split`](super::split). `publish` makes all windows current before it
//! stores anything.
//!
//! Notifications: the device's event suppression structure says DISABLE while polling. Unlike a
//! split ring's `avail_event`, a stale event would come round every two laps. It is written when
//! the first chain behind an `arm` has been consumed, so that a core that goes to sleep and wakes
//! for other queues costs this one nothing.
//!
//! Cost when idle: one comparison and one acquire load per poll.
//!
//! Left out: partial use of a chain, several used descriptors for one buffer; the specification
//! allows neither.

mod notify;
mod position;
mod single;
mod used;
mod walk;

use std::collections::VecDeque;

use guest_mem::{Access, Dma, Pages, Perm};

use self::position::Position;
use super::area::Area;
use super::chain::{DESC_SIZE, RawDescriptor};
use super::counter::Counter;
use super::journal::{Journal, RingPosition, RingStart, StartError};
use super::order::UsedOrder;
use super::parked::ParkState;
use super::table::Table;
use crate::queue_config::{ActivateError, QueueConfig, feature};

/// VIRTQ_DESC_F_AVAIL (§2.8.1): equal to the driver's wrap counter in what it makes available.
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED: equal to the device's wrap counter in what it has used, different in what is
/// available.
pub const DESC_F_USED: u16 = 1 << 15;
/// RING_EVENT_FLAGS_ENABLE (§2.8.10): notify for every descriptor.
pub const EVENT_ENABLE: u16 = 0;
/// RING_EVENT_FLAGS_DISABLE: never notify.
pub const EVENT_DISABLE: u16 = 1;
/// RING_EVENT_FLAGS_DESC, with EVENT_IDX: notify when the descriptor named beside it is reached.
pub const EVENT_DESC: u16 = 2;

/// Largest ring (§2.8).
const MAX_SIZE: u16 = 32768;
/// Offset of `len`, `id` and `flags`, one aligned word, in a descriptor.
const REST: u32 = 8;
/// Offset of `flags` in a descriptor.
const DESC_FLAGS: u32 = 14;
/// Bytes of an event suppression structure.
const EVENT_LEN: u32 = 4;

/// The device's side of one packed virtqueue.
pub struct PackedQueue {
    pub(super) index: u16,
    pub(super) size: u16,
    event_idx: bool,
    indirect: bool,
    /// The ring for reading, and for writing.
    desc: Area,
    desc_used: Area,
    driver: Area,
    device: Area,
    /// The descriptor to take next.
    next_avail: Position,
    /// `len`, `id` and `flags` there, once they say that it is available.
    head: Option<u64>,
    /// Position of the next used descriptor.
    next_used: Position,
    /// Used descriptors for the next publish, in the ring's order.
    staged: Vec<Used>,
    /// Descriptors that those stand for.
    staged_descs: Counter,
    /// Descriptors consumed and not published, those to replay included; at most `size`.
    pub(super) outstanding: Counter,
    /// Chains taken and not published.
    taken: Counter,
    /// Word that was last stored in the device's event suppression structure.
    told: Option<u32>,
    /// The place a doorbell was last asked for at, if that still stands in memory.
    armed: Option<Position>,
    pub(super) park_state: ParkState,
    table: Table,
    /// Chains to take before any other, with the journal's slots.
    pub(super) replay: VecDeque<(u16, Vec<RawDescriptor>)>,
    /// Completions in order, with IN_ORDER.
    pub(super) order: Option<UsedOrder>,
    pub(super) journal: Option<Box<dyn Journal>>,
    /// A request could not be recorded: nothing is published any more.
    is_broken: bool,
}

/// A used descriptor to be written.
#[derive(Clone, Copy, Debug)]
struct Used {
    at: Position,
    id: u16,
    /// The journal's.
    slot: u16,
    len: u32,
}

impl PackedQueue {
    /// A queue as the driver set it up. `max` is the device's maximum size, `features` the accepted
    /// ones.
    pub(super) fn new(
        config: &QueueConfig,
        max: u16,
        features: u64,
    ) -> Result<Self, ActivateError> {
        let QueueConfig {
            index,
            size,
            desc,
            avail: driver,
            used: device,
        } = *config;
        if size == 0 || size > max.min(MAX_SIZE) {
            return Err(ActivateError::QueueSize { index, size, max });
        }
        let bad = ActivateError::QueueAddress { index };
        if !desc.is_aligned(16) || !driver.is_aligned(4) || !device.is_aligned(4) {
            return Err(bad);
        }
        let len = u32::from(size) * DESC_SIZE;
        Ok(Self {
            index,
            size,
            event_idx: features & feature::EVENT_IDX != 0,
            indirect: features & feature::INDIRECT_DESC != 0,
            desc: Area::new(desc, len, Perm::Read).ok_or(bad)?,
            desc_used: Area::new(desc, len, Perm::Write).ok_or(bad)?,
            driver: Area::new(driver, EVENT_LEN, Perm::Read).ok_or(bad)?,
            device: Area::new(device, EVENT_LEN, Perm::Write).ok_or(bad)?,
            next_avail: Position::FIRST,
            head: None,
            next_used: Position::FIRST,
            staged: Vec::new(),
            staged_descs: Counter::default(),
            outstanding: Counter::default(),
            taken: Counter::default(),
            told: None,
            armed: None,
            park_state: ParkState::default(),
            table: Table::default(),
            replay: VecDeque::new(),
            order: (features & feature::IN_ORDER != 0).then(|| UsedOrder::new(size)),
            journal: None,
            is_broken: false,
        })
    }

    pub(super) fn start(&mut self, at: RingStart) -> Result<(), StartError> {
        if self.taken.get() != 0 || self.outstanding.get() != 0 {
            return Err(StartError::InUse);
        }
        let first = (0, true);
        let (avail, used, replay) = match at {
            RingStart::Fresh => (first, first, Vec::new()),
            RingStart::Packed {
                avail,
                used,
                replay,
            } => (avail, used, replay),
            RingStart::Split { .. } => return Err(StartError::Layout),
        };
        for (idx, _) in [avail, used] {
            if idx >= self.size {
                return Err(StartError::Position(idx));
            }
        }
        let mut outstanding = 0;
        for (_, descs) in &replay {
            let room = usize::from(self.size - outstanding);
            if !(1..=room).contains(&descs.len()) {
                return Err(StartError::Replay);
            }
            outstanding += descs.len() as u16;
        }
        self.next_avail = avail.into();
        self.next_used = used.into();
        self.head = None;
        self.outstanding.set(outstanding);
        self.replay = replay.into();
        self.armed = None;
        self.told = None;
        Ok(())
    }

    pub(super) fn set_journal(&mut self, journal: Box<dyn Journal>) {
        self.journal = Some(journal);
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition::Packed {
            avail: self.next_avail.into(),
            used: self.next_used.into(),
        }
    }

    pub(super) fn config(&self) -> QueueConfig {
        QueueConfig {
            index: self.index,
            size: self.size,
            desc: self.desc.base(),
            avail: self.driver.base(),
            used: self.device.base(),
        }
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u16 {
        self.taken.get()
    }

    pub(super) fn in_use(&self, generation: u64, pages: &Pages) -> u32 {
        let areas = [&self.desc, &self.desc_used, &self.driver, &self.device].into_iter();
        areas.fold(0, |mask, area| mask | area.in_use(generation, pages))
    }
}

/// Loads the `len`, `id` and `flags` of descriptor `idx` in one acquire load: it orders the load of
/// the flags before later loads of what the driver wrote before them.
#[inline(always)]
fn load_rest<D: Dma>(desc: &mut Area, dma: &mut D, idx: u16) -> Access<u64> {
    let (window, at) = desc.at(dma, DESC_SIZE * u32::from(idx) + REST)?;
    Ok(window.load_u64(at))
}
