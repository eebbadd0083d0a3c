//! Models of the algorithms of stock kernels, for comparison. They have the layout of the shared
//! data as publicly described, and report every access to a shared word to the line probe. They
//! allocate and wait correctly, but contain no code of a kernel.
//!
//! **Tree** (the path behind the per-CPU caches): one lock; ranges in a balanced tree whose nodes
//! have one line each; a cursor at the range allocated last. An allocation walks down the address
//! space from the cursor, neighbour by neighbour, to the first gap. A free searches from the root
//! and moves the cursor up. The tree is assumed to be perfectly balanced, and rebalancing to write
//! only the parent, to the kernel's advantage.
//!
//! **Queue** (strict, Intel): one lock per unit around the ring of descriptors and their states. An
//! unmap writes its invalidation and a wait descriptor (16 bytes each, and an `int` of state each).
//! It polls the state of its wait under the lock, which it releases between two polls. Writes of
//! these states by the hardware are not counted.

use anyhow::Result;
use line_probe::{touch_read, touch_write};
use lines::{CachePadded, Lock};
use seeded::Random;

use crate::alloc::{WINDOW, random_turns};
use crate::map::FLUSH_ROUNDS;
use crate::turns::{self, Rounds};
use crate::{PerOp, below};

/// A range of one page, on a line of its own.
type Node = CachePadded<u64>;

/// Tree of ranges: their pages in ascending order, each with the index of its node.
struct Tree {
    order: Vec<(u64, usize)>,
    nodes: Vec<Node>,
    free: Vec<usize>,
    /// The page allocated last, or the next range above a page freed since.
    cursor: u64,
    top: u64,
}

impl Tree {
    fn new(top: u64) -> Self {
        Self {
            order: Vec::new(),
            nodes: Vec::new(),
            free: Vec::new(),
            cursor: top,
            top,
        }
    }

    /// Searches for `page` from the root, and reads the nodes on the way. Returns its position, or
    /// where to insert it.
    fn descend(&self, page: u64) -> Result<usize, usize> {
        self.order.binary_search_by(|(at, node)| {
            touch_read(&self.nodes[*node]);
            at.cmp(&page)
        })
    }

    /// Writes the node linked to the one at `place`. The neighbour is taken as the parent.
    fn relink(&self, place: usize) {
        let parent = place.checked_sub(1).or(Some(place + 1));
        if let Some((_, node)) = parent.and_then(|at| self.order.get(at)) {
            touch_write(&self.nodes[*node]);
        }
    }

    fn alloc(&mut self) -> u64 {
        // The cursor points to its node, so there is no search.
        let below = self.order.partition_point(|(at, _)| *at < self.cursor);
        let mut page = self.cursor - 1;
        for (at, node) in self.order[..below].iter().rev() {
            touch_read(&self.nodes[*node]);
            if *at < page {
                break;
            }
            page = at - 1;
        }
        assert!(page > 0, "the space is larger than what the workload holds");
        let node = self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node::new(0));
            self.nodes.len() - 1
        });
        let place = self.descend(page).unwrap_or_else(|place| place);
        self.order.insert(place, (page, node));
        touch_write(&self.nodes[node]);
        self.relink(place);
        self.cursor = page;
        page
    }

    fn free(&mut self, page: u64) {
        let place = self
            .descend(page)
            .expect("the workload frees what it holds");
        self.relink(place);
        let (_, node) = self.order.remove(place);
        touch_write(&self.nodes[node]);
        self.free.push(node);
        if page >= self.cursor {
            self.cursor = self.order.get(place).map_or(self.top, |(at, _)| *at);
        }
    }
}

/// Workload `a1` on the tree path.
///
/// # Errors
/// None.
pub fn tree(cores: usize) -> Result<PerOp> {
    let mut state = Tree::new(1 << 36);
    // A node never moves: its cache line is its identity.
    state.nodes.reserve(cores * WINDOW);
    let shared = CachePadded::new(Lock::new(state));
    let mut held = vec![Vec::new(); cores];
    for window in &mut held {
        window.extend((0..WINDOW).map(|_| shared.lock().alloc()));
    }
    let mut randoms: Vec<_> = (0..cores).map(Random::of_core).collect();
    let turns = (2048 / cores).clamp(32, 256);
    random_turns(cores, (turns, turns), |core| {
        let held: &mut Vec<u64> = &mut held[core];
        if held.len() == WINDOW {
            let page = held.swap_remove(below(&mut randoms[core], WINDOW));
            shared.lock().free(page);
        } else {
            held.push(shared.lock().alloc());
        }
        Ok(())
    })
}

/// Number of descriptors of the ring: two for each waiting core.
const RING: usize = 256;

/// Descriptors have 16 bytes and states 4: a line holds four descriptors or sixteen states.
struct Queue {
    descriptors: [CachePadded<[u128; 4]>; RING / 4],
    states: [CachePadded<[u32; 16]>; RING / 16],
    tail: usize,
    /// The round in which the hardware, which works in order, completes the last descriptor.
    busy_until: u64,
}

impl Queue {
    fn new() -> Self {
        Self {
            descriptors: std::array::from_fn(|_| CachePadded::default()),
            states: std::array::from_fn(|_| CachePadded::default()),
            tail: 0,
            busy_until: 0,
        }
    }

    /// Writes an invalidation and a wait descriptor. Returns the index of the wait, and the round
    /// in which the hardware completes it.
    fn submit(&mut self, now: u64) -> (usize, u64) {
        let wait = (self.tail + 1) % RING;
        touch_write(&self.descriptors[wait / 4][..2]);
        touch_write(&self.states[wait / 16][..2]);
        self.tail = (wait + 1) % RING;
        self.busy_until = self.busy_until.max(now) + FLUSH_ROUNDS;
        (wait, self.busy_until)
    }
}

/// Workload `dstr_busy` on the queue: submits, polls under the lock until the wait is complete, and
/// frees the descriptors.
///
/// # Errors
/// None, unless a simulated core panics.
pub fn strict(cores: usize) -> Result<PerOp> {
    let queue = CachePadded::new(Lock::new(Queue::new()));
    let rounds = Rounds::default();
    turns::count(cores, |machine, ops| {
        turns::run(
            machine,
            &rounds,
            &mut vec![(); cores],
            |_, (), hand_over| {
                for _ in 0..ops {
                    let mut held = queue.lock();
                    let (wait, done) = held.submit(rounds.now());
                    loop {
                        touch_read(&held.states[wait / 16][0]);
                        if rounds.now() >= done {
                            break;
                        }
                        drop(held);
                        lines::spin_loop();
                        held = queue.lock();
                    }
                    touch_write(&held.states[wait / 16][..2]);
                    drop(held);
                    hand_over();
                }
                Ok(())
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_gives_each_page_once_and_the_nearest_gap_below_its_cursor() {
        let mut tree = Tree::new(100);
        let pages: Vec<_> = (0..5).map(|_| tree.alloc()).collect();
        assert_eq!(pages, [99, 98, 97, 96, 95]);
        tree.free(97);
        tree.free(99);
        assert_eq!([(); 3].map(|()| tree.alloc()), [99, 97, 94]);
        assert_eq!(tree.order.len(), 6);
        tree.free(94);
        assert_eq!(tree.alloc(), 94);
    }

    #[test]
    fn one_core_moves_no_line_and_several_move_what_is_expected() {
        assert_eq!(tree(1).unwrap().transfers, 0.0);
        assert_eq!(strict(1).unwrap().transfers, 0.0);
        let two = tree(2).unwrap();
        assert_eq!(two.locks, 2.0);
        assert!(two.transfers >= 3.0, "{two:?}");
        let waits = strict(4).unwrap();
        assert!(waits.transfers >= 4.0 && waits.locks > 2.0, "{waits:?}");
        assert_eq!(waits, strict(4).unwrap());
    }
}
