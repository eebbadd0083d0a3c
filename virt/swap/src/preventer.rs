//! The False Reads Preventer: it finds out, before an absent page is read for a vCPU, whether a
//! vCPU is about to overwrite all of it.
//!
//! The pager makes every vCPU leave the guest and report its registers. The one whose instruction
//! overwrites the page ([`overwrite`](crate::overwrite)) receives the registers after that, and
//! continues behind the instruction's effect. One page is handled at a time. Other vCPUs that fault
//! meanwhile are served as if there were no Preventer, and so is the page when all vCPUs have
//! reported, or a limit of time has passed (1 ms in the paper).
//!
//! Stopping vCPUs without a result costs them more than the read that it might save. With an
//! in-kernel APIC a thread of KVM resolves vCPUs' faults, and the kernel takes each for a store. So
//! only recent results show whether the guest is overwriting pages or reading them: after an
//! unsuccessful attempt faults are passed over, twice as many each time. A page near the one that
//! was found last is tried all the same, until two attempts were unsuccessful: adjacent pages are
//! often allocated together, and overwritten together. For the same reason nothing is read ahead
//! from the store while attempts succeed.

use std::time::Duration;

use guest_mem::{Gpa, PhysMem};
use sidecore::Nanos;

use crate::frames::Content;
use crate::overwrite::{Memory, Registers, decide};
use crate::ram::SwappedRam;
use crate::residency::{Page, Residency, State};

/// Unsuccessful attempts in a row after which pages near the one that was found last are treated as
/// any other.
const LEFT: u32 = 2;

/// Unsuccessful attempts in a row after which the guest is taken not to be overwriting pages any
/// more.
const LATELY: u32 = 4;

/// Largest number of faults that are passed over between two attempts, as a power of 2.
const MOST_PASSED: u32 = 5;

/// Distance, in pages, from one that was overwritten within which pages are likely to be next.
const NEAR: u32 = 8;

/// A page that waits for a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub page: Page,
    pub is_store: bool,
    /// Number of vCPUs that have not reported.
    left: usize,
    until: Nanos,
}

/// Result of an attempt.
pub(crate) enum Found {
    /// The page is to have this content, and the vCPU to continue with these registers.
    Overwritten(Page, Box<Content>, Registers),
    /// The page is to be read.
    Read(Pending),
    /// No result yet.
    Nothing,
}

/// The Preventer. See the module's head.
#[derive(Debug)]
pub(crate) struct Preventer {
    vcpus: usize,
    limit: Duration,
    pending: Option<Pending>,
    /// Unsuccessful attempts since the last successful one.
    in_vain: u32,
    /// Faults that are passed over before the next attempt.
    passes: u32,
    /// Last page that was found to be overwritten, if the guest has not left its neighbourhood
    /// since.
    last: Option<Page>,
    /// An attempt has been successful.
    has_found: bool,
}

impl Preventer {
    /// Creates a Preventer for `vcpus` vCPUs, which are waited for at most `limit`.
    pub fn new(vcpus: usize, limit: Duration) -> Self {
        Self {
            vcpus,
            limit,
            pending: None,
            in_vain: 0,
            passes: 0,
            last: None,
            has_found: false,
        }
    }

    /// Returns whether pages are being overwritten at present: the neighbours of one that has to be
    /// read are then likely to be next.
    pub fn finds(&self) -> bool {
        self.has_found && self.in_vain < LATELY
    }

    /// Returns whether `page`, at which a vCPU has faulted, waits for a decision; if so, all vCPUs
    /// must be stopped.
    pub fn begin(&mut self, page: Page, is_store: bool, now: Nanos) -> bool {
        if self.pending.is_some() {
            return false;
        }
        let is_near = |last: Page| last.0.abs_diff(page.0) <= NEAR;
        if self.passes > 0 && !self.last.is_some_and(is_near) {
            self.passes -= 1;
            return false;
        }
        self.pending = Some(Pending {
            page,
            is_store,
            left: self.vcpus,
            until: Nanos(now.0.saturating_add(self.limit.as_nanos() as u64)),
        });
        true
    }

    /// Handles the registers that a vCPU has reported.
    pub fn stopped(&mut self, registers: &Registers, view: &mut View<'_>) -> Found {
        let Some(pending) = &mut self.pending else {
            return Found::Nothing;
        };
        let page = pending.page;
        let overwritten = view.is_still_elsewhere(page).then(|| {
            let overwrite = decide(registers, view, view.ram.gpa_of(page))?;
            let mut content = Box::<Content>::default();
            overwrite.content(view, &mut content)?;
            Some((content, *overwrite.after()))
        });
        if let Some(Some((content, after))) = overwritten {
            self.found(page);
            return Found::Overwritten(page, content, after);
        }
        pending.left = pending.left.saturating_sub(1);
        match pending.left {
            0 => self.give_up(),
            _ => Found::Nothing,
        }
    }

    /// Returns the page that has waited too long, if there is one.
    pub fn look(&mut self, now: Nanos) -> Found {
        match self.pending {
            Some(pending) if now >= pending.until => self.give_up(),
            _ => Found::Nothing,
        }
    }

    fn found(&mut self, page: Page) {
        self.pending = None;
        self.in_vain = 0;
        self.passes = 0;
        self.last = Some(page);
        self.has_found = true;
    }

    fn give_up(&mut self) -> Found {
        let Some(pending) = self.pending.take() else {
            return Found::Nothing;
        };
        self.passes = 1 << self.in_vain.min(MOST_PASSED);
        self.in_vain = self.in_vain.saturating_add(1);
        if self.in_vain >= LEFT {
            self.last = None;
        }
        Found::Read(pending)
    }

    /// Returns the time of the next [`look`](Self::look).
    pub fn deadline(&self) -> Option<Nanos> {
        self.pending.map(|pending| pending.until)
    }
}

/// Memory as it is now: absent pages are not touched. Only the pager evicts pages, and this is its
/// thread.
pub(crate) struct View<'a> {
    pub residency: &'a Residency,
    pub ram: &'a SwappedRam,
}

impl View<'_> {
    fn is_still_elsewhere(&self, page: Page) -> bool {
        self.residency.look(page).0 == State::Absent
    }

    fn page(&self, at: Gpa) -> Option<Page> {
        let page = self.ram.page_at(at)?;
        let is_there = matches!(
            self.residency.look(page).0,
            State::Resident | State::Unmapped | State::Saving
        );
        is_there.then_some(page)
    }
}

impl Memory for View<'_> {
    fn word(&mut self, at: Gpa) -> Option<u64> {
        self.page(at)?;
        self.ram.ram().read_u64(at).ok()
    }

    fn bytes(&mut self, at: Gpa, into: &mut [u8]) -> Option<()> {
        self.page(at)?;
        self.ram.ram().read(at, into).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(1);

    /// Makes an unsuccessful attempt; returns the number of faults that are passed over before the
    /// next one.
    fn look_in_vain(preventer: &mut Preventer, now: &mut Nanos) -> u32 {
        assert!(matches!(preventer.look(*now), Found::Nothing));
        now.0 += LIMIT.as_nanos() as u64;
        assert!(matches!(preventer.look(*now), Found::Read(_)));
        assert!(matches!(preventer.look(*now), Found::Nothing));
        let mut passed = 0;
        while !preventer.begin(Page(7), true, *now) {
            passed += 1;
        }
        passed
    }

    #[test]
    fn one_page_waits_at_a_time_and_no_longer_than_the_limit() {
        let mut preventer = Preventer::new(2, LIMIT);
        assert_eq!(preventer.deadline(), None);
        assert!(preventer.begin(Page(3), true, Nanos(10)));
        assert!(!preventer.begin(Page(4), true, Nanos(11)));
        assert_eq!(preventer.deadline(), Some(Nanos(1_000_010)));
        assert!(matches!(preventer.look(Nanos(1_000_009)), Found::Nothing));
        let found = preventer.look(Nanos(1_000_010));
        assert!(matches!(found, Found::Read(pending) if pending.page == Page(3)));
        assert_eq!(preventer.deadline(), None);
    }

    #[test]
    fn beside_a_page_that_was_found_all_are_looked_at_until_two_are_not() {
        let mut preventer = Preventer::new(1, LIMIT);
        let mut now = Nanos(0);
        assert!(preventer.begin(Page(7), true, now));
        for _ in 0..5 {
            look_in_vain(&mut preventer, &mut now);
        }
        preventer.found(Page(100));
        assert!(preventer.begin(Page(1000), true, now), "the first");
        preventer.give_up();
        assert!(!preventer.begin(Page(109), true, now), "too far away");
        preventer.passes = 32;
        assert!(preventer.begin(Page(92), true, now), "beside it");
        preventer.give_up();
        assert!(
            !preventer.begin(Page(101), true, now),
            "that was the end of it"
        );
    }

    #[test]
    fn finds_overwrites_until_four_attempts_have_failed() {
        let mut preventer = Preventer::new(1, LIMIT);
        assert!(!preventer.finds(), "nothing yet");
        let mut now = Nanos(0);
        preventer.found(Page(100));
        assert!(preventer.begin(Page(7), true, now));
        for _ in 0..3 {
            look_in_vain(&mut preventer, &mut now);
            assert!(preventer.finds());
        }
        look_in_vain(&mut preventer, &mut now);
        assert!(!preventer.finds());
        preventer.found(Page(7));
        assert!(preventer.finds());
    }

    #[test]
    fn failed_attempts_become_rare() {
        let mut preventer = Preventer::new(1, LIMIT);
        let mut now = Nanos(0);
        assert!(preventer.begin(Page(7), true, now));
        let passed: Vec<u32> = (0..9)
            .map(|_| look_in_vain(&mut preventer, &mut now))
            .collect();
        assert_eq!(passed, [1, 2, 4, 8, 16, 32, 32, 32, 32]);
    }
}
