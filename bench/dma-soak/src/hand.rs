//! Passing of ranges or mappings from a core to its neighbour, which frees them; and cores that run
//! in turns or concurrently.

use std::sync::{Mutex, PoisonError};
use std::thread;

use iova::testing::Random;

/// Greatest number of items that wait for one core.
const FULL: usize = 256;

/// For each core, the items that its neighbour has passed to it and that it has to free.
pub struct Hands<T>(Vec<Mutex<Vec<T>>>);

impl<T> Hands<T> {
    pub fn new(cores: usize) -> Self {
        Self((0..cores).map(|_| Mutex::new(Vec::new())).collect())
    }

    /// Passes `thing` to the next core; returns it if that core's list is full.
    pub fn pass(&self, core: usize, thing: T) -> Option<T> {
        let next = &self.0[(core + 1) % self.0.len()];
        let mut hand = next.lock().unwrap_or_else(PoisonError::into_inner);
        if hand.len() >= FULL {
            return Some(thing);
        }
        hand.push(thing);
        None
    }

    pub fn take(&self, core: usize) -> Option<T> {
        let mut hand = self.0[core].lock().unwrap_or_else(PoisonError::into_inner);
        hand.pop()
    }
}

/// One core of a run.
pub trait Worker: Send {
    /// Makes one operation.
    fn step(&mut self);
}

/// Makes `operations` on one thread that acts as all cores, in an order that the seed determines.
pub fn in_turns(workers: &mut [impl Worker], operations: u64, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..operations {
        let worker = random.index(workers.len());
        workers[worker].step();
    }
}

/// Makes `operations` on all cores at once, each with a thread of its own.
pub fn at_once(workers: &mut [impl Worker], operations: u64) {
    let each = operations.div_ceil(workers.len() as u64);
    thread::scope(|scope| {
        for worker in workers {
            scope.spawn(move || (0..each).for_each(|_| worker.step()));
        }
    });
}
