//! Memory that has been used: a child writes it and ends, so that free pages of the guest hold
//! something.
//!
//! A guest that has just booted has never touched most of its memory, and a host has nothing to
//! keep of it. What is shown there is not what happens to a guest that has run for a while.

use crate::child::{self, Child, Ended};
use crate::memory::{CHUNK, Huge, Means, Memory, PAGE};

/// Pages of 1 MiB.
pub(crate) const MIB: u64 = (1 << 20) / PAGE as u64;

/// Has a child write `mib` MiB of memory, no word of which is zero, and waits for its end.
///
/// # Errors
/// In words, with what helps.
pub fn run(mib: u64) -> Result<(), String> {
    let pages = pages(mib)?;
    // Mapped here, so that the child need not allocate; what it touches is the child's alone.
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

fn verdict(ended: Ended, mib: u64) -> Result<(), String> {
    match ended {
        Ended::Status(0) => Ok(()),
        Ended::Status(status) => Err(format!("the child that writes ended with {status}")),
        Ended::Killed(signal) => Err(format!(
            "the child that writes was killed by signal {signal}: if that is 9, less than {mib} MiB are free; \
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
pub(crate) fn ended(child: std::io::Result<Child>) -> Result<(Ended, Vec<u8>), String> {
    child
        .and_then(Child::wait)
        .map_err(|error| format!("no child process: {error}"))
}

/// Pages of so many MiB.
///
/// # Errors
/// There are none, or more than this machine can have.
pub(crate) fn pages(mib: u64) -> Result<usize, String> {
    // 1 TiB: what an index of pages below has room for.
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
        let killed = verdict(Ended::Killed(9), 150).unwrap_err();
        assert!(killed.contains("less than 150 MiB") && killed.contains("--mib"));
        assert!(verdict(Ended::Status(child::PANICKED), 150).is_err());
    }

    #[test]
    fn senseless_sizes_are_refused() {
        assert!(run(0).unwrap_err().contains("0 MiB"));
        assert!(run(u64::MAX).unwrap_err().contains("MiB are not"));
    }
}
