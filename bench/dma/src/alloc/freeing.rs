//! Random frees of a million live pages: each by itself, in lists, and Linux's. The allocations are
//! not timed.
//!
//! A free looks at the page's state first, which lies in one of some 16,000 lines: more than the
//! caches nearest to the core have; Linux's magazine looks at nothing. (Tried: a list that reads
//! the states of 16 ranges before it frees them. It was as fast as one that does not, so the
//! processor overlaps those misses by itself, and it was taken out again.)

use std::time::Instant;

use anyhow::{Context, Result};
use dma_linux::Linux;
use iova::{CoreAllocator, CoreId, IovaAllocator, IovaRange, Request};
use report::Measured;

use super::subject::{Called, OfLinux, Subject, Worker};
use super::{Best, LAST_PAGE, linux, space};
use crate::measure::{Random, Turns};
use crate::record::Record;

/// Live pages.
const LIVE: usize = 1 << 20;
/// Ranges of a list.
const LISTS: [usize; 2] = [32, 512];

/// Nanoseconds of a page, for what frees all of them.
fn per_page(free: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    free()?;
    Ok(start.elapsed().as_nanos() as f64 / LIVE as f64)
}

/// Returns `items` in a random order.
fn shuffled<T>(mut items: Vec<T>, random: &mut Random) -> Vec<T> {
    for at in (1..items.len()).rev() {
        items.swap(at, random.below(at as u64 + 1) as usize);
    }
    items
}

/// Ours, by lists of so many; 0: one by one.
fn ours(list: usize, random: &mut Random) -> Result<f64> {
    let space = Best::new(space()?, 1)?;
    let mut core = space.claim(CoreId(0))?;
    let live: Result<Vec<IovaRange>, _> =
        (0..LIVE).map(|_| core.alloc(Request::pages(1))).collect();
    let live = shuffled(live?, random);
    per_page(|| {
        match list {
            0 => live.iter().try_for_each(|range| core.free(*range))?,
            list => live
                .chunks(list)
                .try_for_each(|list| core.free_many(list))?,
        }
        Ok(())
    })
}

fn linuxs(linux: &'static Linux, random: &mut Random) -> Result<f64> {
    let subject = Called(OfLinux::new(linux)?);
    let mut worker = subject.worker(0)?;
    let live = shuffled(
        (0..LIVE).map(|_| worker.alloc(1, LAST_PAGE)).collect(),
        random,
    );
    per_page(|| {
        live.iter().for_each(|slot| worker.free(*slot));
        Ok(())
    })
}

/// Measures all of it, in turns.
///
/// # Errors
/// A space or a core cannot be had, or a range is refused.
pub fn measure(turns: &Turns, record: &mut Record) -> Result<()> {
    let linux = linux();
    let mut random = Random::of_core(0);
    let mut names = vec!["free_1m_chunk".to_owned()];
    names.extend(LISTS.map(|list| format!("free_1m_many{list}")));
    names.extend(linux.map(|_| "free_1m_linux".to_owned()));
    let mut times = vec![Vec::new(); names.len()];
    for _ in 0..turns.runs {
        let lists = [0].into_iter().chain(LISTS);
        let own: Result<Vec<f64>> = lists.map(|list| ours(list, &mut random)).collect();
        let mut round = own?;
        if let Some(linux) = linux {
            round.push(linuxs(linux, &mut random)?);
        }
        times
            .iter_mut()
            .zip(round)
            .for_each(|(all, one)| all.push(one));
    }
    println!("\nfrees of 1,048,576 live pages in random order, ns a page");
    for (name, times) in names.iter().zip(&times) {
        let measured = Measured::of(times.clone()).context("no runs")?;
        println!(
            "{name:40} {:>9.2} {:>9.2} {:>9.2}",
            measured.min, measured.median, measured.max
        );
        record.measured(&format!("{name}_ns"), &measured, 2);
    }
    if linux.is_some() {
        for at in 0..=LISTS.len() {
            let pairs = times[at].iter().zip(&times[names.len() - 1]);
            let ratio = Measured::of(pairs.map(|(ours, linux)| ours / linux));
            let ratio = ratio.context("no runs")?;
            record.measured(&format!("{}_ratio", names[at]), &ratio, 2);
        }
    }
    Ok(())
}
