//! Costs that loops do not show, ours beside Linux's: an allocation that fails, the cost of a core
//! that is out of addresses to its neighbour, the space that an idle core keeps, the first
//! allocations, and bytes of bookkeeping.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use dma_linux::Linux;
use iova::{Aperture, IovaAllocator, IovaPfn};
use report::Measured;

use super::loops::{WINDOW, Window, windows};
use super::subject::{Called, OfLinux, Ours, Subject, Worker};
use super::{Best, LAST_BELOW_4G, LAST_PAGE, linux, space};
use crate::measure::{BATCH, Case, Random, Task, Tasks, Turns};
use crate::record::Record;

/// Pages that the core takes which then idles.
const IDLE_PAGES: u64 = 2048;
/// Live ranges that bytes are counted for.
const LIVE: [(&str, usize); 2] = [("65536", 65_536), ("1m", 1 << 20)];

/// Ours for so many cores.
fn ours(cores: usize) -> Result<Called<Ours<Best>>> {
    Ok(Called(Ours(Best::new(space()?, cores)?)))
}

/// Measures all of it.
pub fn measure(turns: &Turns, record: &mut Record) {
    if let Err(error) = all(turns, record) {
        println!("not measured: {error:#}");
    }
}

fn all(turns: &Turns, record: &mut Record) -> Result<()> {
    let linux = linux();
    failing(turns, record, linux);
    exhaustion(turns, record, linux);
    idle(record, linux)?;
    cold(turns, record, linux)?;
    bytes(turns, record, linux)?;
    super::freeing::measure(turns, record)
}

/// The tasks of a case, made anew for every run.
type Make = Box<dyn Fn() -> Result<Tasks>>;

/// A case of ours, and Linux's where that is.
fn both(
    title: &str,
    threads: usize,
    linux: Option<&'static Linux>,
    of_ours: Make,
    of_linux: impl Fn(&'static Linux) -> Result<Tasks> + 'static,
) -> Vec<Case<'static>> {
    let mut cases = vec![Case::new(format!("{title} chunk"), threads, of_ours)];
    cases.extend(
        linux.map(|linux| Case::new(format!("{title} linux"), threads, move || of_linux(linux))),
    );
    cases
}

/// All that is below 4 GiB, taken by one core, which then asks for more.
struct Starving<W: Worker> {
    worker: W,
    taken: Vec<u64>,
    /// Whether its failures are what is counted.
    counts: bool,
}

impl<W: Worker> Starving<W> {
    fn new(mut worker: W, counts: bool) -> Self {
        let next = || Some(worker.alloc(1, LAST_BELOW_4G)).filter(|page| *page != 0);
        let taken = std::iter::from_fn(next).collect();
        Self {
            worker,
            taken,
            counts,
        }
    }
}

impl<W: Worker> Task for Starving<W> {
    fn batch(&mut self, stop: &AtomicBool) -> u64 {
        self.worker.enter();
        for failed in 0..BATCH {
            assert_eq!(self.worker.alloc(1, LAST_BELOW_4G), 0, "all of it is taken");
            if stop.load(Ordering::Relaxed) {
                return if self.counts { failed + 1 } else { 0 };
            }
        }
        if self.counts { BATCH } else { 0 }
    }

    fn finish(&mut self) {
        self.worker.enter();
        for page in self.taken.drain(..) {
            self.worker.free(page);
        }
    }
}

/// Random numbers, which count for nothing: a neighbour that does not disturb.
struct Quiet(Random);

impl Task for Quiet {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            black_box(self.0.bits());
        }
        0
    }
}

fn failing(turns: &Turns, record: &mut Record, linux: Option<&'static Linux>) {
    fn tasks<S: Subject>(subject: &S) -> Result<Tasks> {
        Ok(vec![Box::new(Starving::new(subject.worker(0)?, true))])
    }
    record.section(
        "an allocation below 4 GiB where nothing is free; Linux empties its caches before it fails",
    );
    let cases = both(
        "failing",
        1,
        linux,
        Box::new(|| tasks(&ours(1)?)),
        |linux| tasks(&Called(OfLinux::new(linux)?)),
    );
    let found = turns.measure(&cases);
    for (name, (case, outcome)) in ["chunk", "linux"].iter().zip(cases.iter().zip(&found)) {
        record.row(&format!("failing_{name}"), case, outcome);
    }
    if let Some(Ok(outcome)) = found.first() {
        record.measured("failing_alloc_ns", &outcome.ns, 1);
    }
}

/// a-1 on one core, beside a core that is quiet and beside one that asks below 4 GiB, where nothing
/// is free.
fn neighbours<S: Subject>(subject: &S, is_starving: bool) -> Result<Tasks> {
    let mut tasks = windows(subject, 1, Window::of(WINDOW))?;
    tasks.push(match is_starving {
        true => Box::new(Starving::new(subject.worker(1)?, false)),
        false => Box::new(Quiet(Random::of_core(1))),
    });
    Ok(tasks)
}

fn exhaustion(turns: &Turns, record: &mut Record, linux: Option<&'static Linux>) {
    record.section(
        "a-1 beside a core that is quiet, and beside one whose 32-bit device gets nothing",
    );
    let mut cases = Vec::new();
    for is_starving in [false, true] {
        let title = if is_starving { "starving" } else { "quiet" };
        cases.extend(both(
            title,
            2,
            linux,
            Box::new(move || neighbours(&ours(2)?, is_starving)),
            move |linux| neighbours(&Called(OfLinux::new(linux)?), is_starving),
        ));
    }
    let found = turns.measure(&cases);
    let half = cases.len() / 2;
    for (at, (case, outcome)) in cases.iter().zip(&found).enumerate() {
        record.row(&case.name.replace(' ', "_"), case, outcome);
        let key = [
            "exhaustion_neighbour_ratio",
            "exhaustion_neighbour_linux_ratio",
        ][at % half];
        if let (true, Ok(starving), Ok(quiet)) = (at >= half, outcome, &found[at % half]) {
            record.ratio(key, Some(starving), Some(quiet));
        }
    }
}

/// Measures how much B gets of a space that A took whole, freed, and left alone.
fn idle(record: &mut Record, linux: Option<&'static Linux>) -> Result<()> {
    fn gets<S: Subject>(subject: &S, last: u64) -> Result<(u64, u64)> {
        let take = |worker: &mut S::Worker| -> Vec<u64> {
            let next = || Some(worker.alloc(1, last)).filter(|page| *page != 0);
            std::iter::from_fn(next).collect()
        };
        let mut a = subject.worker(0)?;
        let taken = take(&mut a);
        for page in &taken {
            a.free(*page);
        }
        let mut b = subject.worker(1)?;
        b.enter();
        let found = take(&mut b);
        for page in &found {
            b.free(*page);
        }
        Ok((found.len() as u64, taken.len() as u64))
    }
    let last = 4096 + IDLE_PAGES - 1;
    let aperture = Aperture::new(IovaPfn::new(4096), IovaPfn::new(last), &[])?;
    let (found, all) = gets(&Ours(Best::new(aperture, 2)?), last)?;
    println!("\nan idle core: A freed {all} pages, all there are, and sleeps; B gets {found}");
    record.number("idle_core_pages", found as f64, 0);
    if let Some(linux) = linux {
        let domain = dma_linux::Domain::new(linux, 4096)?;
        let (found, all) = gets(&OfLinux(Arc::new(domain)), last)?;
        println!("Linux's: A freed {all}, B gets {found}");
        record.number("idle_core_linux_pages", found as f64, 0);
    }
    Ok(())
}

/// The first allocation of a new space, and the first 4,096 pages.
fn cold(turns: &Turns, record: &mut Record, linux: Option<&'static Linux>) -> Result<()> {
    fn first<S: Subject>(make: impl Fn() -> Result<S>, repeat: usize) -> Result<[Measured; 2]> {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..repeat {
            let start = Instant::now();
            let subject = make()?;
            let mut worker = subject.worker(0)?;
            let mut pages = vec![worker.alloc(1, LAST_PAGE)];
            times[0].push(start.elapsed().as_nanos() as f64 / 1e3);
            let start = Instant::now();
            pages.extend((1..4096).map(|_| worker.alloc(1, LAST_PAGE)));
            times[1].push(start.elapsed().as_nanos() as f64 / 4095.0);
            pages.iter().for_each(|page| worker.free(*page));
        }
        let [space, pages] = times.map(Measured::of);
        space.zip(pages).map(|(a, b)| [a, b]).context("no runs")
    }
    let repeat = turns.runs * 4 + 1;
    println!("\ncold: a new space and its first page, us; the next 4,095 pages, ns each");
    let mut rows = vec![("chunk", first(|| ours(1), repeat)?)];
    if let Some(linux) = linux {
        rows.push(("linux", first(|| Ok(Called(OfLinux::new(linux)?)), repeat)?));
    }
    for (name, [space, pages]) in rows {
        println!("{name:40} {:>9.1} {:>9.1}", space.median, pages.median);
        record.measured(&format!("cold_space_{name}_us"), &space, 2);
        record.measured(&format!("cold_page_{name}_ns"), &pages, 1);
    }
    Ok(())
}

/// Bytes of bookkeeping per live range of a page, and of a space with one range.
fn bytes(turns: &Turns, record: &mut Record, linux: Option<&'static Linux>) -> Result<()> {
    println!(
        "\nbytes of bookkeeping: a space of two cores with one range; per live range of a page"
    );
    let held = |mut worker: Box<dyn FnMut() -> u64>, live: usize| {
        for _ in 0..live {
            assert_ne!(worker(), 0, "the space is larger than that");
        }
    };
    let mut rows = Vec::new();
    let live: Vec<_> = [("domain", 1)]
        .into_iter()
        .chain(LIVE.into_iter().filter(|_| turns.runs > 1))
        .collect();
    for (name, count) in live {
        let space = Best::new(space()?, 2)?;
        let mut core = Ours(space.clone()).worker(0)?;
        held(Box::new(move || core.alloc(1, LAST_PAGE)), count);
        rows.push(("chunk", name, space.stats().bytes as f64 / count as f64));
        if let Some(linux) = linux {
            let before = linux.bytes();
            let subject = OfLinux::new(linux)?;
            let mut core = subject.worker(0)?;
            held(Box::new(move || core.alloc(1, LAST_PAGE)), count);
            let bytes = (linux.bytes() - before) as f64 / count as f64;
            rows.push(("linux", name, bytes));
        }
    }
    for (of, name, bytes) in rows {
        println!("{of:10} {name:10} {bytes:>12.1}");
        record.number(&format!("bytes_{name}_{of}"), bytes, 1);
    }
    Ok(())
}
