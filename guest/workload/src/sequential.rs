//! The phases of the swapper's demonstration: a disk is read in order, repeatedly, through the page
//! cache; then a child fills memory of its own, page by page, and reads it again.
//!
//! In a guest whose memory seems large enough for both, the host first sees the accesses of a page
//! cache, then those of a process that overwrites whole pages of it. Everything is checked: the
//! disk against the pattern of [`crate::pattern`], the child's pages against [`crate::block`].
//!
//! The host may count by phase: marker [`marker::ITERATION`] plus *i* is written before iteration
//! *i*, [`marker::ALLOC`] after the last, [`marker::CHECK`] when the child has filled its memory,
//! [`marker::ALLOC_END`] after the child's end. An iteration is reported before the next marker.
//!
//! Left out: time.

use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::age::{self, MIB};
use crate::child::{self, Child, ChildExit};
use crate::memory::{Memory, PAGE};
use crate::{BLOCK, block, device, marker, pattern};

/// Bytes of one read(2): the size of Linux's read-ahead by default.
const READ: usize = 128 << 10;

/// Largest number of iterations: as many markers as there are before [`marker::ALLOC`].
pub const ITERATIONS_MAX: u64 = (marker::ALLOC - marker::ITERATION) as u64;

/// Byte that the child sends when its pages are filled.
const FILLED: u8 = b'f';

/// Generation that the child's pages are sealed with.
const GENERATION: u64 = 1;

/// Configuration of a run.
#[derive(Debug, Clone)]
pub struct SequentialConfig {
    /// The disk, or a file; has the pattern.
    pub disk: PathBuf,
    /// MiB of it that are read.
    pub mib: u64,
    /// Number of iterations; at most [`ITERATIONS_MAX`].
    pub iterations: u64,
    /// MiB that the child fills; 0 for no child.
    pub alloc_mib: u64,
    /// Seed of the pattern, and of the child's pages.
    pub seed: u64,
}

/// Event of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A phase is about to begin, or the last is over: write this marker.
    Mark(u8),
    /// All pages of an iteration were right.
    Read {
        /// Number of the iteration, from 0.
        iteration: u64,
        /// Number of pages.
        pages: u64,
    },
    /// All pages of the child were right.
    Alloc {
        /// Number of pages.
        pages: u64,
    },
    /// The child was killed, as the guest's out-of-memory killer does.
    AllocKilled,
}

/// Executes the phases.
///
/// # Errors
/// The first wrong byte, or the system's error, as text.
pub fn run(config: &SequentialConfig, event: &mut dyn FnMut(Event)) -> Result<(), String> {
    let iterations = config.iterations;
    if iterations > ITERATIONS_MAX {
        return Err(format!(
            "{iterations} iterations are more than {ITERATIONS_MAX}"
        ));
    }
    let pages = age::pages(config.mib)? as u64;
    let path = config.disk.as_path();
    let explain = |error: io::Error| device::explain(path, &error);
    // Held open: when the last descriptor of a disk is closed, Linux drops its page cache.
    let held = device::open_cached(path, false).map_err(explain)?;
    let blocks = device::blocks(&held).map_err(explain)?;
    if blocks < pages {
        let (mib, has) = (config.mib, blocks / MIB);
        return Err(format!(
            "{}: has {has} MiB, and {mib} are to be read: take a smaller --mib, or a larger disk",
            path.display()
        ));
    }
    let mut buffer = vec![0; READ];
    for iteration in 0..iterations {
        event(Event::Mark(marker_of(iteration)));
        // Opened again, so that read-ahead starts anew in each iteration.
        let file = device::open_cached(path, false).map_err(explain)?;
        read(path, &file, pages, config.seed, &mut buffer)
            .map_err(|wrong| format!("iteration {iteration}: {wrong}"))?;
        event(Event::Read { iteration, pages });
    }
    event(Event::Mark(marker::ALLOC));
    if config.alloc_mib > 0 {
        let outcome = alloc(config, &mut || event(Event::Mark(marker::CHECK)))?;
        event(Event::Mark(marker::ALLOC_END));
        event(outcome);
    }
    Ok(())
}

fn marker_of(iteration: u64) -> u8 {
    marker::ITERATION + u8::try_from(iteration).expect("at most ITERATIONS_MAX")
}

/// Reads and checks `pages` pages from the beginning.
fn read(path: &Path, file: &File, pages: u64, seed: u64, buffer: &mut [u8]) -> Result<(), String> {
    let mut at = 0;
    let end = pages * PAGE as u64;
    while at < end {
        let len = usize::try_from(end - at).map_or(READ, |left| left.min(READ));
        let data = &mut buffer[..len];
        file.read_exact_at(data, at)
            .map_err(|error| format!("{}: byte {at:#x}: {error}", path.display()))?;
        if let Some(wrong) = pattern::first_difference(seed, at, data) {
            return Err(wrong_byte(path, seed, at, wrong, data));
        }
        at += len as u64;
    }
    Ok(())
}

/// Describes the wrong byte at `wrong` in `data`, which was read at `at`.
fn wrong_byte(path: &Path, seed: u64, at: u64, wrong: u64, data: &[u8]) -> String {
    let index = usize::try_from(wrong - at).expect("an index of the buffer");
    let mut wanted = vec![0; data.len()];
    pattern::fill(seed, at, &mut wanted);
    let path = path.display();
    format!(
        "{path}: byte {wrong:#x} (block {}) is {:#04x}, wanted {:#04x} of the pattern with seed \
         {seed} \
         (`workload write-pattern {path} --bytes N --seed {seed}` lays it down)",
        wrong / BLOCK as u64,
        data[index],
        wanted[index],
    )
}

/// Has a child fill pages, calls `filled`, and has the child read the pages again.
fn alloc(config: &SequentialConfig, filled: &mut dyn FnMut()) -> Result<Event, String> {
    let no_child = |error: io::Error| format!("no child process: {error}");
    let pages = age::pages(config.alloc_mib)?;
    let mut memory = age::map(pages)?;
    let (mut go, mut let_go) = io::pipe().map_err(no_child)?;
    let mut child = Child::start(|say| {
        child::offer_to_oom_killer();
        fill(&mut memory, config.seed);
        // If the parent is gone, the child is killed.
        let _ = say.write_all(&[FILLED]);
        let _ = go.read_exact(&mut [0]);
        first_wrong(&memory, config.seed).map_or(0, |page| tell(say, &memory, page))
    })
    .map_err(no_child)?;
    // A child that was killed has closed the pipe; its end is examined below.
    child.next_byte().map_err(no_child)?;
    filled();
    let_go.write_all(&[0]).map_err(no_child)?;
    let (ended, said) = age::ended(Ok(child))?;
    alloc_ended(ended, &said, pages as u64, config.seed)
}

/// Returns the event or error that a child's end stands for.
fn alloc_ended(ended: ChildExit, said: &[u8], pages: u64, seed: u64) -> Result<Event, String> {
    match ended {
        ChildExit::Status(0) => Ok(Event::Alloc { pages }),
        ChildExit::Killed(libc::SIGKILL) => Ok(Event::AllocKilled),
        ChildExit::Status(1) => Err(wrong_page(said, seed)),
        ended => Err(format!("the child of phase alloc ended with {ended:?}")),
    }
}

fn fill(memory: &mut Memory, seed: u64) {
    for page in 0..memory.pages() {
        block::seal(
            memory.bytes_mut(page..page + 1),
            page as u64,
            GENERATION,
            seed,
        );
    }
}

fn first_wrong(memory: &Memory, seed: u64) -> Option<usize> {
    let is_wrong = |page: &usize| {
        let found = memory.bytes(*page..page + 1);
        block::check(found, *page as u64, GENERATION, seed).is_err()
    };
    (0..memory.pages()).find(is_wrong)
}

/// Sends the number and content of a wrong page to the parent.
fn tell(say: &mut PipeWriter, memory: &Memory, page: usize) -> u8 {
    // If the parent is gone, the message has no recipient.
    let _ = say
        .write_all(&(page as u64).to_le_bytes())
        .and_then(|()| say.write_all(memory.bytes(page..page + 1)));
    1
}

/// Describes a wrong page that the child has sent.
fn wrong_page(said: &[u8], seed: u64) -> String {
    let Some((number, found)) = said
        .split_first_chunk::<8>()
        .filter(|(_, found)| found.len() == PAGE)
    else {
        return "alloc: a page of the child is wrong, and it could not say which".into();
    };
    let number = u64::from_le_bytes(*number);
    let mut wanted = vec![0; PAGE];
    block::seal(&mut wanted, number, GENERATION, seed);
    let damage = block::check(found, number, GENERATION, seed)
        .map_or_else(|damage| damage.to_string(), |()| "is right now".into());
    let differs = |(_, (found, wanted)): &(usize, (&u8, &u8))| found != wanted;
    match found.iter().zip(&wanted).enumerate().find(differs) {
        Some((at, (found, wanted))) => format!(
            "alloc: page {number} of the child: byte {at:#x} is {found:#04x}, wanted \
             {wanted:#04x}; {damage}"
        ),
        None => format!("alloc: page {number} of the child: {damage}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const SEED: u64 = 4;

    struct Image(PathBuf);

    impl Image {
        /// 2 MiB of the pattern.
        fn new(name: &str) -> Self {
            let name = format!("sequential-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let mut data = vec![0; 2 << 20];
            pattern::fill(SEED, 0, &mut data);
            fs::write(&path, data).unwrap();
            Self(path)
        }

        fn config(&self) -> SequentialConfig {
            SequentialConfig {
                disk: self.0.clone(),
                mib: 2,
                iterations: 2,
                alloc_mib: 1,
                seed: SEED,
            }
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn events(config: &SequentialConfig) -> Result<Vec<Event>, String> {
        let mut events = Vec::new();
        run(config, &mut |event| events.push(event)).map(|()| events)
    }

    #[test]
    fn phases_are_marked_and_told_in_order() {
        let image = Image::new("order");
        let read = |iteration| Event::Read {
            iteration,
            pages: 512,
        };
        assert_eq!(
            events(&image.config()).unwrap(),
            [
                Event::Mark(16),
                read(0),
                Event::Mark(17),
                read(1),
                Event::Mark(32),
                Event::Mark(33),
                Event::Mark(34),
                Event::Alloc { pages: 256 },
            ]
        );
        let mut config = image.config();
        config.alloc_mib = 0;
        assert_eq!(events(&config).unwrap().last(), Some(&Event::Mark(32)));
    }

    #[test]
    fn a_byte_that_changes_between_iterations_is_named() {
        let image = Image::new("changed");
        let file = File::options().write(true).open(&image.0).unwrap();
        let mut wanted = vec![0; 8];
        let at = (1 << 20) + 77;
        pattern::fill(SEED, at - at % 8, &mut wanted);
        let byte = wanted[(at % 8) as usize];
        let mut seen = Vec::new();
        let wrong = run(&image.config(), &mut |event| {
            if event == Event::Mark(17) {
                file.write_all_at(&[byte ^ 1], at).unwrap();
            }
            seen.push(event);
        })
        .unwrap_err();
        assert_eq!(seen.len(), 3, "{seen:?}");
        let text = format!(
            "byte 0x10004d (block 256) is {:#04x}, wanted {byte:#04x}",
            byte ^ 1
        );
        assert!(
            wrong.starts_with("iteration 1: ") && wrong.contains(&text),
            "{wrong}"
        );
    }

    #[test]
    fn a_wrong_page_of_the_child_is_named() {
        let mut memory = age::map(4).unwrap();
        fill(&mut memory, SEED);
        assert_eq!(first_wrong(&memory, SEED), None);
        memory.copy(1..2, 2, crate::memory::Means::Library);
        let page = first_wrong(&memory, SEED);
        assert_eq!(page, Some(2));
        let (_, said) = Child::start(|say| tell(say, &memory, 2))
            .unwrap()
            .wait()
            .unwrap();
        let text =
            "page 2 of the child: byte 0x8 is 0x01, wanted 0x02; block 2: number is 1, not 2";
        assert!(
            wrong_page(&said, SEED).contains(text),
            "{}",
            wrong_page(&said, SEED)
        );
        let told = alloc_ended(ChildExit::Status(1), &said, 4, SEED);
        assert_eq!(told, Err(wrong_page(&said, SEED)));
        assert!(alloc_ended(ChildExit::Status(1), b"", 4, SEED).is_err());
        memory.give_back(1..2).unwrap();
        assert_eq!(first_wrong(&memory, SEED), Some(1));
    }

    #[test]
    fn a_child_that_memory_was_short_for_is_no_failure_and_another_signal_is() {
        let ended = |signal| alloc_ended(ChildExit::Killed(signal), b"", 4, SEED);
        assert_eq!(ended(libc::SIGKILL), Ok(Event::AllocKilled));
        assert!(ended(libc::SIGSEGV).unwrap_err().contains("Killed(11)"));
        assert!(alloc_ended(ChildExit::Status(101), b"", 4, SEED).is_err());
    }

    #[test]
    fn bad_config_is_refused_with_advice() {
        let image = Image::new("refused");
        let refused = |change: &dyn Fn(&mut SequentialConfig)| {
            let mut config = image.config();
            change(&mut config);
            events(&config).unwrap_err()
        };
        assert!(refused(&|config| config.mib = 3).contains("has 2 MiB, and 3"));
        assert!(refused(&|config| config.iterations = 17).contains("17 iterations"));
        let gone = refused(&|config| config.disk = "/dev/vdz".into());
        assert!(
            gone.contains("/dev/vdz") && gone.contains("ls /dev/vd*"),
            "{gone}"
        );
    }
}
