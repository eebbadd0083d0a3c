//! Packed virtqueues, "When reconnecting".
//!
//! Everything is read and checked first, each word once; then come the stores, in an order that
//! allows dying between any two of them: until both positions are stored as one, the next successor
//! decides the same again.

use super::layout::{check_head, entry, head};
use super::packed::{Chain, positions, positions_word};
use super::{Packed, PackedDesc, PackedPosition, PackedSizes, RecoverError, Region, Slot};
use super::{State, VERSION};
use crate::backend::RingLayout;

/// VIRTQ_DESC_F_AVAIL, virtio 1.2 §2.8.1.
const AVAIL: u16 = 1 << 7;
/// VIRTQ_DESC_F_USED.
const USED: u16 = 1 << 15;

/// Access to the ring in the guest's memory that recovery needs.
pub trait PackedRing {
    /// The flags of the descriptor at `at`, below the ring's size.
    fn flags(&self, at: u16) -> u16;
    /// Stores the flags of a descriptor that the device owns.
    fn set_flags(&mut self, at: u16, flags: u16);
}

/// Returns whether a ring of `size` descriptors that is to begin where new ones do has been in use:
/// one bears the used flag, which neither side sets before that. A front end that keeps no inflight
/// region (QEMU's for network devices) cannot know where a back end stood that was killed, and
/// names the beginning. Good for a warning: a ring may have been stopped in order exactly there,
/// and one that was once stopped elsewhere is named by that place. Looks at each descriptor once.
pub fn was_in_use(at: PackedPosition, size: u16, ring: &impl PackedRing) -> bool {
    at == PackedPosition { idx: 0, wrap: true } && (0..size).any(|at| ring.flags(at) & USED != 0)
}

/// A request to be executed again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRequest {
    /// Slot for [`Packed::complete`].
    pub slot: Slot,
    /// Its descriptors as they were taken, at least one; in the ring they may be overwritten. The
    /// last one's id is the buffer's. The front end may have changed them: they are checked as if
    /// fetched.
    pub descs: Vec<PackedDesc>,
}

/// State that a predecessor left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRecovery {
    /// In the order in which they were taken; in flight already, so without `begin`.
    pub requests: Vec<PackedRequest>,
    /// Position of the next used descriptor, the same as [`Packed::used`].
    pub used: PackedPosition,
    /// The next descriptor to take. Both positions replace the base of SET_VRING_BASE, which a
    /// front end can only guess after a crash.
    pub avail: PackedPosition,
}

impl<R: Region> Packed<R> {
    /// Takes over a region, new or left by a predecessor. No other process may serve the ring any
    /// more; the driver may go on. A region that was never used (version 0) starts at `base` with
    /// nothing in flight; otherwise `base` is ignored.
    ///
    /// If the process dies within the call, a repeated call has the same result.
    ///
    /// # Errors
    /// If the region is too small or its contents impossible. Nothing is stored then.
    pub fn recover(
        mut region: R,
        sizes: PackedSizes,
        base: PackedPosition,
        ring: &mut impl PackedRing,
    ) -> Result<(Self, PackedRecovery), RecoverError> {
        let PackedSizes {
            desc_num,
            ring_size,
        } = sizes;
        if check_head(&region, RingLayout::Packed, ring_size, desc_num)? {
            check_position("base", base, ring_size)?;
            format(&mut region, desc_num, base);
        }
        let (new, old) = positions(region.load_u64(head!(PackedHead.used_idx)));
        check_position("used_idx", new, ring_size)?;
        check_position("old_used_idx", old, ring_size)?;
        // A published batch has changed the flags at its start, and whatever the driver has put
        // there since belongs to the next lap.
        let is_published =
            new != old && ring.flags(old.idx) & (AVAIL | USED) != available(old.wrap);
        let (used, free_head) = if is_published {
            (new, region.load_u16(head!(PackedHead.free_head)))
        } else {
            (old, region.load_u16(head!(PackedHead.old_free_head)))
        };
        let entries = Entries::read(&region, desc_num, free_head)?;
        let chains = entries.chains(&region, ring_size)?;

        if !is_published && new != old {
            withdraw(ring, old, new, ring_size);
        }
        if is_published {
            region.store_u16(head!(PackedHead.old_free_head), free_head);
        } else {
            region.store_u16(head!(PackedHead.free_head), free_head);
        }
        region.store_u64(head!(PackedHead.used_idx), positions_word(used, used));
        for &index in &entries.to_clear {
            region.store_u8(entry!(PackedHead, PackedEntry[index].inflight), 0);
        }
        let recovery = PackedRecovery {
            requests: chains.requests,
            used,
            avail: used.advanced(chains.in_flight, ring_size),
        };
        let tracker = Self {
            region,
            ring_size,
            next: entries.next,
            chains: chains.chains,
            free_head,
            in_flight: chains.in_flight,
            used,
            batch: Vec::with_capacity(usize::from(desc_num)),
            batch_descs: 0,
            is_closed: false,
            counter: chains.counter,
        };
        Ok((tracker, recovery))
    }
}

fn check_position(
    field: &'static str,
    position: PackedPosition,
    ring_size: u16,
) -> Result<(), RecoverError> {
    if position.idx >= ring_size {
        return Err(RecoverError::corrupt(field, position.idx));
    }
    Ok(())
}

/// The two bits of a descriptor that the driver made available in the lap of this wrap counter.
const fn available(wrap: bool) -> u16 {
    if wrap { AVAIL } else { USED }
}

/// Makes a region that was never used; the version, last, makes it one that was.
fn format(region: &mut impl Region, desc_num: u16, base: PackedPosition) {
    for index in 0..desc_num {
        region.store_u8(entry!(PackedHead, PackedEntry[index].inflight), 0);
        region.store_u16(entry!(PackedHead, PackedEntry[index].next), index + 1);
    }
    region.store_u64(head!(PackedHead.features), 0);
    region.store_u16(head!(PackedHead.desc_num), desc_num);
    region.store_u16(head!(PackedHead.free_head), 0);
    region.store_u16(head!(PackedHead.old_free_head), 0);
    region.store_u64(head!(PackedHead.used_idx), positions_word(base, base));
    region.store_u16(head!(PackedHead.version), VERSION);
}

/// Takes back used descriptors of a batch whose first one was never written: all but that one, in
/// `from..to`. The driver looks at none of them before the first is used.
fn withdraw(ring: &mut impl PackedRing, from: PackedPosition, to: PackedPosition, ring_size: u16) {
    let mut at = from;
    for _ in 1..ring_size {
        at = at.advanced(1, ring_size);
        // By index alone: another back end may have died between the index and its wrap counter.
        if at.idx == to.idx {
            break;
        }
        let flags = ring.flags(at.idx);
        let used = if at.wrap { AVAIL | USED } else { 0 };
        if flags & (AVAIL | USED) == used {
            ring.set_flags(at.idx, flags & !(AVAIL | USED) | available(at.wrap));
        }
    }
}

/// The array, and which of its entries are free.
struct Entries {
    next: Vec<u16>,
    is_free: Vec<bool>,
    /// Free entries that say they are in flight.
    to_clear: Vec<u16>,
    /// The other ones that say so.
    heads: Vec<u16>,
}

impl Entries {
    fn read(region: &impl Region, desc_num: u16, free_head: u16) -> Result<Self, RecoverError> {
        let next: Vec<u16> = (0..desc_num)
            .map(|index| region.load_u16(entry!(PackedHead, PackedEntry[index].next)))
            .collect();
        let mut is_free = vec![false; next.len()];
        let mut at = free_head;
        for _ in 0..desc_num {
            if at == desc_num {
                break;
            }
            match is_free.get_mut(usize::from(at)) {
                Some(is_free) if !*is_free => *is_free = true,
                _ => return Err(RecoverError::corrupt("free_head's list", at)),
            }
            at = next[usize::from(at)];
        }
        if at != desc_num {
            return Err(RecoverError::corrupt("free_head's list", at));
        }
        let (to_clear, heads) = (0..desc_num)
            .filter(|&index| region.load_u8(entry!(PackedHead, PackedEntry[index].inflight)) != 0)
            .partition(|&index| is_free[usize::from(index)]);
        Ok(Self {
            next,
            is_free,
            to_clear,
            heads,
        })
    }

    /// Follows each chain in flight. Every entry is in one list.
    fn chains(&self, region: &impl Region, ring_size: u16) -> Result<Chains, RecoverError> {
        let idle = Chain {
            state: State::Free,
            last: 0,
            num: 0,
        };
        let mut chains = vec![idle; self.next.len()];
        let mut is_listed = self.is_free.clone();
        let mut in_flight = 0_u16;
        let mut taken = Vec::with_capacity(self.heads.len());
        for &head in &self.heads {
            let num = region.load_u16(entry!(PackedHead, PackedEntry[head].num));
            if num == 0 || num > ring_size - in_flight {
                return Err(RecoverError::corrupt("num", num));
            }
            in_flight += num;
            let mut descs = Vec::with_capacity(usize::from(num));
            let (mut last, mut at) = (head, head);
            for _ in 0..num {
                match is_listed.get_mut(usize::from(at)) {
                    Some(is_listed) if !*is_listed => *is_listed = true,
                    _ => return Err(RecoverError::corrupt("next", at)),
                }
                descs.push(PackedDesc::from_words(
                    region.load_u64(entry!(PackedHead, PackedEntry[at].addr)),
                    region.load_u64(entry!(PackedHead, PackedEntry[at].id)),
                ));
                last = at;
                at = self.next[usize::from(at)];
            }
            let found = region.load_u16(entry!(PackedHead, PackedEntry[head].last));
            if found != last {
                return Err(RecoverError::corrupt("last", found));
            }
            chains[usize::from(head)] = Chain {
                state: State::InFlight,
                last,
                num,
            };
            let counter = region.load_u64(entry!(PackedHead, PackedEntry[head].counter));
            let slot = Slot(head);
            taken.push((counter, PackedRequest { slot, descs }));
        }
        if let Some(lost) = is_listed.iter().position(|&is_listed| !is_listed) {
            return Err(RecoverError::corrupt("entry in no list", lost as u64));
        }
        taken.sort_by_key(|(counter, _)| *counter);
        let counter = taken
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(Chains {
            chains,
            in_flight,
            counter,
            requests: taken.into_iter().map(|(_, request)| request).collect(),
        })
    }
}

/// Descriptor chains and requests in flight.
struct Chains {
    chains: Vec<Chain>,
    in_flight: u16,
    counter: u64,
    requests: Vec<PackedRequest>,
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Flags<'a>(&'a [u16]);

    impl PackedRing for Flags<'_> {
        fn flags(&self, at: u16) -> u16 {
            self.0[usize::from(at)]
        }

        fn set_flags(&mut self, _: u16, _: u16) {
            unreachable!("it only looks");
        }
    }

    #[test]
    fn a_ring_with_a_used_descriptor_was_in_use_and_a_new_one_was_not() {
        let was =
            |idx, wrap, flags: &[u16]| was_in_use(PackedPosition { idx, wrap }, 4, &Flags(flags));
        // Cleared; two made available, one with other flags.
        assert!(!was(0, true, &[0; 4]));
        assert!(!was(0, true, &[AVAIL, AVAIL | 3, 0, 0]));
        // Used in the first lap, made available in the second.
        assert!(was(0, true, &[AVAIL | USED, AVAIL, 0, 0]));
        assert!(was(0, true, &[0, 0, 0, USED]));
        // Wherever else it is to begin, it was stopped there once.
        assert!(!was(1, true, &[AVAIL | USED, AVAIL, 0, 0]));
        assert!(!was(0, false, &[AVAIL | USED; 4]));
    }
}
