//! A workload in phases, done by a child: where memory is short the kernel ends the child, and not
//! who tells of it.
//!
//! Before each phase the child asks its parent, which marks the phase ([`marker::ITERATION`] plus
//! its number, and [`marker::OVER`] behind the last) and lets it go on. A child that was killed has
//! its remaining phases marked all the same, so that who counts from outside meets every mark.

use std::io::{self, PipeReader, PipeWriter, Read, Write};

use crate::child::{self, Child, Ended};
use crate::{age, marker};

/// Phases at most: as many markers there are before [`marker::ALLOC`].
pub const PHASES_MAX: u64 = (marker::ALLOC - marker::ITERATION) as u64;

/// What a child says before a phase.
const BEGINS: u8 = b'b';
/// What it says when the phases are over; its checksum follows.
const OVER: u8 = b'o';

/// Statuses of a child.
const WRONG: u8 = 1;
const SHORT: u8 = 2;

/// A child's side: when the next phase may begin.
#[derive(Debug)]
pub struct Phases<'a> {
    say: &'a mut PipeWriter,
    go: &'a mut PipeReader,
}

impl Phases<'_> {
    /// The phase before, if any, is over: waits until the next may begin.
    pub fn begin(&mut self) {
        // A parent that is gone kills its child.
        let _ = self.say.write_all(&[BEGINS]);
        let _ = self.go.read_exact(&mut [0]);
    }
}

/// Has a child do `work`, which begins `count` phases, and calls `mark` with the marker of each.
/// Answers the checksum that came of it, or `None` where memory was too short for it.
///
/// # Errors
/// The first wrong byte, as `work` says it; a child that ended in another way; more phases than
/// [`PHASES_MAX`].
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
        // A parent that is gone needs no word.
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

/// What the end of the child means.
fn verdict(ended: Ended, said: &[u8]) -> Result<Option<u64>, String> {
    match ended {
        Ended::Status(0) => {
            let sum = said.try_into().map_err(|_| "the child said no checksum")?;
            Ok(Some(u64::from_le_bytes(sum)))
        }
        Ended::Status(SHORT) | Ended::Killed(libc::SIGKILL) => Ok(None),
        Ended::Status(WRONG) => Err(String::from_utf8_lossy(said).into_owned()),
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
        assert_eq!(verdict(Ended::Killed(libc::SIGKILL), b""), Ok(None));
        assert!(verdict(Ended::Killed(libc::SIGSEGV), b"").is_err());
    }

    #[test]
    fn what_is_wrong_is_told_in_the_childs_words() {
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
