//! `make bench-swap-native`: cost of the swapper compared with bare system calls, without a virtual
//! machine.
//!
//! | key | time of the operation ÷ time of the same by bare system calls |
//! |---|---|
//! | `fault_ratio` | one page-in from a disk that answers at once: from the fault to the end of the access, both servers spinning |
//! | `fault_sleeping_ratio` | the same, both servers asleep when the fault occurs |
//! | `batch_out_ratio` | page-out of 32 pages: released by the owner, unmapped but kept resident, write-protection marker read, content examined, dropped |
//! | `batch_in_ratio` | page-in of 32 pages by one fault |
//! | `batch_ratio` | the greater of the two |
//! | `scan_ratio` | uffd-wp bits of 32 clean pages, by the pager's call ÷ by `PAGEMAP_SCAN` |
//! | `scan_read_ratio`, `scan_whole_ratio` | the same ÷ one read of the pagemap; ÷ one `PAGEMAP_SCAN` of all pages |
//!
//! | `metadata_bytes_per_page`, `metadata_bytes_per_slot` | bytes allocated, as the crate reports them (a test of the crate compares that with the allocator) |
//!
//! The bare loops ([`bare`]) read the userfaultfd, copy the same bytes to the same kind of mapping,
//! and map the page write-protected. They check nothing. The pager's further work (a checksum of
//! each page that leaves and that returns, the search for zero pages, the residency state, the
//! owner's consent, the flags of device use) is part of the ratios. The guest is a thread on the
//! first CPU, the server a thread on the second. A round yields the median of its faults, batches
//! or calls, so that interruptions by other programs do not count. A ratio is of one round; the two
//! sides begin alternately.
//!
//! Not measured: exits, which need a guest; disks with latency; faults on zero pages.
#![deny(unsafe_code)]

mod bare;
mod image;
mod memory;
mod paged;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use guest_mem::{Gpa, PAGE_SIZE, PhysMem, SlotMapping};
use report::{Host, Measured, Object, host, median};
use swap::ram::SwappedRam;
use swap::residency::{BATCH as SWAP_BATCH, Residency};
use uffd::{Features, GuestMapping, Protection, Source, Stores, Uffd};

use bare::Bare;
use image::{Image, Layout};
use memory::{load, memory, scan, wait_until_empty};
use paged::Paged;

/// Number of pages of a batch.
const BATCH: usize = SWAP_BATCH;

/// Goals: greatest value of a figure.
const BARS: [(&str, f64); 4] = [
    ("fault_ratio", 1.25),
    ("batch_ratio", 1.5),
    ("scan_ratio", 1.5),
    ("metadata_bytes_per_page", 24.0),
];

/// Measures the swapper beside the bare system calls.
#[derive(Parser)]
struct Args {
    /// Where the figures go, as one JSON object.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/report/swap-native.json"
    )]
    report: PathBuf,
    /// A report that is there already, of `make bench-swap`: the ratios and the bytes are added to
    /// it as well.
    #[arg(long, value_name = "FILE")]
    into: Option<PathBuf>,
    /// Rounds, each of all cases.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Pages of memory, a multiple of 32.
    #[arg(long, default_value_t = 2048)]
    pages: usize,
}

/// CPUs of the two threads.
#[derive(Clone, Copy)]
struct Cpus {
    guest: usize,
    pager: usize,
}

/// Manner in which a server waits for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Spins,
    Sleeps,
}

/// Nanoseconds per page of one case, by the pager and by bare system calls, one value per round.
#[derive(Default)]
struct Pair {
    ours: Vec<f64>,
    bare: Vec<f64>,
}

impl Pair {
    fn ratio(&self) -> Measured {
        measured(
            self.ours
                .iter()
                .zip(&self.bare)
                .map(|(ours, bare)| ours / bare),
        )
    }
}

fn measured(runs: impl IntoIterator<Item = f64>) -> Measured {
    Measured::of(runs).expect("there are rounds")
}

/// Parameters of the measurements, and the contents of the pages.
struct Bench {
    cpus: Cpus,
    pages: usize,
    apart: Image,
    side_by_side: Image,
}

impl Bench {
    fn image(&self, step: usize) -> &Image {
        match step {
            1 => &self.apart,
            _ => &self.side_by_side,
        }
    }

    /// Touches every `step`-th page. Returns the median nanoseconds of a touch, per page that it
    /// brought in.
    fn touch(&self, mapping: &SlotMapping, step: usize) -> f64 {
        let image = self.image(step);
        let times = (0..self.pages).step_by(step).map(|page| {
            let start = Instant::now();
            let found = load(mapping, page);
            let time = start.elapsed().as_nanos() as f64;
            assert_eq!(found, image.first_byte(page), "page {page}");
            time
        });
        median(times) / step as f64
    }

    /// Measures bare system calls: page-in by faults that bring `step` pages each, then page-out.
    fn bare(&self, waiting: Waiting, step: usize) -> Result<(f64, f64)> {
        let bare = Bare::new(self.pages, self.image(step))?;
        let touch = || self.touch(&bare.mapping, step);
        let come = bare.served(self.cpus, waiting, step, touch)?;
        let go = thread::scope(|scope| {
            let server = scope.spawn(|| bare.evict(self.pages, self.cpus));
            wait_until_empty(&bare.ram, || Ok(()))?;
            let times = server.join().expect("it does not panic")?;
            Ok::<_, anyhow::Error>(median(times) / BATCH as f64)
        })?;
        Ok((come, go))
    }

    /// Measures the same by the pager.
    fn ours(&self, waiting: Waiting, step: usize) -> Result<(f64, f64)> {
        let paged = Paged::new(self.pages, self.image(step), self.cpus, waiting)?;
        paged.open();
        let before = paged.report()?;
        let come = self.touch(&paged.mapping, step);
        let after = paged.report()?;
        let faults = (self.pages / step) as u64;
        ensure!(
            after.faults - before.faults == faults,
            "{} faults of {faults}",
            after.faults - before.faults
        );
        let fetched = after.counts.fetched_from_disk - before.counts.fetched_from_disk;
        ensure!(fetched == self.pages as u64, "{fetched} pages came back");
        let go = median(paged.batches()?) / BATCH as f64;
        let dropped = paged.report()?.counts.dropped_to_disk - after.counts.dropped_to_disk;
        ensure!(dropped == self.pages as u64, "{dropped} pages went clean");
        paged.stop();
        Ok((come, go))
    }
}

/// Measurement of reading all uffd-wp bits, in nanoseconds per page: by the pager's call, by
/// `PAGEMAP_SCAN` and by a read of the pagemap, a batch at a time; and by one `PAGEMAP_SCAN` of all
/// pages.
struct Scan {
    guest: GuestMapping,
    mapping: Arc<SlotMapping>,
    pagemap: File,
    pages: usize,
}

impl Scan {
    fn new(pages: usize) -> Result<Self> {
        let (ram, mapping) = memory(pages)?;
        let mapping = Arc::new(mapping);
        let all = [(0, mapping.clone())];
        let guest = GuestMapping::new(all, Source::Kernel, Stores::Traced)?;
        for page in 0..pages as u64 {
            let written = ram.write(Gpa::new(page * PAGE_SIZE), &[1]);
            written.expect("a page of the memory");
        }
        guest.map(0, pages as u64, Protection::WriteProtected)?;
        Ok(Self {
            guest,
            mapping,
            pagemap: File::open("/proc/self/pagemap")?,
            pages,
        })
    }

    fn time(&self, batch: usize, mut each: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        const TIMES: usize = 16;
        let mut times = Vec::with_capacity(TIMES * self.pages / batch);
        for _ in 0..TIMES {
            for first in (0..self.pages).step_by(batch) {
                let start = Instant::now();
                each(first)?;
                times.push(start.elapsed().as_nanos() as f64);
            }
        }
        Ok(median(times) / batch as f64)
    }

    fn round(&self) -> Result<[f64; 4]> {
        let at = |page: usize| self.mapping.hva().raw() + page as u64 * PAGE_SIZE;
        let ours = self.time(BATCH, |first| {
            let clean = self.guest.protected(first as u64, BATCH as u64)?;
            ensure!(
                clean == u64::MAX >> (64 - BATCH),
                "all are clean: {clean:#x}"
            );
            Ok(())
        })?;
        let mut runs = [[0; 3]; BATCH];
        let scanned = self.time(BATCH, |first| {
            let found = scan(&self.pagemap, at(first), BATCH, &mut runs)?;
            ensure!(found == 0, "none is written");
            Ok(())
        })?;
        let mut words = [0; 8 * BATCH];
        let read = self.time(BATCH, |first| {
            self.pagemap
                .read_exact_at(&mut words, at(first) / PAGE_SIZE * 8)?;
            std::hint::black_box(&words);
            Ok(())
        })?;
        let whole = self.time(self.pages, |first| {
            let found = scan(&self.pagemap, at(first), self.pages, &mut runs)?;
            ensure!(found == 0, "none is written");
            Ok(())
        })?;
        Ok([ours, scanned, read, whole])
    }
}

/// Returns the bytes of metadata per page and per slot, for a machine of 1 GiB and four pages: just
/// above a power of two is the worst case.
fn metadata() -> Result<(f64, f64)> {
    let pages = (1 << 18) + 4;
    let residency = Residency::new(pages, 0, pages as usize);
    let ram = SwappedRam::new(memory(pages as usize)?.0);
    let of_pages = (residency.page_bytes() + ram.page_bytes()) as f64;
    let of_slots = residency.slot_bytes() as f64;
    Ok((of_pages / f64::from(pages), of_slots / f64::from(pages)))
}

/// Returns the reason why this kernel lacks a required feature of userfaultfd, or `None`.
fn refused() -> Option<String> {
    let features = Features::MISSING_SHARED
        | Features::MINOR_SHARED
        | Features::WRITE_PROTECT
        | Features::WRITE_PROTECT_SHARED
        | Features::WRITE_PROTECT_ASYNC;
    let error = Uffd::open(Source::Kernel, features).err()?;
    Some(error.to_string())
}

fn run(args: &Args) -> Result<()> {
    ensure!(
        args.rounds > 0 && args.pages > 0 && args.pages.is_multiple_of(BATCH),
        "some rounds, and a multiple of {BATCH} pages"
    );
    let (guest, pager) = match host::cpus()?[..] {
        [guest, pager, ..] => (guest, pager),
        _ => anyhow::bail!("one CPU: a guest and its pager need two"),
    };
    let cpus = Cpus { guest, pager };
    let host = Host::read();
    host::pin(cpus.guest)?;
    let bench = Bench {
        cpus,
        pages: args.pages,
        apart: Image::new(args.pages, Layout::Apart),
        side_by_side: Image::new(args.pages, Layout::SideBySide),
    };
    let markers = Scan::new(args.pages)?;
    let [mut spinning, mut sleeping, mut around, mut out] = <[Pair; 4]>::default();
    let mut scans: [Vec<f64>; 4] = Default::default();
    for round in 0..=args.rounds {
        // The two sides alternate in being first; the first round warms up.
        let mut of_round = Vec::new();
        for (waiting, step) in [
            (Waiting::Spins, 1),
            (Waiting::Sleeps, 1),
            (Waiting::Spins, BATCH),
        ] {
            let (ours, bare) = match round % 2 {
                0 => {
                    let ours = bench.ours(waiting, step)?;
                    (ours, bench.bare(waiting, step)?)
                }
                _ => {
                    let bare = bench.bare(waiting, step)?;
                    (bench.ours(waiting, step)?, bare)
                }
            };
            of_round.push((ours, bare));
        }
        let of_scan = markers.round()?;
        if round == 0 {
            continue;
        }
        let come = [&mut spinning, &mut sleeping, &mut around];
        for (pair, (ours, bare)) in come.into_iter().zip(&of_round) {
            pair.ours.push(ours.0);
            pair.bare.push(bare.0);
        }
        let (ours, bare) = of_round[2];
        out.ours.push(ours.1);
        out.bare.push(bare.1);
        for (times, time) in scans.iter_mut().zip(of_scan) {
            times.push(time);
        }
    }
    let [ours, scanned, read, whole] = scans;
    let beside = |bare| Pair {
        ours: ours.clone(),
        bare,
    };
    let rows = [
        ("fault", &spinning),
        ("fault_sleeping", &sleeping),
        ("batch_out", &out),
        ("batch_in", &around),
        ("scan", &beside(scanned)),
        ("scan_read", &beside(read)),
        ("scan_whole", &beside(whole)),
    ];
    let mut report = Object::new(&host, "native, release, no virtual machine");
    println!(
        "the swapper beside bare system calls, on {host}, Linux {}; native, {} rounds of {} pages, \
         load {:.1}",
        host.kernel, args.rounds, args.pages, host.load_average
    );
    report.number("rounds", args.rounds as f64);
    println!(
        "{:<16}{:>8}{:>8}{:>8}{:>14}{:>14}",
        "", "ratio", "min", "max", "ours ns/page", "bare ns/page"
    );
    let row = |report: &mut Object, key: &str, pair: &Pair| {
        let ratio = pair.ratio();
        let (ours, bare) = (
            measured(pair.ours.iter().copied()),
            measured(pair.bare.iter().copied()),
        );
        println!(
            "{key:<16}{:>8.2}{:>8.2}{:>8.2}{:>14.1}{:>14.1}",
            ratio.median, ratio.min, ratio.max, ours.median, bare.median
        );
        report.measured(&format!("{key}_ratio"), &ratio, 3);
        report.measured(&format!("{key}_ns"), &ours, 1);
        report.measured(&format!("{key}_bare_ns"), &bare, 1);
    };
    for (key, pair) in rows {
        row(&mut report, key, pair);
    }
    let worse = match out.ratio().median > around.ratio().median {
        true => out.ratio(),
        false => around.ratio(),
    };
    report.measured("batch_ratio", &worse, 3);
    let (of_page, of_slot) = metadata()?;
    println!("metadata: {of_page:.2} bytes a page of guest memory, {of_slot:.2} bytes a slot");
    report.number("metadata_bytes_per_page", of_page);
    report.number("metadata_bytes_per_slot", of_slot);
    for (key, bar) in BARS {
        let found = report.get(key).unwrap_or(f64::NAN);
        let verdict = if found <= bar { "holds" } else { "MISSED" };
        println!("{key:<24}{found:>8.3}  at most {bar:<6} {verdict}");
    }
    report
        .write(&args.report)
        .with_context(|| format!("writing {}", args.report.display()))?;
    println!("figures: {}", args.report.display());
    if let Some(file) = &args.into {
        let read = Object::read(file);
        let mut beside = read.with_context(|| format!("cannot read {}", file.display()))?;
        for (key, _) in BARS {
            beside.number(key, report.get(key).unwrap_or(f64::NAN));
        }
        // The host's keys in that report are those of its lab, so the native host has keys of its
        // own.
        beside.value("native_host", host.to_string());
        beside.value("native_kernel", host.kernel.clone());
        let written = beside.write(file);
        written.with_context(|| format!("writing {}", file.display()))?;
        println!("added to {}", file.display());
    }
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(why) = refused() {
        eprintln!("swap-bench: nothing is measured: {why}");
        return ExitCode::from(2);
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("swap-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
