//! `late`: a disk is made to access buffers that the guest has unmapped.
//!
//! The kernel unmaps a buffer before the read that it belonged to returns. By this program's clock,
//! the time since that read returned is therefore at most the page's age. The last trigger of a
//! round, which reads another block, comes when the youngest page has reached the limit's age, or
//! later. This program sleeps a few times before it, so that all work which the guest kernel had
//! planned for until then has run, even if the processor did not run for a while.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use workload::BLOCK;
use workload::device::{self, Buffer};

use crate::failure::Failure;
use crate::options::Options;

/// Block whose read is the trigger: sector 64.
const TRIGGER: u64 = 8;
/// Block whose read is the trigger after the limit: sector 72.
const JUDGE: u64 = 9;
/// Number and length of the additional sleeps.
const SLEEPS: u32 = 4;
const SLEEP: Duration = Duration::from_millis(10);
/// First of the blocks that fill the pages.
const FIRST: u64 = 16;
/// Largest number of pages.
const BUFFERS_MAX: u64 = 4096;
/// Bytes that the disk writes at the start of a page: `vio_faults::ROGUE_BYTES`.
const ROGUE_BYTES: [u8; 8] = [0xee; 8];

/// Counts of triggers, and of pages that the disk has changed.
#[derive(Debug, Default)]
struct Counts {
    triggers: u64,
    changed: u64,
    changed_at_limit: u64,
}

/// State of the attack: the disk, and the pages that are read into.
struct Attack {
    file: File,
    /// Buffer for the block of the trigger.
    own: Buffer,
    pages: Vec<Buffer>,
    counts: Counts,
}

impl Attack {
    /// Reads a block into each page.
    fn fill(&mut self) -> io::Result<()> {
        for (block, page) in (FIRST..).zip(&mut self.pages) {
            device::read(&self.file, block, page)?;
            if page.bytes().starts_with(&ROGUE_BYTES) {
                let why = format!("block {block} begins with the bytes that mark an attack");
                return Err(io::Error::other(why));
            }
        }
        Ok(())
    }

    /// Makes the disk touch the pages, by a read of this block. Returns the number of pages it has
    /// changed.
    fn trigger(&mut self, block: u64) -> io::Result<u64> {
        device::read(&self.file, block, &mut self.own)?;
        self.counts.triggers += 1;
        let mut changed = 0;
        for page in &mut self.pages {
            let start = &mut page.bytes_mut()[..ROGUE_BYTES.len()];
            if *start == ROGUE_BYTES {
                changed += 1;
                start.fill(0);
            }
        }
        self.counts.changed += changed;
        Ok(changed)
    }

    /// Executes a round: from the reads to the trigger at the limit.
    fn round(&mut self, limit: Duration, step: Duration) -> io::Result<()> {
        self.fill()?;
        let start = Instant::now();
        // A millisecond more: the disk counts from the first trigger, which follows the reads.
        let end = start + limit + Duration::from_millis(1);
        self.trigger(TRIGGER)?;
        let end = end + start.elapsed();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            thread::sleep(left.min(step));
            if Instant::now() >= end {
                break;
            }
            self.trigger(TRIGGER)?;
        }
        for _ in 0..SLEEPS {
            thread::sleep(SLEEP);
        }
        self.counts.changed_at_limit += self.trigger(JUDGE)?;
        Ok(())
    }
}

/// Runs all rounds.
pub fn run(options: &mut Options) -> Result<(), Failure> {
    let limit = options.number("limit-ms", None)?;
    let buffers = options.number("buffers", Some(50))?;
    let rounds = options.number("rounds", Some(20))?;
    let step = options.number("step-ms", Some((limit / 8).max(1)))?;
    if !(1..=BUFFERS_MAX).contains(&buffers) || limit == 0 || step == 0 {
        return Err(Failure::Usage(format!(
            "--limit-ms and --step-ms are at least 1, --buffers is 1 to {BUFFERS_MAX}"
        )));
    }
    let file = device::open(Path::new(&options.subject("DEV")?), false)?;
    if device::blocks(&file)? < FIRST + buffers {
        return Err(Failure::Usage(format!(
            "the disk has less than the {} blocks that {buffers} buffers take",
            FIRST + buffers
        )));
    }
    let mut attack = Attack {
        file,
        own: Buffer::new(BLOCK),
        pages: (0..buffers).map(|_| Buffer::new(BLOCK)).collect(),
        counts: Counts::default(),
    };
    // From the first on the disk remembers buffers.
    attack.trigger(TRIGGER)?;
    for _ in 0..rounds {
        attack.round(Duration::from_millis(limit), Duration::from_millis(step))?;
    }
    let Counts {
        triggers,
        changed,
        changed_at_limit,
    } = attack.counts;
    println!(
        "late ok rounds={rounds} buffers={buffers} triggers={triggers} changed={changed} \
         changed_at_limit={changed_at_limit}"
    );
    Ok(())
}
