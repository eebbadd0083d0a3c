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
//! Each of the batches in flight has a status word of its own. So a word identifies the complete
//! batch in whatever order the unit completes waits, and a poll does not take the lock. Page ranges
//! become page-selective descriptors of aligned powers of two with IH set (only leaves have
//! changed). A domain or global command has no IH: it drops page-walk caches, too, which must
//! happen before a table page is released ([`flush_tables`](DomainInvalidator::flush_tables) does
//! so for a range). Reads and writes are drained if the unit supports that.
//!
//! # Failures
//! Waits are bounded by [`QueueConfig::timeout_ns`]. When the unit reports IQE, ICE or ITE the
//! queue stops: every ticket in flight fails, also those that may have completed, and the next
//! submission turns the queue off and on again. So a mapper keeps the ranges that were not
//! invalidated, and the next flush that succeeds covers them.
//!
//! Any number of threads may call. There is one lock per queue. It is held while descriptors are
//! written, and not while the unit works, except when the queue is turned off and on. Cost of a
//! batch: one lock, 16 bytes per descriptor, one register write. Cost of a poll that returns true:
//! one load of memory; of one that returns false: a clock, and a register read every [`CHECK_NS`].
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

/// Registers of a unit as a driver accesses them. Accesses are 4 or 8 bytes, aligned.
pub trait Registers: Send + Sync {
    /// Loads 4 bytes. Stores to memory that the unit made before it changed the register are
    /// visible afterwards.
    fn read32(&self, offset: u16) -> u32;

    /// Loads 8 bytes, with the ordering of [`read32`](Self::read32).
    fn read64(&self, offset: u16) -> u64;

    /// Stores 4 bytes, after all earlier stores to memory.
    fn write32(&self, offset: u16, value: u32);

    /// Stores 8 bytes, with the ordering of [`write32`](Self::write32).
    fn write64(&self, offset: u16, value: u64);

    /// Called repeatedly while the queue waits for the unit. It may not call the queue.
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
    /// Creates the invalidator of the domain whose context entries have the domain id `did`.
    pub fn new(queue: Arc<InvalidationQueue<R, M, C>>, did: u16) -> Self {
        Self { queue, did }
    }

    /// Returns the queue of the unit.
    pub fn queue(&self) -> &InvalidationQueue<R, M, C> {
        &self.queue
    }

    /// Invalidates the translations of `range` and the cached table pointers that lead to them (IH
    /// clear). Returns when that is complete.
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

    /// While the unit is not idle, cores combine their invalidations: one batch for all of them
    /// needs one wait descriptor, one write of the tail and one lock.
    fn is_idle(&self) -> bool {
        self.queue.is_idle()
    }
}
