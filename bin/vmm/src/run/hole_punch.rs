//! Memory that is all here, under a balloon: pages that the guest discards are given back to the
//! host.
//!
//! A page goes from every mapping of it at once: the guest's, ours, and those of processes that
//! serve `--disk socket=…`. The next access, by any of them, finds zeroes. A disk's request that is
//! under way with such a page keeps the old page, and what it reads into that page is lost: a guest
//! that gives pages away while a disk reads into them has no claim to what was read.
//!
//! Where memory is populated ahead of devices, pages of the window that is being populated at that
//! moment stay too, and no window that the guest has given a page of back is populated from then on
//! ([`pv_iommu::populate`]).
//!
//! A page that an *assigned* device reaches stays: the host's IOMMU would go on leading to the old
//! one, while the guest found another.

use std::sync::Arc;

use assign::reach::Reach;
use guest_mem::{GuestRam, PAGE_SIZE, Ticket};
use pv_iommu::populate::{PopulateWindows, WINDOW};
use vio::balloon::{BalloonIo, PageRange};

/// Gives pages of this memory back.
pub struct Holes {
    ram: GuestRam,
    reach: Reach,
    /// Populated ahead of devices.
    windows: Option<Arc<PopulateWindows>>,
    has_failed: bool,
}

impl Holes {
    /// Creates the handler of this memory, of which assigned devices reach some.
    pub fn new(ram: GuestRam, reach: Reach) -> Self {
        Self {
            ram,
            reach,
            windows: None,
            has_failed: false,
        }
    }

    /// Returns the same, of memory of which these windows are populated ahead.
    pub fn beside(self, windows: Option<Arc<PopulateWindows>>) -> Self {
        Self { windows, ..self }
    }

    fn discard(&mut self, pages: &[PageRange]) {
        for range in pages {
            if self.reach.touches(range.gpa, range.bytes()) {
                self.discard_some(range);
                continue;
            }
            let Some(windows) = self.windows.clone() else {
                self.discard_now(range);
                continue;
            };
            for piece in in_windows(range) {
                if windows.give_back(piece.gpa, piece.bytes()) {
                    self.discard_now(&piece);
                }
            }
        }
    }

    fn discard_now(&mut self, range: &PageRange) {
        // Pages that stay are memory that the host does not get, and nothing else.
        if let Err(error) = self.ram.discard(range.gpa, range.bytes())
            && !self.has_failed
        {
            self.has_failed = true;
            tracing::warn!(%error, "pages of the balloon stay in memory");
        }
    }

    /// Discards pages of a range of which devices reach some, one by one.
    #[cold]
    fn discard_some(&mut self, range: &PageRange) {
        for page in 0..range.pages {
            let Some(gpa) = range.gpa.checked_add(page * PAGE_SIZE) else {
                return;
            };
            if !self.reach.touches(gpa, PAGE_SIZE) {
                self.discard(&[PageRange { gpa, pages: 1 }]);
            }
        }
    }
}

/// Returns a range, cut where windows begin.
fn in_windows(range: &PageRange) -> impl Iterator<Item = PageRange> + use<> {
    let mut left = *range;
    std::iter::from_fn(move || {
        let in_window = (WINDOW - left.gpa.raw() % WINDOW) / PAGE_SIZE;
        let pages = left.pages.min(in_window);
        let piece = PageRange { pages, ..left };
        // Behind the last one there is nothing, whatever its address.
        left.gpa = left.gpa.checked_add(pages * PAGE_SIZE).unwrap_or(left.gpa);
        left.pages -= pages;
        (pages > 0).then_some(piece)
    })
}

impl BalloonIo for Holes {
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        self.discard(pages);
        Ok(())
    }

    /// Does nothing: pages come back at the next access.
    fn deflated(&mut self, _pages: &[PageRange]) {}

    fn reported(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        self.discard(pages);
        Ok(())
    }

    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use guest_mem::{Gpa, PAGE_SIZE, PhysMem};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns two regions, with a hole between them.
    fn ram() -> GuestRam {
        let regions = [(Gpa::new(0), 2 * MIB), (Gpa::new(4 * MIB), 2 * MIB)];
        GuestRam::with_pages(&regions, guest_mem::HugePages::Never).expect("memory")
    }

    /// Blocks of 512 bytes that the memory file has.
    fn bytes(ram: &GuestRam) -> u64 {
        let stat = rustix::fs::fstat(ram.memfd().expect("a file")).expect("its facts");
        u64::try_from(stat.st_blocks).expect("a count") * 512
    }

    #[test]
    fn pages_leave_the_host_and_read_as_zeroes() {
        let ram = ram();
        for gpa in [0, MIB, 4 * MIB, 6 * MIB - PAGE_SIZE] {
            ram.write(Gpa::new(gpa), &[7; PAGE_SIZE as usize])
                .expect("memory");
        }
        assert_eq!(bytes(&ram), 4 * PAGE_SIZE);
        let mut holes = Holes::new(ram.clone(), Reach::default());
        let range = |gpa, pages| PageRange {
            gpa: Gpa::new(gpa),
            pages,
        };
        let given = [range(MIB, 1), range(6 * MIB - 2 * PAGE_SIZE, 2)];
        holes.inflated(&given).expect("done at once");
        assert_eq!(bytes(&ram), 2 * PAGE_SIZE);
        for (gpa, byte) in [(0, 7), (MIB, 0), (4 * MIB, 7), (6 * MIB - PAGE_SIZE, 0)] {
            let mut found = [1];
            ram.read(Gpa::new(gpa), &mut found).expect("memory");
            assert_eq!(found, [byte], "{gpa:#x}");
        }
        holes.deflated(&given);
        ram.write(Gpa::new(MIB), &[9]).expect("memory");
        holes.reported(&[range(0, 1)]).expect("done at once");
        let mut found = [0; 2];
        ram.read(Gpa::new(MIB), &mut found).expect("memory");
        assert_eq!(found, [9, 0]);
        assert!(!holes.has_failed);
    }

    #[test]
    fn window_with_discarded_pages_is_not_populated_again() {
        let ram = ram();
        let pieces = ram.regions().iter().map(|own| (own.gpa, own.len));
        let windows = Arc::new(PopulateWindows::new(pieces));
        let mut holes = Holes::new(ram.clone(), Reach::default()).beside(Some(windows.clone()));
        // Across two windows.
        let across = PageRange {
            gpa: Gpa::new(MIB - PAGE_SIZE),
            pages: 2,
        };
        holes.inflated(&[across]).expect("done at once");
        let helper = super::super::hints::populate(&windows, &ram).expect("a thread");
        for window in [0, 1, 4] {
            windows.ask(Gpa::new(window * MIB), PAGE_SIZE);
        }
        while windows.populated() == 0 {
            std::thread::yield_now();
        }
        drop(helper);
        // The third alone, whole.
        assert_eq!((windows.populated(), bytes(&ram)), (1, MIB));
        holes.reported(&[across]).expect("done at once");
        assert_eq!((windows.kept(), bytes(&ram)), (0, MIB));
        let cut: Vec<_> = in_windows(&PageRange {
            gpa: Gpa::new(MIB - 2 * PAGE_SIZE),
            pages: 3 + MIB / PAGE_SIZE,
        })
        .map(|piece| (piece.gpa.raw(), piece.pages))
        .collect();
        let page = PAGE_SIZE;
        assert_eq!(cut, [(MIB - 2 * page, 2), (MIB, 256), (2 * MIB, 1)]);
    }
}
