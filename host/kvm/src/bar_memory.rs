//! Memory of a device's BARs as memory slots that follow the BARs: what the guest reads and writes
//! there are no exits.
//!
//! A BAR consists of pieces (page-aligned mappings of the device's file) and of what is in none:
//! pages that must be exits, such as those of the MSI-X table. Each piece is shown where its BAR is
//! decoded, if that is inside a PCI window of the machine, and if KVM takes it: not where RAM or
//! another slot is, nor beyond the addresses it has. A piece that is not shown works as exits, and
//! is tried again when a BAR of the same function changes: two BARs may pass through each other's
//! places.
//!
//! Called on vCPU threads, one call at a time for a function ([`PlaceMemory`]). Cost: two grace
//! periods of KVM's for each piece that moves.

use std::fmt::{self, Display};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{Gpa, SlotMapping};
use platform::layout;
use platform::memory::PlaceMemory;

use crate::vm::{KvmError, SlotId, StillMapped, Vm};

/// A part of a BAR that the guest may reach without an exit.
pub struct BarPiece {
    /// Number of the BAR.
    pub bar: u8,
    /// Bytes from its start, a multiple of 4 KiB.
    pub offset: u64,
    /// The device's memory.
    pub mapping: Arc<SlotMapping>,
}

/// The pieces of one function's BARs, shown where they are decoded.
pub struct BarMemory {
    slots: Arc<dyn Slots>,
    /// Held during a change, so that each begins where the one before it has ended.
    pieces: Mutex<Pieces>,
}

struct Pieces {
    list: Vec<Piece>,
    /// No piece is shown again.
    has_ended: bool,
}

/// Operations on memory slots that [`BarMemory`] needs; tests have their own.
trait Slots: Send + Sync {
    fn show(&self, at: Gpa, mapping: &Arc<SlotMapping>) -> Result<SlotId, KvmError>;

    fn hide(&self, slot: SlotId) -> Result<(), StillMapped>;
}

impl Slots for Vm {
    fn show(&self, at: Gpa, mapping: &Arc<SlotMapping>) -> Result<SlotId, KvmError> {
        self.map(at, mapping, 0)
    }

    fn hide(&self, slot: SlotId) -> Result<(), StillMapped> {
        self.unmap(slot)
    }
}

/// A piece, and how far it has followed its BAR.
struct Piece {
    what: BarPiece,
    /// Where its BAR is decoded.
    wanted: Option<PieceAddress>,
    shown: Option<(Gpa, SlotId)>,
    /// A guest may move a BAR as often as it likes: each kind of refusal is logged once for a
    /// piece.
    has_logged: Logged,
}

#[derive(Clone, Copy, Default)]
struct Logged {
    refusal: bool,
    stuck: bool,
}

/// A place of a piece: an address, or one that no slot of a BAR may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PieceAddress {
    Inside(Gpa),
    Outside(u64),
}

/// Windows in which BARs may be shown: only there does the machine decode them.
const WINDOWS: [Range<u64>; 2] = [
    layout::PCI_WINDOW..layout::PCI_WINDOW_END,
    layout::PCI_WINDOW_HIGH,
];

impl PieceAddress {
    /// Returns the place of `len` bytes at `offset` of a BAR at `base`.
    fn new(base: u64, offset: u64, len: u64) -> Self {
        let first = base.checked_add(offset);
        let end = first.and_then(|first| first.checked_add(len));
        match (first, end) {
            (Some(first), Some(end))
                if WINDOWS
                    .iter()
                    .any(|window| window.start <= first && end <= window.end) =>
            {
                Self::Inside(Gpa::new(first))
            }
            _ => Self::Outside(base),
        }
    }
}

impl Piece {
    fn new(what: BarPiece) -> Self {
        Self {
            what,
            wanted: None,
            shown: None,
            has_logged: Logged::default(),
        }
    }

    fn want(&mut self, base: Option<u64>) {
        let place = |base| PieceAddress::new(base, self.what.offset, self.what.mapping.len());
        self.wanted = base.map(place);
    }

    /// Removes it from where it should not be.
    fn leave(&mut self, slots: &dyn Slots) {
        let Some((at, slot)) = self.shown.take() else {
            return;
        };
        if self.wanted == Some(PieceAddress::Inside(at)) {
            self.shown = Some((at, slot));
        } else if let Err(StillMapped { slot, source }) = slots.hide(slot) {
            // The mapping keeps the device open, so the guest reaches no other guest's device
            // there.
            self.shown = Some((at, slot));
            if !std::mem::replace(&mut self.has_logged.stuck, true) {
                let at = at.raw();
                tracing::error!(%source, "memory of {self} stays at {at:#x}, where its BAR no \
                     longer is");
            }
        }
    }

    /// Shows it where it should be.
    fn enter(&mut self, slots: &dyn Slots) {
        let (None, Some(wanted)) = (&self.shown, self.wanted) else {
            return;
        };
        let refusal: Box<dyn Display> = match wanted {
            PieceAddress::Inside(at) => match slots.show(at, &self.what.mapping) {
                Ok(slot) => {
                    self.shown = Some((at, slot));
                    return;
                }
                Err(error) => Box::new(format!("at {:#x}: {}", at.raw(), chain(&error))),
            },
            PieceAddress::Outside(base) => {
                Box::new(format!("at {base:#x}: it leaves the machine's PCI windows"))
            }
        };
        if !std::mem::replace(&mut self.has_logged.refusal, true) {
            tracing::warn!("{self} is not shown as memory, each access is an exit: {refusal}");
        }
    }
}

impl Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BarPiece {
            bar,
            offset,
            mapping,
        } = &self.what;
        write!(f, "BAR {bar}+{offset:#x}, {:#x} bytes,", mapping.len())
    }
}

/// Returns an error with its sources.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

impl BarMemory {
    /// Takes the pieces of one function, shown nowhere yet.
    pub fn new(vm: Arc<Vm>, pieces: Vec<BarPiece>) -> Self {
        Self::over(vm, pieces)
    }

    /// Hides all pieces for good: their mappings end. A piece whose slot KVM does not delete stays.
    pub fn end(&self) {
        let mut pieces = self.pieces();
        pieces.has_ended = true;
        self.leave_all(&mut pieces.list);
    }

    /// Hides each piece. Those whose slots KVM did not delete stay in the list.
    fn leave_all(&self, pieces: &mut Vec<Piece>) {
        for piece in &mut *pieces {
            piece.wanted = None;
            piece.leave(&*self.slots);
        }
        pieces.retain(|piece| piece.shown.is_some());
    }

    fn over(slots: Arc<dyn Slots>, pieces: Vec<BarPiece>) -> Self {
        let pieces = pieces.into_iter().map(Piece::new).collect();
        Self {
            slots,
            pieces: Mutex::new(Pieces {
                list: pieces,
                has_ended: false,
            }),
        }
    }

    fn pieces(&self) -> MutexGuard<'_, Pieces> {
        // Each piece's slot is noted as soon as KVM has added or deleted it: a panic in between
        // leaves a slot that stays.
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings all pieces where they are wanted: first out of what is to be left, which another
    /// piece may want.
    fn follow(&self, pieces: &mut [Piece]) {
        for piece in &mut *pieces {
            piece.leave(&*self.slots);
        }
        for piece in pieces {
            piece.enter(&*self.slots);
        }
    }
}

impl PlaceMemory for BarMemory {
    fn place(&self, bar: u8, at: Option<u64>) {
        let mut pieces = self.pieces();
        if pieces.has_ended {
            return self.leave_all(&mut pieces.list);
        }
        let list = &mut pieces.list;
        for piece in list.iter_mut().filter(|piece| piece.what.bar == bar) {
            piece.want(at);
        }
        self.follow(list);
    }
}

impl Drop for BarMemory {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
