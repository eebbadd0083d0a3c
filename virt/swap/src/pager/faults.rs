//! Faults of processors at absent pages: each page is read unless a vCPU is found to be about to
//! overwrite it.

use std::io;

use sidecore::Nanos;

use super::Pager;
use crate::preventer::{Found, Pending, Preventer, View};
use crate::residency::{Backing, Page, ReadAhead, State};
use crate::stopped::Stopped;

/// Faults that are served before other sources are polled.
const FAULTS: usize = 32;

impl Pager {
    pub(super) fn serve_faults(&mut self) -> io::Result<bool> {
        for nth in 0..FAULTS {
            let Some(frames) = &self.frames else {
                return Ok(false);
            };
            let Some(fault) = frames.guest().next_fault()? else {
                return Ok(nth > 0);
            };
            self.report.faults += 1;
            // As many pages as the book has.
            self.fault(Page(fault.page as u32), fault.is_write)?;
            // An access whose page's read has ended does not wait for the next message.
            self.take_ended()?;
        }
        Ok(true)
    }

    fn fault(&mut self, page: Page, is_store: bool) -> io::Result<()> {
        let (state, backing) = self.residency.look(page);
        if state == State::Absent
            && backing != Backing::Nowhere
            && is_store
            && let Some(preventer) = &mut self.preventer
            && preventer.begin(page, is_store, Nanos::now())
        {
            self.machine.stop_vcpus();
            return Ok(());
        }
        self.residency.fault(page, self.ahead(is_store));
        self.carry_out()
    }

    /// Returns the read-ahead for a page that is read.
    fn ahead(&self, is_store: bool) -> ReadAhead {
        let overwrites = self.preventer.as_ref().is_some_and(Preventer::finds);
        match is_store {
            true if overwrites => ReadAhead::Never,
            true => ReadAhead::InOrder,
            false => ReadAhead::Always,
        }
    }

    /// Handles a vCPU that has stopped and reports its registers.
    pub(super) fn stopped(&mut self, vcpu: Stopped) -> io::Result<()> {
        let Some(preventer) = &mut self.preventer else {
            vcpu.answer(None);
            return Ok(());
        };
        // A vCPU that has continued counts as one that has not reported.
        let Some(registers) = vcpu.take() else {
            return Ok(());
        };
        let mut view = View {
            residency: &self.residency,
            ram: &self.ram,
        };
        match preventer.stopped(&registers, &mut view) {
            Found::Overwritten(page, content, after) => {
                self.content = Some((page, content));
                self.residency.fault_overwriting(page);
                self.carry_out()?;
                // Without room it comes later, with its old content; or the policy has it read.
                let has_come = self.content.take().is_none();
                self.report.prevented += u64::from(has_come);
                self.report.false_reads += u64::from(!has_come);
                vcpu.answer(has_come.then_some(after));
                Ok(())
            }
            Found::Read(pending) => {
                vcpu.answer(None);
                self.read(pending)
            }
            Found::Nothing => {
                vcpu.answer(None);
                Ok(())
            }
        }
    }

    /// Reads a page that no vCPU was found to overwrite.
    pub(super) fn read(&mut self, pending: Pending) -> io::Result<()> {
        self.report.undecided += 1;
        let ahead = self.ahead(pending.is_store);
        self.residency.fault(pending.page, ahead);
        self.carry_out()
    }
}
