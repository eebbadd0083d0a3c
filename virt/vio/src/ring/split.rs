//! A split virtqueue as a polling device uses it (virtio 1.2 §2.7).
//!
//! Work flows as [`Ring`](super::Ring) says; `walk` takes chains, `used` gives them back, `notify`
//! asks for doorbells.
//!
//! Pending: every step that touches memory changes nothing of ours before its last access, so
//! repeating it is harmless: `peek` does not consume, `stage` rewrites the same unpublished slot,
//! `publish` needs its pointer before it stores.
//!
//! Stops: a ring whose own addresses fault is parked until a doorbell or a reset, so that a poller
//! does not record the same fault a million times a second; one that pends, until its ticket; one
//! that breaks the protocol, until a reset. While parked, nothing here is to be called that touches
//! guest memory.
//!
//! Notifications: while polling, `avail_event` is left behind (at most one spurious doorbell per
//! 65,536 chains; writing it would dirty a line the driver reads), and without EVENT_IDX the
//! NO_NOTIFY flag is set. [`arm`](super::Ring::arm) asks for the next doorbell.
//!
//! Cost when idle: one comparison and one acquire load per poll.

mod notify;
mod single;
mod used;
mod walk;

use std::collections::VecDeque;

use guest_mem::{Access, Dma, Pages, Perm};
pub use virtqueue::split::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use virtqueue::split::{FLAGS, IDX, Layout, RING, Unfit};

use super::area::Area;
use super::counter::Counter;
use super::journal::{Journal, RingPosition, RingStart, StartError};
use super::order::UsedOrder;
use super::parked::ParkState;
use super::table::Table;
use crate::queue_config::{ActivateError, QueueConfig, feature};

/// The device's side of one split virtqueue.
pub struct SplitQueue {
    pub(super) index: u16,
    pub(super) size: u16,
    event_idx: bool,
    indirect: bool,
    desc: Area,
    avail: Area,
    used: Area,
    /// The available entry to take next, counted modulo 2^16.
    next_avail: Counter,
    /// The available index as last loaded: what lies before it is available.
    seen: Counter,
    /// The used entry to publish next, counted modulo 2^16.
    next_used: Counter,
    /// Used entries written behind `next_used` and not published.
    staged: Counter,
    /// Chains consumed and not published, those to replay included.
    pub(super) outstanding: Counter,
    /// Whether NO_NOTIFY stands in `used.flags`, if known: a predecessor may have left it (only
    /// without EVENT_IDX).
    no_notify: Option<bool>,
    /// The entry a doorbell was last asked for at, if that still stands in memory.
    armed: Option<u16>,
    pub(super) park_state: ParkState,
    table: Table,
    /// Heads to take before any other.
    pub(super) replay: VecDeque<u16>,
    /// Completions in order, with IN_ORDER.
    pub(super) order: Option<UsedOrder>,
    pub(super) journal: Option<Journaled>,
}

/// A journal, and what goes with it.
pub(super) struct Journaled {
    journal: Box<dyn Journal>,
    /// Which heads are in flight; as many as the ring has entries.
    taken: Vec<bool>,
    /// Staged: head and slot.
    batch: Vec<(u16, u16)>,
    /// A request could not be recorded: nothing is published any more.
    is_broken: bool,
}

impl SplitQueue {
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
            avail,
            used,
        } = *config;
        let bad = ActivateError::QueueAddress { index };
        let layout = Layout::new(config, max).map_err(|unfit| match unfit {
            Unfit::Size => ActivateError::QueueSize { index, size, max },
            Unfit::Alignment => bad,
        })?;
        Ok(Self {
            index,
            size,
            event_idx: features & feature::EVENT_IDX != 0,
            indirect: features & feature::INDIRECT_DESC != 0,
            desc: Area::new(desc, layout.desc_len(), Perm::Read).ok_or(bad)?,
            avail: Area::new(avail, layout.avail_len(), Perm::Read).ok_or(bad)?,
            used: Area::new(used, layout.used_len(), Perm::Write).ok_or(bad)?,
            next_avail: Counter::default(),
            seen: Counter::default(),
            next_used: Counter::default(),
            staged: Counter::default(),
            outstanding: Counter::default(),
            no_notify: None,
            armed: None,
            park_state: ParkState::default(),
            table: Table::default(),
            replay: VecDeque::new(),
            order: (features & feature::IN_ORDER != 0).then(|| UsedOrder::new(size)),
            journal: None,
        })
    }

    pub(super) fn start(&mut self, at: RingStart) -> Result<(), StartError> {
        if self.outstanding.get() != 0 || self.staged() != 0 {
            return Err(StartError::InUse);
        }
        let (next_avail, next_used, replay) = match at {
            RingStart::Fresh => (0, 0, Vec::new()),
            RingStart::Split {
                next_avail,
                next_used,
                replay,
            } => (next_avail, next_used, replay),
            RingStart::Packed { .. } => return Err(StartError::Layout),
        };
        let entries = match &self.journal {
            None if replay.is_empty() => 0,
            _ => usize::from(self.size),
        };
        let mut taken = vec![false; entries];
        for &head in &replay {
            match taken.get_mut(usize::from(head)) {
                Some(taken) if !*taken => *taken = true,
                _ => return Err(StartError::Replay),
            }
        }
        self.next_avail.set(next_avail);
        self.seen.set(next_avail);
        self.next_used.set(next_used);
        // Each head at most once: no more than the ring has entries.
        self.outstanding.set(replay.len() as u16);
        self.replay = replay.into();
        self.armed = None;
        self.no_notify = None;
        if let Some(journal) = &mut self.journal {
            journal.taken = taken;
        }
        Ok(())
    }

    pub(super) fn set_journal(&mut self, journal: Box<dyn Journal>) {
        let mut taken = vec![false; usize::from(self.size)];
        for &head in &self.replay {
            taken[usize::from(head)] = true;
        }
        self.journal = Some(Journaled {
            journal,
            taken,
            batch: Vec::new(),
            is_broken: false,
        });
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition::Split {
            next_avail: self.next_avail.get(),
            next_used: self.next_used.get(),
        }
    }

    pub(super) fn config(&self) -> QueueConfig {
        QueueConfig {
            index: self.index,
            size: self.size,
            desc: self.desc.base(),
            avail: self.avail.base(),
            used: self.used.base(),
        }
    }

    /// Chains taken and not published.
    pub(super) fn in_flight(&self) -> u16 {
        // As many as `start` has counted in.
        self.outstanding.get() - self.replay.len() as u16
    }

    pub(super) fn in_use(&self, generation: u64, pages: &Pages) -> u32 {
        let areas = [&self.desc, &self.avail, &self.used].into_iter();
        areas.fold(0, |mask, area| mask | area.in_use(generation, pages))
    }

    /// Used elements that the next publish covers.
    #[inline]
    pub(super) fn staged(&self) -> u16 {
        match &self.order {
            Some(order) => order.ready(),
            None => self.staged.get(),
        }
    }

    fn slot(&self, index: u16) -> u32 {
        u32::from(index & (self.size - 1))
    }
}

#[inline(always)]
fn load_u16<D: Dma>(area: &mut Area, dma: &mut D, offset: u32) -> Access<u16> {
    let (window, at) = area.at(dma, offset)?;
    Ok(window.load_u16(at))
}

#[inline(always)]
fn store_u16<D: Dma>(area: &mut Area, dma: &mut D, offset: u32, value: u16) -> Access<()> {
    let (window, at) = area.at(dma, offset)?;
    window.store_u16(at, value);
    Ok(())
}
