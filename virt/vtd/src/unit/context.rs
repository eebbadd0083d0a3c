//! The context cache: checked context entries, one slot per device and function.
//!
//! Indexed by the low byte of the source id; two buses in use with the same device and function evict
//! each other. A slot is also the handle that a translation starts from: it holds what the IOTLB lookup
//! needs, so that a hit hashes nothing.

use guest_mem::SourceId;

use super::iotlb::DomainTag;
use super::walk::{Context, ContextKind};

#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    /// Source id + 1 if the context goes through tables, else 0: what the hit path compares.
    pub(super) translated: u32,
    /// Source id + 1 of the slot's owner; 0 when empty.
    owner: u32,
    pub(super) tag: DomainTag,
    pub(super) beyond: u64,
    context: Context,
}

const EMPTY: Cached = Cached {
    translated: 0,
    owner: 0,
    tag: DomainTag::ZERO,
    beyond: !0,
    context: Context {
        did: 0,
        fpd: false,
        kind: ContextKind::PassThrough,
        beyond: !0,
    },
};

pub(super) struct ContextCache {
    slots: Box<[Cached; 256]>,
}

const fn name(source: SourceId) -> u32 {
    source.0 as u32 + 1
}

impl ContextCache {
    pub(super) fn new() -> Self {
        Self {
            slots: Box::new([EMPTY; 256]),
        }
    }

    /// The slot that `source` would use, whoever owns it. Compare `translated` before using it.
    #[inline]
    pub(super) fn slot(&self, source: SourceId) -> &Cached {
        &self.slots[usize::from(source.devfn())]
    }

    #[inline]
    pub(super) fn is_translated(slot: &Cached, source: SourceId) -> bool {
        slot.translated == name(source)
    }

    pub(super) fn get(&self, source: SourceId) -> Option<Context> {
        let slot = self.slot(source);
        (slot.owner == name(source)).then_some(slot.context)
    }

    pub(super) fn insert(&mut self, source: SourceId, context: Context) {
        let translated = match context.kind {
            ContextKind::PassThrough => 0,
            ContextKind::Table { .. } => name(source),
        };
        self.slots[usize::from(source.devfn())] = Cached {
            translated,
            owner: name(source),
            tag: DomainTag::new(context.did),
            beyond: context.beyond,
            context,
        };
    }

    pub(super) fn flush_all(&mut self) {
        self.slots.fill(EMPTY);
    }

    pub(super) fn flush_domain(&mut self, did: u16) {
        for slot in self.slots.iter_mut() {
            if slot.owner != 0 && slot.context.did == did {
                *slot = EMPTY;
            }
        }
    }

    pub(super) fn flush_sources(&mut self, matches: impl Fn(SourceId) -> bool) {
        for slot in self.slots.iter_mut() {
            // `owner` is a 16-bit id + 1.
            if slot.owner != 0 && matches(SourceId((slot.owner - 1) as u16)) {
                *slot = EMPTY;
            }
        }
    }
}
