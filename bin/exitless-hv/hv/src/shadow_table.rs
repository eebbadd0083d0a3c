//! Where the guest has its interrupt descriptor table, and whether it is shadowed in place.
//!
//! ```text
//!   plain ── show: its page is fit ─▶ shadowed ── hide: before it is checked once more ─▶ plain
//!   load: LIDT, in either
//! ```

use eli::Vector;
use eli::gate::{GATE_LEN, Gate};

use crate::memory::Guest;

/// The guest's table.
#[derive(Debug, Default)]
pub struct ShadowTable {
    base: u64,
    limit: u32,
    page: Option<u64>,
    /// Levels of the page tables of long mode when the mode was read.
    levels: Option<u8>,
}

impl ShadowTable {
    /// Returns its linear address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the limit: its bytes - 1.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns whether it is shadowed.
    pub fn is_shown(&self) -> bool {
        self.page.is_some()
    }

    /// Returns the page that is shadowed.
    pub fn page(&self) -> Option<u64> {
        self.page
    }

    /// Returns whether this is the page that is shadowed.
    pub fn is_at(&self, page: u64) -> bool {
        self.page == Some(page)
    }

    /// Takes the address and limit that the guest loaded.
    pub fn load(&mut self, base: u64, limit: u32) {
        (self.base, self.limit) = (base, limit);
    }

    /// Takes the levels of the page tables, none outside of long mode. Returns whether they were
    /// others.
    pub fn set_levels(&mut self, levels: Option<u8>) -> bool {
        let were_others = self.levels != levels;
        self.levels = levels;
        were_others
    }

    /// Marks the table as shadowed, in this page.
    pub fn show(&mut self, page: u64) {
        self.page = Some(page);
    }

    /// Marks the table as plain. Returns the page that was shadowed.
    pub fn hide(&mut self) -> Option<u64> {
        self.page.take()
    }

    /// Returns the guest's own gate, of a table that is shadowed; else an empty one.
    pub fn guests_gate(&self, memory: &Guest, vector: Vector) -> Gate {
        let offset = u64::from(vector) * u64::from(GATE_LEN);
        let word = |at: u64| self.page.and_then(|page| memory.read(page + at));
        Gate([offset, offset + 8].map(|at| word(at).unwrap_or(0)))
    }
}
