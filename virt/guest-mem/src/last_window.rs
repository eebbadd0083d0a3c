//! A cache of one entry before guest memory: where the last window of 1 MiB lies on the host.
//!
//! [`GuestRam`] finds an address in its first region by a subtraction and two comparisons, and in
//! others by a search: of a machine with more than 3 GiB most memory is behind that. With the cache
//! an address that is asked for ([`PhysMem::host`], the way of every lease and window) in the
//! window of the last one costs as much as in the first region. Copies and words bypass the cache:
//! their own cost dominates.
//!
//! An entry needs no invalidation. A region's mapping stays where it is for as long as the memory
//! exists; a page that is discarded loses its content, and keeps its address.
//!
//! Cost and gain, natively: `make bench-pviommu-native`, `host_ns_*`.

use std::cell::Cell;

use crate::access::{Access, Intent};
use crate::addr::{Gpa, Hva};
use crate::phys::{KeepAlive, PhysMem};
use crate::ram::{GuestRam, Region};

/// Bytes of a window, which begins at a multiple of them.
const WINDOW: u64 = 1 << 20;

/// Guest RAM behind such a cache. One thread's: a clone begins with its own, empty one.
#[derive(Debug)]
pub struct LastWindow {
    ram: GuestRam,
    is_on: bool,
    hit: Cell<Entry>,
}

/// A piece of a window that lies in one region; `len` 0: none.
#[derive(Clone, Copy, Debug)]
struct Entry {
    gpa: u64,
    len: u64,
    hva: u64,
}

impl Entry {
    const NONE: Self = Self {
        gpa: 0,
        len: 0,
        hva: 0,
    };

    /// The window of an address in `region`, as far as the region has it.
    fn of(gpa: Gpa, region: &Region) -> Self {
        let start = gpa.raw() / WINDOW * WINDOW;
        let first = start.max(region.gpa.raw());
        let inside = first - region.gpa.raw();
        Self {
            gpa: first,
            len: (region.len - inside).min(WINDOW - (first - start)),
            hva: region.hva.raw() + inside,
        }
    }
}

impl LastWindow {
    /// This memory; the cache is used if it `is_on`.
    pub fn new(ram: GuestRam, is_on: bool) -> Self {
        Self {
            ram,
            is_on,
            hit: Cell::new(Entry::NONE),
        }
    }

    /// As [`PhysMem::host`], past the cache; if it is on, the window of `gpa` is in it from now on.
    #[inline(never)]
    fn search(&self, gpa: Gpa, len: u64) -> Access<Hva> {
        let (region, inside) = self.ram.find(gpa, len)?;
        if self.is_on {
            self.hit.set(Entry::of(gpa, region));
        }
        Ok(Hva::new(region.hva.raw() + inside))
    }
}

impl Clone for LastWindow {
    fn clone(&self) -> Self {
        Self::new(self.ram.clone(), self.is_on)
    }
}

impl PhysMem for LastWindow {
    #[inline]
    fn read_u64(&self, gpa: Gpa) -> Access<u64> {
        self.ram.read_u64(gpa)
    }

    #[inline]
    fn read_u128(&self, gpa: Gpa) -> Access<u128> {
        self.ram.read_u128(gpa)
    }

    #[inline]
    fn store_u32_release(&self, gpa: Gpa, value: u32) -> Access<()> {
        self.ram.store_u32_release(gpa, value)
    }

    #[inline]
    fn read(&self, gpa: Gpa, buf: &mut [u8]) -> Access<()> {
        self.ram.read(gpa, buf)
    }

    #[inline]
    fn write(&self, gpa: Gpa, buf: &[u8]) -> Access<()> {
        self.ram.write(gpa, buf)
    }

    #[inline]
    fn host(&self, gpa: Gpa, len: u64, _intent: Intent) -> Access<Hva> {
        let hit = self.hit.get();
        // An address below the entry wraps to an offset beyond its length.
        let inside = gpa.raw().wrapping_sub(hit.gpa);
        match hit.len.checked_sub(inside) {
            // An empty range wraps as well, and has no room anywhere.
            Some(room) if len.wrapping_sub(1) < room => Ok(Hva::new(hit.hva + inside)),
            _ => self.search(gpa, len),
        }
    }

    #[inline]
    fn run(&self, gpa: Gpa) -> Access<u64> {
        self.ram.run(gpa)
    }

    fn keep_alive(&self) -> KeepAlive {
        self.ram.keep_alive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Two regions, of which the second begins and ends inside windows, and a third far above.
    fn ram() -> GuestRam {
        let regions = [(0, 2 * MIB), (3 * MIB + 0x8000, MIB), (64 * MIB, 2 * MIB)];
        GuestRam::in_heap(&regions.map(|(gpa, len)| (Gpa::new(gpa), len))).expect("memory")
    }

    #[test]
    fn the_entry_is_the_window_as_far_as_the_region_has_it() {
        let cached = LastWindow::new(ram(), true);
        let host = |gpa: u64| cached.host(Gpa::new(gpa), 1, Intent::Read).expect("RAM");
        host(65 * MIB + 7);
        let entry = cached.hit.get();
        assert_eq!((entry.gpa, entry.len), (65 * MIB, MIB));
        host(3 * MIB + 0x9000);
        let entry = cached.hit.get();
        assert_eq!((entry.gpa, entry.len), (3 * MIB + 0x8000, MIB - 0x8000));
        host(4 * MIB + 0x7fff);
        let entry = cached.hit.get();
        assert_eq!((entry.gpa, entry.len), (4 * MIB, 0x8000));
        // Refused: the entry stays.
        let refused = cached.host(Gpa::new(4 * MIB + 0x7fff), 2, Intent::Read);
        assert!(matches!(
            refused,
            Err(crate::Stop::Fault(crate::DmaFault::NotRam { .. }))
        ));
        assert_eq!(cached.hit.get().gpa, 4 * MIB);
        let off = LastWindow::new(ram(), false);
        off.host(Gpa::new(0), 1, Intent::Read).expect("RAM");
        assert_eq!(off.hit.get().len, 0);
    }

    proptest! {
        /// Regardless of the previous accesses, the result is that of memory without a cache.
        #[test]
        fn answers_equal_those_of_uncached_memory(
            asked in prop::collection::vec((0..70 * MIB, 0_u64..3 * MIB, any::<bool>()), 1..100)
        ) {
            let plain = ram();
            let cached = LastWindow::new(plain.clone(), true);
            for (gpa, len, is_short) in asked {
                let len = if is_short { len % 3 } else { len };
                for gpa in [gpa, gpa % (5 * MIB), 64 * MIB + gpa % (3 * MIB), u64::MAX - gpa % 4] {
                    let gpa = Gpa::new(gpa);
                    let expected = plain.host(gpa, len, Intent::Write);
                    prop_assert_eq!(cached.host(gpa, len, Intent::Write), expected);
                }
            }
        }
    }
}
