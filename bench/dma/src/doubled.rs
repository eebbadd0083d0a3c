//! Two threads against one: the targets that are ratios of the two, beside a control.
//!
//! Five cases take turns, all of them in each: a loop on one thread; on two threads of one space; on two threads with a
//! space each (the control: same loop, same types, nothing shared); and a loop of random numbers on one thread and two.
//! Ratios are made turn by turn, so that the machine is in the same mood for both sides, and their median counts.
//!
//! * **prescribed**: two threads of one space / one thread, divided by the same ratio of the random numbers;
//! * **against the control**: two threads of one space / two threads with a space each.
//!
//! They differ where two processors of this machine are not two: threads of one core, of which the other may be ours or
//! somebody else's. There the random numbers, each of which waits for the one before, leave room for another thread, and
//! an allocator's loop, which keeps the core busy, does not: threads that share nothing slow each other down, which the
//! prescribed ratio takes for a cost of sharing. The control does not.

use std::sync::Arc;

use anyhow::Result;

use crate::alloc::loops::{Sizes, WINDOW};
use crate::alloc::subject::{Apart, Ours};
use crate::alloc::{self, Best, space};
use crate::map::rig;
use crate::measure::primitives::private;
use crate::measure::{Case, Outcome, Tasks, Turns};
use crate::record::Record;
use crate::table;

/// How often a ratio takes turns, against other figures: it is of two that both vary.
const RUNS: usize = 3;

/// What the threads of a case work on.
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
    /// The target is a throughput; otherwise a time.
    is_throughput: bool,
    make: fn(Layout) -> Result<Tasks>,
}

/// The loops, in the order of the results page.
pub const LOOPS: [Loop; 4] = [
    Loop {
        name: "a1",
        title: "a-1",
        is_throughput: false,
        make: |layout| windows(layout, WINDOW, Sizes::One),
    },
    Loop {
        name: "c1",
        title: "c-1",
        is_throughput: false,
        make: |layout| windows(layout, WINDOW, Sizes::UpTo32 { shift: 20 }),
    },
    Loop {
        name: "slow",
        title: "a-1 with 65,536 ranges",
        is_throughput: true,
        make: |layout| windows(layout, 65_536, Sizes::One),
    },
    Loop {
        name: "map_unmap",
        title: "p-256 with allocated pages",
        is_throughput: false,
        make: map_unmap,
    },
];

fn windows(layout: Layout, window: usize, sizes: Sizes) -> Result<Tasks> {
    let Layout { threads, spaces } = layout;
    let each = |_| Ok(Ours(Best::new(space()?, threads / spaces)?));
    let spaces = (0..spaces).map(each).collect::<Result<_>>()?;
    alloc::loops::windows(&Apart(spaces), threads, window, 1, sizes)
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

/// The cases: their names in keys, for people, and what their threads work on; `None` for random numbers.
const CASES: [(&str, &str, usize, Option<usize>); 5] = [
    ("one", "one thread", 1, Some(1)),
    ("shared", "two threads, one space", 2, Some(1)),
    ("separate", "two threads, a space each", 2, Some(2)),
    ("private", "random numbers, one thread", 1, None),
    ("private", "random numbers, two threads", 2, None),
];

/// Measures all of them.
pub fn measure(turns: &Turns, record: &mut Record) {
    for of in &LOOPS {
        double(turns, record, of);
    }
}

/// Measures a loop and records rows `NAME_CASE`, ratios of times `NAME_2thr_times`, `NAME_2thr_control_times` and
/// `NAME_2thr_vs_separate_times`, and for the target `NAME_2thr_ratio` (`_raw` beside it) and `NAME_2thr_vs_separate`. Where the
/// target is a throughput, the latter two are of throughputs.
fn double(turns: &Turns, record: &mut Record, of: &Loop) {
    let &Loop {
        name,
        title,
        is_throughput,
        make,
    } = of;
    let cases = CASES.map(|(_, title, threads, spaces)| {
        Case::new(title, threads, move || match spaces {
            Some(spaces) => make(Layout { threads, spaces }),
            None => Ok((0..threads).map(private).collect()),
        })
    });
    record.section(&format!("two threads against one: {title}"));
    let found = turns.with_runs(turns.runs * RUNS).measure(&cases);
    for ((of, case), outcome) in CASES.iter().zip(&cases).zip(&found) {
        record.row(&format!("{name}_{}", of.0), case, outcome, "");
    }
    let [Ok(one), Ok(shared), Ok(separate), Ok(alone), Ok(both)] = &found[..] else {
        return;
    };
    let (raw, apart, control) = (
        ratio(shared, one),
        ratio(separate, one),
        ratio(shared, separate),
    );
    // The lesser of two ways to see it: random numbers that others disturbed would flatter what is divided by them.
    let random = ratio(both, alone).min(both.ns.min / alone.ns.min);
    record.number(&format!("{name}_2thr_random_times"), random, 3);
    for (key, times) in [
        ("times", raw),
        ("control_times", apart),
        ("vs_separate_times", control),
    ] {
        record.number(&format!("{name}_2thr_{key}"), times, 3);
    }
    let of_times = |times: f64| if is_throughput { 2.0 / times } else { times };
    let (shown, scaled) = (of_times(raw), of_times(raw / random));
    record.both(&format!("{name}_2thr_ratio"), Some(shown), Some(scaled), 3);
    let control = if is_throughput {
        1.0 / control
    } else {
        control
    };
    record.number(&format!("{name}_2thr_vs_separate"), control, 3);
    println!(
        "  {}: two of one space / one {shown:.3}, two with a space each / one {:.3}; random numbers {random:.3}",
        if is_throughput { "throughput" } else { "time" },
        of_times(apart),
    );
    println!(
        "  scaled by the random numbers {scaled:.3}; two of one space / two with a space each {control:.3}"
    );
}

/// The median of the turns' ratios.
fn ratio(this: &Outcome, other: &Outcome) -> f64 {
    let of = this.turn_by_turn(other, |this, other| Some(this.ns / other.ns));
    of.map_or(f64::NAN, |of| of.median)
}
