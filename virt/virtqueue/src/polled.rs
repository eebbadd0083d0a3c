//! A split queue of a device that polls, and completes each request before it takes the next.
//!
//! ```text
//!   next ─▶ a chain, copied and checked ── the device ─▶ complete
//!   complete ─▶ used element, index ─▶ is an interrupt wanted?
//! ```
//! At most one chain is in flight, so nothing is journalled, replayed or reordered, and no heap is
//! needed. Memory is a [`Memory`], which checks each access; data are copied once.
//!
//! Doorbells are suppressed ([`start`](PolledQueue::start)), since a polling device needs none:
//! with EVENT_IDX `avail_event` is never advanced, without it NO_NOTIFY is set.
//!
//! A queue that has stopped returns [`QueueStop`] from each call. After a reset a new one is
//! created.

use core::sync::atomic::{Ordering, fence};

use address::Iova;

use crate::chain::{DESC_SIZE, Segment, SegmentList, Sum, Violation};
use crate::config::{QueueConfig, feature};
use crate::split::{self, FLAGS, IDX, Layout, RING, Unfit};

/// Guest memory of a device: every access is checked.
pub trait Memory {
    /// Copies guest memory into `buf`.
    ///
    /// # Errors
    /// Some of the range is not the guest's memory.
    fn read(&self, at: Iova, buf: &mut [u8]) -> Result<(), OutOfReach>;

    /// Copies `buf` into guest memory.
    ///
    /// # Errors
    /// As for [`read`](Self::read); nothing has been written then.
    fn write(&self, at: Iova, buf: &[u8]) -> Result<(), OutOfReach>;

    /// Loads an aligned word with acquire ordering: if it sees a store of the driver, the driver's
    /// earlier stores are visible after it.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn load_u16(&self, at: Iova) -> Result<u16, OutOfReach>;

    /// Stores an aligned word with release ordering: if the driver's load sees it, the driver sees
    /// all earlier stores.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn store_u16(&self, at: Iova, value: u16) -> Result<(), OutOfReach>;
}

/// An address that is not the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfReach(pub Iova);

/// Reason why a queue has stopped, until the device is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueStop {
    /// The ring, or a buffer that it names, does not lie in the guest's memory.
    OutOfReach(OutOfReach),
    /// The driver broke the protocol.
    Violation(Violation),
}

impl From<OutOfReach> for QueueStop {
    fn from(why: OutOfReach) -> Self {
        Self::OutOfReach(why)
    }
}

impl From<Violation> for QueueStop {
    fn from(why: Violation) -> Self {
        Self::Violation(why)
    }
}

impl core::fmt::Display for QueueStop {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::OutOfReach(OutOfReach(at)) => {
                write!(f, "{:#x} is not the guest's memory", at.raw())
            }
            Self::Violation(why) => write!(f, "{why}"),
        }
    }
}

/// A checked chain of at most `N` segments: readable ones, then writable ones. It is reused for
/// each chain.
#[derive(Clone, Debug)]
pub struct FixedChain<const N: usize> {
    head: u16,
    segments: [Segment; N],
    len: usize,
    sum: Sum,
}

impl<const N: usize> Default for FixedChain<N> {
    fn default() -> Self {
        Self {
            head: 0,
            segments: [Segment {
                iova: Iova::new(0),
                len: 0,
            }; N],
            len: 0,
            sum: Sum::default(),
        }
    }
}

impl<const N: usize> SegmentList for FixedChain<N> {
    #[inline]
    fn push(&mut self, segment: Segment) -> Result<(), Violation> {
        let slot = self.segments.get_mut(self.len).ok_or(Violation::TooLong)?;
        *slot = segment;
        self.len += 1;
        Ok(())
    }
}

impl<const N: usize> FixedChain<N> {
    /// Index of its first descriptor.
    #[must_use]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Segments that the device reads.
    #[must_use]
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.sum.readable()]
    }

    /// Segments that the device writes.
    #[must_use]
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.sum.readable()..self.len]
    }

    /// Bytes that the device reads.
    #[must_use]
    pub fn readable_len(&self) -> u32 {
        // `Sum::check` has found it below 4 GiB.
        self.sum.readable_len() as u32
    }

    /// Bytes that the device writes.
    #[must_use]
    pub fn writable_len(&self) -> u32 {
        self.sum.writable_len() as u32
    }
}

/// The device's side of one split queue.
#[derive(Clone, Debug)]
pub struct PolledQueue {
    config: QueueConfig,
    event_idx: bool,
    next_avail: u16,
    next_used: u16,
    stopped: Option<QueueStop>,
}

impl PolledQueue {
    /// Creates a queue of at most `max` entries as the driver configured it, with the features that
    /// it accepted.
    ///
    /// # Errors
    /// The size or an alignment is invalid.
    pub fn new(config: &QueueConfig, max: u16, features: u64) -> Result<Self, Unfit> {
        let layout = Layout::new(config, max)?;
        let areas = [
            (config.desc, layout.desc_len()),
            (config.avail, layout.avail_len()),
            (config.used, layout.used_len()),
        ];
        // Every offset used below is before one of these ends, so that sums of addresses do not
        // wrap.
        if areas
            .iter()
            .any(|(base, len)| base.checked_add((*len).into()).is_none())
        {
            return Err(Unfit::Alignment);
        }
        Ok(Self {
            config: *config,
            event_idx: features & feature::EVENT_IDX != 0,
            next_avail: 0,
            next_used: 0,
            stopped: None,
        })
    }

    /// Suppresses doorbells. Called before the first [`next`](Self::next).
    ///
    /// # Errors
    /// The ring does not lie in the guest's memory.
    pub fn start(&mut self, memory: &impl Memory) -> Result<(), QueueStop> {
        if self.event_idx {
            return Ok(());
        }
        let flags = at(self.config.used, FLAGS);
        let stored = memory.store_u16(flags, split::USED_F_NO_NOTIFY);
        stored.map_err(|why| self.stop(why.into()))
    }

    /// Takes the next chain. Returns whether there was one. It has to be
    /// [completed](Self::complete) before another is taken.
    ///
    /// # Errors
    /// The queue stops.
    pub fn next<const N: usize>(
        &mut self,
        memory: &impl Memory,
        chain: &mut FixedChain<N>,
    ) -> Result<bool, QueueStop> {
        if let Some(why) = self.stopped {
            return Err(why);
        }
        self.try_next(memory, chain).map_err(|why| self.stop(why))
    }

    fn try_next<const N: usize>(
        &mut self,
        memory: &impl Memory,
        chain: &mut FixedChain<N>,
    ) -> Result<bool, QueueStop> {
        let QueueConfig {
            size, desc, avail, ..
        } = self.config;
        // Acquire: pairs with the driver's barrier between filling the ring and storing
        // `avail.idx`.
        let idx = memory.load_u16(at(avail, IDX))?;
        // Each chain is completed before the next is taken, so none is outstanding.
        if split::available(idx, self.next_avail, size, 0)? == 0 {
            return Ok(false);
        }
        let slot = u32::from(self.next_avail & (size - 1));
        let mut head = [0; 2];
        memory.read(at(avail, RING + 2 * slot), &mut head)?;
        chain.head = u16::from_le_bytes(head);
        chain.len = 0;
        let mut sum = Sum::default();
        let walked = sum.follow(chain, size, u16::from_le_bytes(head), false, |index| {
            let mut words = [0; DESC_SIZE as usize];
            memory.read(at(desc, DESC_SIZE * u32::from(index)), &mut words)?;
            let word = u128::from_le_bytes(words);
            Ok::<_, QueueStop>((word as u64, (word >> 64) as u64))
        })?;
        debug_assert!(walked.is_none(), "no table is followed");
        sum.check()?;
        chain.sum = sum;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(true)
    }

    /// Returns the chain that begins at `head`, with `len` bytes written into it, to the driver.
    /// Returns whether the driver wants an interrupt.
    ///
    /// # Errors
    /// The queue stops.
    pub fn complete(
        &mut self,
        memory: &impl Memory,
        head: u16,
        len: u32,
    ) -> Result<bool, QueueStop> {
        if let Some(why) = self.stopped {
            return Err(why);
        }
        self.try_complete(memory, head, len)
            .map_err(|why| self.stop(why))
    }

    fn try_complete(
        &mut self,
        memory: &impl Memory,
        head: u16,
        len: u32,
    ) -> Result<bool, QueueStop> {
        let QueueConfig {
            size, avail, used, ..
        } = self.config;
        let (old, new) = (self.next_used, self.next_used.wrapping_add(1));
        let slot = u32::from(old & (size - 1));
        let element = u64::from(head) | u64::from(len) << 32;
        memory.write(at(used, RING + 8 * slot), &element.to_le_bytes())?;
        // Release: a driver that sees the index sees the element and the buffers' bytes.
        memory.store_u16(at(used, IDX), new)?;
        self.next_used = new;
        // Pairs with the driver's full barrier between its store to the event field (or flags) and
        // its re-check of the index: either the driver sees this index, or its store is seen here.
        fence(Ordering::SeqCst);
        Ok(if self.event_idx {
            let event = memory.load_u16(at(avail, RING + 2 * u32::from(size)))?;
            split::steps_over(event, old, new)
        } else {
            memory.load_u16(at(avail, FLAGS))? & split::AVAIL_F_NO_INTERRUPT == 0
        })
    }

    /// Stops the queue until a reset, for a fault of the ring or one that the device found in a
    /// request.
    #[cold]
    pub fn stop(&mut self, why: QueueStop) -> QueueStop {
        *self.stopped.get_or_insert(why)
    }

    /// Returns the reason why the queue has stopped, if it has.
    #[must_use]
    pub fn stopped(&self) -> Option<QueueStop> {
        self.stopped
    }
}

/// Returns the address of `offset` in an area whose end [`PolledQueue::new`] has checked.
fn at(base: Iova, offset: u32) -> Iova {
    base.checked_add(offset.into())
        .expect("an offset within an area that does not wrap")
}

#[cfg(test)]
mod tests;
