//! Invalidation of the translations in the IOMMU's IOTLB and page-walk caches.
//!
//! An [`Invalidator`] belongs to one domain. A batch of [`Command`]s is submitted, which returns a
//! [`Ticket`]; the ticket is polled or waited for. From then on no device access uses what the
//! commands name, as long as the entries were cleared before the submission. (The shape is VT-d's
//! queued invalidation: descriptors, then a wait descriptor; AMD's COMPLETION_WAIT and SMMUv3's
//! CMD_SYNC are alike.)
//!
//! | implementation | for |
//! |---|---|
//! | `testing::ModelIotlb` (feature `testing`) | caches translations *and table pointers*, and serves them until they are invalidated |
//! | [`NullInvalidator`] | no hardware caches anything |
//!
//! [`Combiner`] lets the unmaps of many cores meet in one batch and one wait.
//!
//! Callers: `DmaMapper` and its cores, on any thread, from several at once. An implementation must
//! not call back into the mapper. A wait may fail ([`InvalidateError`]): the translations that it
//! should have covered are then as stale as before. Left out: device TLBs (ATS) and PASIDs; an
//! implementation for such a device adds them to the same commands.

mod combine;

pub(crate) use combine::merge;
pub use combine::{Combiner, GATHER_LOOKS};

use iova::IovaRange;
use thiserror::Error;

/// Translations to invalidate, within the domain of the [`Invalidator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// The translations of these pages. Cached table pointers may stay (VT-d: page-selective with
    /// IH set).
    Pages(IovaRange),
    /// Every translation of the domain, and every pointer to its tables.
    Domain,
    /// Everything of every domain.
    Global,
}

/// Identifies a submitted batch. Tickets of one invalidator complete in no particular order unless
/// it says so. Any number of threads may poll one, at the same time and after it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Reason why an invalidation is not known to be complete. The translations it named may still be
/// in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InvalidateError {
    /// The hardware did not answer in time (VT-d: ITE in the fault status register, or no wait
    /// status).
    #[error("an invalidation was not answered for {waited_ns} ns")]
    TimedOut {
        /// Duration of the wait, in nanoseconds.
        waited_ns: u64,
    },
    /// The hardware refused a command or has stopped its queue (VT-d: IQE, ICE).
    #[error("the invalidation queue stopped with status {status:#x}")]
    Stopped {
        /// The hardware's status, raw.
        status: u64,
    },
}

/// The hardware that caches translations of one domain, as seen by software that changes them.
///
/// # Contract
/// After a ticket is complete, no access of a device of the domain uses a translation that a
/// command of its batch names and that was not in the tables at some moment after
/// [`submit`](Self::submit) was called. The protection of unmapped memory rests on this; the memory
/// safety of this crate does not.
pub trait Invalidator: Send + Sync {
    /// Hands the hardware a batch. The caller polls or waits for the ticket; a slow or full queue
    /// is waited for here. Stores made before the call are visible to the hardware's walks when it
    /// carries the batch out.
    ///
    /// # Errors
    /// [`InvalidateError`]; some commands may have been carried out.
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError>;

    /// Whether the batch is complete. Acquires what the hardware did before.
    ///
    /// # Errors
    /// [`InvalidateError`]; the ticket is void then.
    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError>;

    /// Returns when the batch is complete.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    fn wait(&self, ticket: Ticket) -> Result<(), InvalidateError> {
        while !self.poll(ticket)? {
            lines::spin_loop();
        }
        Ok(())
    }

    /// Submits and waits.
    ///
    /// # Errors
    /// As [`submit`](Self::submit) and [`poll`](Self::poll).
    fn flush(&self, commands: &[Command]) -> Result<(), InvalidateError> {
        self.wait(self.submit(commands)?)
    }

    /// Whether a batch submitted now would begin at once. A hint: only speed rests on it.
    fn is_idle(&self) -> bool {
        true
    }

    /// [`submit`](Self::submit) if that [begins at once](Self::is_idle); otherwise nothing has
    /// happened.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    #[inline]
    fn try_submit(&self, commands: &[Command]) -> Result<Option<Ticket>, InvalidateError> {
        match self.is_idle() {
            true => self.submit(commands).map(Some),
            false => Ok(None),
        }
    }

    /// Number of [`Command::Pages`] in one batch from which on a [`Command::Domain`] is cheaper.
    fn whole_domain_from(&self) -> usize {
        32
    }

    /// Number of cores, each with a [`Command::Pages`], from which on one batch for all is cheaper
    /// than a batch for each; `usize::MAX` where it never is.
    fn meets_from(&self) -> usize {
        2
    }
}

impl<I: Invalidator + ?Sized> Invalidator for alloc::sync::Arc<I> {
    fn submit(&self, commands: &[Command]) -> Result<Ticket, InvalidateError> {
        (**self).submit(commands)
    }

    #[inline]
    fn poll(&self, ticket: Ticket) -> Result<bool, InvalidateError> {
        (**self).poll(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), InvalidateError> {
        (**self).wait(ticket)
    }

    fn is_idle(&self) -> bool {
        (**self).is_idle()
    }

    #[inline]
    fn try_submit(&self, commands: &[Command]) -> Result<Option<Ticket>, InvalidateError> {
        (**self).try_submit(commands)
    }

    fn whole_domain_from(&self) -> usize {
        (**self).whole_domain_from()
    }

    #[inline]
    fn meets_from(&self) -> usize {
        (**self).meets_from()
    }
}

/// Hardware without caches: every batch is complete when it is submitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullInvalidator;

impl Invalidator for NullInvalidator {
    #[inline]
    fn submit(&self, _commands: &[Command]) -> Result<Ticket, InvalidateError> {
        // The stores that cleared the entries come before whatever the caller does next, device
        // walks included.
        lines::fence(lines::Ordering::SeqCst);
        Ok(Ticket(0))
    }

    #[inline]
    fn poll(&self, _ticket: Ticket) -> Result<bool, InvalidateError> {
        Ok(true)
    }

    fn meets_from(&self) -> usize {
        usize::MAX
    }
}
