//! The machine's primitives, printed beside the figures, which are as measured.
//!
//! * **floor**: an object taken from an array that its core owns and put back, two calls that are
//!   not inlined;
//! * **private loop**: random numbers on one and on two threads that share nothing;
//! * **lock**: an uncontended [`lines::Lock`], taken and given back;
//! * **round trip**: a cache line there and back between the two CPUs.

use std::hint::black_box;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use lines::Lock;
use report::Measured;

use super::Random;
use super::threads::{BATCH, Task};
use super::turns::{Case, Outcome, Turns};

/// Objects of one magazine, as Bonwick and Linux have them.
const MAGAZINE: usize = 127;

/// An array of free objects that one core owns.
struct Magazine {
    len: usize,
    objects: [u64; MAGAZINE],
}

impl Magazine {
    #[inline(never)]
    fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        self.objects.get(self.len).copied()
    }

    #[inline(never)]
    fn push(&mut self, object: u64) -> bool {
        match self.objects.get_mut(self.len) {
            Some(place) => {
                *place = object;
                self.len += 1;
                true
            }
            None => false,
        }
    }
}

struct Floor(Box<Magazine>);

impl Task for Floor {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            let object = self.0.pop().expect("as many are put back as are taken");
            self.0.push(black_box(object));
        }
        BATCH
    }
}

struct Private(Random);

impl Task for Private {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            black_box(self.0.bits());
        }
        BATCH
    }
}

struct Locking(Lock<u64>);

impl Task for Locking {
    fn batch(&mut self, _: &AtomicBool) -> u64 {
        for _ in 0..BATCH {
            *self.0.lock() += 1;
        }
        BATCH
    }
}

fn magazine() -> Box<Floor> {
    Box::new(Floor(Box::new(Magazine {
        len: 64,
        objects: [0; MAGAZINE],
    })))
}

fn private(id: usize) -> Box<dyn Task> {
    Box::new(Private(Random::of_core(id)))
}

/// The primitives of one run of the program.
#[derive(Clone, Debug)]
pub struct Primitives {
    /// See the module's head.
    pub floor_ns: Measured,
    /// One thread.
    pub private_ns: Measured,
    /// Two threads; `None` where there is one CPU.
    pub private_2thr_ns: Option<Measured>,
    /// See the module's head.
    pub lock_ns: Measured,
    /// `None` where there is one CPU.
    pub rtt_ns: Option<Measured>,
}

impl Primitives {
    /// Measures them.
    ///
    /// # Errors
    /// The CPUs cannot be used.
    pub fn measure(turns: &Turns) -> Result<Self> {
        let cases = [
            Case::new("floor", 1, || Ok(vec![magazine()])),
            Case::new("private", 1, || Ok(vec![private(0)])),
            Case::new("lock", 1, || Ok(vec![Box::new(Locking(Lock::new(0)))])),
            Case::new("private 2", 2, || Ok(vec![private(0), private(1)])),
        ];
        let rtt = (0..turns.runs).filter_map(|_| turns.round_trip());
        let rtt_ns = Measured::of(rtt);
        let found = turns.measure(&cases);
        let ns = |outcome: &Result<Outcome>| outcome.as_ref().ok().map(|outcome| outcome.ns);
        let must = |index: usize| ns(&found[index]).context("one thread on the first CPU");
        Ok(Self {
            floor_ns: must(0)?,
            private_ns: must(1)?,
            lock_ns: must(2)?,
            private_2thr_ns: ns(&found[3]),
            rtt_ns,
        })
    }

    /// Two threads that share nothing against one; `None` where there is one CPU.
    pub fn private_ratio(&self) -> Option<f64> {
        self.private_2thr_ns
            .map(|two| two.min / self.private_ns.min)
    }
}
