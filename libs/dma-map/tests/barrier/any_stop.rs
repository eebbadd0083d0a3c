//! Every policy, every teardown, three allocators, stops anywhere.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dma_map::Policy;
use dma_map::mapper::{Optimistic, Reuse, Teardown, Window};
use iova::{Aperture, CHUNK_PAGES, ChunkAllocator, IovaAllocator, IovaPfn, TreeAllocator};

use crate::turns::Cores;
use crate::world::{Worker, World, attend, end};

const CORES: usize = 3;
/// Operations of one run, on one mapper.
const EACH: u64 = 1_500;

fn policies() -> Vec<Policy> {
    let age = Duration::from_millis(10);
    let windows = [250, 6].map(|entries| Window { entries, age });
    let teardowns = [
        Teardown::Strict,
        Teardown::COMBINING,
        Teardown::Combining { looks: 0 },
        Teardown::Async(windows[0]),
        Teardown::Async(windows[1]),
        Teardown::Deferred(windows[0]),
        Teardown::Deferred(windows[1]),
    ];
    let idle = [4, 16, 256, 4096].map(Optimistic::of);
    let mut reuses = vec![Reuse::Never, Reuse::Shared];
    reuses.extend(idle.map(Reuse::Optimistic));
    let of =
        |reuse| teardowns.map(|teardown| Policy::STRICT.with_reuse(reuse).with_teardown(teardown));
    reuses.into_iter().flat_map(of).collect()
}

fn space() -> Aperture {
    let last = IovaPfn::new(16 * CHUNK_PAGES - 1);
    Aperture::new(IovaPfn::new(1), last, &[]).expect("pages")
}

/// Runs one mapper with all its users. Returns the number of its operations and of the barriers
/// among them.
fn run<A: IovaAllocator + 'static>(allocator: A, policy: Policy, seed: u64) -> (u64, u64)
where
    A::Core: 'static,
{
    let world = World::new(allocator, policy, seed, EACH);
    let mut cores = Cores::new(seed, 1 + seed % 7);
    for id in 0..CORES {
        let worker = Worker::new(&world, id);
        cores.add(move || worker.work());
    }
    for _ in 0..2 {
        let world = Rc::clone(&world);
        cores.add(move || attend(&world, !seed.is_multiple_of(3)));
    }
    cores.run_all(|| world.done());
    end(&world, CORES);
    (world.done(), world.barriers())
}

/// Runs of all policies, one after the other, until there were so many operations.
fn look(operations: u64, from: u64) -> (u64, u64) {
    let policies = policies();
    let (mut done, mut barriers) = (0, 0);
    for seed in from.. {
        let policy = policies[seed as usize % policies.len()];
        let allocator = ["tree", "chunk"][(seed / policies.len() as u64 % 2) as usize];
        let what = format!("seed {seed}, {allocator}, {policy:?}, after {done} operations");
        let tell = Tell(what);
        let (more, checked) = match allocator {
            "tree" => run(
                TreeAllocator::new(space(), CORES).expect("cores"),
                policy,
                seed,
            ),
            _ => run(
                ChunkAllocator::retiring(space(), CORES).expect("cores"),
                policy,
                seed,
            ),
        };
        drop(tell);
        done += more;
        barriers += checked;
        if done >= operations {
            break;
        }
    }
    (done, barriers)
}

/// Prints what ran when a panic passes.
struct Tell(String);

impl Drop for Tell {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// On two threads, which share nothing.
fn look_twice(operations: u64) {
    let (done, barriers) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for half in 0..2 {
            let (done, barriers) = (&done, &barriers);
            scope.spawn(move || {
                let counted = look(operations / 2, half << 32);
                done.fetch_add(counted.0, Ordering::Relaxed);
                barriers.fetch_add(counted.1, Ordering::Relaxed);
            });
        }
    });
    let (done, barriers) = (done.into_inner(), barriers.into_inner());
    println!("{done} operations, {barriers} barriers that returned Ok");
    assert!(done >= operations && barriers >= done / 100);
}

#[test]
fn mappings_unmapped_before_a_barrier_are_out_of_reach_after_it() {
    look_twice(if cfg!(debug_assertions) {
        100_000
    } else {
        1_000_000
    });
}

#[test]
#[ignore = "long: make soak"]
fn the_same_for_longer() {
    let operations = std::env::var("BARRIER_OPERATIONS");
    let operations = operations.map_or(100_000_000, |n| n.parse().expect("a number"));
    look_twice(operations);
}
