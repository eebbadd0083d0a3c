//! Memory that has been used: a child writes it and ends, so that free pages of the guest are not
//! zero.
//!
//! A guest that has just booted has never touched most of its memory, and its host need not store
//! those pages. Counts of such a guest do not apply to one that has run for a while.

use crate::child::{self, Child, ChildExit};
use crate::memory::{CHUNK, Huge, Means, Memory, PAGE};

/// Pages of a MiB.
pub(crate) const MIB: u64 = (1 << 20) / PAGE as u64;

/// Has a child write `mib` MiB of memory, no word of which is zero, and waits for its end.
///
/// # Errors
/// A description, with advice.
pub fn run(mib: u64) -> Result<(), String> {
    let pages = pages(mib)?;
    // Mapped here, so that the child need not allocate; the pages that it touches are its own.
    let mut memory = map(pages)?;
    let child = Child::start(|_| {
        child::offer_to_oom_killer();
        for first in (0..pages).step_by(CHUNK) {
            let run = first..memory.end_of_chunk(first);
            memory.set(run, u64::MAX - first as u64, Means::RepWords);
        }
        0
    });
    verdict(ended(child)?.0, mib)
}

fn verdict(ended: ChildExit, mib: u64) -> Result<(), String> {
    match ended {
        ChildExit::Status(0) => Ok(()),
        ChildExit::Status(status) => Err(format!("the child that writes ended with {status}")),
        ChildExit::Killed(signal) => Err(format!(
            "the child that writes was killed by signal {signal}: if that is 9, less than {mib} \
             MiB are free; \
             take a smaller --mib"
        )),
    }
}

/// Maps pages that are touched one by one.
pub(crate) fn map(pages: usize) -> Result<Memory, String> {
    Memory::new(pages, Huge::Never)
        .map_err(|error| format!("no address space for {pages} pages: {error}"))
}

/// Waits for a child that has been started.
pub(crate) fn ended(child: std::io::Result<Child>) -> Result<(ChildExit, Vec<u8>), String> {
    child
        .and_then(Child::wait)
        .map_err(|error| format!("no child process: {error}"))
}

/// Returns the number of pages of so many MiB.
///
/// # Errors
/// The number is zero, or larger than this machine supports.
pub(crate) fn pages(mib: u64) -> Result<usize, String> {
    // 1 TiB: an index of pages is large enough for it.
    match usize::try_from(mib) {
        Ok(mib) if (1..=1 << 20).contains(&mib) => Ok(mib * (MIB as usize)),
        _ => Err(format!("{mib} MiB are not 1 to {}", 1 << 20)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_by_a_child_that_has_ended() {
        assert_eq!(run(4), Ok(()));
    }

    #[test]
    fn a_child_that_did_not_write_all_is_told_of() {
        let killed = verdict(ChildExit::Killed(9), 150).unwrap_err();
        assert!(killed.contains("less than 150 MiB") && killed.contains("--mib"));
        assert!(verdict(ChildExit::Status(child::PANICKED), 150).is_err());
    }

    #[test]
    fn senseless_sizes_are_refused() {
        assert!(run(0).unwrap_err().contains("0 MiB"));
        assert!(run(u64::MAX).unwrap_err().contains("MiB are not"));
    }
}
