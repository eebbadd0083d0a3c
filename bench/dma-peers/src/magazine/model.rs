//! A loom model of the exchange of magazines: in every order in which cores and depot can meet,
//! each range is in one place, and none is lost. Run with
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p dma-peers --lib --release model
//! ```
//!
//! Two cores with magazines of one or two ranges and a depot of one full magazine allocate and free
//! through the whole of [`Rack`] and [`Depot`]; the tree is a list behind a lock. Afterwards all
//! ranges are counted. A model that cannot fail proves nothing: `tests/mutants/dma-peers` drops the
//! magazine that the depot has no room for, as Linux 6.7 did.

use loom::{model::Builder, sync::Arc, thread};

use super::depot::{Depot, Rack};
use lines::Lock;

struct World {
    depot: Depot,
    tree: Lock<Vec<u64>>,
    size: usize,
}

impl World {
    fn alloc(&self, rack: &mut Rack) -> Option<u64> {
        if let found @ Some(_) = rack.pop() {
            return found;
        }
        if rack.refill(&self.depot) {
            return rack.pop();
        }
        let magazine = rack.filling(self.size);
        let mut tree = self.tree.lock();
        while magazine.len() < self.size {
            let Some(range) = tree.pop() else { break };
            magazine.push(range);
        }
        drop(tree);
        rack.pop()
    }

    fn free(&self, rack: &mut Rack, range: u64) {
        if rack.push(range) {
            return;
        }
        if let Some(magazine) = rack.make_room(&self.depot, self.size) {
            self.tree.lock().extend(magazine);
        }
        assert!(rack.push(range), "an empty magazine is loaded");
    }
}

/// Work of one core.
fn work(world: &World, held: usize) {
    let mut rack = Rack::default();
    for _ in 0..2 {
        let out: Vec<u64> = (0..held).filter_map(|_| world.alloc(&mut rack)).collect();
        out.into_iter()
            .for_each(|range| world.free(&mut rack, range));
    }
    world.tree.lock().extend(rack.drain());
}

/// Each core allocates `held` ranges and frees them, twice; then every range is in the tree again.
fn explore(ranges: u64, held: usize, size: usize) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = Arc::new(World {
            depot: Depot::new(1),
            tree: Lock::new((0..ranges).collect()),
            size,
        });
        let other = Arc::clone(&world);
        let other = thread::spawn(move || work(&other, held));
        work(&world, held);
        other.join().expect("loom ends the model at a panic");
        let mut all = world.tree.lock();
        while let Some(magazine) = world.depot.pop_full() {
            all.extend(magazine);
        }
        all.sort_unstable();
        let expected: Vec<u64> = (0..ranges).collect();
        assert_eq!(*all, expected, "ranges leaked or doubled");
    });
}

#[test]
fn model_magazines_of_one() {
    explore(6, 3, 1);
}

#[test]
fn model_magazines_of_two() {
    explore(12, 6, 2);
}

#[test]
fn model_an_exhausted_tree() {
    explore(3, 3, 1);
}
