//! Pages in order of arrival: doubly linked chains through the pages' own entries, so that a page
//! can leave from any position.
//!
//! A page is in one queue at most, and has one pair of links. Nothing is allocated.

use super::entry::{Entry, Page};

const END: u32 = u32::MAX;

/// A queue of pages.
#[derive(Debug)]
pub(super) struct Queue {
    head: u32,
    tail: u32,
    len: usize,
}

impl Queue {
    pub const EMPTY: Self = Self {
        head: END,
        tail: END,
        len: 0,
    };

    pub fn len(&self) -> usize {
        self.len
    }

    /// Appends a page that is in no queue.
    pub fn push_back(&mut self, entries: &mut [Entry], page: Page) {
        let before = self.tail;
        self.insert(entries, page, before, END);
    }

    /// Puts a page that is in no queue before all others.
    pub fn push_front(&mut self, entries: &mut [Entry], page: Page) {
        let after = self.head;
        self.insert(entries, page, END, after);
    }

    /// Takes the first page.
    pub fn pop_front(&mut self, entries: &mut [Entry]) -> Option<Page> {
        let page = (self.head != END).then_some(Page(self.head))?;
        self.remove(entries, page);
        Some(page)
    }

    /// Takes a page of this queue.
    pub fn remove(&mut self, entries: &mut [Entry], page: Page) {
        let (before, after) = entries[page.0 as usize].leave_queue();
        self.join(entries, before, after, after, before);
        self.len -= 1;
    }

    fn insert(&mut self, entries: &mut [Entry], page: Page, before: u32, after: u32) {
        entries[page.0 as usize].enter_queue(before, after);
        self.join(entries, before, page.0, after, page.0);
        self.len += 1;
    }

    /// Links `next` behind `before`, and `previous` before `after`; an end of the queue may take
    /// the place of either neighbour.
    fn join(&mut self, entries: &mut [Entry], before: u32, next: u32, after: u32, previous: u32) {
        match before {
            END => self.head = next,
            before => entries[before as usize].set_next(next),
        }
        match after {
            END => self.tail = previous,
            after => entries[after as usize].set_previous(previous),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::residency::pages::entry::Mark;
    use seeded::Random;

    /// Two queues over the same pages, against two deques.
    #[test]
    fn queues_hold_what_deques_hold() {
        const PAGES: u64 = 24;
        let mut random = Random::new(3);
        let mut entries = vec![Entry::NEW; PAGES as usize];
        let mut queues = [Queue::EMPTY, Queue::EMPTY];
        let mut models: [VecDeque<Page>; 2] = Default::default();
        for _ in 0..100_000 {
            let page = Page(random.below(PAGES) as u32);
            let which = random.below(2) as usize;
            let holder = models.iter().position(|model| model.contains(&page));
            assert_eq!(entries[page.0 as usize].has(Mark::Queued), holder.is_some());
            match (holder, random.below(3)) {
                (_, 0) => {
                    let first = queues[which].pop_front(&mut entries);
                    assert_eq!(first, models[which].pop_front());
                }
                (Some(holder), _) => {
                    queues[holder].remove(&mut entries, page);
                    models[holder].retain(|other| *other != page);
                }
                (None, 1) => {
                    queues[which].push_back(&mut entries, page);
                    models[which].push_back(page);
                }
                (None, _) => {
                    queues[which].push_front(&mut entries, page);
                    models[which].push_front(page);
                }
            }
            for (queue, model) in queues.iter().zip(&models) {
                assert_eq!(queue.len(), model.len());
            }
        }
        for (queue, model) in queues.iter_mut().zip(models) {
            let rest = std::iter::from_fn(|| queue.pop_front(&mut entries));
            assert_eq!(rest.collect::<VecDeque<_>>(), model);
        }
    }
}
