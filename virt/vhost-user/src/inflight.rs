//! The inflight region: which requests a back end had taken and not yet returned, kept in memory
//! that outlives it, so that its successor neither loses a request nor completes one twice.
//!
//! Follows section "Inflight I/O tracking" of the protocol, in the machine's byte order. The back
//! end makes the region (GET_INFLIGHT_FD), the front end keeps it and gives it back
//! (SET_INFLIGHT_FD). Queue `n`'s part is the `n`-th piece of [`queue_region_len`] bytes, tracked
//! by a [`Split`] or a [`Packed`]:
//!
//! ```text
//!                 split                          packed
//! take            begin(head)                    begin(descriptors) ─▶ Slot
//! return, n times complete(head)                 complete(slot)
//!                                                advance()
//! publish         the caller stores used.idx     the caller writes used descriptors, the first
//!                                                one's flags last
//! forget          commit()                       commit()
//! after a crash   recover(used.idx) ─▶ heads     recover(the ring's flags) ─▶ descriptor chains
//! ```
//! One store publishes a batch: the successor compares the ring with the region, and sees on which
//! side of it the predecessor died.
//!
//! **Order of stores.** The enemy is SIGKILL, not power loss (which takes the guest too). A killed
//! thread stops between two instructions: stores before that point reach memory that others map,
//! even if they were still in a store buffer, and later ones were never executed. So it suffices
//! that the *program* stores in the document's order, which the compiler could break and the
//! processor cannot. Every store of [`Region`] is a release store, hence after every store before
//! it; `advance`, whose store must also come before the caller's next plain ones, ends in a
//! compiler fence.
//!
//! **Caller.** The ring's owner, one thread. Cost per request: five stores (split) or twelve
//! (packed, and four per further descriptor), per batch one or three, no load of shared memory, no
//! allocation. The successor signals the guest unconditionally after `recover` and looks at the
//! ring as if it had been kicked: its predecessor may have died between publishing and signalling.
//!
//! **The front end is not trusted.** It can write the region at any time, so nothing is read back
//! while the device runs: free list and states are private copies. Only `recover` reads, each field
//! once and checked; its loops end after `desc_num` steps. Contents that no crash leaves behind are
//! an error, and the ring is not to be served.
//!
//! **Where packed departs from the document,** whose steps lose or repeat requests at these points:
//! - `used_idx`, `old_used_idx` and both wrap counters share an aligned 64-bit word and are stored
//!   as that word. A death between the stores of `old_used_idx` and its wrap counter would leave a
//!   position in the wrong lap.
//! - A batch that fills the ring moves only the wrap counter; `recover` compares position and
//!   counter.
//! - A batch of several used descriptors is rolled back with all but the first already written. A
//!   smaller batch later would make the driver read one of those; `recover` makes them available
//!   again.
//!
//! A region that another back end left at one of these points is taken as it stands.
//!
//! **Left out:** mapping the file (the daemon's), VIRTIO_F_IN_ORDER's one used entry per batch.
//!
//! ```
//! use vhost_user::inflight::{MemRegion, Split, queue_region_len};
//! use vhost_user::backend::RingLayout;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let region = MemRegion::new(queue_region_len(RingLayout::Split, 8));
//! let (mut tracker, recovery) = Split::recover(region, 8, 0)?;
//! assert_eq!((recovery.heads.len(), recovery.next_avail), (0, 0));
//! for head in [5, 2, 7] {
//!     tracker.begin(head)?;
//! }
//! tracker.complete(2)?;
//! // The used ring's idx is stored, 1, and the process dies before it can commit.
//! let region = tracker.into_region();
//! let (_, recovery) = Split::recover(region, 8, 1)?;
//! assert_eq!(recovery.heads, [5, 7]);
//! assert_eq!(recovery.next_avail, 3);
//! # Ok(())
//! # }
//! ```

mod error;
mod layout;
mod packed;
mod recover_packed;
mod region;
mod split;
#[cfg(test)]
mod tests;

pub use error::{RecoverError, TrackError};
pub use layout::{ALIGN, VERSION, queue_region_len, region_len};
pub use packed::{Packed, PackedDesc, PackedPosition, PackedSizes, Slot};
pub use recover_packed::{PackedRecovery, PackedRequest, PackedRing, was_in_use};
pub use region::{MemRegion, Region};
pub use split::{Split, SplitRecovery};

/// State of a head between being taken and being returned; private, since the front end can rewrite
/// the region's own word for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not taken, or forgotten again.
    Free,
    /// Taken.
    InFlight,
    /// Returned in the batch that is being put together.
    InBatch,
}
