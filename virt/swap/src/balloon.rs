//! Balloon over memory of which pages may be absent: the memory and the slots of pages that the
//! guest discards are freed through the pager.

use guest_mem::{Gpa, PAGE_SIZE, Ticket};
use vio::balloon::{BalloonIo, PageRange};

use crate::ram::SwappedRam;

/// Balloon back end that reports discarded pages to the pager. Thread: the owner's, as of all back
/// ends.
///
/// For each queue, the pages of its last call are remembered until it calls with them again and the
/// pager has answered. A repeated call alone does not mean that the pager has answered, since the
/// queue may have waited for a page of its ring. If a guest changes its buffer meanwhile, the call
/// is for other pages; dropped pages stay dropped.
pub struct SwappedBalloon {
    ram: SwappedRam,
    inflated: Offer,
    reported: Offer,
}

/// Last discard of a queue that has not been answered, and its ticket.
type Offer = Option<(Vec<PageRange>, Ticket)>;

impl SwappedBalloon {
    /// Creates a balloon over this memory.
    pub fn new(ram: SwappedRam) -> Self {
        Self {
            ram,
            inflated: None,
            reported: None,
        }
    }
}

/// Reports `pages` as discarded, unless they are those of the last call, and the pager has
/// answered.
fn offer(ram: &SwappedRam, last: &mut Offer, pages: &[PageRange]) -> Result<(), Ticket> {
    if let Some((before, ticket)) = last
        && before == pages
    {
        if !ram.is_answered(*ticket) {
            return Err(*ticket);
        }
        *last = None;
        return Ok(());
    }
    let each = |range: &PageRange| {
        let first = range.gpa.raw();
        (0..range.pages).map(move |nth| Gpa::new(first + nth * PAGE_SIZE))
    };
    let ticket = ram.offer(pages.iter().flat_map(each));
    *last = Some((pages.to_vec(), ticket));
    Err(ticket)
}

impl BalloonIo for SwappedBalloon {
    fn inflated(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        offer(&self.ram, &mut self.inflated, pages)
    }

    /// Does nothing: deflated pages come back when they are accessed.
    fn deflated(&mut self, _pages: &[PageRange]) {}

    fn reported(&mut self, pages: &[PageRange]) -> Result<(), Ticket> {
        offer(&self.ram, &mut self.reported, pages)
    }

    fn reset(&mut self) {
        self.inflated = None;
        self.reported = None;
    }
}

#[cfg(test)]
mod tests {
    use guest_mem::{GuestRam, HugePages};

    use super::*;
    use crate::residency;

    #[test]
    fn repeated_discard_returns_once_the_pager_has_answered() {
        let regions = [(Gpa::new(0), 16 * PAGE_SIZE)];
        let ram = GuestRam::with_pages(&regions, HugePages::Never).expect("memory");
        let ram = SwappedRam::new(ram);
        let mut balloon = SwappedBalloon::new(ram.clone());
        let range = |page, pages| PageRange {
            gpa: Gpa::new(page * PAGE_SIZE),
            pages,
        };
        let (one, two) = ([range(1, 2)], [range(1, 1), range(5, 1)]);
        assert_eq!(balloon.inflated(&one), Err(Ticket(1)));
        // The other queue's discards are its own.
        assert_eq!(balloon.reported(&one), Err(Ticket(2)));
        // A queue that asks again may have waited for something else.
        assert_eq!(balloon.inflated(&one), Err(Ticket(1)));
        ram.answer(residency::Ticket(1));
        assert_eq!(balloon.inflated(&one), Ok(()));
        assert_eq!(balloon.reported(&one), Err(Ticket(2)));
        ram.answer(residency::Ticket(2));
        assert_eq!(balloon.reported(&one), Ok(()));
        // They may be discarded once more.
        assert_eq!(balloon.inflated(&one), Err(Ticket(3)));
        // The guest has changed its buffer.
        assert_eq!(balloon.inflated(&two), Err(Ticket(4)));
        assert_eq!(balloon.inflated(&one), Err(Ticket(5)));
        balloon.reset();
        assert_eq!(balloon.inflated(&one), Err(Ticket(6)));
    }
}
