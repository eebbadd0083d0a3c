//! Workload in phases, executed by a child process: where memory is short the kernel kills the
//! child, and not the process that reports.
//!
//! Before each phase the child asks its parent, which writes the phase's marker
//! ([`marker::ITERATION`] plus its number, and [`marker::OVER`] behind the last) and permits it to
//! go on. If a child was killed, its remaining phases are marked all the same, so that a counter
//! outside the guest finds every marker.

use std::io::{self, PipeReader, PipeWriter, Read, Write};

use crate::child::{self, Child, ChildExit};
use crate::{age, marker};

/// Largest number of phases: as many markers as there are before [`marker::ALLOC`].
pub const PHASES_MAX: u64 = (marker::ALLOC - marker::ITERATION) as u64;

/// Byte that a child sends before a phase.
const BEGINS: u8 = b'b';
/// Byte that a child sends when the phases are over; its checksum follows.
const OVER: u8 = b'o';

/// Exit statuses of a child.
const WRONG: u8 = 1;
const SHORT: u8 = 2;

/// Child's side of the phases: it asks its parent before each.
#[derive(Debug)]
pub struct Phases<'a> {
    say: &'a mut PipeWriter,
    go: &'a mut PipeReader,
}

impl Phases<'_> {
    /// Ends the phase before, if any, and waits until the next may begin.
    pub fn begin(&mut self) {
        // If the parent is gone, the child is killed.
        let _ = self.say.write_all(&[BEGINS]);
        let _ = self.go.read_exact(&mut [0]);
    }
}

/// Runs `work` in a child. `work` begins `count` phases, and `mark` is called with the marker of
/// each. Returns the checksum that `work` returns, or `None` where memory was too short for it.
///
/// # Errors
/// The first wrong byte, as `work` describes it; a child that ended in another way; more phases
/// than [`PHASES_MAX`].
pub(crate) fn run(
    count: u64,
    mark: &mut dyn FnMut(u8),
    work: impl FnOnce(&mut Phases<'_>) -> Result<Option<u64>, String>,
) -> Result<Option<u64>, String> {
    if !(1..=PHASES_MAX).contains(&count) {
        return Err(format!("{count} phases are not 1 to {PHASES_MAX}"));
    }
    let no_child = |error: io::Error| format!("no child process: {error}");
    let (mut go, mut let_go) = io::pipe().map_err(no_child)?;
    let mut child = Child::start(|say| {
        child::offer_to_oom_killer();
        let outcome = work(&mut Phases {
            say: &mut *say,
            go: &mut go,
        });
        let (status, words) = match outcome {
            Ok(Some(sum)) => (0, sum.to_le_bytes().to_vec()),
            Ok(None) => (SHORT, Vec::new()),
            Err(wrong) => (WRONG, wrong.into_bytes()),
        };
        // If the parent is gone, the result has no recipient.
        let _ = say.write_all(&[OVER]).and_then(|()| say.write_all(&words));
        status
    })
    .map_err(no_child)?;
    let mut marks = (marker::ITERATION..marker::ALLOC).take(count as usize);
    while let Some(BEGINS) = child.next_byte().map_err(no_child)? {
        let next = marks.next();
        mark(next.ok_or_else(|| format!("more than the {count} phases it said"))?);
        let_go.write_all(&[0]).map_err(no_child)?;
    }
    let (ended, said) = age::ended(Ok(child))?;
    let outcome = verdict(ended, &said)?;
    marks.for_each(&mut *mark);
    mark(marker::OVER);
    Ok(outcome)
}

/// Returns the result that a child's end stands for.
fn verdict(ended: ChildExit, said: &[u8]) -> Result<Option<u64>, String> {
    match ended {
        ChildExit::Status(0) => {
            let sum = said.try_into().map_err(|_| "the child said no checksum")?;
            Ok(Some(u64::from_le_bytes(sum)))
        }
        ChildExit::Status(SHORT) | ChildExit::Killed(libc::SIGKILL) => Ok(None),
        ChildExit::Status(WRONG) => Err(String::from_utf8_lossy(said).into_owned()),
        ended => Err(format!("the child that works ended with {ended:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(
        count: u64,
        work: impl FnOnce(&mut Phases<'_>) -> Result<Option<u64>, String>,
    ) -> (Vec<u8>, Result<Option<u64>, String>) {
        let mut marks = Vec::new();
        let outcome = run(count, &mut |mark| marks.push(mark), work);
        (marks, outcome)
    }

    #[test]
    fn each_phase_is_marked_before_it_begins_and_the_sum_arrives() {
        let work = |phases: &mut Phases<'_>| {
            phases.begin();
            phases.begin();
            Ok(Some(7))
        };
        assert_eq!(marks(2, work), (vec![16, 17, 35], Ok(Some(7))));
    }

    #[test]
    fn one_that_memory_was_too_short_for_has_all_its_marks_and_no_sum() {
        let short = |phases: &mut Phases<'_>| {
            phases.begin();
            Ok(None)
        };
        assert_eq!(marks(3, short), (vec![16, 17, 18, 35], Ok(None)));
        assert_eq!(verdict(ChildExit::Killed(libc::SIGKILL), b""), Ok(None));
        assert!(verdict(ChildExit::Killed(libc::SIGSEGV), b"").is_err());
    }

    #[test]
    fn childs_error_is_returned_in_its_own_words() {
        let wrong = |_: &mut Phases<'_>| Err("page 7 is wrong".into());
        assert_eq!(marks(1, wrong).1, Err("page 7 is wrong".into()));
        let panics = |_: &mut Phases<'_>| panic!("on purpose");
        assert!(marks(1, panics).1.is_err());
    }

    #[test]
    fn more_phases_than_markers_are_refused() {
        let nothing = |_: &mut Phases<'_>| Ok(Some(0));
        assert!(marks(0, nothing).1.is_err() && marks(17, nothing).1.is_err());
        let two = |phases: &mut Phases<'_>| {
            phases.begin();
            phases.begin();
            Ok(Some(0))
        };
        assert!(marks(1, two).1.unwrap_err().contains("more than the 1"));
    }
}
