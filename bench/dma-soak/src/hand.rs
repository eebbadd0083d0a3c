//! Hand-over of things from a core to its neighbour, which frees them; and cores that take turns,
//! or run at once.

use std::sync::{Mutex, PoisonError};
use std::thread;

use iova::testing::Random;

/// Most things that one hand holds.
const FULL: usize = 256;

/// Hand of each core: the things that this core has to free.
pub struct Hands<T>(Vec<Mutex<Vec<T>>>);

impl<T> Hands<T> {
    pub fn new(cores: usize) -> Self {
        Self((0..cores).map(|_| Mutex::new(Vec::new())).collect())
    }

    /// Gives `thing` to the neighbour of `core`; returns it if that hand is full.
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
    /// One operation.
    fn step(&mut self);
}

/// `operations` by one thread that plays all cores, in an order that the seed gives.
pub fn in_turns(workers: &mut [impl Worker], operations: u64, seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..operations {
        let worker = random.index(workers.len());
        workers[worker].step();
    }
}

/// `operations` by all cores at once.
pub fn at_once(workers: &mut [impl Worker], operations: u64) {
    let each = operations.div_ceil(workers.len() as u64);
    thread::scope(|scope| {
        for worker in workers {
            scope.spawn(move || (0..each).for_each(|_| worker.step()));
        }
    });
}
