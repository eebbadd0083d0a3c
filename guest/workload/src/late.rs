//! `late`: a disk is asked, again and again, to touch buffers that this guest has taken back.
//!
//! The kernel releases a buffer before the read that it belonged to returns. So by this program's
//! clock a page's age is never less than the time since its read returned, and the last trigger of
//! a round, which is another block, comes at the limit's age of the youngest page, or later. Before
//! it this program sleeps a few times more: whatever its kernel had planned for until then has run
//! by that, even if the processor did not for a while.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use workload::BLOCK;
use workload::device::{self, Buffer};

use crate::failure::Failure;
use crate::options::Options;

/// The block whose read is the trigger: sector 64.
const TRIGGER: u64 = 8;
/// The same, when this program has waited: sector 72.
const JUDGE: u64 = 9;
/// How often, and how long, it sleeps more.
const SLEEPS: u32 = 4;
const SLEEP: Duration = Duration::from_millis(10);
/// First of the blocks that are read otherwise.
const FIRST: u64 = 16;
/// Pages at most.
const BUFFERS_MAX: u64 = 4096;
/// What the disk writes at the start of a page: `vio_faults::ROGUE_BYTES`.
const ROGUE_BYTES: [u8; 8] = [0xee; 8];

/// Pages that the disk has changed, and triggers.
#[derive(Debug, Default)]
struct Counts {
    triggers: u64,
    changed: u64,
    changed_at_limit: u64,
}

/// The disk, and pages to read to.
struct Attack {
    file: File,
    /// Where the trigger is read to.
    own: Buffer,
    pages: Vec<Buffer>,
    counts: Counts,
}

impl Attack {
    /// Reads a block to each page.
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

    /// Has the disk touch the pages, by this block; how many it has changed.
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

    /// A round: from the reads to the trigger at the limit.
    fn round(&mut self, limit: Duration, step: Duration) -> io::Result<()> {
        self.fill()?;
        let start = Instant::now();
        // A millisecond more: the disk counts from the first trigger, which comes behind the reads.
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
