//! Writes beside each other, and misaligned ones alone.
//!
//! Past the page cache a write that is no whole number of blocks reads the blocks around it, and
//! writes them with the new data in them. Another write to one of these blocks in between would be
//! undone, so such a write begins when all that change the file have ended, and others begin when
//! it has. They begin in the order in which they came, so that none waits for ever. Reads do not
//! wait: they find the bytes beside the new data unchanged at any time.

use std::collections::VecDeque;

/// The permission of an operation that changes the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// Beside others.
    Shared,
    /// Alone.
    Exclusive,
}

/// Operations that change the file: those that run, and those that wait for them.
#[derive(Debug, Default)]
pub(super) struct WriteOrder {
    shared: u32,
    is_exclusive: bool,
    waiting: VecDeque<(u32, Hold)>,
}

impl WriteOrder {
    /// An operation has come; [`next`](Self::next) says when it begins.
    pub(super) fn enter(&mut self, slot: u32, hold: Hold) {
        self.waiting.push_back((slot, hold));
    }

    /// The operation that begins now, if one does.
    pub(super) fn next(&mut self) -> Option<(u32, Hold)> {
        let &(_, hold) = self.waiting.front()?;
        let may_begin = match hold {
            Hold::Shared => !self.is_exclusive,
            Hold::Exclusive => !self.is_exclusive && self.shared == 0,
        };
        if !may_begin {
            return None;
        }
        match hold {
            Hold::Shared => self.shared += 1,
            Hold::Exclusive => self.is_exclusive = true,
        }
        self.waiting.pop_front()
    }

    /// One that had begun has ended.
    pub(super) fn leave(&mut self, hold: Hold) {
        match hold {
            Hold::Shared => self.shared -= 1,
            Hold::Exclusive => self.is_exclusive = false,
        }
    }

    /// A slot waits no longer; false: it does not wait.
    pub(super) fn give_up(&mut self, slot: u32) -> bool {
        let at = self.waiting.iter().position(|&(other, _)| other == slot);
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::Hold::{Exclusive, Shared};
    use super::*;

    #[test]
    fn an_exclusive_operation_begins_alone_and_in_its_turn() {
        let mut order = WriteOrder::default();
        for (slot, hold) in [Shared, Shared, Exclusive, Shared, Exclusive]
            .into_iter()
            .enumerate()
        {
            order.enter(slot as u32, hold);
        }
        assert_eq!(order.next(), Some((0, Shared)));
        assert_eq!(order.next(), Some((1, Shared)));
        assert_eq!(order.next(), None);
        order.leave(Shared);
        assert_eq!(order.next(), None, "one of them still runs");
        order.leave(Shared);
        assert_eq!(order.next(), Some((2, Exclusive)));
        assert_eq!(order.next(), None);
        assert!(order.give_up(3) && !order.give_up(3) && !order.give_up(2));
        order.leave(Exclusive);
        assert_eq!(order.next(), Some((4, Exclusive)));
        order.leave(Exclusive);
        assert_eq!(order.next(), None);
    }
}
