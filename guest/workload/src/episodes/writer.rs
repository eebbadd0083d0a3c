//! Writers by the kernel's driver, and their log.

use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::acked::{OWNED, Record};
use crate::device::{self, Buffer};
use crate::pattern::Random;
use crate::{BLOCK, block, console};

/// Time limit of any step once the storage holds no request.
const LIMIT: Duration = Duration::from_secs(120);
/// Delay between two tries of a request that failed.
const AGAIN: Duration = Duration::from_millis(20);
/// Number of each writer's blocks that an episode writes, and number of those that the episode
/// before did not write.
const WINDOW: usize = 24;
const NEW: usize = 8;

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct EpisodesConfig {
    /// The disk that is tested.
    pub disk: PathBuf,
    /// The disk with the log, which does not misbehave.
    pub log: PathBuf,
    /// Seed of the written content and of all random choices.
    pub seed: u64,
}

/// Requests of an episode that may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MayFail {
    Nothing,
    Flushes,
    Anything,
}

impl FromStr for MayFail {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "nothing" => Ok(Self::Nothing),
            "flushes" => Ok(Self::Flushes),
            "anything" => Ok(Self::Anything),
            _ => Err(format!("what may fail is not {word:?}")),
        }
    }
}

/// Returns the first of a writer's blocks that this episode (from 1) writes.
pub(super) fn window(episode: usize) -> usize {
    episode.saturating_sub(1) * NEW % (OWNED - WINDOW + 1)
}

/// Returns one of the blocks of the window that begins at `first`.
pub(super) fn choose(random: &mut Random, first: usize) -> usize {
    first + usize::try_from(random.below(WINDOW as u64)).expect("below WINDOW")
}

/// Returns the content of the write under way.
pub(super) fn sealed(record: &Record, seed: u64) -> Vec<u8> {
    let mut data = vec![0; BLOCK];
    let next = record.next();
    block::seal(
        &mut data,
        record.block(next.index),
        next.generation.into(),
        seed,
    );
    data
}

/// The second disk, which holds the log.
pub(super) struct Log {
    file: std::fs::File,
    seed: u64,
}

impl Log {
    pub(super) fn open(config: &EpisodesConfig) -> Result<Self, String> {
        let file = device::open(&config.log, true);
        let seed = config.seed;
        file.map(|file| Self { file, seed })
            .map_err(|e| device::explain(&config.log, &e))
    }

    pub(super) fn put(&self, record: &Record) -> Result<(), String> {
        let mut buffer = Buffer::new(BLOCK);
        record.seal(buffer.bytes_mut(), self.seed);
        device::write(&self.file, record.place(), &buffer).map_err(|e| format!("the log: {e}"))
    }
}

/// Counts of writes done and requests failed.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) writes: u64,
    pub(super) failed: u64,
}

/// The running writers.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    /// Whether the power is going off: Linux then breaks its virtio devices and fails their
    /// requests.
    is_going: Arc<AtomicBool>,
    writers: Vec<JoinHandle<Result<(Record, Counts), String>>>,
}

impl Load {
    /// Starts a writer for each record, and waits until each has written. The writers are seeded
    /// from `random`.
    pub(super) fn start(
        config: &EpisodesConfig,
        episode: usize,
        may_fail: MayFail,
        records: Vec<Record>,
        random: &mut Random,
    ) -> Result<Self, String> {
        let [stop, is_going] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (send, has_written) = channel();
        let mut writers = Vec::new();
        for record in records {
            let writer = Writer {
                seed: config.seed,
                may_fail,
                first: window(episode),
                random: Random::new(random.next()),
                counts: Counts::default(),
                log: Log::open(config)?,
                file: device::open(&config.disk, true).map_err(|e| e.to_string())?,
                record,
            };
            let (stop, is_going, send) = (stop.clone(), is_going.clone(), send.clone());
            writers.push(thread::spawn(move || {
                let ended = writer.write_until(&stop, send);
                // At once: the episode may end without a request for its result.
                ended.inspect_err(|reason| {
                    if !is_going.load(Ordering::Relaxed) {
                        console::say(&format!("episode {episode} wrong: {reason}"));
                    }
                })
            }));
        }
        drop(send);
        // Returns once each has dropped its sender: it has written, or it has ended and `end`
        // returns the reason.
        has_written.iter().for_each(drop);
        Ok(Self {
            stop,
            is_going,
            writers,
        })
    }

    /// Announces that the power goes off: requests that fail from now on are no errors.
    pub(super) fn power_goes(&self) {
        // Relaxed: it orders nothing; a request fails after a later system call.
        self.is_going.store(true, Ordering::Relaxed);
    }

    /// Stops the writers; each completes the request that it has under way.
    pub(super) fn end(self) -> Result<(Vec<Record>, Counts), String> {
        // Relaxed: it orders nothing; joining does.
        self.stop.store(true, Ordering::Relaxed);
        let (mut records, mut counts) = (Vec::new(), Counts::default());
        for writer in self.writers {
            let (record, own) = writer.join().map_err(|_| "a writer panicked")??;
            records.push(record);
            counts.writes += own.writes;
            counts.failed += own.failed;
        }
        Ok((records, counts))
    }
}

struct Writer {
    seed: u64,
    may_fail: MayFail,
    first: usize,
    random: Random,
    counts: Counts,
    log: Log,
    file: std::fs::File,
    record: Record,
}

impl Writer {
    fn write_until(
        mut self,
        stop: &AtomicBool,
        has_written: Sender<()>,
    ) -> Result<(Record, Counts), String> {
        let mut until_written = Some(has_written);
        while !stop.load(Ordering::Relaxed) {
            match self.random.below(10) {
                0..2 => self.flush()?,
                2..5 => self.read()?,
                _ => self.write()?,
            }
            if self.counts.writes > 0 {
                drop(until_written.take());
            }
        }
        Ok((self.record, self.counts))
    }

    fn write(&mut self) -> Result<(), String> {
        let index = self.record.next().index;
        let mut buffer = Buffer::new(BLOCK);
        buffer
            .bytes_mut()
            .copy_from_slice(&sealed(&self.record, self.seed));
        let number = self.record.block(index);
        self.until_done(|file| device::write(file, number, &buffer))?;
        self.counts.writes += 1;
        let next = choose(&mut self.random, self.first);
        self.record.acknowledge(next);
        self.log.put(&self.record)
    }

    /// Reads and checks one of the blocks that an acknowledged write wrote.
    fn read(&mut self) -> Result<(), String> {
        let index = choose(&mut self.random, self.first);
        if !self.record.is_written(index) {
            return Ok(());
        }
        let (number, mut buffer) = (self.record.block(index), Buffer::new(BLOCK));
        self.until_done(|file| device::read(file, number, &mut buffer))?;
        self.record.check(index, buffer.bytes(), self.seed)
    }

    fn flush(&mut self) -> Result<(), String> {
        match self.file.sync_data() {
            Err(error) if self.may_fail == MayFail::Nothing => Err(format!("a flush: {error}")),
            Err(_) => {
                self.counts.failed += 1;
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Repeats a request while it fails, if it may.
    fn until_done(
        &mut self,
        mut request: impl FnMut(&std::fs::File) -> io::Result<()>,
    ) -> Result<(), String> {
        let start = Instant::now();
        while let Err(error) = request(&self.file) {
            if self.may_fail != MayFail::Anything || start.elapsed() > LIMIT {
                return Err(error.to_string());
            }
            self.counts.failed += 1;
            thread::sleep(AGAIN);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_windows_of_all_episodes_are_inside_a_writers_blocks() {
        for episode in 0..40 {
            assert!(window(episode) + WINDOW <= OWNED, "{episode}");
        }
        assert_eq!((window(1), window(2)), (0, NEW));
    }
}
