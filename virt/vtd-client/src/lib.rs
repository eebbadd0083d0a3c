//! Driver side of queued invalidation (Intel VT-d 4.1, §6.5.2), for [`dma_map`].
//!
//! [`InvalidationQueue`] owns one unit's queue; [`DomainInvalidator`] is one domain's
//! [`Invalidator`] over it, so that a `DmaMapper` can unmap behind a remapping unit: the one of
//! [`vtd`], or any other that keeps to the specification and is reached through [`Registers`] and
//! memory.
//!
//! # How work flows
//! ```text
//! submit: encode ─ lock ─ descriptors, wait descriptor ─ IQT ─ unlock ─▶ ticket
//! unit:                                                   └ invalidates, drains ─ status word := ticket
//! poll:                                                                              └ seen: complete
//! ```
//! A batch ends with one wait descriptor, which stores the ticket's low 32 bits in a status word.
//! There are as many words as batches can be in flight, one each, so a word identifies the complete
//! batch in whatever order the unit completes waits, and a poll does not take the lock. Page ranges
//! become page-selective descriptors of aligned powers of two with IH set, because only leaves have
//! changed. A domain or global command has no IH: it drops page-walk caches, too, which must happen
//! before a table page is released ([`flush_tables`](DomainInvalidator::flush_tables) does so for a
//! range). Reads and writes are drained wherever the unit can.
//!
//! # Failures
//! Waits are bounded by [`QueueConfig::timeout_ns`]. When the unit reports IQE, ICE or ITE the
//! queue stops: every ticket in flight fails, also those that may have completed, and the next
//! submission turns the queue off and on again. So a mapper keeps the ranges that were not
//! invalidated, and the next flush that succeeds covers them.
//!
//! Threads: any number. Lock: one per queue, held while descriptors are written, never while the
//! unit works, except when the queue is turned off and on. Cost of a batch: one lock, 16 bytes per
//! descriptor, one register write; of a poll that returns true: one load of memory; of one that
//! returns false: a clock, and a register read every [`CHECK_NS`].
//!
//! Left out: units in caching mode (they need invalidations after mapping, too), units that do not
//! read the processor's caches or that need their write buffer flushed ([`EnableError`] reports
//! them), device TLBs, interrupt-entry caches, and completion interrupts. A caller that changes
//! root or context entries must call [`flush_all`](InvalidationQueue::flush_all).

#![forbid(unsafe_code)]

mod encode;
mod queue;

pub use queue::{CHECK_NS, EnableError, InvalidationQueue, MEMORY_LOST, QueueConfig};

use std::sync::Arc;

use dma_map::Clock;
use dma_map::invalidate::{Command, InvalidateError, Invalidator, Ticket};
use guest_mem::{PhysMem, RegPage};
use iova::IovaRange;

/// A unit's registers, as a driver reaches them. Accesses are 4 or 8 bytes, aligned.
pub trait Registers: Send + Sync {
    /// Loads 4 bytes. The unit's stores to memory before its change of the register are visible
    /// afterwards.
    fn read32(&self, offset: u16) -> u32;

    /// An 8-byte load, as [`read32`](Self::read32).
    fn read64(&self, offset: u16) -> u64;

    /// A 4-byte store, ordered after all earlier stores to memory.
    fn write32(&self, offset: u16, value: u32);

    /// An 8-byte store, as [`write32`](Self::write32).
    fn write64(&self, offset: u16, value: u64);

    /// Called again and again while the unit is waited for. It may not call the queue.
    fn pause(&self) {
        std::hint::spin_loop();
    }
}

/// Registers in a page that unit and driver share.
#[derive(Clone, Debug)]
pub struct MappedRegisters<P>(pub P);

impl<P: RegPage + Send + Sync> Registers for MappedRegisters<P> {
    fn read32(&self, offset: u16) -> u32 {
        self.0.load32(offset)
    }

    fn read64(&self, offset: u16) -> u64 {
        self.0.load64(offset)
    }

    fn write32(&self, offset: u16, value: u32) {
        self.0.store32(offset, value);
    }

    fn write64(&self, offset: u16, value: u64) {
        self.0.store64(offset, value);
    }
}

/// Invalidator of one domain, over the queue of its unit.
pub struct DomainInvalidator<R, M, C> {
    queue: Arc<InvalidationQueue<R, M, C>>,
    did: u16,
}

impl<R, M, C> Clone for DomainInvalidator<R, M, C> {
    fn clone(&self) -> Self {
        Self {
            queue: Arc::clone(&self.queue),
            did: self.did,
        }
    }
}

impl<R: Registers, M: PhysMem + Send + Sync, C: Clock> DomainInvalidator<R, M, C> {
    /// For the domain whose context entries say `did`.
    pub fn new(queue: Arc<InvalidationQueue<R, M, C>>, did: u16) -> Self {
        Self { queue, did }
    }

    /// The queue.
    pub fn queue(&self) -> &InvalidationQueue<R, M, C> {
        &self.queue
    }

    /// Makes the unit forget the translations of `range` and every table pointer on the way to them
    /// (IH clear). Returns when it is done.
    ///
    /// # Errors
    /// [`InvalidateError`].
    pub fn flush_tables(&self, range: IovaRange) -> Result<(), InvalidateError> {
        let ticket = self
            .queue
            .submit(|encoder, out| encoder.pages(self.did, range, false, out))?;
        self.wait(ticket)
    }
}

impl<R: Registers, M: PhysMem + Send + Sync, C: Clock> Invalidator for DomainInvalidator<R, M, C> {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        self.queue
            .submit(|encoder, out| encoder.batch(self.did, commands, out))
    }

    #[inline]
    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        self.queue.poll(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), InvalidateError> {
        self.queue.wait(ticket)
    }

    /// Cores combine their invalidations while the unit works: a batch for all of them needs one
    /// wait descriptor, one tail and one lock.
    fn is_idle(&self) -> bool {
        self.queue.is_idle()
    }
}
