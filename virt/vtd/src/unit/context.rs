//! The context cache: checked context entries, and the tag by which each source finds its
//! translations.
//!
//! Tags have a place for every source id, so that a translation begins with one load and compares
//! nothing: a source whose context is not here, or does not go through tables, has the tag of no
//! domain, which no translation is kept under. All contexts of one domain hold the same tag.
//!
//! Contexts have a slot for each device and function; two buses in use with the same device and
//! function evict each other. Flushes visit the slots in use, few in any real machine and at
//! most 256.
//!
//! Memory: tags are 512 KiB of address space, of which two buses touch one page.

use guest_mem::SourceId;

use super::iotlb::{DomainTag, zeroed};
use super::walk::Context;

#[derive(Clone, Copy, Debug)]
struct Cached {
    owner: SourceId,
    tag: DomainTag,
    context: Context,
}

/// Source ids.
const SOURCES: usize = 1 << 16;

pub(super) struct ContextCache {
    /// By source id.
    tags: Box<[DomainTag; SOURCES]>,
    /// By device and function.
    slots: Box<[Option<Cached>; 256]>,
    /// Slots with an owner, in no order.
    used: Vec<u8>,
}

impl ContextCache {
    pub(super) fn new() -> Self {
        Self {
            tags: zeroed(),
            slots: Box::new([None; 256]),
            used: Vec::with_capacity(256),
        }
    }

    /// Returns the tag of the IOTLB entries of `source`.
    #[inline]
    pub(super) fn tag(&self, source: SourceId) -> DomainTag {
        self.tags[usize::from(source.0)]
    }

    pub(super) fn get(&self, source: SourceId) -> Option<Context> {
        let slot = self.slots[usize::from(source.devfn())].as_ref();
        let own = slot.filter(|cached| cached.owner == source);
        own.map(|cached| cached.context)
    }

    /// The tag that contexts of a domain hold, if there is one, and the address bits that none of
    /// them may have.
    #[inline]
    pub(super) fn domain(&self, did: u16) -> Option<(DomainTag, u64)> {
        let used = self.used.iter();
        let mut cached = used.filter_map(|index| self.slots[usize::from(*index)].as_ref());
        let same = cached.find(|cached| cached.context.did == did && cached.tag != DomainTag::NONE);
        same.map(|cached| (cached.tag, cached.context.beyond))
    }

    pub(super) fn insert(&mut self, source: SourceId, context: Context, tag: DomainTag) {
        let new = Cached {
            owner: source,
            tag,
            context,
        };
        match self.slots[usize::from(source.devfn())].replace(new) {
            Some(old) => self.tags[usize::from(old.owner.0)] = DomainTag::NONE,
            None => self.used.push(source.devfn()),
        }
        self.tags[usize::from(source.0)] = tag;
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
        let Self { tags, slots, used } = self;
        used.retain(|index| {
            let slot = &mut slots[usize::from(*index)];
            let goes = slot.take_if(|cached| matches(cached.owner, &cached.context));
            if let Some(cached) = &goes {
                tags[usize::from(cached.owner.0)] = DomainTag::NONE;
            }
            goes.is_none()
        });
    }
}
