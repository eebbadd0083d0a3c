//! Two threads against one: a loop on one thread, on two of one space, and on two with a space each
//! (the control: same loop, same types, nothing shared), in turns.
//!
//! The cost of sharing is two threads of one space against two with a space each. Two threads
//! against one is shown beside it: where two processors are halves of one core, threads that share
//! nothing slow each other down too.

use std::sync::Arc;

use anyhow::Result;

use crate::alloc::loops::{WINDOW, Window};
use crate::alloc::subject::{Apart, Called, Ours};
use crate::alloc::{self, Best, space};
use crate::map::rig;
use crate::measure::{Case, Tasks, Turns};
use crate::record::Record;
use crate::table;

/// Factor by which a ratio takes more turns than other figures: it is of two that both vary.
const RUNS: usize = 3;

/// Threads and spaces of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Threads of all spaces together, as many in each.
    pub threads: usize,
    /// Spaces; thread `t` is core `t / spaces` of space `t % spaces`.
    pub spaces: usize,
}

/// A loop that is measured on one thread and on two.
#[derive(Clone, Copy)]
pub struct Loop {
    /// Its name in keys.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    make: fn(Layout) -> Result<Tasks>,
}

/// The loops, in the order of the results page.
pub const LOOPS: [Loop; 4] = [
    Loop {
        name: "a1",
        title: "a-1",
        make: |layout| windows(layout, Window::of(WINDOW)),
    },
    Loop {
        name: "c1",
        title: "c-1",
        make: |layout| windows(layout, Window::of(WINDOW).pages(1, 31)),
    },
    Loop {
        name: "slow",
        title: "a-1 with 65,536 ranges",
        make: |layout| windows(layout, Window::of(65_536)),
    },
    Loop {
        name: "map_unmap",
        title: "p-256 with allocated pages",
        make: map_unmap,
    },
];

fn windows(layout: Layout, window: Window) -> Result<Tasks> {
    let Layout { threads, spaces } = layout;
    let each = |_| Ok(Ours(Best::new(space()?, threads / spaces)?));
    let spaces = (0..spaces).map(each).collect::<Result<_>>()?;
    alloc::loops::windows(&Called(Apart(spaces)), threads, window)
}

fn map_unmap(layout: Layout) -> Result<Tasks> {
    let Layout { threads, spaces } = layout;
    let each = |_| {
        let allocator = Best::new(space()?, threads / spaces)?;
        Ok((Arc::new(rig::table()?), allocator))
    };
    let spaces = (0..spaces).map(each).collect::<Result<Vec<_>>>()?;
    table::loops::allocated(&spaces, threads, 256)
}

/// The cases: their names in keys, for people, threads and spaces.
const CASES: [(&str, &str, usize, usize); 3] = [
    ("one", "one thread", 1, 1),
    ("shared", "two threads, one space", 2, 1),
    ("separate", "two threads, a space each", 2, 2),
];

/// Measures all of them: rows `NAME_CASE`, and the ratios of times `NAME_2thr_times` (one space /
/// one thread), `NAME_2thr_control_times` (a space each / one thread) and `NAME_2thr_vs_separate`
/// (one space / a space each).
pub fn measure(turns: &Turns, record: &mut Record) {
    for &Loop { name, title, make } in &LOOPS {
        let cases = CASES.map(|(_, title, threads, spaces)| {
            Case::new(title, threads, move || make(Layout { threads, spaces }))
        });
        record.section(&format!("two threads against one: {title}"));
        let found = turns.with_runs(turns.runs * RUNS).measure(&cases);
        for ((of, case), outcome) in CASES.iter().zip(&cases).zip(&found) {
            record.row(&format!("{name}_{}", of.0), case, outcome);
        }
        let [one, shared, separate] = [0, 1, 2].map(|at: usize| found[at].as_ref().ok());
        record.ratio(&format!("{name}_2thr_times"), shared, one);
        record.ratio(&format!("{name}_2thr_control_times"), separate, one);
        record.ratio(&format!("{name}_2thr_vs_separate"), shared, separate);
    }
}
