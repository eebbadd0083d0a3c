//! Frames that wait for one receiver, in the order in which they came.
//!
//! A short frame that goes to its receiver as it came lies here, in a ring of slots of its own. Any
//! other one is named by its place in [`Shared::frames`](super::Shared::frames), where it is for
//! all of its receivers.

use std::collections::VecDeque;

use super::{QUEUE, SHORT};

/// The length of a frame in the next slot, or the place of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Short(u16),
    Place(usize),
}

/// See the module's head. Bound: [`QUEUE`] frames, and as many slots of [`SHORT`] bytes: 256 KiB,
/// from the first short frame on.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    items: VecDeque<Item>,
    /// Buffers for the largest number of frames; made for the first one.
    slots: Box<[[u8; SHORT]]>,
    /// The slot of the first short frame, and how many there are.
    first: usize,
    short: usize,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Puts a frame of [`SHORT`] bytes at most behind the others; false if there is no room.
    #[inline]
    pub fn push_short(&mut self, bytes: &[u8]) -> bool {
        if self.items.len() == QUEUE {
            return false;
        }
        if self.slots.is_empty() {
            self.slots = vec![[0; SHORT]; QUEUE].into();
        }
        let at = (self.first + self.short) % QUEUE;
        self.slots[at][..bytes.len()].copy_from_slice(bytes);
        self.short += 1;
        self.items.push_back(Item::Short(bytes.len() as u16));
        true
    }

    /// The same with the frame at `place`.
    pub fn push(&mut self, place: usize) -> bool {
        let has_room = self.items.len() < QUEUE;
        if has_room {
            self.items.push_back(Item::Place(place));
        }
        has_room
    }

    /// Bytes of the short frames in front.
    #[inline]
    pub fn short(&self) -> impl Iterator<Item = &[u8]> {
        let items = self.items.iter().enumerate();
        items.map_while(|(nth, item)| match item {
            Item::Short(len) => Some(&self.slots[(self.first + nth) % QUEUE][..usize::from(*len)]),
            Item::Place(_) => None,
        })
    }

    /// Takes `count` short frames away, which are in front.
    #[inline]
    pub fn drop_short(&mut self, count: usize) {
        self.items.drain(..count);
        self.short -= count;
        self.first = match self.short {
            // The slots that are in the cache.
            0 => 0,
            _ => (self.first + count) % QUEUE,
        };
    }

    /// The place of the frame in front, if it is none of the short ones.
    pub fn front(&self) -> Option<usize> {
        match self.items.front() {
            Some(Item::Place(place)) => Some(*place),
            Some(Item::Short(_)) | None => None,
        }
    }

    /// Takes it away.
    pub fn pop_front(&mut self) -> Option<usize> {
        let place = self.front()?;
        self.items.pop_front();
        Some(place)
    }

    /// Returns the position in the queue of the frame at `place`.
    pub fn position(&self, place: usize) -> Option<usize> {
        let wanted = Item::Place(place);
        self.items.iter().position(|item| *item == wanted)
    }

    /// Takes the frame away that stands there, and is none of the short ones.
    pub fn remove(&mut self, at: usize) {
        self.items.remove(at);
    }

    /// Takes all frames away; the places of those that have one.
    pub fn clear(&mut self) -> Vec<usize> {
        (self.first, self.short) = (0, 0);
        let places = self.items.drain(..).filter_map(|item| match item {
            Item::Place(place) => Some(place),
            Item::Short(_) => None,
        });
        places.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seeded::Random;

    /// Frames of both kinds come, are taken in bursts, and some are taken away in between: as a
    /// queue of whole frames has it.
    #[test]
    fn frames_leave_in_the_order_in_which_they_came() {
        let mut random = Random::new(1);
        let mut waiting = Waiting::default();
        let mut model: VecDeque<Result<Vec<u8>, usize>> = VecDeque::new();
        let mut next = 0;
        for phase in 0..40 {
            // Filled, and emptied.
            let fills = phase % 2 == 0;
            for _ in 0..1_500 {
                if random.below(4) < if fills { 3 } else { 1 } {
                    next += 1;
                    let frame = match random.below(3) {
                        0 => Err(next),
                        _ => Ok(vec![next as u8; 14 + random.below(200) as usize]),
                    };
                    let taken = match &frame {
                        Ok(bytes) => waiting.push_short(bytes),
                        Err(place) => waiting.push(*place),
                    };
                    assert_eq!(taken, model.len() < QUEUE);
                    if taken {
                        model.push_back(frame);
                    }
                } else if let Some(place) = waiting.front() {
                    assert_eq!(model.pop_front(), Some(Err(place)));
                    assert_eq!(waiting.pop_front(), Some(place));
                } else {
                    let most = random.below(33) as usize;
                    let short = waiting.short().take(most);
                    let short = Vec::from_iter(short.map(<[u8]>::to_vec));
                    for frame in &short {
                        assert_eq!(model.pop_front(), Some(Ok(frame.clone())));
                    }
                    waiting.drop_short(short.len());
                }
                if let Some(Err(place)) = model.get(random.below(64) as usize).cloned() {
                    let at = waiting.position(place).expect("it waits");
                    assert_eq!(model.remove(at), Some(Err(place)));
                    waiting.remove(at);
                }
                assert_eq!(waiting.len(), model.len());
            }
            if phase % 10 == 9 {
                let places = model.drain(..).filter_map(Result::err);
                assert_eq!(waiting.clear(), Vec::from_iter(places));
            }
        }
    }
}
