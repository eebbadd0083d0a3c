//! Operations that begin in the order in which they came, as far as there is room for them beside
//! each other. None waits for ever, since none that comes later begins before it.

use std::collections::VecDeque;

/// Operations by slot: the room left by those that run, and those that wait.
#[derive(Debug)]
pub(super) struct Turns {
    room: u32,
    waiting: VecDeque<(u32, u32)>,
}

impl Turns {
    /// So much room for all that run at a time.
    pub(super) fn new(room: u32) -> Self {
        Self {
            room,
            waiting: VecDeque::new(),
        }
    }

    /// An operation that takes up `share` of the room has come; [`next`](Self::next) says when it
    /// begins.
    pub(super) fn enter(&mut self, slot: u32, share: u32) {
        self.waiting.push_back((slot, share));
    }

    /// The operation that begins now, if one does, and its share.
    pub(super) fn next(&mut self) -> Option<(u32, u32)> {
        let &(_, share) = self.waiting.front()?;
        self.room = self.room.checked_sub(share)?;
        self.waiting.pop_front()
    }

    /// One that had begun has ended, and gives its share back.
    pub(super) fn leave(&mut self, share: u32) {
        self.room += share;
    }

    /// A slot waits no longer; false: it does not wait.
    pub(super) fn give_up(&mut self, slot: u32) -> bool {
        let at = self.waiting.iter().position(|&(other, _)| other == slot);
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_takes_all_the_room_begins_alone_and_in_its_turn() {
        const ALL: u32 = 8;
        let mut turns = Turns::new(ALL);
        for (slot, share) in [(0, 1), (1, 1), (2, ALL), (3, 1), (4, ALL)] {
            turns.enter(slot, share);
        }
        assert_eq!(turns.next(), Some((0, 1)));
        assert_eq!(turns.next(), Some((1, 1)));
        assert_eq!(turns.next(), None);
        turns.leave(1);
        assert_eq!(turns.next(), None, "one of them still runs");
        turns.leave(1);
        assert_eq!(turns.next(), Some((2, ALL)));
        assert_eq!(turns.next(), None);
        assert!(turns.give_up(3) && !turns.give_up(3) && !turns.give_up(2));
        turns.leave(ALL);
        assert_eq!(turns.next(), Some((4, ALL)));
        turns.leave(ALL);
        assert_eq!(turns.next(), None);
    }

    #[test]
    fn an_operation_that_comes_again_has_its_turn_behind_those_that_wait() {
        let mut turns = Turns::new(2);
        for slot in 0..3 {
            turns.enter(slot, 1);
        }
        assert_eq!(
            [turns.next(), turns.next(), turns.next()],
            [Some((0, 1)), Some((1, 1)), None]
        );
        turns.leave(1);
        turns.enter(0, 1);
        assert_eq!([turns.next(), turns.next()], [Some((2, 1)), None]);
    }
}
