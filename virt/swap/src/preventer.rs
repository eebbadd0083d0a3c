//! The False Reads Preventer: before an absent page is read for a vCPU, whether the vCPU is about
//! to overwrite all of it.
//!
//! The pager has every vCPU leave the guest and say where it stands; the one whose instruction
//! overwrites the page ([`overwrite`](crate::overwrite)) is given the effect of it, and goes on
//! behind it. One page at a time; whoever faults meanwhile is served as if there were no Preventer,
//! and so is the page when all have said where they stand, or a limit of time has passed (1 ms in
//! the paper).
//!
//! Stopping vCPUs for nothing costs them more than the read that it might save. With an in-kernel
//! APIC a thread of KVM resolves vCPUs' faults, and the kernel takes each for a store; so whether
//! the guest is overwriting pages or reading them shows only in what was found last: after a look
//! in vain faults are let pass, twice as many each time. A page beside the one that was found last
//! is looked at all the same, until two looks were in vain: what is allocated together lies
//! together, and is overwritten together. For the same reason nothing is read ahead from the store
//! while looks find something.

use std::time::Duration;

use guest_mem::{Gpa, PhysMem};
use sidecore::Nanos;

use crate::book::{Book, Page, State};
use crate::frames::Content;
use crate::overwrite::{Memory, Registers, decide};
use crate::ram::SwappedRam;

/// Looks in vain, one after another, by which pages beside the one that was found last are as good
/// as any.
const LEFT: u32 = 2;

/// Looks in vain, one after another, by which the guest has turned to other things than overwriting
/// pages.
const LATELY: u32 = 4;

/// Faults that are let pass between two looks, at most, as a power of 2.
const MOST_PASSED: u32 = 5;

/// Pages on either side of one that was overwritten, which likely are next.
const NEAR: u32 = 8;

/// A page that waits for a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub page: Page,
    pub is_store: bool,
    /// vCPUs that have not said where they stand.
    left: usize,
    until: Nanos,
}

/// What was found out.
pub(crate) enum Found {
    /// The page is to hold this, and the vCPU to go on there.
    Overwritten(Page, Box<Content>, Registers),
    /// The page is to be read.
    Read(Pending),
    /// Nothing yet.
    Nothing,
}

/// The Preventer. See the module's head.
#[derive(Debug)]
pub(crate) struct Preventer {
    vcpus: usize,
    limit: Duration,
    pending: Option<Pending>,
    /// Looks in vain since the last that was not.
    in_vain: u32,
    /// Faults that are let pass before the next look.
    passes: u32,
    /// The last page that was found to be overwritten, if the guest has not left it since.
    last: Option<Page>,
    /// A look has not been in vain yet.
    has_found: bool,
}

impl Preventer {
    /// For so many vCPUs, each of which is waited for so long at most.
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

    /// Whether pages are being overwritten these days: those beside one that has to be read likely
    /// are next.
    pub fn finds(&self) -> bool {
        self.has_found && self.in_vain < LATELY
    }

    /// Whether `page`, at which a vCPU has faulted, is to wait for a decision; if so, all vCPUs are
    /// to be stopped.
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

    /// A vCPU has said where it stands.
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

    /// The page that has waited too long, if one has.
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

    /// When to [`look`](Self::look).
    pub fn deadline(&self) -> Option<Nanos> {
        self.pending.map(|pending| pending.until)
    }
}

/// Memory as it is now: what is absent is not touched. The pager is the only one who takes pages
/// away, and this is its thread.
pub(crate) struct View<'a> {
    pub book: &'a Book,
    pub ram: &'a SwappedRam,
}

impl View<'_> {
    fn is_still_elsewhere(&self, page: Page) -> bool {
        self.book.look(page).0 == State::Absent
    }

    fn page(&self, at: Gpa) -> Option<Page> {
        let page = self.ram.page_at(at)?;
        let is_there = matches!(
            self.book.look(page).0,
            State::Resident | State::Soft | State::Saving
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

    /// Has a look in vain; how many faults are let pass before the next one.
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
    fn it_finds_something_until_four_looks_were_in_vain() {
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
    fn looks_in_vain_become_rare() {
        let mut preventer = Preventer::new(1, LIMIT);
        let mut now = Nanos(0);
        assert!(preventer.begin(Page(7), true, now));
        let passed: Vec<u32> = (0..9)
            .map(|_| look_in_vain(&mut preventer, &mut now))
            .collect();
        assert_eq!(passed, [1, 2, 4, 8, 16, 32, 32, 32, 32]);
    }
}
