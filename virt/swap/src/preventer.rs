//! The False Reads Preventer: before an absent page is read for a vCPU, whether the vCPU is about to overwrite all of it.
//!
//! The pager has every vCPU leave the guest and say where it stands; the one whose instruction overwrites the page
//! ([`overwrite`](crate::overwrite)) is given the effect of it, and goes on behind it. One page at a time; whoever faults meanwhile
//! is served as if there were no Preventer, and so is the page when all have said where they stand, or a limit of time has passed
//! (1 ms in the paper).

use std::sync::mpsc;
use std::time::Duration;

use guest_mem::{Gpa, PhysMem};
use sidecore::Nanos;

use crate::book::{Book, Page, State};
use crate::frames::Content;
use crate::overwrite::{Memory, Registers, decide};
use crate::ram::SwappedRam;

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
}

impl Preventer {
    /// For so many vCPUs, each of which is waited for so long at most.
    pub fn new(vcpus: usize, limit: Duration) -> Self {
        Self {
            vcpus,
            limit,
            pending: None,
        }
    }

    /// Whether `page`, at which a vCPU has faulted, is to wait for a decision; if so, all vCPUs are to be stopped.
    pub fn begin(&mut self, page: Page, is_store: bool, now: Nanos) -> bool {
        if self.pending.is_some() {
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
            self.pending = None;
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

    fn give_up(&mut self) -> Found {
        self.pending.take().map_or(Found::Nothing, Found::Read)
    }

    /// When to [`look`](Self::look).
    pub fn deadline(&self) -> Option<Nanos> {
        self.pending.map(|pending| pending.until)
    }
}

/// Memory as it is now: what is absent is not touched. The pager is the only one who takes pages away, and this is its thread.
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

/// Tells a vCPU how to go on. One that did not wait stands where it stood, and does the same itself.
pub(crate) fn go_on(reply: &mpsc::Sender<Option<Registers>>, registers: Option<Registers>) {
    let _ = reply.send(registers);
}
