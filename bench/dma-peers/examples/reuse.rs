//! The caches for reuse, side by side: ns for a map and the unmap that follows, hit rate, bytes per
//! mapping.
//!
//! `cargo run --release -p dma-peers --example reuse`. Two sequences of pages: a ring of buffers
//! that comes round, and pages drawn by Zipf's law, of which 64 are in use at a time. Each pair
//! acquires a page, and releases the page of 64 pairs before; a miss makes a mapping (here: a new
//! number). The clock advances by 500 ns a pair. Time is the CPU time of the thread (Linux), the
//! median of 5 runs with least and most. The time of the loop itself (the sequence, the window) is
//! measured with a cache that does nothing and taken off.

use std::collections::VecDeque;
use std::hint::black_box;

use address::PhysAddr;
use dma_peers::reuse::{
    Batch, Counts, Key, OptimisticCache, Progress, Released, ReuseCache, SharingTable,
};
use dma_peers::{CYCLE_NS, LruCache, RESIDENCY_NS, RtcCache};
use iova::{Access, IovaPfn, IovaRange};

const PAIRS: usize = 1 << 20;
const PAIR_NS: u64 = 500;
const WINDOW: usize = 64;

/// Knows nothing: what remains is the loop.
#[derive(Default)]
struct Nothing;

impl ReuseCache for Nothing {
    fn acquire(&mut self, key: Key, _: u64) -> Option<IovaRange> {
        IovaRange::new(IovaPfn::of(address::Iova::new(key.phys().raw())), 1)
    }
    fn insert(&mut self, _: Key, _: IovaRange, _: u64) {}
    fn release(&mut self, _: Key, range: IovaRange, _: u64, _: &mut Batch) -> Released {
        black_box(range);
        Released::Kept
    }
    fn expire(&mut self, _: u64, _: &mut Batch) -> Progress {
        Progress::Done
    }
    fn drain(&mut self, _: &mut Batch) -> Progress {
        Progress::Done
    }
    fn torn_down(&mut self, _: &mut Batch, _: u64) {}
    fn counts(&self) -> Counts {
        Counts::default()
    }
}

/// CPU time of this thread so far, ns.
fn cpu_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux has it");
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().expect("a number of nanoseconds")
}

/// A cache under the sequence: ns per pair, and its counters.
fn drive<C: ReuseCache>(cache: &mut C, keys: &[Key]) -> (f64, Counts) {
    let mut batch = Batch::with_room(64);
    let mut window = VecDeque::with_capacity(WINDOW + 1);
    let (mut now_ns, mut fresh) = (0, 1 << 24);
    let start_ns = cpu_ns();
    for &key in keys {
        now_ns += PAIR_NS;
        let range = cache.acquire(key, now_ns).unwrap_or_else(|| {
            fresh += 1;
            let range = IovaRange::new(IovaPfn::new(fresh), 1).expect("a page");
            cache.insert(key, range, now_ns);
            range
        });
        window.push_back((key, range));
        if window.len() > WINDOW
            && let Some((key, range)) = window.pop_front()
        {
            let released = cache.release(key, range, now_ns, &mut batch);
            let _ = black_box(released);
            if !batch.is_empty() {
                cache.torn_down(&mut batch, now_ns);
            }
        }
    }
    ((cpu_ns() - start_ns) / keys.len() as f64, cache.counts())
}

fn page(number: u64) -> Key {
    // Spread as physical pages are, not one after the other.
    let pfn = number.wrapping_mul(0x9e37_79b1) & 0xff_ffff;
    Key::new(PhysAddr::new(pfn << 12), 1, Access::Write).expect("a page")
}

/// Buffers of a ring, round and round.
fn ring(buffers: u64) -> Vec<Key> {
    (0..PAIRS as u64).map(|at| page(at % buffers)).collect()
}

/// `pages` pages, the nth as often as 1/n.
fn zipf(pages: usize) -> Vec<Key> {
    let mut sums = Vec::with_capacity(pages);
    let mut sum = 0.0;
    for rank in 1..=pages {
        sum += 1.0 / rank as f64;
        sums.push(sum);
    }
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = || {
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        let unit = (random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64;
        page(sums.partition_point(|&s| s < unit * sum) as u64)
    };
    (0..PAIRS).map(|_| draw()).collect()
}

fn report<C: ReuseCache>(name: &str, keys: &[Key], loop_ns: f64, make: impl Fn() -> C) {
    let mut runs: Vec<_> = (0..5).map(|_| drive(&mut make(), keys)).collect();
    runs.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (ns, counts) = runs[2];
    println!(
        "  {name:<18} {:>6.1} ns ({:.1}-{:.1})   hits {:>5.1} %   {:>6.0} B/mapping   stale max {}",
        ns - loop_ns,
        runs[0].0 - loop_ns,
        runs[4].0 - loop_ns,
        counts.hit_rate() * 100.0,
        counts.bytes as f64 / counts.entries.max(1) as f64,
        counts.stale_max,
    );
}

fn main() {
    let sequences = [
        ("ring of 200 buffers", ring(200)),
        ("ring of 2,000 buffers", ring(2000)),
        ("Zipf over 10,000 pages", zipf(10_000)),
    ];
    for (name, keys) in sequences {
        let mut loops: Vec<_> = (0..5).map(|_| drive(&mut Nothing, &keys).0).collect();
        loops.sort_by(f64::total_cmp);
        println!("{name} (loop {:.1} ns taken off)", loops[2]);
        for quota in [256, 4096] {
            let new = || LruCache::new(quota, RESIDENCY_NS);
            report(&format!("LRU {quota}"), &keys, loops[2], new);
            let new = || OptimisticCache::new(quota, RESIDENCY_NS);
            report(&format!("optimistic {quota}"), &keys, loops[2], new);
        }
        report("RTC", &keys, loops[2], || RtcCache::new(CYCLE_NS));
        let new = || SharingTable::new(4096, 4);
        report("sharing 4096", &keys, loops[2], new);
    }
}
