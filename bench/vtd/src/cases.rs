//! The cases that are measured beside the old build. They are compiled against the crates of
//! either, so they use only what both have.
//!
//! The unit is one of a closed enum, matched once per poll, with generic code behind: as in the
//! program.

use std::hint::black_box;
use std::time::Instant;

use guest_mem::{Dma, Iommu, Iova, LeaseId, NoIommu, PAGE_SIZE, Perm, View};
use vtd::spec::registers;
use vtd::{AccessLen, Unit};

use crate::guest::{DISK, Guest, IOVA, PAGES, Quiet, SCATTERED, SCATTERED_PAGES};

/// Runs of each measurement in one process.
const RUNS: usize = 15;
const _: () = assert!(64 * 16 <= SCATTERED_PAGES, "as many pages as are used");
/// Requests of one poll.
const BATCH: u64 = 32;

/// The names that [`run`] knows.
pub const CASES: [&str; 4] = ["hit", "hit_64k", "scattered_64k", "drain_256"];

/// The IOMMUs that a program composes.
enum Units {
    Vtd(Box<Unit>),
    None(NoIommu),
}

/// A function over a unit of either type.
trait Visitor {
    fn visit<I: Iommu>(&mut self, iommu: &mut I);
}

impl Units {
    fn visit(&mut self, visitor: &mut impl Visitor) {
        match self {
            Self::Vtd(unit) => visitor.visit(&mut **unit),
            Self::None(none) => visitor.visit(none),
        }
    }
}

/// Requests for `len` bytes each, at 64 different places from `from` on, so that the branch
/// predictor learns no one.
struct Requests<'a> {
    guest: &'a Guest,
    from: u64,
    len: u64,
    next: u64,
    held: Vec<LeaseId>,
}

impl Visitor for Requests<'_> {
    #[inline(never)]
    fn visit<I: Iommu>(&mut self, iommu: &mut I) {
        let mut dma = View::new(iommu, &self.guest.ram, DISK);
        for _ in 0..BATCH {
            let start = black_box(self.from + self.next % 64 * self.len);
            self.next += 1;
            let lease = dma
                .lease(Iova::new(start), self.len as u32, Perm::Write)
                .expect("mapped");
            black_box(lease.hva);
            let mut done = u64::from(lease.len);
            if done == self.len {
                dma.release(lease.id);
                continue;
            }
            // As many leases as it takes.
            self.held.push(lease.id);
            while done < self.len {
                let iova = Iova::new(start + done);
                let lease = dma
                    .lease(iova, (self.len - done) as u32, Perm::Write)
                    .expect("mapped");
                black_box(lease.hva);
                done += u64::from(lease.len);
                self.held.push(lease.id);
            }
            for id in self.held.drain(..) {
                dma.release(id);
            }
        }
    }
}

/// Nanoseconds of one operation of `case`, the median of some runs, while `leases` other leases are
/// in flight.
pub fn run(case: &str, leases: u64) -> Option<f64> {
    let guest = Guest::new().expect("guest memory");
    let mut unit = guest.unit();
    let mut dma = View::new(&mut unit, &guest.ram, DISK);
    for page in 0..leases {
        let iova = Iova::new(IOVA + page % PAGES * PAGE_SIZE);
        let lease = dma.lease(iova, 512, Perm::Read).expect("mapped");
        // Held to the end.
        let _ = lease;
    }
    match case {
        "hit" => Some(requests(&guest, unit, IOVA, PAGE_SIZE)),
        "hit_64k" => Some(requests(&guest, unit, IOVA, 16 * PAGE_SIZE)),
        "scattered_64k" => Some(requests(&guest, unit, SCATTERED, 16 * PAGE_SIZE)),
        "drain_256" => Some(drain(guest, unit)),
        _ => None,
    }
}

fn median(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

fn requests(guest: &Guest, unit: Unit, from: u64, len: u64) -> f64 {
    // The other kind of unit is there, so that the match is one.
    let mut units = black_box([Units::Vtd(Box::new(unit)), Units::None(NoIommu::new(8))]);
    let mut requests = Requests {
        guest,
        from,
        len,
        next: 0,
        held: Vec::new(),
    };
    let polls = 64_000 / (len / PAGE_SIZE) / BATCH;
    let runs = (0..=RUNS).map(|_| {
        let start = Instant::now();
        for _ in 0..polls {
            black_box(&mut units[0]).visit(&mut requests);
        }
        start.elapsed().as_nanos() as f64 / (polls * BATCH) as f64
    });
    // The first one warms up.
    median(runs.skip(1).collect())
}

/// 255 page-selective invalidations and a wait: filling the queue is the guest's work and not
/// timed.
fn drain(mut guest: Guest, mut unit: Unit) -> f64 {
    let runs = (0..64).map(|i| {
        guest.invalidate_pages(254);
        let tail = guest.wait(i);
        unit.write(registers::IQT, AccessLen::B4, tail);
        let start = Instant::now();
        while unit.read(registers::IQH, AccessLen::B8) != tail {
            unit.step(&guest.ram, 0, &mut Quiet);
        }
        start.elapsed().as_nanos() as f64
    });
    median(runs.skip(1).collect())
}
