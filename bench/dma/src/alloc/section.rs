//! The loops over everything that allocates, and the ratios to Linux that come from them.

use anyhow::Result;
use dma_peers::{
    EiovaRAllocator, IdentityAllocator, LinearAllocator, MagazineAllocator, SlabAllocator,
};
use iova::TreeAllocator;

use super::loops::{self, WINDOW, Window};
use super::subject::{Called, Identity, Nothing, OfLinux, Ours, Subject, Unchecked};
use super::{Best, LAST_BELOW_4G, limits, linux, peers, space};
use crate::measure::{Case, Tasks, Turns};
use crate::record::Record;

/// A loop and how many threads run it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Its name in keys.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    /// Threads.
    pub threads: usize,
    /// The key of its ratio to Linux, where it is one that has a target.
    pub ratio: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Window(Window),
    Ring(usize),
    /// Every so-manieth range is freed by the other thread.
    Exchange(u64),
}

const fn window(
    name: &'static str,
    title: &'static str,
    threads: usize,
    ratio: &'static str,
    window: Window,
) -> Workload {
    Workload {
        name,
        title,
        threads,
        ratio,
        kind: Kind::Window(window),
    }
}

const fn ring(
    name: &'static str,
    title: &'static str,
    ratio: &'static str,
    burst: usize,
) -> Workload {
    Workload {
        name,
        title,
        threads: 2,
        ratio,
        kind: Kind::Ring(burst),
    }
}

const fn exchange(name: &'static str, title: &'static str, every: u64) -> Workload {
    Workload {
        name,
        title,
        threads: 2,
        ratio: "",
        kind: Kind::Exchange(every),
    }
}

const ONE: Window = Window::of(WINDOW);
const MANY: Window = Window::of(65_536);

/// All of them. Those of the papers (a-1, c-1, rings) are run by every allocator, the others by
/// ours and Linux's.
#[rustfmt::skip]
pub const WORKLOADS: [Workload; 27] = [
    window("a1", "1 page, 256 live, random (a-1)", 1, "linux_a1_ratio", ONE),
    window("a1", "the same", 2, "", ONE),
    window("mask32", "the same below 4 GiB", 1, "linux_mask32_ratio", ONE.below(LAST_BELOW_4G)),
    window("c1", "1-32 pages, 256 live, random (c-1)", 1, "", ONE.pages(1, 31)),
    window("c1", "the same", 2, "", ONE.pages(1, 31)),
    window("a1_w4096", "1 page, 4,096 live, random", 1, "", Window::of(4096)),
    window("a1_w65536", "1 page, 65,536 live, random", 1, "linux_random_65536_ratio", MANY),
    window("a1_w65536", "the same", 2, "", MANY),
    window("a1_w1m", "1 page, 1,048,576 live, random", 1, "", Window::of(1 << 20)),
    window("c16_w65536", "1-16 pages, 65,536 live, random", 1, "", MANY.pages(1, 15)),
    window("burst32", "1 page, bursts of 32 of 65,536 live", 1, "linux_b32_ratio", MANY.oldest(32)),
    window("burst512", "the same, of 512", 1, "", MANY.oldest(512)),
    window("burst4096", "the same, of 4,096", 1, "linux_burst4096_ratio", MANY.oldest(4096)),
    window("fifo256", "1-16 pages, the oldest of 256", 1, "", ONE.pages(1, 15).oldest(1)),
    window("fifo4096", "1-16 pages, the oldest of \
         4,096", 1, "linux_fifo4096_ratio", Window::of(4096).pages(1, 15).oldest(1)),
    ring("xcore32", "from core to core, batches of 32", "linux_xcore_ratio", 32),
    ring("xcore1", "from core to core, one by one", "", 1),
    window("stray_w256", "one stray free, then 1 page, 256 live, random", 1, "", ONE.strays(1)),
    window("stray_w4096", "the same, 4,096 live", 1, "", Window::of(4096).strays(1)),
    window("strays_w4096", "one stray free in every chunk, then the \
         same", 1, "", Window::of(4096).strays(8)),
    exchange("exchange64", "1 page, 128 live, one in 64 freed by the other core", 64),
    exchange("exchange8", "the same, one in 8", 8),
    window("p64", "64 pages, the oldest of 256", 1, "", ONE.pages(64, 0).oldest(1)),
    window("p64_w4096", "64 pages, 4,096 live, random", 1, "", Window::of(4096).pages(64, 0)),
    window("p64", "64 pages, the oldest of 256", 2, "", ONE.pages(64, 0).oldest(1)),
    window("p512", "512 pages, 256 live, random", 1, "linux_512p_ratio", ONE.pages(512, 0)),
    window("p512", "the same", 2, "", ONE.pages(512, 0)),
];

impl Workload {
    /// Whether every allocator runs it.
    pub fn is_for_all(&self) -> bool {
        matches!(self.name, "a1" | "c1" | "xcore32")
    }

    /// Cores that it takes: those of its threads, and such as only freed something before.
    fn cores(&self) -> usize {
        match self.kind {
            Kind::Window(window) if window.strays > 0 => 2 * self.threads,
            _ => self.threads,
        }
    }

    /// Whether it is one of one thread and of single pages, where a bare stack says what is the
    /// least.
    fn has_least(&self) -> bool {
        matches!(
            self.kind,
            Kind::Window(Window {
                from: 1,
                mask: 0,
                ..
            })
        ) && self.threads == 1
    }

    /// Whether peers behind a mutex do.
    fn is_for_peers(&self) -> bool {
        matches!(self.name, "a1" | "c1")
    }

    fn tasks<S: Subject>(&self, subject: &S) -> Result<Tasks> {
        match self.kind {
            Kind::Window(window) => loops::windows(subject, self.threads, window),
            Kind::Ring(burst) => loops::ring(subject, burst),
            Kind::Exchange(every) => loops::exchange(subject, 128, every),
        }
    }
}

/// Names of allocators in keys: Linux's own, ours, ours inlined, what the papers describe, and
/// other people's.
pub const ALLOCATORS: [&str; 11] = [
    "linux",
    "chunk",
    "chunk_inlined",
    "magazine",
    "identity",
    "slab",
    "tree",
    "eiovar",
    "linear",
    "range_alloc",
    "vm_allocator",
];

/// Makes an allocator and the threads of a loop over it.
type MakeTasks = dyn Fn(&Workload) -> Result<Tasks>;

/// An allocator that runs the loops.
pub struct Entry {
    /// Its name in keys.
    pub name: &'static str,
    tasks: Box<MakeTasks>,
}

impl Entry {
    fn is_peer(&self) -> bool {
        matches!(self.name, "range_alloc" | "vm_allocator")
    }

    fn runs(&self, workload: &Workload) -> bool {
        match self.name {
            "linux" | "chunk" | "chunk_inlined" => true,
            _ if self.is_peer() => workload.is_for_peers(),
            _ => workload.is_for_all(),
        }
    }
}

/// One that is made anew for every run, for as many cores as the loop has threads, as it is.
fn inlined<S: Subject>(name: &'static str, make: impl Fn(usize) -> Result<S> + 'static) -> Entry {
    Entry {
        name,
        tasks: Box::new(move |workload| workload.tasks(&make(workload.cores())?)),
    }
}

/// The same behind calls.
fn called<S: Subject>(name: &'static str, make: impl Fn(usize) -> Result<S> + 'static) -> Entry {
    inlined(name, move |cores| Ok(Called(make(cores)?)))
}

/// Everything that allocates; Linux's only where it is.
#[rustfmt::skip]
pub fn entries() -> Vec<Entry> {
    // Linux's is a call through a pointer as it is.
    let linux = linux().map(|linux| inlined("linux", move |_| OfLinux::new(linux)));
    linux.into_iter().chain([
        called("chunk", |cores| Ok(Ours(Best::new(space()?, cores)?))),
        inlined("chunk_inlined", |cores| Ok(Ours(Best::new(space()?, cores)?))),
        called("magazine", |cores| Ok(Ours(MagazineAllocator::new(space()?, cores)?))),
        called("identity", |cores| Ok(Identity(IdentityAllocator::new(space()?, cores, 46)?))),
        called("slab", |cores| Ok(Ours(SlabAllocator::new(space()?, cores)?))),
        called("tree", |cores| Ok(Ours(TreeAllocator::new(space()?, cores)?))),
        called("eiovar", |cores| Ok(Ours(EiovaRAllocator::new(space()?, cores)?))),
        called("linear", |cores| Ok(Ours(LinearAllocator::new(space()?, cores)?))),
        called("range_alloc", |_| Ok(peers::range_alloc())),
        called("vm_allocator", |_| peers::vm_allocator()),
    ]).collect()
}

/// Runs everything, one workload at a time, the allocators taking turns.
pub fn measure(turns: &Turns, record: &mut Record) {
    let (entries, control) = (entries(), called("loop", |_| Ok(Nothing)));
    let least = called("stack", |_| Ok(Unchecked));
    let is_wanted = |one: &&Workload| turns.runs_loop(one.name);
    for workload in WORKLOADS.iter().filter(is_wanted) {
        let is_ring = matches!(workload.kind, Kind::Ring(_));
        let runs: Vec<_> = entries
            .iter()
            .filter(|entry| entry.runs(workload))
            .chain(is_ring.then_some(&control))
            .chain(workload.has_least().then_some(&least))
            .collect();
        let cases: Vec<_> = runs
            .iter()
            .map(|entry| {
                let title = format!("{} {}", workload.name, entry.name);
                let case = Case::new(title, workload.threads, || (entry.tasks)(workload));
                if entry.is_peer() {
                    case.sleeping()
                } else {
                    case
                }
            })
            .collect();
        let s = if workload.threads == 1 { "" } else { "s" };
        record.section(&format!(
            "{}, {} thread{s}",
            workload.title, workload.threads
        ));
        let found = turns.measure(&cases);
        for ((entry, case), outcome) in runs.iter().zip(&cases).zip(&found) {
            record.row(&format!("{}_{}", workload.name, entry.name), case, outcome);
        }
        let of = |name| {
            let at = runs.iter().position(|entry| entry.name == name)?;
            found[at].as_ref().ok()
        };
        let row = format!("{}_{}thr", workload.name, workload.threads);
        record.ratio(&format!("{row}_ratio"), of("chunk"), of("linux"));
        let inlined = format!("{row}_inlined_ratio");
        record.ratio(&inlined, of("chunk_inlined"), of("linux"));
        if !workload.ratio.is_empty() {
            record.ratio(workload.ratio, of("chunk"), of("linux"));
        }
    }
    if turns.loops.is_empty() {
        limits::measure(turns, record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_names_is_that_of_the_entries() {
        let names: Vec<_> = entries().iter().map(|entry| entry.name).collect();
        assert_eq!(names, ALLOCATORS[ALLOCATORS.len() - names.len()..]);
    }

    #[test]
    fn every_allocator_runs_its_loops() {
        for entry in entries() {
            for workload in &WORKLOADS {
                if !entry.runs(workload) || workload.name == "a1_w1m" {
                    continue;
                }
                let mut tasks = (entry.tasks)(workload)
                    .unwrap_or_else(|error| panic!("{} {}: {error:#}", entry.name, workload.name));
                if matches!(workload.kind, Kind::Window(_)) {
                    for task in &mut tasks {
                        task.batch(&std::sync::atomic::AtomicBool::new(false));
                    }
                }
                tasks.iter_mut().for_each(|task| task.finish());
            }
        }
    }
}
