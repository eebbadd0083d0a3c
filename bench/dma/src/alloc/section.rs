//! The loops over everything that allocates, and the figures that come from them.

use anyhow::Result;
use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, SlabAllocator,
};
use iova::TreeAllocator;

use super::loops::{self, Sizes, WINDOW};
use super::subject::{Identity, Nothing, OnePage, Ours, Subject};
use super::{Best, peers, quoted, space};
use crate::measure::{Case, Outcome, Tasks, Turns, scale};
use crate::record::Record;

/// A loop and how many threads run it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Its name in keys.
    pub name: &'static str,
    /// Threads.
    pub threads: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Window {
        window: usize,
        burst: usize,
        sizes: Sizes,
    },
    Ring {
        burst: usize,
    },
}

const fn window(
    name: &'static str,
    threads: usize,
    window: usize,
    burst: usize,
    sizes: Sizes,
) -> Workload {
    Workload {
        name,
        threads,
        kind: Kind::Window {
            window,
            burst,
            sizes,
        },
    }
}

const fn ring(name: &'static str, burst: usize) -> Workload {
    Workload {
        name,
        threads: 2,
        kind: Kind::Ring { burst },
    }
}

const C1: Sizes = Sizes::UpTo32 { shift: 20 };
const C32: Sizes = Sizes::UpTo32 { shift: 40 };

/// All of them.
pub const WORKLOADS: [Workload; 15] = [
    window("a1", 1, WINDOW, 1, Sizes::One),
    window("a1", 2, WINDOW, 1, Sizes::One),
    window("a32", 1, WINDOW, 32, Sizes::One),
    window("a32", 2, WINDOW, 32, Sizes::One),
    window("a256", 1, WINDOW, 256, Sizes::One),
    window("a256", 2, WINDOW, 256, Sizes::One),
    window("a1_w4096", 1, 4096, 1, Sizes::One),
    window("a1_w65536", 1, 65536, 1, Sizes::One),
    window("a1_w65536", 2, 65536, 1, Sizes::One),
    ring("b32", 32),
    ring("b1", 1),
    window("c1", 1, WINDOW, 1, C1),
    window("c1", 2, WINDOW, 1, C1),
    window("c32", 1, WINDOW, 32, C32),
    window("c32", 2, WINDOW, 32, C32),
];

impl Workload {
    /// Whether the peers run it: the others would only show that a mutex is one.
    fn is_for_peers(&self) -> bool {
        matches!(self.name, "a1" | "c1")
    }

    fn tasks<S: Subject>(&self, subject: &S) -> Result<Tasks>
    where
        S::Worker: OnePage,
    {
        match self.kind {
            Kind::Window { .. } => self.window_tasks(subject),
            Kind::Ring { burst } => loops::ring(subject, burst),
        }
    }

    fn window_tasks<S: Subject>(&self, subject: &S) -> Result<Tasks> {
        let Kind::Window {
            window,
            burst,
            sizes,
        } = self.kind
        else {
            unreachable!("peers run windows only");
        };
        loops::windows(subject, self.threads, window, burst, sizes)
    }
}

/// Names of our allocators in keys; the first is the one that the targets are about.
pub const ALLOCATORS: [&str; 7] = [
    "chunk", "magazine", "identity", "slab", "tree", "eiovar", "linear",
];
/// Names of the peers.
pub const PEERS: [&str; 3] = ["range_alloc", "offset_allocator", "vm_allocator"];

/// Makes an allocator and the threads of a loop over it.
type MakeTasks = dyn Fn(&Workload) -> Result<Tasks>;

/// An allocator that runs the loops.
pub struct Entry {
    /// Its name in keys.
    pub name: &'static str,
    is_peer: bool,
    tasks: Box<MakeTasks>,
}

/// One of ours: made anew for every run, for as many cores as the loop has threads.
fn ours<S: Subject>(name: &'static str, make: impl Fn(usize) -> Result<S> + 'static) -> Entry
where
    S::Worker: OnePage,
{
    Entry {
        name,
        is_peer: false,
        tasks: Box::new(move |workload| workload.tasks(&make(workload.threads)?)),
    }
}

fn peer<S: Subject>(name: &'static str, make: impl Fn() -> Result<S> + 'static) -> Entry {
    Entry {
        name,
        is_peer: true,
        tasks: Box::new(move |workload| workload.window_tasks(&make()?)),
    }
}

/// Everything that allocates; the first one is what the targets are about.
pub fn entries() -> Vec<Entry> {
    vec![
        ours("chunk", |cores| Ok(Ours(Best::new(space()?, cores)?))),
        ours("magazine", |cores| {
            Ok(Ours(MagazineAllocator::new(space()?, cores)?))
        }),
        ours("identity", |cores| {
            Ok(Identity(IdentityAllocator::new(space()?, cores, 46)?))
        }),
        ours("slab", |cores| {
            Ok(Ours(SlabAllocator::new(space()?, cores)?))
        }),
        ours("tree", |cores| {
            Ok(Ours(TreeAllocator::new(space()?, cores)?))
        }),
        ours("eiovar", |cores| {
            Ok(Ours(EiovaRAllocator::new(space()?, cores)?))
        }),
        ours("linear", |cores| {
            Ok(Ours(LinearAllocator::new(space()?, cores)?))
        }),
        peer("range_alloc", || Ok(peers::range_alloc())),
        peer("offset_allocator", || Ok(peers::offset_allocator())),
        peer("vm_allocator", peers::vm_allocator),
    ]
}

/// The ring without an allocator, as the entry that b-B is compared with.
fn control() -> Entry {
    ours("x", |_| Ok(Nothing))
}

/// Runs everything, one workload at a time, the allocators taking turns.
pub fn measure(turns: &Turns, record: &mut Record) {
    let (entries, control) = (entries(), control());
    for workload in &WORKLOADS {
        let is_ring = matches!(workload.kind, Kind::Ring { .. });
        // The control runs right before the first, which is compared with it.
        let runs: Vec<_> = is_ring
            .then_some(&control)
            .into_iter()
            .chain(&entries)
            .filter(|entry| !entry.is_peer || workload.is_for_peers())
            .collect();
        let cases: Vec<_> = runs
            .iter()
            .map(|entry| {
                let title = format!("{} {}", workload.name, entry.name);
                let case = Case::new(title, workload.threads, || (entry.tasks)(workload));
                if entry.is_peer { case.sleeping() } else { case }
            })
            .collect();
        record.section(&format!(
            "{}, {} thread{}",
            workload.name,
            workload.threads,
            if workload.threads == 1 { "" } else { "s" }
        ));
        let found = turns.measure(&cases);
        for ((entry, case), outcome) in runs.iter().zip(&cases).zip(&found) {
            let quoted = quoted(entry, workload);
            record.row(
                &format!("{}_{}", workload.name, entry.name),
                case,
                outcome,
                &quoted,
            );
        }
        if let (true, [Ok(control), Ok(ours), ..]) = (is_ring, &found[..]) {
            net(record, &format!("{}_ns", workload.name), ours, control);
        }
    }
    derive(record);
}

/// What is quoted beside a row.
fn quoted(entry: &Entry, workload: &Workload) -> String {
    let (name, threads) = (workload.name, workload.threads);
    match entry.name {
        "chunk" => quoted::linux(name, threads),
        "x" => quoted::linux(&name.replace('b', "x"), threads),
        peer => quoted::peer(peer, name, threads).to_owned(),
    }
}

/// The figures that are made of several rows.
fn derive(record: &mut Record) {
    for (key, row) in [
        ("a1_ns", "a1_chunk_1thr"),
        ("c1_ns", "c1_chunk_1thr"),
        ("slow_65536_ns", "a1_w65536_chunk_1thr"),
    ] {
        let raw = record.get(&format!("{row}_ns_raw"));
        record.both(key, raw, record.get(&format!("{row}_ns")), 2);
    }
}

/// b-B net of its control: turn by turn, each by the round trips beside both.
fn net(record: &mut Record, key: &str, ours: &Outcome, control: &Outcome) {
    let raw = ours.turn_by_turn(control, |ours, control| Some(ours.ns - control.ns));
    let scaled = ours.turn_by_turn(control, |ours, control| {
        let rtt = f64::midpoint(ours.beside_ns?, control.beside_ns?);
        Some(scale::by_round_trip(ours.ns - control.ns, rtt))
    });
    if let (Some(raw), Some(scaled)) = (raw, scaled) {
        record.measured(key, &scaled, 2);
        record.measured(&format!("{key}_raw"), &raw, 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_of_names_are_those_of_the_entries() {
        let names: Vec<_> = entries().iter().map(|entry| entry.name).collect();
        let listed: Vec<_> = ALLOCATORS.iter().chain(&PEERS).copied().collect();
        assert_eq!(names, listed);
    }

    #[test]
    fn every_allocator_runs_every_loop() {
        for entry in entries().iter().filter(|entry| !entry.is_peer) {
            for workload in &WORKLOADS {
                // Filling the larger windows of the linear scan takes its time.
                if workload.name == "a1_w65536" {
                    continue;
                }
                let mut tasks = (entry.tasks)(workload)
                    .unwrap_or_else(|error| panic!("{} {}: {error:#}", entry.name, workload.name));
                if matches!(workload.kind, Kind::Window { .. }) {
                    for task in &mut tasks {
                        task.batch(&std::sync::atomic::AtomicBool::new(false));
                    }
                }
                tasks.iter_mut().for_each(|task| task.finish());
            }
        }
    }
}
