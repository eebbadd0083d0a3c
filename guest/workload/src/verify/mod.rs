//! A verifying guest: pages of memory and blocks of a disk go through all operations of a guest,
//! and every byte is compared with the expected one.
//!
//! It is a test of a host's swapper, so it looks for a swapper's errors: a page that comes back as
//! it was before its last write; another page in its place; a page that a block was read into, and
//! that changes when the block does; a store of the whole page that loses its end; zeros in place
//! of content, or content in place of zeros.
//!
//! ```text
//!   memory: fill check patch straddle zero set copy give-back remap fork
//!      │ write, write-twice      │ relay       ▲ read, read-many, replace
//!      ▼                         ▼ (both)      │
//!   disk: read-twice read-part write-part discard zero-out sync forget drop-caches
//! ```
//!
//! `content` is the model: the bytes that a page must hold. `kinds` lists the operations, and their
//! frequencies in the phases *fill*, *fragment* and *clear*, which take turns. A `worker` is one
//! thread; it owns its pages and its blocks, so it always knows their content, while the device and
//! the kernel's page cache see all threads at once. Each thread does every kind of operation once
//! and fills its memory, then goes on until the time is over, and then compares everything it owns.
//! The first wrong byte ends the run.
//!
//! Bounds: 64 bytes are stored for each page and block; at most 32,768 blocks of a disk are used;
//! beside M MiB and that, a thread takes 150 KiB, and one child at a time copies the pages that are
//! written during its life, some hundred.
//!
//! The tests of this module run it on a file: without discard and dropped caches, and with no
//! direct requests of less than a block, or none at all where the file system has none.
//!
//! Left out: durability across a crash; files; shared memory.

mod content;
mod kinds;
mod shared;
mod worker;

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::age::{self, MIB};
use crate::device;
use crate::end_event::EndEvent;

pub use kinds::{Count, Counts, Kind, Phase};

use shared::Shared;
use worker::{LEAST, Part, Worker};

/// Largest number of blocks of a device that are used: 128 MiB, so that their records stay small
/// and the last pass short.
pub const BLOCKS_MAX: u64 = 1 << 15;

/// Largest number of threads.
pub const THREADS_MAX: u64 = 16;

/// Configuration of a run.
#[derive(Debug, Clone, Copy)]
pub struct VerifyConfig {
    /// Duration before the last pass.
    pub duration: Duration,
    /// MiB of memory that are written and compared.
    pub mib: u64,
    /// Seed of the data and of all random choices.
    pub seed: u64,
    /// Number of threads, 1 to [`THREADS_MAX`].
    pub threads: u64,
    /// Number of blocks at the beginning that are not used.
    pub skip: u64,
    /// Period of the progress reports.
    pub progress: Duration,
}

/// Event of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// Remark that a reader of the result should know.
    Note(&'a str),
    /// A thread begins a phase.
    Begins {
        /// Number of the thread.
        thread: u32,
        /// The phase; `None` for the last pass.
        phase: Option<Phase>,
    },
    /// Progress report.
    Progress {
        /// Time since the start.
        at: Duration,
        /// Comparisons.
        operations: u64,
        /// Phase of the first thread; `None` for the last pass.
        phase: Option<Phase>,
    },
}

/// Receiver of events; it may be called in any thread.
pub type Listener<'a> = dyn Fn(Event<'_>) + Sync + 'a;

/// Counts of a run that found everything right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifyReport {
    /// Comparisons of a page or block, or part of one.
    pub operations: u64,
    /// Pages of memory.
    pub pages: u64,
    /// Blocks of the device.
    pub blocks: u64,
    /// Operations by kind.
    pub counts: Counts,
    /// Duration of the run, the last pass included.
    pub elapsed: Duration,
}

/// Runs on a device or file, and destroys its content.
///
/// # Errors
/// The first wrong byte: its place, the wanted and the found content, and the operations on the
/// page; or the system's error, or the reason why the run is not possible here.
pub fn run(
    path: &Path,
    config: &VerifyConfig,
    listener: &Listener<'_>,
) -> Result<VerifyReport, String> {
    if !(1..=THREADS_MAX).contains(&config.threads) {
        let threads = config.threads;
        return Err(format!("{threads} threads are not 1 to {THREADS_MAX}"));
    }
    enough_memory(config.mib)?;
    let explain = |error| device::explain(path, &error);
    let shared = Shared::open(path, config.seed).map_err(explain)?;
    let blocks = shared.blocks().map_err(explain)?;
    let pages = age::pages(config.mib)? as u64;
    let parts =
        divide(pages, blocks, config).map_err(|reason| format!("{}: {reason}", path.display()))?;
    if !shared.has_direct() {
        listener(Event::Note(
            "the file system has no direct I/O: all goes through the page cache",
        ));
    }
    let run = Run {
        shared: &shared,
        start: Instant::now(),
        duration: config.duration,
        listener,
        phase: AtomicU8::new(0),
        first_wrong: Mutex::new(None),
        counts: Mutex::new(Counts::default()),
    };
    run.all(&parts, config.progress);
    let first_wrong = run.first_wrong.into_inner().expect("setting cannot panic");
    if let Some(wrong) = first_wrong {
        return Err(wrong);
    }
    let sum = |of: fn(&Part) -> usize| parts.iter().map(|part| of(part) as u64).sum();
    Ok(VerifyReport {
        operations: shared.operations.load(Ordering::Relaxed),
        pages: sum(|part| part.pages),
        blocks: sum(|part| part.blocks),
        counts: run.counts.into_inner().expect("adding cannot panic"),
        elapsed: run.start.elapsed(),
    })
}

/// Checks that the memory which `mib` MiB need is available.
fn enough_memory(mib: u64) -> Result<(), String> {
    let Ok(text) = fs::read_to_string("/proc/meminfo") else {
        return Ok(());
    };
    let available = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    match available {
        Some(kib) if kib / 1024 < mib => Err(format!(
            "{} MiB of memory are available, and {mib} are to be written: take a smaller --mib, or \
             give the guest more",
            kib / 1024
        )),
        _ => Ok(()),
    }
}

/// Divides pages and blocks evenly among the threads.
fn divide(pages: u64, blocks: u64, config: &VerifyConfig) -> Result<Vec<Part>, String> {
    let (threads, skip) = (config.threads, config.skip);
    let left = blocks.saturating_sub(skip);
    let each = |all: u64| usize::try_from(all / threads).expect("as many as an index has room for");
    let (pages, blocks) = (each(pages), each(left.min(BLOCKS_MAX)));
    if blocks < LEAST {
        return Err(format!(
            "{left} blocks after the first {skip} are too few for {threads} threads, which need \
             {LEAST} each: \
             take a larger disk, or fewer --threads"
        ));
    }
    if skip + BLOCKS_MAX > u64::from(content::Place::LIMIT) {
        return Err(format!("{skip} blocks to skip are too many to count"));
    }
    if pages < LEAST {
        let mib = (threads * LEAST as u64).div_ceil(MIB);
        return Err(format!(
            "{threads} threads need {mib} MiB: take a larger --mib, or fewer --threads"
        ));
    }
    let narrow = |number: u64| u32::try_from(number).expect("below Place::LIMIT");
    Ok((0..threads)
        .map(|thread| Part {
            thread: narrow(thread),
            first_page: narrow(thread * pages as u64),
            pages,
            first_block: narrow(skip + thread * blocks as u64),
            blocks,
        })
        .collect())
}

/// A run that is under way.
struct Run<'a> {
    shared: &'a Shared,
    start: Instant,
    duration: Duration,
    listener: &'a Listener<'a>,
    /// Index of the first thread's phase; the value after the last phase is the last pass.
    phase: AtomicU8,
    first_wrong: Mutex<Option<String>>,
    counts: Mutex<Counts>,
}

impl Run<'_> {
    /// Runs all threads to their ends.
    fn all(&self, parts: &[Part], every: Duration) {
        let ended = EndEvent::default();
        thread::scope(|scope| {
            let threads: Vec<_> = parts
                .iter()
                .map(|part| scope.spawn(move || self.one(*part)))
                .collect();
            let ended = &ended;
            scope.spawn(move || {
                while !ended.wait(every) {
                    (self.listener)(Event::Progress {
                        at: self.start.elapsed(),
                        // Relaxed, both: the numbers are only reported.
                        operations: self.shared.operations.load(Ordering::Relaxed),
                        phase: phase_at(self.phase.load(Ordering::Relaxed)),
                    });
                }
            });
            // All are joined before any panic is passed on, or the progress reports would never
            // end.
            let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            ended.set();
            if let Some(panic) = outcomes.into_iter().find_map(Result::err) {
                std::panic::resume_unwind(panic);
            }
        });
    }

    /// Runs one thread.
    fn one(&self, part: Part) {
        let outcome = Worker::new(self.shared, part).and_then(|mut worker| {
            let outcome = self.steps(&mut worker, part.thread);
            let mut counts = self.counts.lock().expect("adding cannot panic");
            counts.add_all(worker.counts());
            outcome
        });
        if let Err(wrong) = outcome {
            // Relaxed: the other threads may end a little later.
            self.shared.stop.store(true, Ordering::Relaxed);
            let mut first = self.first_wrong.lock().expect("setting cannot panic");
            first.get_or_insert(wrong);
        }
    }

    fn steps(&self, worker: &mut Worker<'_>, thread: u32) -> Result<(), String> {
        worker.begin()?;
        let is_over = || self.shared.is_stopped() || self.start.elapsed() >= self.duration;
        for phase in Phase::ALL.into_iter().cycle() {
            if is_over() {
                break;
            }
            self.begin(thread, Some(phase));
            worker.work(phase, &is_over)?;
        }
        self.begin(thread, None);
        worker.check_all()
    }

    fn begin(&self, thread: u32, phase: Option<Phase>) {
        if thread == 0 {
            let index = phase.map_or(Phase::ALL.len(), |phase| phase as usize);
            self.phase.store(index as u8, Ordering::Relaxed);
        }
        (self.listener)(Event::Begins { thread, phase });
    }
}

fn phase_at(index: u8) -> Option<Phase> {
    Phase::ALL.get(usize::from(index)).copied()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::BLOCK;

    const BLOCKS: u64 = 2048;

    struct Image(PathBuf);

    impl Image {
        fn new(name: &str) -> Self {
            let name = format!("verify-run-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let file = File::create(&path).unwrap();
            file.set_len(BLOCKS * BLOCK as u64).unwrap();
            Self(path)
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn config(duration: Duration) -> VerifyConfig {
        VerifyConfig {
            duration,
            mib: 8,
            seed: 5,
            threads: 2,
            skip: 3,
            progress: Duration::from_millis(100),
        }
    }

    #[test]
    fn a_sound_machine_passes_with_every_kind_done() {
        let image = Image::new("sound");
        let (lines, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let report = run(&image.0, &config(Duration::from_secs(2)), &|event| {
            if let Event::Progress { operations, .. } = event {
                lines.fetch_add(1, Ordering::Relaxed);
                most.fetch_max(operations, Ordering::Relaxed);
            }
        })
        .unwrap();
        assert_eq!((report.pages, report.blocks), (2048, (BLOCKS - 3) / 2 * 2));
        assert!(lines.into_inner() >= 3 && report.operations >= most.into_inner());
        // More than the first and the last pass, of 2048 pages and twice 2044 blocks.
        assert!(report.operations > 10_000, "{report:?}");
        assert_all_done(&report);
        let content = fs::read(&image.0).unwrap();
        assert_eq!(content[..3 * BLOCK], [0; 3 * BLOCK], "blocks to skip");
        assert_eq!(content.len() as u64, BLOCKS * BLOCK as u64);
    }

    /// Checks that each kind was done that a file supports.
    fn assert_all_done(report: &VerifyReport) {
        for kind in Kind::ALL {
            let is_files = !matches!(kind, Kind::Discard | Kind::DropCaches);
            let may_lack = matches!(kind, Kind::WriteDirect | Kind::ReadDirect | Kind::ZeroOut);
            let count = report.counts.of(kind);
            assert!((count.operations > 0) == is_files || may_lack, "{kind:?}");
        }
    }

    #[test]
    fn a_run_without_time_does_everything_once() {
        let image = Image::new("short");
        let mut config = config(Duration::ZERO);
        (config.threads, config.mib) = (1, 1);
        let report = run(&image.0, &config, &|_| {}).unwrap();
        assert_all_done(&report);
        let filled = report.counts.of(Kind::Fill).pages;
        assert!(
            filled >= 200,
            "{filled} pages, of 256, beside a few that others filled"
        );
    }

    #[test]
    fn a_file_that_changes_behind_its_back_between_two_phases_is_noticed() {
        let image = Image::new("changed");
        let file = File::options()
            .read(true)
            .write(true)
            .open(&image.0)
            .unwrap();
        // By the first phase Clear most blocks have been written.
        let rounds = AtomicU64::new(0);
        // Both threads stop, and not because the time is over.
        let wrong = run(&image.0, &config(Duration::from_secs(3600)), &|event| {
            if event
                == (Event::Begins {
                    thread: 0,
                    phase: Some(Phase::Clear),
                })
                && rounds.fetch_add(1, Ordering::Relaxed) == 0
            {
                for block in 3..BLOCKS / 2 {
                    let at = block * BLOCK as u64 + 2000;
                    let mut byte = [0];
                    file.read_exact_at(&mut byte, at).unwrap();
                    file.write_all_at(&[byte[0] ^ 0x80], at).unwrap();
                }
            }
        })
        .unwrap_err();
        assert!(wrong.starts_with("block "), "{wrong}");
        for part in [
            "byte 0x7d0: wanted 0x",
            "(1 bytes differ",
            "its past: ",
            "of thread 0, seed 5",
        ] {
            assert!(wrong.contains(part), "no {part:?} in {wrong}");
        }
    }

    #[test]
    fn corruption_before_the_last_pass_is_detected_by_it() {
        let image = Image::new("late");
        let file = File::options().write(true).open(&image.0).unwrap();
        let mut config = config(Duration::ZERO);
        (config.threads, config.mib) = (1, 1);
        let wrong = run(&image.0, &config, &|event| {
            if matches!(event, Event::Begins { phase: None, .. }) {
                let ones = vec![1; (BLOCKS - config.skip) as usize * BLOCK];
                file.write_all_at(&ones, config.skip * BLOCK as u64)
                    .unwrap();
            }
        })
        .unwrap_err();
        for part in ["block ", "found the byte 0x01, repeated (damaged)"] {
            assert!(wrong.contains(part), "no {part:?} in {wrong}");
        }
    }

    #[test]
    fn bad_config_or_short_memory_is_refused_with_advice() {
        let image = Image::new("refused");
        let refused = |change: &dyn Fn(&mut VerifyConfig)| {
            let mut config = config(Duration::ZERO);
            change(&mut config);
            run(&image.0, &config, &|_| {}).unwrap_err()
        };
        assert!(refused(&|config| config.threads = 0).contains("0 threads are not 1 to 16"));
        assert!(
            refused(&|config| config.skip = 2000).contains("a larger disk, or fewer --threads")
        );
        assert!(refused(&|config| config.skip = u64::MAX / 2).contains("0 blocks after"));
        // Called directly: a run that did not check would take all the memory of this machine.
        assert!(
            enough_memory(1 << 30)
                .unwrap_err()
                .contains("a smaller --mib")
        );
        assert_eq!(enough_memory(1), Ok(()));
        let few = refused(&|config| (config.mib, config.threads) = (1, 16));
        assert!(few.contains("16 threads need 4 MiB"), "{few}");
        let gone = run(Path::new("/dev/vdz"), &config(Duration::ZERO), &|_| {}).unwrap_err();
        assert!(
            gone.contains("/dev/vdz: ") && gone.contains("ls /dev/vd*"),
            "{gone}"
        );
    }
}
