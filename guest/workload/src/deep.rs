//! Many requests in flight: each thread reads or writes one whole block at a time, so that as many
//! requests are in flight as there are threads.
//!
//! Windows are cut by requests, not by time. Answered requests are counted under a lock; the thread
//! whose request is the last before a marker writes the marker with the lock held, so that no
//! request is counted on the wrong side. Requests go on until the last window is over: it ends with
//! as many in flight as it began.
//!
//! The pattern of the whole device is made before the first request. Blocks read are compared with
//! it in place, and blocks written are written from it, so that in the windows a processor does
//! little besides requests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::BLOCK;
use crate::device::{self, Buffer};
use crate::marker::RequestWindows;
use crate::pattern;

/// Largest number of blocks of a device that are used: 64 MiB, all in memory.
pub const BLOCKS_MAX: u64 = 1 << 14;

/// Configuration of a run.
#[derive(Debug, Clone, Copy)]
pub struct DeepConfig {
    /// Number of threads; 1 to 64.
    pub depth: u64,
    /// Seed of the pattern.
    pub seed: u64,
    /// Whether blocks are written; otherwise they are read and compared.
    pub write: bool,
    /// Windows in which requests are counted.
    pub windows: RequestWindows,
}

/// Writes a marker. It stays in the thread that created it.
pub type Mark = Box<dyn Fn(u8)>;

/// Reads or writes the blocks in their order, again and again. `open` is called once in each
/// thread.
///
/// # Errors
/// The depth is out of range, or not below the number of blocks; a device's or a marker's own;
/// `InvalidData` for a block that is not as the pattern has it.
pub fn run(
    path: &Path,
    config: &DeepConfig,
    open: &(dyn Fn() -> io::Result<Mark> + Sync),
) -> io::Result<()> {
    let file = device::open(path, config.write)?;
    let blocks = device::blocks(&file)?.min(BLOCKS_MAX);
    if !(1..=64).contains(&config.depth) || config.depth >= blocks {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a depth of {} is outside 1 to 64, or not below {blocks} blocks",
                config.depth
            ),
        ));
    }
    let len = usize::try_from(blocks).expect("at most BLOCKS_MAX") * BLOCK;
    let mut content = Buffer::new(len);
    pattern::fill(config.seed, 0, content.bytes_mut());
    let shared = Shared {
        file: &file,
        config,
        content: content.bytes(),
        asked: AtomicU64::new(0),
        answered: Mutex::new(0),
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..config.depth)
            .map(|_| {
                scope.spawn(|| {
                    let ended = open().and_then(|mark| shared.work(&mark));
                    if ended.is_err() {
                        shared.stop();
                    }
                    ended
                })
            })
            .collect();
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        // All are joined, whichever panicked.
        let end = |end: thread::Result<_>| end.unwrap_or_else(|panic| resume_unwind(panic));
        ends.into_iter().try_for_each(end)
    })
}

/// State shared by all threads of a run.
struct Shared<'a> {
    file: &'a File,
    config: &'a DeepConfig,
    /// The pattern of the whole device.
    content: &'a [u8],
    /// Requests given to threads so far.
    asked: AtomicU64,
    /// Requests answered so far.
    answered: Mutex<u64>,
}

impl Shared<'_> {
    /// Returns the next request; `None` if the last window needs no more.
    fn next(&self) -> Option<u64> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        // The depth more, so that as many stay in flight until the last one of the windows is
        // answered.
        let last = self.config.windows.total() + self.config.depth;
        (number < last).then_some(number)
    }

    /// Makes every thread stop requesting.
    fn stop(&self) {
        // Far enough from the largest number for the increments of the other threads.
        self.asked.store(u64::MAX / 2, Ordering::Relaxed);
    }

    fn work(&self, mark: &Mark) -> io::Result<()> {
        let mut buffer = Buffer::new(BLOCK);
        while let Some(number) = self.next() {
            let blocks = (self.content.len() / BLOCK) as u64;
            let block = number % blocks;
            let at = usize::try_from(block).expect("at most BLOCKS_MAX") * BLOCK;
            let content = &self.content[at..at + BLOCK];
            if self.config.write {
                self.file.write_all_at(content, at as u64)?;
            } else {
                device::read(self.file, block, &mut buffer)?;
                if buffer.bytes() != content {
                    let text = format!("block {block} is not as it was written");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
            }
            // No thread panics with the lock held: it only counts.
            let mut answered = self.answered.lock().expect("counting cannot panic");
            *answered += 1;
            if let Some(value) = self.config.windows.marker_after(*answered) {
                mark(value);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::marker::{BEGIN, END};

    const SEED: u64 = 5;

    struct Image(std::path::PathBuf);

    impl Image {
        fn new(name: &str, content: &[u8]) -> Self {
            let path = std::env::temp_dir().join(format!("deep-{name}-{}", std::process::id()));
            fs::write(&path, content).unwrap();
            Self(path)
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn config(write: bool) -> DeepConfig {
        DeepConfig {
            depth: 8,
            seed: SEED,
            write,
            windows: RequestWindows::new(4, 30, 2).unwrap(),
        }
    }

    fn pattern_of(blocks: usize) -> Vec<u8> {
        let mut content = vec![0; blocks * BLOCK];
        pattern::fill(SEED, 0, &mut content);
        content
    }

    /// Runs it, and returns the markers in their order.
    fn marks(path: &Path, config: &DeepConfig) -> io::Result<Vec<u8>> {
        let marks = std::sync::Arc::new(Mutex::new(Vec::new()));
        run(path, config, &|| {
            let marks = marks.clone();
            Ok(Box::new(move |value| marks.lock().unwrap().push(value)) as Mark)
        })?;
        Ok(marks.lock().unwrap().clone())
    }

    #[test]
    fn reads_of_many_threads_are_compared_and_marked_once() {
        let image = Image::new("reads", &pattern_of(20));
        let seen = marks(&image.0, &config(false)).unwrap();
        assert_eq!(seen, [BEGIN, END, BEGIN, END]);
    }

    #[test]
    fn writes_of_many_threads_leave_the_pattern() {
        let image = Image::new("writes", &vec![0xee; 20 * BLOCK]);
        assert_eq!(marks(&image.0, &config(true)).unwrap().len(), 4);
        assert!(fs::read(&image.0).unwrap() == pattern_of(20));
    }

    #[test]
    fn a_wrong_byte_ends_all_threads_with_its_block() {
        let mut content = pattern_of(20);
        content[13 * BLOCK + 1] ^= 1;
        let image = Image::new("wrong", &content);
        let error = marks(&image.0, &config(false)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("block 13"), "{error}");
    }

    #[test]
    fn a_depth_that_would_meet_itself_on_a_block_is_refused() {
        let image = Image::new("small", &pattern_of(8));
        let error = marks(&image.0, &config(false)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_marker_that_is_not_to_be_had_ends_the_run() {
        let image = Image::new("unmarked", &pattern_of(20));
        let refused = || -> io::Result<Mark> { Err(io::ErrorKind::PermissionDenied.into()) };
        let error = run(&image.0, &config(false), &refused).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
