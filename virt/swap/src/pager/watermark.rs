//! Mode of the disks' reports: they report above a watermark of memory, and on until nothing
//! depends on it.

use std::time::Duration;

use sidecore::Nanos;

use super::after;
use crate::link::{ReportEpoch, Reports};
use crate::ram::SwappedRam;
use crate::residency::Residency;

/// Time between two checks whether disks need not report any more.
const LOOK: Duration = Duration::from_secs(1);

/// Last change of the disks' mode, and its progress.
pub(super) struct Watermark {
    asked: ReportEpoch,
    /// Disks have seen that no block is to back a page any more.
    is_seen: bool,
    look_at: Nanos,
}

impl Default for Watermark {
    fn default() -> Self {
        Self {
            asked: ReportEpoch::default(),
            is_seen: false,
            look_at: Nanos(0),
        }
    }
}

impl Watermark {
    /// Begins the reports if memory is short: at the beginning of each turn, before any other
    /// effect of it, so that the pages present determine whether the next request is reported.
    pub fn rise(&mut self, residency: &mut Residency, ram: &SwappedRam) {
        if self.asked.reports() == Reports::Off && is_short(residency, ram) {
            self.choose(residency, ram);
        }
    }

    /// Updates the mode if a check is due.
    pub fn look(&mut self, now: Nanos, residency: &mut Residency, ram: &SwappedRam) {
        if now >= self.look_at {
            self.look_at = after(now, LOOK);
            self.choose(residency, ram);
        }
    }

    /// Returns the time of the next [`look`](Self::look), if it matters.
    pub fn deadline(&self) -> Option<Nanos> {
        (self.asked.reports() != Reports::Off).then_some(self.look_at)
    }

    /// Records that disks have seen this change.
    pub fn seen(&mut self, asked: ReportEpoch) {
        self.is_seen |= asked == self.asked;
    }

    fn choose(&mut self, residency: &mut Residency, ram: &SwappedRam) {
        let old = self.asked.reports();
        let reports = match old {
            _ if is_short(residency, ram) => Reports::On,
            Reports::On if residency.present() < residency.limit() / 2 => Reports::Draining,
            Reports::Draining if self.is_seen => {
                // Pages that have left memory come back when they are accessed; until then disks go
                // on reporting.
                residency.forget_blocks();
                match residency.knows_no_disk() {
                    true => Reports::Off,
                    false => old,
                }
            }
            Reports::On | Reports::Draining | Reports::Off => old,
        };
        if reports != old {
            self.asked = self.asked.next(reports);
            self.is_seen = false;
            ram.ask_disks(self.asked);
        }
    }
}

/// Returns whether pages may have to leave soon.
fn is_short(residency: &Residency, ram: &SwappedRam) -> bool {
    let limit = residency.limit();
    limit < ram.pages() && residency.present() > limit / 4 * 3
}

#[cfg(test)]
mod tests;
