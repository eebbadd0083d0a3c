//! Check that a [`KeepAlive`] keeps an address mapped: required for every raw pointer that outlives
//! a call.
//!
//! Only one type makes a `KeepAlive` whose addresses may be dereferenced: the [`MappingSet`],
//! private to this crate, which has the mappings of one guest's memory. A `KeepAlive` of any other
//! type keeps nothing mapped, as far as this module is concerned.
//!
//! Cost of the check, made for every piece of every request: one indirect call for the type, and
//! two comparisons with the member found last.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::addr::Hva;
use crate::mapping::Mapping;
use crate::phys::KeepAlive;

/// Mappings that are kept together.
#[derive(Debug)]
pub(crate) struct MappingSet {
    /// Sorted by host address. Mappings are disjoint; the same one may be here twice.
    members: Box<[Member]>,
    /// Index of the member last found: a guess, which orders nothing and may be any number.
    hint: AtomicUsize,
}

#[derive(Debug)]
struct Member {
    /// Copies of the bounds of `mapping`, so that a lookup stays inside the array.
    start: u64,
    len: u64,
    mapping: Arc<Mapping>,
}

impl Member {
    #[inline]
    fn holds(&self, hva: Hva, len: u64) -> bool {
        // An address below the start wraps to an offset beyond any mapping's length.
        let inside = hva.raw().wrapping_sub(self.start);
        inside <= self.len && len <= self.len - inside
    }
}

impl MappingSet {
    pub(crate) fn new(mappings: impl IntoIterator<Item = Arc<Mapping>>) -> Self {
        let mut members: Vec<Member> = mappings
            .into_iter()
            .map(|mapping| Member {
                start: mapping.hva(0).raw(),
                len: mapping.len() as u64,
                mapping,
            })
            .collect();
        members.sort_unstable_by_key(|member| member.start);
        Self {
            members: members.into(),
            hint: AtomicUsize::new(0),
        }
    }

    /// The mapping that holds all of `[hva, hva + len)`.
    #[inline]
    fn find(&self, hva: Hva, len: u64) -> Option<&Arc<Mapping>> {
        match self.members.get(self.hint.load(Ordering::Relaxed)) {
            Some(member) if member.holds(hva, len) => Some(&member.mapping),
            _ => self.search(hva, len),
        }
    }

    fn search(&self, hva: Hva, len: u64) -> Option<&Arc<Mapping>> {
        let above = self
            .members
            .partition_point(|member| member.start <= hva.raw());
        let index = above.checked_sub(1)?;
        let member = &self.members[index];
        if !member.holds(hva, len) {
            return None;
        }
        self.hint.store(index, Ordering::Relaxed);
        Some(&member.mapping)
    }
}

/// Returns the [`Mapping`] that holds `[hva, hva + len)`, if `keep` keeps it, and the pointer
/// there. It is that mapping alone, not the set: a window must not keep memory that a guest has
/// unplugged.
pub(crate) fn mapping_of(
    keep: &KeepAlive,
    hva: Hva,
    len: u64,
) -> Option<(Arc<Mapping>, NonNull<u8>)> {
    let mapping = keep.downcast_ref::<MappingSet>()?.find(hva, len)?.clone();
    let pointer = mapping.pointer(hva, len)?;
    Some((mapping, pointer))
}

/// The pointer to `[hva, hva + len)`, if `keep` keeps it: valid for as long as `keep` is held.
#[inline]
pub(crate) fn pointer_of(keep: &KeepAlive, hva: Hva, len: u64) -> Option<NonNull<u8>> {
    let mapping = keep.downcast_ref::<MappingSet>()?.find(hva, len)?;
    mapping.pointer(hva, len)
}

/// Whether `keep` keeps all of `[hva, hva + len)` mapped: true only of memory that this crate
/// mapped, and of a range inside one mapping.
///
/// The check behind an `unsafe` use of a [`Lease`](crate::Lease) (handing its address to the
/// kernel): [`Dma`](crate::Dma) is a safe trait, so its word alone is no safety argument; this
/// function's is.
///
/// ```
/// use guest_mem::{Gpa, GuestRam, Intent, PhysMem, keeps_mapped};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ram = GuestRam::new(&[(Gpa::new(0), 1 << 20)])?;
/// let hva = ram.host(Gpa::new(0x1000), 512, Intent::Read).expect("inside RAM");
/// assert!(keeps_mapped(&ram.keep_alive(), hva, 512));
/// assert!(!keeps_mapped(&ram.keep_alive(), hva, 1 << 20));
/// # Ok(())
/// # }
/// ```
#[inline]
pub fn keeps_mapped(keep: &KeepAlive, hva: Hva, len: u64) -> bool {
    keep.downcast_ref::<MappingSet>()
        .is_some_and(|set| set.find(hva, len).is_some())
}
