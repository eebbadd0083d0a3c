//! Mixed, verified I/O: several threads read, write and flush; at the end everything is read back.
//!
//! The blocks are divided among the threads, so that a thread always knows the content of its
//! blocks, while the device sees all threads' requests at once. A request covers one to eight
//! blocks. Every read is checked. A block that was never written, or was discarded, is not read;
//! one that was zeroed must read as zeros.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::BLOCK;
use crate::block;
use crate::device::{self, Buffer, Trim};
use crate::end_event::EndEvent;
use crate::pattern::Random;
use crate::stall::{Acks, Stall};

/// Largest number of blocks of a device that are used: 1 GiB, so that the last pass stays short.
pub const BLOCKS_MAX: u64 = 1 << 18;

/// Largest number of blocks in one request.
const RUN_MAX: u64 = 8;

/// Configuration of a run.
#[derive(Debug, Clone, Copy)]
pub struct MixedConfig {
    /// Duration of the mix, before the last pass.
    pub duration: Duration,
    /// Seed of the data and of all random choices.
    pub seed: u64,
    /// Number of threads, each with one request at a time; 1 to 64.
    pub depth: u64,
    /// Number of blocks at the beginning that are not used.
    pub skip: u64,
    /// Whether to discard and zero blocks too, if the device can.
    pub trim: bool,
    /// Shortest time without an acknowledged write that is reported as a stall.
    pub stall: Option<Duration>,
    /// Period of the progress reports.
    pub progress: Option<Duration>,
}

/// Event of a run.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A request failed, or a block has wrong content.
    Wrong(&'a str),
    /// No write was acknowledged for a while; now one is.
    Stall(Stall),
    /// Progress report.
    Progress {
        /// Time since the start.
        at: Duration,
        /// Acknowledged writes, flushes, discards and zeroings.
        writes: u64,
    },
}

/// Receiver of events; it may be called in any thread.
pub type Listener<'a> = dyn Fn(Event<'_>) + Sync + 'a;

/// Counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MixedReport {
    /// Read requests, the last pass included.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discards done.
    pub discards: u64,
    /// Zeroings done, of both kinds.
    pub zeroes: u64,
    /// Requests that failed and blocks with wrong content.
    pub errors: u64,
}

impl MixedReport {
    fn add(&mut self, other: &Self) {
        let Self {
            reads,
            writes,
            flushes,
            discards,
            zeroes,
            errors,
        } = other;
        self.reads += reads;
        self.writes += writes;
        self.flushes += flushes;
        self.discards += discards;
        self.zeroes += zeroes;
        self.errors += errors;
    }
}

/// Runs on a device or file, and destroys its content.
///
/// # Errors
/// The device cannot be opened or is too small; the depth is out of range.
pub fn run(path: &Path, config: &MixedConfig, listener: &Listener<'_>) -> io::Result<MixedReport> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    if !(1..=64).contains(&config.depth) {
        return Err(invalid(format!(
            "a depth of {} is outside 1 to 64",
            config.depth
        )));
    }
    let file = device::open(path, true)?;
    let left = device::blocks(&file)?.saturating_sub(config.skip);
    let each = left.min(BLOCKS_MAX) / config.depth;
    if each == 0 {
        return Err(invalid(format!("too small for {} threads", config.depth)));
    }
    let shared = Shared::new(&file, config, listener);
    let deadline = Instant::now() + config.duration;
    let total = Mutex::new(MixedReport::default());
    let ended = EndEvent::default();
    let work = |number| {
        let mut worker = Worker::new(&shared, number, each);
        while Instant::now() < deadline {
            worker.step();
        }
        worker.read_back();
        // No other thread panics with the lock held: all only add.
        let mut total = total.lock().expect("adding cannot panic");
        total.add(&worker.report);
    };
    let work = &work;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..config.depth)
            .map(|number| scope.spawn(move || work(number)))
            .collect();
        if let Some(every) = config.progress {
            let (shared, ended) = (&shared, &ended);
            scope.spawn(move || {
                while !ended.wait(every) {
                    let (at, writes) = (shared.acks.elapsed(), shared.acks.count());
                    (shared.listener)(Event::Progress { at, writes });
                }
            });
        }
        // All are joined before any panic is passed on, or the progress reports would never end.
        let outcomes: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        ended.set();
        if let Some(panic) = outcomes.into_iter().find_map(Result::err) {
            std::panic::resume_unwind(panic);
        }
    });
    Ok(total.into_inner().expect("adding cannot panic"))
}

/// State shared by all threads of a run.
struct Shared<'a> {
    file: &'a File,
    seed: u64,
    skip: u64,
    listener: &'a Listener<'a>,
    acks: Acks,
    can_discard: AtomicBool,
    can_zero: AtomicBool,
}

impl<'a> Shared<'a> {
    fn new(file: &'a File, config: &MixedConfig, listener: &'a Listener<'a>) -> Self {
        Self {
            file,
            seed: config.seed,
            skip: config.skip,
            listener,
            acks: Acks::new(config.stall),
            can_discard: AtomicBool::new(config.trim),
            can_zero: AtomicBool::new(config.trim),
        }
    }

    /// Notes that a write, a flush, a discard or a zeroing was acknowledged.
    fn acknowledged(&self) {
        if let Some(stall) = self.acks.note() {
            (self.listener)(Event::Stall(stall));
        }
    }
}

/// Expected content of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Anything.
    Unknown,
    /// Zeros.
    Zero,
    /// Content that [`block::seal`] made with this generation.
    Sealed(u64),
}

struct Worker<'a> {
    shared: &'a Shared<'a>,
    random: Random,
    /// Number of the first block owned.
    first: u64,
    /// Content of each block owned.
    contents: Vec<Content>,
    /// Counts writes, so that no two of them have the same content.
    generation: u64,
    report: MixedReport,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, number: u64, each: u64) -> Self {
        Self {
            shared,
            random: Random::new(shared.seed.wrapping_add(number)),
            first: shared.skip + number * each,
            contents: vec![Content::Unknown; index(each)],
            generation: 0,
            report: MixedReport::default(),
        }
    }

    /// Makes one request.
    fn step(&mut self) {
        let owned = self.contents.len() as u64;
        let at = self.random.below(owned);
        let len = (1 + self.random.below(RUN_MAX)).min(owned - at);
        let (at, len) = (index(at), index(len));
        match self.random.below(100) {
            0..4 => {
                self.report.flushes += 1;
                let flushed = self.shared.file.sync_data();
                self.written(flushed.map_err(|e| format!("flush: {e}")));
            }
            4..7 => self.trim(at, len, Trim::Discard),
            7..10 => self.trim(at, len, Trim::Zero),
            10..13 => self.trim(at, len, Trim::ZeroAndUnmap),
            13..56 => self.write(at, len),
            _ => self.read(at, len),
        }
    }

    fn write(&mut self, at: usize, len: usize) {
        let mut buffer = Buffer::new(len * BLOCK);
        self.generation += 1;
        for (n, data) in (at..).zip(buffer.bytes_mut().chunks_mut(BLOCK)) {
            self.contents[n] = Content::Sealed(self.generation);
            let number = self.first + n as u64;
            block::seal(data, number, self.generation, self.shared.seed);
        }
        self.report.writes += 1;
        let written = device::write(self.shared.file, self.first + at as u64, &buffer);
        self.written(written.map_err(|e| e.to_string()));
    }

    /// Discards or zeroes; writes, where the device cannot.
    fn trim(&mut self, at: usize, len: usize, how: Trim) {
        let (can, after) = match how {
            Trim::Discard => (&self.shared.can_discard, Content::Unknown),
            Trim::Zero | Trim::ZeroAndUnmap => (&self.shared.can_zero, Content::Zero),
        };
        // Relaxed: the flag orders nothing.
        if !can.load(Ordering::Relaxed) {
            return self.write(at, len);
        }
        let first = self.first + at as u64;
        let trimmed = device::trim(self.shared.file, first, len as u64, how);
        // ENOTTY: a regular file has no discard.
        if let Err(Some(libc::EOPNOTSUPP | libc::ENOTTY)) =
            trimmed.as_ref().map_err(io::Error::raw_os_error)
        {
            can.store(false, Ordering::Relaxed);
            return;
        }
        self.contents[at..at + len].fill(after);
        match how {
            Trim::Discard => self.report.discards += 1,
            Trim::Zero | Trim::ZeroAndUnmap => self.report.zeroes += 1,
        }
        self.written(trimmed.map_err(|e| format!("{how:?} of block {first}: {e}")));
    }

    /// Reads the blocks of the range that come before the first of unknown content.
    fn read(&mut self, at: usize, len: usize) {
        let len = self.contents[at..at + len]
            .iter()
            .take_while(|content| **content != Content::Unknown)
            .count();
        if len == 0 {
            return;
        }
        let mut buffer = Buffer::new(len * BLOCK);
        self.report.reads += 1;
        if let Err(error) = device::read(self.shared.file, self.first + at as u64, &mut buffer) {
            return self.note(Err(error.to_string()));
        }
        for (n, data) in (at..).zip(buffer.bytes().chunks(BLOCK)) {
            let number = self.first + n as u64;
            let checked = match self.contents[n] {
                Content::Sealed(generation) => {
                    block::check(data, number, generation, self.shared.seed)
                        .map_err(|damage| damage.to_string())
                }
                Content::Zero if data.iter().any(|byte| *byte != 0) => {
                    Err(format!("block {number}: not zeros, which it was made"))
                }
                Content::Zero | Content::Unknown => Ok(()),
            };
            self.note(checked);
        }
    }

    fn read_back(&mut self) {
        let step = index(RUN_MAX);
        let known = |content: &Content| *content != Content::Unknown;
        for at in (0..self.contents.len()).step_by(step) {
            let end = (at + step).min(self.contents.len());
            let mut from = at;
            // Holes of unknown content split the run.
            while let Some(skip) = self.contents[from..end].iter().position(known) {
                from += skip;
                let run = self.contents[from..end]
                    .iter()
                    .take_while(|content| known(content))
                    .count();
                self.read(from, run);
                from += run;
            }
        }
    }

    fn written(&mut self, outcome: Result<(), String>) {
        if outcome.is_ok() {
            self.shared.acknowledged();
        }
        self.note(outcome);
    }

    fn note(&mut self, outcome: Result<(), String>) {
        if let Err(reason) = outcome {
            self.report.errors += 1;
            if self.report.errors <= 10 {
                (self.shared.listener)(Event::Wrong(&reason));
            }
        }
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("at most BLOCKS_MAX")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn image(name: &str, blocks: u64) -> PathBuf {
        let path = std::env::temp_dir().join(format!("mixed-{name}-{}", std::process::id()));
        File::create(&path)
            .unwrap()
            .set_len(blocks * BLOCK as u64)
            .unwrap();
        path
    }

    fn config(duration: Duration, depth: u64) -> MixedConfig {
        MixedConfig {
            duration,
            seed: 3,
            depth,
            skip: 0,
            trim: true,
            stall: None,
            progress: None,
        }
    }

    #[test]
    fn a_sound_device_passes_and_progress_is_told() {
        let path = image("sound", 257);
        let mut config = config(Duration::from_millis(300), 8);
        config.skip = 8;
        config.progress = Some(Duration::from_millis(20));
        let (lines, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let report = run(&path, &config, &|event| match event {
            Event::Wrong(text) => panic!("{text}"),
            Event::Stall(stall) => panic!("{stall:?}"),
            Event::Progress { writes, .. } => {
                lines.fetch_add(1, Ordering::Relaxed);
                most.fetch_max(writes, Ordering::Relaxed);
            }
        })
        .unwrap();
        assert_eq!(report.errors, 0);
        assert_eq!(fs::read(&path).unwrap()[..8 * BLOCK], [0; 8 * BLOCK]);
        assert!(
            report.reads > 0 && report.writes > 0 && report.flushes > 0,
            "{report:?}"
        );
        assert!(lines.into_inner() >= 3 && most.into_inner() > 0);
        fs::remove_file(path).unwrap();
    }

    /// Runs `test` with a worker that owns the 16 blocks of a fresh image, and with its complaints.
    fn with_worker(name: &str, test: impl FnOnce(&mut Worker<'_>, &Mutex<Vec<String>>)) {
        let path = image(name, 16);
        let file = device::open(&path, true).unwrap();
        let complaints = Mutex::new(Vec::new());
        let listener = |event: Event<'_>| {
            if let Event::Wrong(text) = event {
                complaints.lock().unwrap().push(text.to_owned());
            }
        };
        let shared = Shared::new(&file, &config(Duration::ZERO, 1), &listener);
        test(&mut Worker::new(&shared, 0, 16), &complaints);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_lost_write_and_a_misplaced_one_are_found() {
        with_worker("lossy", |worker, complaints| {
            let file = worker.shared.file;
            worker.write(0, 4);
            let mut old = Buffer::new(BLOCK);
            device::read(file, 2, &mut old).unwrap();
            worker.write(0, 4);
            file.write_all_at(old.bytes(), 2 * BLOCK as u64).unwrap();
            worker.read_back();
            assert_eq!(worker.report.errors, 1);
            file.write_all_at(old.bytes(), 0).unwrap();
            worker.read_back();
            assert_eq!(worker.report.errors, 3);
            let complaints = complaints.lock().unwrap();
            assert_eq!(complaints[0], "block 2: generation is 1, not 2");
            assert_eq!(complaints[1], "block 0: number is 2, not 0");
        });
    }

    #[test]
    fn zeroed_blocks_must_read_as_zeros() {
        with_worker("zeroed", |worker, complaints| {
            worker.write(0, 8);
            worker.trim(2, 3, Trim::ZeroAndUnmap);
            if worker.report.zeroes == 0 {
                eprintln!("skipped: this file system cannot punch holes");
                return;
            }
            worker.read_back();
            assert_eq!(worker.report.errors, 0);
            let mut ones = Buffer::new(BLOCK);
            ones.bytes_mut().fill(1);
            device::write(worker.shared.file, 3, &ones).unwrap();
            worker.read_back();
            assert_eq!(
                *complaints.lock().unwrap(),
                ["block 3: not zeros, which it was made"]
            );
        });
    }

    #[test]
    fn senseless_depths_and_sizes_are_refused() {
        let path = image("small", 4);
        for depth in [0, 65, 8] {
            assert!(run(&path, &config(Duration::ZERO, depth), &|_| {}).is_err());
        }
        fs::remove_file(path).unwrap();
    }
}
