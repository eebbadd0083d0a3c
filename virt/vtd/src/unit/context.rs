//! The context cache: checked context entries, one slot per device and function.
//!
//! Indexed by the low byte of the source id; two buses in use with the same device and function evict
//! each other. A slot is also the handle that a translation starts from: it holds what the IOTLB lookup
//! needs, so that a hit hashes nothing. All contexts of one domain hold the same tag.
//!
//! Flushes visit the slots in use, few in any real machine and at most 256.

use guest_mem::SourceId;

use super::iotlb::DomainTag;
use super::walk::{Context, ContextKind};

#[derive(Clone, Copy, Debug)]
pub(super) struct Cached {
    /// Source id if the context goes through tables, else [`NOBODY`]: what the hit path compares.
    translated: u32,
    /// Source id of the slot's owner; [`NOBODY`] when empty.
    owner: u32,
    pub(super) tag: DomainTag,
    pub(super) beyond: u64,
    context: Context,
}

/// No source id, which has 16 bits.
const NOBODY: u32 = !0;

const EMPTY: Cached = Cached {
    translated: NOBODY,
    owner: NOBODY,
    tag: DomainTag::NONE,
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
    /// Slots with an owner, in no order.
    used: Vec<u8>,
}

const fn name(source: SourceId) -> u32 {
    source.0 as u32
}

impl ContextCache {
    pub(super) fn new() -> Self {
        Self {
            slots: Box::new([EMPTY; 256]),
            used: Vec::with_capacity(256),
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

    /// The tag that the contexts of a domain hold, if there is one.
    pub(super) fn tag_of(&self, did: u16) -> Option<DomainTag> {
        let used = self
            .used
            .iter()
            .map(|index| &self.slots[usize::from(*index)]);
        let mut same = used.filter(|slot| slot.context.did == did);
        same.next().map(|slot| slot.tag)
    }

    /// `tag` is [`tag_of`](Self::tag_of) the domain, or a new one.
    pub(super) fn insert(&mut self, source: SourceId, context: Context, tag: DomainTag) {
        let translated = match context.kind {
            ContextKind::PassThrough => NOBODY,
            ContextKind::Table { .. } => name(source),
        };
        let slot = &mut self.slots[usize::from(source.devfn())];
        if slot.owner == NOBODY {
            self.used.push(source.devfn());
        }
        *slot = Cached {
            translated,
            owner: name(source),
            tag,
            beyond: context.beyond,
            context,
        };
    }

    pub(super) fn flush_all(&mut self) {
        self.flush(|_, _| true);
    }

    pub(super) fn flush_domain(&mut self, did: u16) {
        self.flush(|_, context| context.did == did);
    }

    pub(super) fn flush_sources(&mut self, matches: impl Fn(SourceId) -> bool) {
        self.flush(|source, _| matches(source));
    }

    fn flush(&mut self, matches: impl Fn(SourceId, &Context) -> bool) {
        let slots = &mut self.slots;
        self.used.retain(|index| {
            let slot = &mut slots[usize::from(*index)];
            // The owner of a slot in use is a 16-bit id.
            let goes = matches(SourceId(slot.owner as u16), &slot.context);
            if goes {
                *slot = EMPTY;
            }
            !goes
        });
    }
}
