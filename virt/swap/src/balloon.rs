//! A balloon over memory of which pages may be elsewhere: what the guest does without leaves memory and store through the pager.

use guest_mem::{Gpa, PAGE_SIZE, Ticket};
use vio::balloon::{BalloonIo, PageRange};

use crate::ram::SwappedRam;

/// Tells the pager what the guest does without. Thread: the owner's, as of all back ends.
///
/// Of each queue the pages that it was asked about last are remembered until it asks about them again, which it does when the pager
/// has seen to them. If a guest changes its buffer meanwhile it is asked about others, and what was dropped is dropped.
pub struct SwappedBalloon {
    ram: SwappedRam,
    inflated: Vec<PageRange>,
    reported: Vec<PageRange>,
}

impl SwappedBalloon {
    /// Of this memory.
    pub fn new(ram: SwappedRam) -> Self {
        Self {
            ram,
            inflated: Vec::new(),
            reported: Vec::new(),
        }
    }
}

/// Offers `pages`, unless they are those that were, and have been seen to.
fn offer(ram: &SwappedRam, last: &mut Vec<PageRange>, pages: &[PageRange]) -> Result<(), Ticket> {
    if last == pages {
        last.clear();
        return Ok(());
    }
    last.clear();
    last.extend_from_slice(pages);
    let each = |range: &PageRange| {
        let first = range.gpa.raw();
        (0..range.pages).map(move |nth| Gpa::new(first + nth * PAGE_SIZE))
    };
    Err(ram.offer(pages.iter().flat_map(each)))
}

impl BalloonIo for SwappedBalloon {
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        offer(&self.ram, &mut self.inflated, pages)
    }

    /// They come back by being reached.
    fn deflated(&mut self, _pages: &[PageRange]) {}

    fn reported(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        offer(&self.ram, &mut self.reported, pages)
    }

    fn reset(&mut self) {
        self.inflated.clear();
        self.reported.clear();
    }
}

#[cfg(test)]
mod tests {
    use guest_mem::{GuestRam, HugePages};

    use super::*;

    #[test]
    fn what_is_asked_again_has_been_seen_to() {
        let regions = [(Gpa::new(0), 16 * PAGE_SIZE)];
        let ram = GuestRam::with_pages(&regions, HugePages::Never).expect("memory");
        let mut balloon = SwappedBalloon::new(SwappedRam::new(ram));
        let range = |page, pages| PageRange {
            gpa: Gpa::new(page * PAGE_SIZE),
            pages,
        };
        let (one, two) = ([range(1, 2)], [range(1, 1), range(5, 1)]);
        assert_eq!(balloon.inflated(&one), Err(Ticket(1)));
        // The other queue's are its own.
        assert_eq!(balloon.reported(&one), Err(Ticket(2)));
        assert_eq!(balloon.inflated(&one), Ok(()));
        assert_eq!(balloon.reported(&one), Ok(()));
        // They may be given up once more.
        assert_eq!(balloon.inflated(&one), Err(Ticket(3)));
        // The guest has changed its buffer.
        assert_eq!(balloon.inflated(&two), Err(Ticket(4)));
        assert_eq!(balloon.inflated(&one), Err(Ticket(5)));
        balloon.reset();
        assert_eq!(balloon.inflated(&one), Err(Ticket(6)));
    }
}
