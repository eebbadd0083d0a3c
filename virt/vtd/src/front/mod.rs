//! Front ends: transport of a guest's register accesses to the unit, and of its results to the
//! guest.
//!
//! | Mode | Guest reads | Guest writes | Here |
//! |---|---|---|---|
//! | `trap` | exit | exit | [`Unit::read`], [`Unit::write`], [`Unit::step`] |
//! | `logged` | a page, read-only to it | in-kernel exit, logged in order | [`Logged`] |
//! | `shared` | a page | the same page, no exit | [`Shared`] |
//!
//! All three drive one engine. The same register script gives the same result in `trap` and
//! `logged` for any guest, and in `shared` for a guest that obeys the *polling rule*: it waits for
//! the status that answers a store before it makes another store that would overwrite the first,
//! unseen. Stock Linux does. Any other guest gets some interleaving of its stores and is as
//! confined as ever.
//!
//! Order in which results become visible, in both page modes: IQH, then the status word in memory;
//! recording registers, then FSTS, then the interrupt. The interrupt leaves last, because its
//! handler reads the page.

mod logged;
mod shared;

pub use logged::{LogEntry, Logged};
pub use shared::{COMMAND_TAG, STATUS_TAG, Shared};

use guest_mem::RegPage;

use crate::spec::fault::{FRCD_LEN, FaultRecording};
use crate::spec::registers::{IQH, PAGE_LEN};
use crate::unit::registers::FRCD;
use crate::unit::{AccessLen, Unit};

/// Shows everything: a page that was not in use before.
fn publish_all(unit: &Unit, page: &impl RegPage) {
    for offset in (0..PAGE_LEN).step_by(8) {
        page.store64(offset, unit.read(offset, AccessLen::B8));
    }
}

/// Publishes the recording registers that differ from `shown`: the dword with F last, with release.
fn publish_records(unit: &Unit, page: &impl RegPage, shown: &mut [FaultRecording]) {
    for (index, shown) in shown.iter_mut().enumerate() {
        let record = unit.faults.records[index];
        if *shown != record {
            *shown = record;
            // At most 222 registers behind 0x220.
            let at = FRCD + index as u16 * FRCD_LEN;
            page.store64(at, unit.read(at, AccessLen::B8));
            page.store32(at + 8, unit.read(at + 8, AccessLen::B4) as u32);
            page.store32(at + 12, unit.read(at + 12, AccessLen::B4) as u32);
        }
    }
}

/// Called by the engine before a status word is written.
fn publish_iqh(page: &impl RegPage) -> impl FnMut(u64) {
    |iqh| page.store64(IQH, iqh)
}
