//! Account of one transmit queue: the frames of it that arrived.
//!
//! Frames are expected in their order. One that is passed over is missing until it arrives after
//! all (late) or the window ends (lost). A number that has arrived already is a duplicate, one that
//! was never sent is forged.

use std::collections::BTreeSet;

/// Missing frames that are remembered; of older ones it is no longer known whether they arrive
/// late.
const REMEMBERED: usize = 1 << 16;

/// Frames of one queue, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Made available to the server.
    pub sent: u64,
    /// Arrived, each once, late ones among them.
    pub arrived: u64,
    /// Arrived behind one with a greater number.
    pub late: u64,
    /// Arrived once more.
    pub duplicate: u64,
    /// With a number that was never sent.
    pub forged: u64,
}

impl Counts {
    /// Sent, and not arrived.
    pub const fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.arrived)
    }
}

/// Relation of a frame to those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The first of its number.
    New,
    /// Not the first.
    Duplicate,
    /// Never sent.
    Forged,
}

/// The account of one queue.
#[derive(Debug, Default)]
pub struct Account {
    /// The next number to send.
    next: u64,
    /// The next number to arrive.
    expected: u64,
    missing: BTreeSet<u64>,
    counts: Counts,
}

impl Account {
    /// Takes the number of the next frame.
    #[inline]
    pub const fn send(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.counts.sent += 1;
        number
    }

    /// Frames that may still arrive in their order.
    #[inline]
    pub const fn in_flight(&self) -> u64 {
        self.next - self.expected
    }

    /// Takes down a frame that arrived.
    #[inline]
    pub fn arrive(&mut self, number: u64) -> Arrival {
        if number == self.expected && number < self.next {
            self.expected += 1;
            self.counts.arrived += 1;
            return Arrival::New;
        }
        self.arrive_otherwise(number)
    }

    #[cold]
    fn arrive_otherwise(&mut self, number: u64) -> Arrival {
        if number >= self.next {
            self.counts.forged += 1;
            return Arrival::Forged;
        }
        if number < self.expected {
            if !self.missing.remove(&number) {
                self.counts.duplicate += 1;
                return Arrival::Duplicate;
            }
            self.counts.late += 1;
        } else {
            self.pass_over(number);
            self.expected = number + 1;
        }
        self.counts.arrived += 1;
        Arrival::New
    }

    /// Remembers those before `end` as missing, the latest of them.
    fn pass_over(&mut self, end: u64) {
        let start = self.expected.max(end.saturating_sub(REMEMBERED as u64));
        self.missing.extend(start..end);
        while self.missing.len() > REMEMBERED {
            self.missing.pop_first();
        }
    }

    /// Gives up those in flight: they are missing now. So many.
    pub fn give_up(&mut self) -> u64 {
        let given_up = self.in_flight();
        self.pass_over(self.next);
        self.expected = self.next;
        given_up
    }

    /// Takes the counts since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Returns the counts so far.
    pub const fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use seeded::Random;

    use super::*;

    fn sent(count: u64) -> Account {
        let mut account = Account::default();
        for number in 0..count {
            assert_eq!(account.send(), number);
        }
        account
    }

    #[test]
    fn each_frame_is_counted_once_in_whatever_order() {
        let mut random = Random::new(37);
        for _ in 0..200 {
            let mut account = sent(100);
            let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
            let mut greatest = None;
            let mut expected = Counts {
                sent: 100,
                ..Counts::default()
            };
            for _ in 0..150 {
                let number = random.below(110);
                let arrival = account.arrive(number);
                if number >= 100 {
                    assert_eq!(arrival, Arrival::Forged);
                    expected.forged += 1;
                    continue;
                }
                let times = seen.entry(number).or_default();
                *times += 1;
                if *times > 1 {
                    assert_eq!(arrival, Arrival::Duplicate);
                    expected.duplicate += 1;
                    continue;
                }
                assert_eq!(arrival, Arrival::New);
                expected.arrived += 1;
                expected.late += u64::from(greatest.is_some_and(|greatest| number < greatest));
                greatest = greatest.max(Some(number));
            }
            assert_eq!(account.counts(), expected);
            assert_eq!(account.counts().lost(), 100 - seen.len() as u64);
        }
    }

    #[test]
    fn a_frame_given_up_may_still_arrive_late_and_only_once() {
        let mut account = sent(10);
        assert_eq!(account.give_up(), 10);
        assert_eq!((account.in_flight(), account.counts().lost()), (0, 10));
        assert_eq!(account.arrive(4), Arrival::New);
        assert_eq!(account.arrive(4), Arrival::Duplicate);
        assert_eq!(account.counts().lost(), 9);
    }

    #[test]
    fn a_leap_of_any_length_costs_no_more_than_what_is_remembered() {
        let mut account = sent(10 * REMEMBERED as u64);
        assert_eq!(account.arrive(9 * REMEMBERED as u64), Arrival::New);
        assert_eq!(account.missing.len(), REMEMBERED);
    }
}
