//! The cores of a space whose handles cache ranges: which have a handle, what each has counted, and
//! which were asked to drain.
//!
//! A core writes its own line of counters; its flag is set by others and cleared by itself.

use alloc::boxed::Box;

use lines::{AtomicBool, CachePadded, Ordering};

use iova::parts::Claims;
use iova::{ApertureError, CoreId};

use crate::backing::{Counters, Counts};

pub(crate) struct Crew {
    pub(crate) claims: Claims,
    flags: Box<[CachePadded<AtomicBool>]>,
    counters: Box<[CachePadded<Counters>]>,
}

impl Crew {
    pub(crate) fn new(cores: usize) -> Result<Self, ApertureError> {
        Ok(Self {
            claims: Claims::new(cores)?,
            flags: (0..cores)
                .map(|_| CachePadded::new(AtomicBool::new(false)))
                .collect(),
            counters: (0..cores).map(|_| CachePadded::default()).collect(),
        })
    }

    /// Returns the counters of a core.
    #[inline]
    pub(crate) fn counters(&self, core: CoreId) -> &Counters {
        &self.counters[core.0]
    }

    /// Returns the sum of the counters of all cores.
    pub(crate) fn sum(&self) -> Counts {
        Counters::sum(self.counters.iter().map(|counters| &**counters))
    }

    /// Cores that have their handles.
    pub(crate) fn claimed(&self) -> usize {
        let cores = 0..self.claims.cores();
        cores.filter(|&core| self.claims.is_claimed(core)).count()
    }

    /// Asks every other core that holds anything to drain; how many there are.
    pub(crate) fn ask_others(&self, own: CoreId) -> usize {
        let others = (0..self.claims.cores()).filter(|&core| core != own.0);
        let holding = others.filter(|&core| {
            let counts = self.counters[core].load();
            self.claims.is_claimed(core) && counts.taken != counts.pages
        });
        holding
            .map(|core| self.flags[core].store(true, Ordering::Relaxed))
            .count()
    }

    /// Whether a core was asked since it last answered.
    #[inline]
    pub(crate) fn is_asked(&self, core: CoreId) -> bool {
        // Relaxed: a request without data; it is seen at one of the next operations.
        self.flags[core.0].load(Ordering::Relaxed)
    }

    /// A core answers.
    pub(crate) fn answered(&self, core: CoreId) {
        self.flags[core.0].store(false, Ordering::Relaxed);
    }

    /// Counts nothing any more.
    pub(crate) fn clear(&self) {
        self.counters.iter().for_each(|counters| counters.clear());
    }

    /// Bytes of all of it.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.flags) + size_of_val(&*self.counters) + self.claims.cores()
    }
}
