//! The guest's interrupt descriptor table (IDT) and its shadow, in place: the nested page tables
//! map the shadow where the guest has its table, so that all of the guest's mappings of that page
//! lead to the shadow. The table's address does not change, so this works with page-table isolation
//! too.
//!
//! Amit's thesis hides the shadow in a device's memory instead (§3.5.2). That changes the table's
//! address, and so needs a mapping in every address space of the guest.

use eli::defence::Defence;
use eli::gate::{self, GATE_LEN, Gate};
use eli::policy::control;
use eli::{Vector, VectorSet};

use super::Processor;

use crate::log::{self, say};
use crate::machine::mailbox::request;
use crate::memory::PAGE;
use crate::nested::Access;
use crate::vmcb;

const SVME: u64 = 1 << 12;

impl Processor {
    /// Translates a linear address of the guest to a guest-physical one, by the guest's page tables
    /// of four or five levels.
    pub(super) fn translate(&self, linear: u64) -> Option<u64> {
        const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
        let levels = self.levels()?;
        let vmcb = &self.pages.vmcb;
        let mut table = vmcb.get(vmcb::CR3) & ADDRESS;
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let entry = self
                .machine
                .memory()
                .read(table + (linear >> shift & 511) * 8)?;
            if entry & 1 == 0 {
                return None;
            }
            let inside = (1_u64 << shift) - 1;
            if level == 0 || level < 3 && entry & 0x80 != 0 {
                return Some(entry & ADDRESS & !inside | linear & inside);
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Returns the number of levels of the guest's page tables, if it is in long mode.
    fn levels(&self) -> Option<u8> {
        let vmcb = &self.pages.vmcb;
        let (efer, cr0, cr4) = (
            vmcb.get(vmcb::EFER),
            vmcb.get(vmcb::CR0),
            vmcb.get(vmcb::CR4),
        );
        control::long_mode_levels(efer, cr0, cr4)
    }

    /// Returns the linear address of the guest's current instruction. In 64-bit mode the code
    /// segment's base is not added.
    pub(super) fn instruction(&self) -> u64 {
        const LONG: u16 = 1 << 9;
        let vmcb = &self.pages.vmcb;
        let pointer = vmcb.get(vmcb::RIP);
        if vmcb.get(vmcb::CS_ATTRIBUTES) & LONG != 0 {
            pointer
        } else {
            vmcb.get(vmcb::CS_BASE).wrapping_add(pointer) & 0xffff_ffff
        }
    }

    /// Handles the guest's write of EFER. Returns whether it is allowed.
    pub(super) fn write_efer(&mut self, value: u64) -> bool {
        /// Bits of EFER that the processor accepts on VM entry.
        const VALID: u64 = 0xcd01;
        let vmcb = &self.pages.vmcb;
        let new = if self.defends(Defence::Modes) {
            let old = vmcb.get(vmcb::EFER) & !SVME;
            control::efer(old, value, vmcb.get(vmcb::CR0))
        } else {
            Some(value).filter(|value| value & !VALID == 0)
        };
        let Some(new) = new else {
            return false;
        };
        self.pages.vmcb.set(vmcb::EFER, new | SVME);
        self.pages.vmcb.flush();
        if self.defends(Defence::Modes) {
            self.mode_changed();
        }
        true
    }

    /// Updates the shadow after a write to a register that may change the processor's mode.
    pub(super) fn mode_changed(&mut self) {
        if self.table.set_levels(self.levels()) {
            self.engage();
        }
    }

    /// Handles a load of IDTR by the guest (LIDT).
    pub(super) fn table_loaded(&mut self) {
        let vmcb = &self.pages.vmcb;
        self.table
            .load(vmcb.get(vmcb::IDTR_BASE), vmcb.get(vmcb::IDTR_LIMIT));
        self.engage();
    }

    /// Recomputes the set of vectors that are delivered directly: the device's, those of the
    /// command line, and the timer's if it is the guest's own.
    pub(super) fn assigned_changed(&mut self) {
        let mut assigned = self.machine.options().assign;
        if self.machine.options().mode.direct_modes().delivery {
            assigned = assigned.union(self.interrupts.device());
            assigned = assigned.union(self.interrupts.block());
            if self.machine.assigns_timer()
                && let Some(vector) = self.interrupts.lapic().timer_vector()
            {
                assigned.insert(vector);
            }
        }
        if self.interrupts.assign(assigned) {
            let direct = self.interrupts.core().assigned();
            self.machine.mailbox(self.index).set_direct(direct);
            self.engage();
        }
    }

    /// Sets up the shadow of the guest's present table, or removes it.
    pub(super) fn engage(&mut self) {
        if !self.machine.options().mode.direct_modes().delivery {
            return;
        }
        if let Some(page) = self.table.hide() {
            self.protect_table(page);
        }
        if self.interrupts.core().is_engaged() {
            // The last entry may have been in direct mode, with another IDT limit. Without a shadow
            // the guest's own limit is in force.
            let limit = self.table.limit();
            self.pages.vmcb.set(vmcb::IDTR_LIMIT, limit);
        }
        self.place_shadow();
        // Other processors write-protect the table's page on this request. Then they ask this
        // processor to update its shadow, since a gate may have been written before the protection.
        let shown = self.table.page();
        if self.machine.mailbox(self.index).set_shadowed(shown) {
            for index in self.others() {
                self.ask(index, request::PROTECT);
            }
        }
    }

    fn place_shadow(&mut self) {
        let long_mode = self.levels().is_some();
        let physical = self.translate(self.table.base());
        let own = physical.filter(|page| self.machine.memory().contains(*page, PAGE));
        let limit = self.table.limit();
        match gate::placement(long_mode, limit, own, self.interrupts.core().assigned()) {
            Ok(page) if !self.pages.nested.has_room() => {
                self.interrupts.load_table(limit, false);
                say!(
                    "mode: injection: no nested page table is left for the table's page {page:#x}"
                );
            }
            Ok(page) => {
                self.table.show(page);
                self.interrupts.load_table(limit, true);
                self.show_all();
                self.protect_table(page);
                if log::traces() {
                    say!(
                        "mode: direct where nothing waits: the table at {:#x} is shadowed in \
                         place, page {page:#x}, for {}",
                        self.table.base(),
                        Vectors(self.interrupts.core().assigned())
                    );
                }
            }
            Err(why) => {
                self.interrupts.load_table(limit, false);
                if log::traces() {
                    say!(
                        "mode: injection: {why} (table at {:#x}, limit {limit:#x})",
                        self.table.base()
                    );
                }
            }
        }
    }

    /// Returns whether a page holds the IDT of any processor of the guest, and so is protected
    /// here.
    pub(super) fn is_table(&self, page: u64) -> bool {
        self.table.is_at(page) || self.protected.contains(&Some(page))
    }

    /// Maps a page as it must be: to the shadow if it holds this processor's table, read-only if it
    /// holds another processor's, else without restriction.
    pub(super) fn protect_table(&mut self, page: u64) {
        let (real, access) = if self.table.is_at(page) {
            (self.pages.shadow.address(), Access::Read)
        } else if self.is_table(page) {
            (page, Access::Read)
        } else {
            (page, Access::All)
        };
        self.map(page, real, access);
    }

    /// Updates the protection of the pages of other processors' tables.
    pub(super) fn protect_others(&mut self) {
        for index in self.others() {
            let page = self.machine.mailbox(index).shadowed();
            let before = core::mem::replace(&mut self.protected[index], page);
            if before == page {
                continue;
            }
            // This processor may be single-stepping a write to either page.
            self.finish_step();
            for page in before.into_iter().chain(page) {
                self.protect_table(page);
            }
            if page.is_some() {
                // A gate may have been written there before the page was protected.
                self.ask(index, request::REFRESH);
            }
        }
    }

    /// Handles a write to a page with a table: updates this processor's shadow of it, and waits
    /// until other processors have updated theirs.
    pub(super) fn gates_written(&mut self, page: u64) {
        self.show_all();
        let machine = self.machine;
        self.ask_and_wait(request::REFRESH, |index| {
            machine.mailbox(index).shadowed() == Some(page)
        });
    }

    /// Maps a page of guest memory to the page `real`, with these rights.
    pub(super) fn map(&mut self, page: u64, real: u64, access: Access) {
        if self.pages.nested.map(page, real, access).is_err() {
            self.stop("no nested page table is left: the guest moves its table too far about");
        }
        self.pages.vmcb.flush();
    }

    /// Returns the gate of the guest's own table.
    pub(super) fn guests_gate(&self, vector: Vector) -> Gate {
        self.table.guests_gate(self.machine.memory(), vector)
    }

    /// Updates one gate of the shadow from the guest's own gate.
    pub(super) fn show_gate(&mut self, vector: Vector) {
        if !self.table.is_shown() {
            return;
        }
        let shown = self.interrupts.shadow(vector, self.guests_gate(vector));
        let at = usize::from(vector) * usize::from(GATE_LEN);
        for (half, word) in shown.0.into_iter().enumerate() {
            self.pages.shadow.0[at + half * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Updates all gates of the shadow.
    pub(super) fn show_all(&mut self) {
        (0..=Vector::MAX).for_each(|vector| self.show_gate(vector));
    }
}

/// Formatter of a set of vectors.
struct Vectors(VectorSet);

impl core::fmt::Display for Vectors {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("vectors")?;
        self.0
            .iter()
            .try_for_each(|vector| write!(f, " {vector:#x}"))
    }
}
