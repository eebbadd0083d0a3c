//! Table of the disks' requests that are under way, by number and by page.
//!
//! ```text
//!  begin ──▶ waits for pages ── arrived, the last one ──▶ goes down ── end ──▶ gone
//!    └─────────── waits for none ─────────────────────────────▲
//! ```
//! A request that was cancelled ends while it still waits.

use std::collections::HashMap;

use super::command::Op;
use super::pages::{Block, Page};

/// Blocks and pages of a disk's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First block.
    pub first: Block,
    /// Number of blocks, including those of which only a part is moved.
    pub count: u32,
    /// Memory of each block in order; none for a write without data of the guest's. For a read of
    /// parts, the pages that it touches.
    pub pages: Vec<Page>,
    /// Each page is a whole block's. Otherwise no block comes to back one.
    pub is_whole: bool,
}

/// Direction of a request: the disk's blocks are read, or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// A request that is under way.
#[derive(Debug)]
struct Request {
    direction: Direction,
    span: Span,
    /// Pages that it waits for.
    waits: usize,
    /// Its blocks come to back no pages: it moves parts of blocks, or another request changes the
    /// same blocks or pages at the same time, in an unknown order.
    is_void: bool,
}

impl Request {
    fn meets(&self, other: &Span) -> bool {
        let own = &self.span;
        let (a, b) = (u64::from(own.first.number), u64::from(other.first.number));
        own.first.disk == other.first.disk
            && a < b + u64::from(other.count)
            && b < a + u64::from(own.count)
    }
}

/// Arrival of a page that a request has waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The request moves the page. Other pages it waits for because blocks that it changes back
    /// them.
    pub is_moved: bool,
    /// The request waits for no more pages.
    pub is_last: bool,
}

/// A request that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub span: Span,
    /// Its pages and blocks hold the same, if it succeeded.
    pub is_evidence: bool,
}

/// All requests that are under way.
#[derive(Debug, Default)]
pub(super) struct Requests {
    by_op: HashMap<Op, Request>,
    /// Requests that each page belongs to.
    by_page: HashMap<Page, Vec<Op>>,
}

impl Requests {
    pub fn is_empty(&self) -> bool {
        self.by_op.is_empty()
    }

    /// Returns whether a request moves the page.
    pub fn has(&self, page: Page) -> bool {
        self.by_page.contains_key(&page)
    }

    #[cfg(test)]
    pub fn direction(&self, op: Op) -> Option<Direction> {
        Some(self.by_op.get(&op)?.direction)
    }

    /// Adds a request, and voids the evidence of those whose order with it is unknown.
    pub fn begin(&mut self, op: Op, direction: Direction, span: &Span) {
        let is_write = direction == Direction::Write;
        let mut is_void = !span.is_whole;
        for other in self.by_op.values_mut() {
            let other_writes = other.direction == Direction::Write;
            if (is_write || other_writes) && other.meets(span) {
                // A read does not void a write.
                other.is_void |= is_write;
                is_void |= other_writes;
            }
        }
        for page in &span.pages {
            let others = self.by_page.entry(*page).or_default();
            for other in others.iter().filter(|other| **other != op) {
                is_void = true;
                if let Some(other) = self.by_op.get_mut(other) {
                    other.is_void = true;
                }
            }
            // The same page twice: its final content is that of one of two blocks.
            is_void |= !is_write && others.contains(&op);
            others.push(op);
        }
        let request = Request {
            direction,
            span: span.clone(),
            waits: 0,
            is_void,
        };
        self.by_op.insert(op, request);
    }

    /// Sets the number of pages that the request waits for. Returns whether it can be submitted at
    /// once.
    pub fn wait(&mut self, op: Op, waits: usize) -> bool {
        if let Some(request) = self.by_op.get_mut(&op) {
            request.waits = waits;
        }
        waits == 0
    }

    /// Records that a page that the request waits for is resident. `None` for a request that has
    /// ended.
    pub fn arrived(&mut self, op: Op, page: Page) -> Option<Arrival> {
        let request = self.by_op.get_mut(&op)?;
        request.waits -= 1;
        Some(Arrival {
            is_moved: request.span.pages.contains(&page),
            is_last: request.waits == 0,
        })
    }

    /// Removes a request, if it is there.
    pub fn end(&mut self, op: Op) -> Option<Finished> {
        let Request { span, is_void, .. } = self.by_op.remove(&op)?;
        for page in &span.pages {
            if let Some(ops) = self.by_page.get_mut(page) {
                ops.retain(|other| *other != op);
                if ops.is_empty() {
                    self.by_page.remove(page);
                }
            }
        }
        Some(Finished {
            span,
            is_evidence: !is_void,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Direction::{Read, Write};
    use super::*;

    /// Returns a request of four whole blocks from `number` on, and of four pages from `page` on.
    fn span(number: u32, page: u32) -> Span {
        Span {
            first: Block { disk: 0, number },
            count: 4,
            pages: (page..page + 4).map(Page).collect(),
            is_whole: true,
        }
    }

    /// Returns whether each of two requests is evidence; they end in either order.
    fn evidence(first: (Direction, Span), second: (Direction, Span)) -> (bool, bool) {
        let ends = [[1, 2], [2, 1]].map(|order| {
            let mut requests = Requests::default();
            requests.begin(Op(1), first.0, &first.1);
            requests.begin(Op(2), second.0, &second.1);
            let mut is_evidence = [false; 2];
            for op in order {
                let finished = requests.end(Op(op)).expect("under way");
                is_evidence[op as usize - 1] = finished.is_evidence;
            }
            assert!(requests.is_empty() && !requests.has(Page(3)));
            (is_evidence[0], is_evidence[1])
        });
        assert_eq!(ends[0], ends[1], "evidence is void from the beginning on");
        ends[0]
    }

    #[test]
    fn requests_that_change_the_same_blocks_or_pages_are_no_evidence() {
        for (first, second, apart, same_blocks) in [
            (Read, Read, (true, true), (true, true)),
            (Read, Write, (true, true), (false, true)),
            (Write, Read, (true, true), (true, false)),
            (Write, Write, (true, true), (false, false)),
        ] {
            let both = |number, page| evidence((first, span(10, 0)), (second, span(number, page)));
            assert_eq!(both(14, 4), apart, "{first:?}, {second:?}");
            assert_eq!(both(6, 4), apart, "{first:?}, {second:?}");
            // One block of either end, or all of them.
            for number in [13, 7, 10] {
                assert_eq!(both(number, 4), same_blocks, "{first:?}, {second:?}");
            }
            // One page.
            assert_eq!(both(14, 3), (false, false), "{first:?}, {second:?}");
        }
    }

    #[test]
    fn request_of_parts_or_of_a_page_twice_is_no_evidence_unless_it_writes_the_page() {
        let of = |direction, span: &Span| {
            let mut requests = Requests::default();
            requests.begin(Op(1), direction, span);
            requests.end(Op(1)).expect("under way").is_evidence
        };
        let mut parts = span(10, 0);
        parts.is_whole = false;
        let mut twice = span(10, 0);
        twice.pages[3] = Page(0);
        assert_eq!([Read, Write].map(|way| of(way, &parts)), [false, false]);
        assert_eq!([Read, Write].map(|way| of(way, &twice)), [false, true]);
    }

    #[test]
    fn request_goes_down_when_the_last_page_has_arrived_and_not_after_its_end() {
        let mut requests = Requests::default();
        requests.begin(Op(1), Write, &span(10, 0));
        assert!(!requests.wait(Op(1), 2));
        let arrival = |is_moved, is_last| Some(Arrival { is_moved, is_last });
        // A page that is backed by a block that is about to change.
        assert_eq!(requests.arrived(Op(1), Page(9)), arrival(false, false));
        assert_eq!(requests.arrived(Op(1), Page(3)), arrival(true, true));
        assert!(requests.end(Op(1)).is_some());
        assert_eq!(requests.arrived(Op(1), Page(2)), None);
        assert!(requests.end(Op(1)).is_none());
    }
}
