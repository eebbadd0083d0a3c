//! What caches outside this crate are built from (feature `parts`). No promise of stability goes with it.

use iova::IovaRange;

pub use super::batch::Taker;
pub use super::key::PackedRange;
pub use super::optimistic::{evicted_together, owners};
pub use super::slot_map::{Found, SlotMap};
use super::{Batch, Expired, Key};

/// The bits of a key: none has the same as another.
pub fn word(key: Key) -> u64 {
    key.word()
}

/// A mapping that occupies `place` in its cache until it is torn down.
pub fn expired(range: IovaRange, since_ns: u64, place: u32) -> Expired {
    Expired {
        range,
        since_ns,
        slot: place,
    }
}

/// The place of an expired mapping.
pub fn place(expired: &Expired) -> u32 {
    expired.place()
}

/// Adds one for `taker`; there is room.
///
/// # Panics
/// The batch holds another's.
pub fn push(batch: &mut Batch, taker: Taker, expired: Expired) {
    batch.push(taker, expired);
}

/// Takes everything out, all of which `taker` has put in.
///
/// # Panics
/// The batch holds another's.
pub fn take(batch: &mut Batch, taker: Taker) -> impl Iterator<Item = Expired> + '_ {
    batch.take(taker)
}
