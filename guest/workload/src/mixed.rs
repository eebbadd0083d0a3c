//! Mixed, verified I/O: several threads read, write and flush; at the end everything is read back.
//!
//! The blocks are divided among the threads, so a thread always knows which generation each of its
//! blocks is in, while the device sees all threads' requests at once. A request covers one to eight
//! blocks. Every read is checked; a block never written is not read.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::BLOCK;
use crate::block;
use crate::device::{self, Buffer};
use crate::pattern::Random;

/// Blocks of a device that are used at most: 1 GiB, so that the last pass stays short.
pub const BLOCKS_MAX: u64 = 1 << 18;

/// Blocks in one request at most.
const RUN_MAX: u64 = 8;

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct MixedConfig {
    /// How long to mix, before the last pass.
    pub duration: Duration,
    /// What the data and the choices depend on.
    pub seed: u64,
    /// Threads, each with one request at a time; 1 to 64.
    pub depth: u64,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MixedReport {
    /// Read requests, the last pass included.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Requests that failed and blocks with wrong content.
    pub errors: u64,
}

/// Runs on a device or file, and destroys its content. Each error is also told to `complain`.
///
/// # Errors
/// The device cannot be opened or is too small; the depth is out of range.
pub fn run(
    path: &Path,
    config: &MixedConfig,
    complain: &(dyn Fn(&str) + Sync),
) -> io::Result<MixedReport> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    if !(1..=64).contains(&config.depth) {
        return Err(invalid(format!(
            "a depth of {} is outside 1 to 64",
            config.depth
        )));
    }
    let file = device::open(path, true)?;
    let each = device::blocks(&file)?.min(BLOCKS_MAX) / config.depth;
    if each == 0 {
        return Err(invalid(format!("too small for {} threads", config.depth)));
    }
    let deadline = Instant::now() + config.duration;
    let total = Mutex::new(MixedReport::default());
    thread::scope(|scope| {
        for number in 0..config.depth {
            let (file, total) = (&file, &total);
            scope.spawn(move || {
                let mut worker = Worker::new(file, config, number, each, complain);
                while Instant::now() < deadline {
                    worker.step();
                }
                worker.read_back();
                // No other thread panics with the lock held: they only add.
                let mut total = total.lock().expect("adding cannot panic");
                total.reads += worker.report.reads;
                total.writes += worker.report.writes;
                total.flushes += worker.report.flushes;
                total.errors += worker.report.errors;
            });
        }
    });
    Ok(total.into_inner().expect("adding cannot panic"))
}

struct Worker<'a> {
    file: &'a File,
    seed: u64,
    random: Random,
    /// Number of the first block owned.
    first: u64,
    /// Generation of each block owned; 0: never written.
    generations: Vec<u64>,
    report: MixedReport,
    complain: &'a (dyn Fn(&str) + Sync),
}

impl<'a> Worker<'a> {
    fn new(
        file: &'a File,
        config: &MixedConfig,
        number: u64,
        each: u64,
        complain: &'a (dyn Fn(&str) + Sync),
    ) -> Self {
        let each_len = usize::try_from(each).expect("at most BLOCKS_MAX");
        Self {
            file,
            seed: config.seed,
            random: Random::new(config.seed.wrapping_add(number)),
            first: number * each,
            generations: vec![0; each_len],
            report: MixedReport::default(),
            complain,
        }
    }

    /// One request.
    fn step(&mut self) {
        let owned = self.generations.len() as u64;
        let at = self.random.below(owned);
        let len = (1 + self.random.below(RUN_MAX)).min(owned - at);
        let (at, len) = (index(at), index(len));
        match self.random.below(100) {
            0..4 => {
                self.report.flushes += 1;
                let flushed = self.file.sync_data();
                self.note(flushed.map_err(|e| format!("flush: {e}")));
            }
            4..52 => self.write(at, len),
            _ => self.read(at, len),
        }
    }

    fn write(&mut self, at: usize, len: usize) {
        let mut buffer = Buffer::new(len * BLOCK);
        for (n, data) in (at..).zip(buffer.bytes_mut().chunks_mut(BLOCK)) {
            self.generations[n] += 1;
            block::seal(data, self.first + n as u64, self.generations[n], self.seed);
        }
        self.report.writes += 1;
        let written = device::write(self.file, self.first + at as u64, &buffer);
        self.note(written.map_err(|e| e.to_string()));
    }

    /// Reads the blocks of the range that come before the first never written.
    fn read(&mut self, at: usize, len: usize) {
        let len = self.generations[at..at + len]
            .iter()
            .take_while(|g| **g > 0)
            .count();
        if len == 0 {
            return;
        }
        let mut buffer = Buffer::new(len * BLOCK);
        self.report.reads += 1;
        if let Err(error) = device::read(self.file, self.first + at as u64, &mut buffer) {
            return self.note(Err(error.to_string()));
        }
        for (n, data) in (at..).zip(buffer.bytes().chunks(BLOCK)) {
            let checked = block::check(data, self.first + n as u64, self.generations[n], self.seed);
            self.note(checked.map_err(|damage| damage.to_string()));
        }
    }

    fn read_back(&mut self) {
        let step = index(RUN_MAX);
        for at in (0..self.generations.len()).step_by(step) {
            let end = (at + step).min(self.generations.len());
            let mut from = at;
            // Holes of blocks never written split the run.
            while let Some(skip) = self.generations[from..end].iter().position(|g| *g > 0) {
                from += skip;
                let run = self.generations[from..end]
                    .iter()
                    .take_while(|g| **g > 0)
                    .count();
                self.read(from, run);
                from += run;
            }
        }
    }

    fn note(&mut self, outcome: Result<(), String>) {
        if let Err(reason) = outcome {
            self.report.errors += 1;
            if self.report.errors <= 10 {
                (self.complain)(&reason);
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

    use super::*;

    fn image(name: &str, blocks: u64) -> PathBuf {
        let path = std::env::temp_dir().join(format!("mixed-{name}-{}", std::process::id()));
        File::create(&path)
            .unwrap()
            .set_len(blocks * BLOCK as u64)
            .unwrap();
        path
    }

    #[test]
    fn a_sound_device_passes() {
        let path = image("sound", 257);
        let config = MixedConfig {
            duration: Duration::from_millis(300),
            seed: 3,
            depth: 8,
        };
        let report = run(&path, &config, &|text| panic!("{text}")).unwrap();
        assert_eq!(report.errors, 0);
        assert!(
            report.reads > 0 && report.writes > 0 && report.flushes > 0,
            "{report:?}"
        );
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_lost_write_and_a_misplaced_one_are_found() {
        let path = image("lossy", 16);
        let file = device::open(&path, true).unwrap();
        let config = MixedConfig {
            duration: Duration::ZERO,
            seed: 3,
            depth: 1,
        };
        let complaints = Mutex::new(Vec::new());
        let complain = |text: &str| complaints.lock().unwrap().push(text.to_owned());
        let mut worker = Worker::new(&file, &config, 0, 16, &complain);
        worker.write(0, 4);
        let mut old = Buffer::new(BLOCK);
        device::read(&file, 2, &mut old).unwrap();
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
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn senseless_depths_and_sizes_are_refused() {
        let path = image("small", 4);
        let config = |depth| MixedConfig {
            duration: Duration::ZERO,
            seed: 1,
            depth,
        };
        assert!(run(&path, &config(0), &|_| {}).is_err());
        assert!(run(&path, &config(65), &|_| {}).is_err());
        assert!(run(&path, &config(8), &|_| {}).is_err());
        fs::remove_file(path).unwrap();
    }
}
