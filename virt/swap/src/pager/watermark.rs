//! Whether disks are to report what they do: above a watermark they do, and on until nothing
//! depends on it.

use std::time::Duration;

use sidecore::Nanos;

use super::after;
use crate::book::Book;
use crate::link::{Asked, Reports};
use crate::ram::SwappedRam;

/// Between two looks whether disks need not report any more.
const LOOK: Duration = Duration::from_secs(1);

/// What disks have been asked, and how far it has come.
pub(super) struct Watermark {
    asked: Asked,
    /// Disks have seen that they are to let no page stand for a block any more.
    is_seen: bool,
    look_at: Nanos,
}

impl Default for Watermark {
    fn default() -> Self {
        Self {
            asked: Asked::default(),
            is_seen: false,
            look_at: Nanos(0),
        }
    }
}

impl Watermark {
    /// At the beginning of each turn, before anything comes of it: what is present decides whether
    /// the next request is reported.
    pub fn rise(&mut self, book: &mut Book, ram: &SwappedRam) {
        if self.asked.reports() == Reports::Off && is_short(book, ram) {
            self.choose(book, ram);
        }
    }

    /// What time brings.
    pub fn look(&mut self, now: Nanos, book: &mut Book, ram: &SwappedRam) {
        if now >= self.look_at {
            self.look_at = after(now, LOOK);
            self.choose(book, ram);
        }
    }

    /// When to [`look`](Self::look), if it matters.
    pub fn deadline(&self) -> Option<Nanos> {
        (self.asked.reports() != Reports::Off).then_some(self.look_at)
    }

    /// Disks have seen this.
    pub fn seen(&mut self, asked: Asked) {
        self.is_seen |= asked == self.asked;
    }

    fn choose(&mut self, book: &mut Book, ram: &SwappedRam) {
        let old = self.asked.reports();
        let reports = match old {
            _ if is_short(book, ram) => Reports::On,
            Reports::On if book.present() < book.limit() / 2 => Reports::Draining,
            Reports::Draining if self.is_seen => {
                // What has left memory comes back as it is wanted; until then disks go on.
                book.forget_blocks();
                match book.knows_no_disk() {
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

/// Pages may have to leave soon.
fn is_short(book: &Book, ram: &SwappedRam) -> bool {
    let limit = book.limit();
    limit < ram.pages() && book.present() > limit / 4 * 3
}

#[cfg(test)]
mod tests;
