//! The local APIC of the small world, an I/O APIC's lines and an 8259.

use super::*;

/// A line of the I/O APIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Line {
    pub(super) is_up: bool,
    /// It was sent, and no EOI has come back.
    pub(super) remote: bool,
}

/// The local APIC and the controllers connected to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Apic {
    pub(super) requested: BTreeSet<Vector>,
    pub(super) in_service: BTreeSet<Vector>,
    pub(super) level: BTreeSet<Vector>,
    pub(super) task_priority: u8,
    pub(super) lines: BTreeMap<Vector, Line>,
    pub(super) pic_requested: BTreeSet<u8>,
    pub(super) pic_in_service: BTreeSet<u8>,
}

impl Apic {
    pub(super) fn edge(&mut self, vector: Vector) -> bool {
        self.level.remove(&vector);
        self.requested.insert(vector)
    }

    pub(super) fn line(&mut self, vector: Vector, is_up: bool) {
        let line = self.lines.entry(vector).or_default();
        line.is_up = is_up;
        if is_up && !line.remote {
            line.remote = true;
            self.level.insert(vector);
            self.requested.insert(vector);
        }
    }

    /// Returns the vector that the processor would receive from it now.
    pub(super) fn deliverable(&self) -> Option<Vector> {
        let highest = *self.requested.last()?;
        let in_service = self.in_service.last().map_or(0, |vector| vector >> 4);
        (highest >> 4 > in_service.max(self.task_priority >> 4)).then_some(highest)
    }

    /// The 8259's line, of which the lowest has the highest priority.
    pub(super) fn pic_deliverable(&self) -> Option<u8> {
        let first = *self.pic_requested.first()?;
        self.pic_in_service
            .first()
            .is_none_or(|other| first < *other)
            .then_some(first)
    }

    pub(super) fn acknowledge(&mut self, prefers_pic: bool) -> Option<(From, Vector)> {
        let (apic, pic) = (self.deliverable(), self.pic_deliverable());
        if let Some(line) = pic.filter(|_| prefers_pic || apic.is_none()) {
            self.pic_requested.remove(&line);
            self.pic_in_service.insert(line);
            return Some((From::Pic, PIC + line));
        }
        let vector = apic?;
        self.requested.remove(&vector);
        self.in_service.insert(vector);
        Some((From::Apic, vector))
    }

    pub(super) fn eoi(&mut self) -> Option<Vector> {
        let vector = self.in_service.pop_last()?;
        if self.level.contains(&vector) {
            let line = self.lines.entry(vector).or_default();
            line.remote = false;
            let is_up = line.is_up;
            self.line(vector, is_up);
        }
        Some(vector)
    }
}
