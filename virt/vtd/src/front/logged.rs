//! `logged`: the guest reads a page that it cannot write; its writes are logged in order by the
//! hypervisor (KVM: `KVM_MEM_READONLY` slot and coalesced MMIO ring) and applied here.
//!
//! Called by the unit's owner: [`Logged::apply`] for each entry in order, and [`Logged::step`]
//! after each entry that needs it, before the next one. Because of the steps between entries, a log
//! of many entries has the same result as the same number of trapped writes: a guest that does not
//! wait for its one-shot commands loses none.
//!
//! A value just written reads back stale until the next step publishes it.

use guest_mem::{PhysMem, RegPage};

use super::{publish_all, publish_iqh, publish_records};
use crate::spec::fault::FaultRecording;
use crate::spec::registers::{CCMD, FECTL, FSTS, GSTS, ICS, IECTL, IQA, IQH, IQT, IRTA, RTADDR};
use crate::unit::registers::{FRCD, IOTLB};
use crate::unit::{AccessLen, Progress, Sink, Unit};

/// One write of the guest, as the hypervisor logged it. Not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Bytes from the base of the page.
    pub offset: u16,
    /// Length in bytes, 4 or 8 for a register access.
    pub len: u8,
    /// Little-endian value in the low `len` bytes.
    pub data: u64,
}

/// Registers that change, in the order of publication. IQH first, as where a status word is
/// written; GSTS last, because it reports that everything before it is done. IQER, CAP and the like
/// never change.
const CHANGING: [(u16, AccessLen); 14] = [
    (IQH, AccessLen::B8),
    (FSTS, AccessLen::B4),
    (FECTL, AccessLen::B8),
    (FECTL + 8, AccessLen::B8),
    (ICS, AccessLen::B4),
    (IECTL, AccessLen::B8),
    (IECTL + 8, AccessLen::B8),
    (RTADDR, AccessLen::B8),
    (IQT, AccessLen::B8),
    (IQA, AccessLen::B8),
    (IRTA, AccessLen::B8),
    (CCMD, AccessLen::B8),
    (IOTLB, AccessLen::B8),
    (GSTS, AccessLen::B4),
];

/// The register page of a unit in `logged` mode.
#[derive(Clone, Debug, Default)]
pub struct Logged {
    /// Values of the registers [`CHANGING`] in the page.
    shown: [u64; CHANGING.len()],
    /// Values of the recording registers in the page.
    records: Vec<FaultRecording>,
    /// `Unit::changes` when the page was last brought up to date.
    seen: u64,
}

impl Logged {
    /// Begins this mode: shows all registers in `page`, which the guest must not see before.
    pub fn enter(unit: &Unit, page: &impl RegPage) -> Self {
        publish_all(unit, page);
        Self {
            shown: CHANGING.map(|(offset, len)| unit.read(offset, len)),
            records: unit.faults.records.to_vec(),
            seen: unit.changes(),
        }
    }

    /// Applies one write of the guest. Returns whether [`step`](Logged::step) is needed before the
    /// next entry. Entries that are no register access (length, alignment, offset) change nothing.
    #[must_use = "the next entry is applied after the step that this one wants"]
    pub fn apply(&mut self, unit: &mut Unit, entry: LogEntry) -> bool {
        let Some(len) = AccessLen::from_bytes(usize::from(entry.len)) else {
            return false;
        };
        unit.write(entry.offset, len, entry.data);
        if entry.offset >= FRCD {
            unit.faults.raise_unseen(&self.records);
        }
        unit.needs_step()
    }

    /// [`Unit::step`] in this mode: works, publishes the changes, then sends interrupts.
    pub fn step<M: PhysMem>(
        &mut self,
        unit: &mut Unit,
        page: &impl RegPage,
        mem: &M,
        now_ns: u64,
        sink: &mut impl Sink,
    ) -> Progress {
        let progress = unit.run(mem, now_ns, sink, &mut publish_iqh(page));
        self.publish(unit, page);
        unit.send_messages(sink);
        // Sending cleared IP.
        self.publish(unit, page);
        progress
    }

    /// Publishes the changes since the last time; one comparison if there are none. For changes
    /// that no step made: a device was refused, the unit was reset.
    pub fn publish(&mut self, unit: &Unit, page: &impl RegPage) {
        if self.seen == unit.changes() {
            return;
        }
        self.seen = unit.changes();
        publish_records(unit, page, &mut self.records);
        for ((offset, len), shown) in CHANGING.iter().zip(&mut self.shown) {
            let value = unit.read(*offset, *len);
            // IQH may have been shown early, before a status word, and taken back; so always.
            if *shown != value || *offset == IQH {
                *shown = value;
                match len {
                    AccessLen::B4 => page.store32(*offset, value as u32),
                    AccessLen::B8 => page.store64(*offset, value),
                }
            }
        }
    }
}
