//! A balloon over memory of which pages may be elsewhere: what the guest does without leaves memory
//! and store through the pager.

use guest_mem::{Gpa, PAGE_SIZE, Ticket};
use vio::balloon::{BalloonIo, PageRange};

use crate::ram::SwappedRam;

/// Tells the pager what the guest does without. Thread: the owner's, as of all back ends.
///
/// Of each queue the pages that it was asked about last are remembered until it asks about them
/// again and the pager has seen to them: that a queue asks says nothing, since it may have waited
/// for a page of its ring. If a guest changes its buffer meanwhile it is asked about others, and
/// what was dropped is dropped.
pub struct SwappedBalloon {
    ram: SwappedRam,
    inflated: Offer,
    reported: Offer,
}

/// The last of a queue that it has not been told of.
type Offer = Option<(Vec<PageRange>, Ticket)>;

impl SwappedBalloon {
    /// Of this memory.
    pub fn new(ram: SwappedRam) -> Self {
        Self {
            ram,
            inflated: None,
            reported: None,
        }
    }
}

/// Offers `pages`, unless they are those that were, and have been seen to.
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

    /// They come back by being reached.
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
    use crate::book;

    #[test]
    fn what_is_asked_again_has_been_seen_to() {
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
        // The other queue's are its own.
        assert_eq!(balloon.reported(&one), Err(Ticket(2)));
        // A queue that asks again may have waited for something else.
        assert_eq!(balloon.inflated(&one), Err(Ticket(1)));
        ram.answer(book::Ticket(1));
        assert_eq!(balloon.inflated(&one), Ok(()));
        assert_eq!(balloon.reported(&one), Err(Ticket(2)));
        ram.answer(book::Ticket(2));
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
