//! What may be done with one range of a chunk: what its owner does, and what strangers do.
//!
//! A stranger's free is a mark that the owner takes note of later. The first stranger to free in a
//! chunk twice becomes its *giver*: only it writes `given`, so that its marks are plain stores, and
//! it remains the giver for as long as it keeps the chunk in mind
//! ([`DirectoryCache`](super::directory_cache::DirectoryCache)). All others mark `freed` by
//! read-modify-write. Everyone looks at both.
//!
//! | free of | costs |
//! |---|---|
//! | the owner | a load and a store of a byte |
//! | the giver | the same, of a word that the owner reads now and then |
//! | another stranger | a read-modify-write |
//!
//! The giver's stores are not followed by a fence, so its owner cannot tell from a mark in the tag
//! that he has seen all of them. Therefore [`GIVER`] itself is a mark: while it is set, the owner
//! looks. Who lets go says [`PENDING`] in the same read-modify-write, which comes after its last
//! store.

use lines::Ordering;

use super::Shared;
use super::layout::{
    AWAY, Chunk, GIVER, MARKS, OWNER, PENDING, WORD_PAGES, bit_of, get, owner_of, pending, word_of,
};
use super::state::State;
use crate::IovaRange;

impl Chunk {
    /// Frees `range` if the `owner` calls, exactly that is allocated and not pinned, and no
    /// stranger has marked it; whether it was.
    pub(super) fn free_marked(&self, owner: u64, range: IovaRange) -> bool {
        self.change_marked(owner, range, State::none)
    }

    /// Pins the range of this order at a page if no stranger has marked anything in the chunk, and
    /// otherwise as [`Self::free_marked`] frees.
    #[inline(always)]
    pub(super) fn pin_own(&self, owner: u64, page: u64, order: usize) -> bool {
        let state = self.state(page);
        let is_ours = state.is_out(order) && self.tag() & (OWNER | MARKS) == owner;
        if is_ours {
            self.set_state(page, state.pinned());
        }
        is_ours
    }

    /// Pins what [`Self::free_marked`] would free; whether there is such a range.
    pub(super) fn pin_marked(&self, owner: u64, range: IovaRange) -> bool {
        self.change_marked(owner, range, State::pinned)
    }

    /// Owner: changes the state of exactly `range` if strangers have not marked it; whether that
    /// was so.
    fn change_marked(&self, owner: u64, range: IovaRange, to: impl Fn(State) -> State) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Acquire, and before the state, which a core that collects for the owner clears before the
        // mark.
        let is_marked = (self.claimed(word).load(Ordering::Acquire)
            | self.freed(word).load(Ordering::Acquire))
            & bit
            != 0;
        let state = self.state(page);
        let is_out = state.is_out_of(range) && !self.is_given(page, state);
        let is_ours = self.is_own(owner) && is_out && !is_marked;
        if is_ours {
            self.set_state(page, to(state));
        }
        is_ours
    }

    /// Owner: frees `range`, which is pinned, by its state or by a claim; `false` where a remote
    /// core has freed it at the same moment, by mistake.
    pub(super) fn free_pinned(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        // Acquire, and before the state: as in `change_marked`.
        let is_freed = self.freed(word_of(page)).load(Ordering::Acquire) & bit_of(page) != 0;
        let state = self.state(page);
        let is_others = is_freed || self.is_given(page, state);
        // What the owner has pinned nobody takes back.
        let is_ours = state.is_pinned() || state.is_out_of(range) && !is_others;
        if is_ours {
            self.set_state(page, state.none());
        }
        is_ours
    }

    /// Owner: whether a range of it at a page, in this state, was freed or pinned by a remote core.
    /// Only what the `tag` has marks for is looked at: where there are none, nothing was marked
    /// that the caller may know of.
    #[inline]
    pub(super) fn is_met(&self, tag: u64, page: u64, state: State) -> bool {
        let (word, bit) = (word_of(page), bit_of(page));
        let is_pending = tag & pending(word) != 0;
        // Acquire: if a core that collects for the owner has cleared the mark, it is seen to have
        // cleared the state.
        let freed = || self.freed(word).load(Ordering::Acquire);
        is_pending && (get(self.claimed(word)) | freed()) & bit != 0
            || (is_pending || tag & GIVER != 0) && self.is_given(page, state)
    }

    /// Lets go of what the `owner`, which calls, pinned; `false` where it does not own the chunk,
    /// or has not pinned the range: it may have parked since, which makes a claim of its pin.
    #[inline(always)]
    pub(super) fn unpin_own(&self, owner: u64, page: u64, order: usize) -> bool {
        let state = self.state(page);
        let is_ours = state.is_pinned_out(order) && self.is_own(owner);
        if is_ours {
            self.set_state(page, state.unpinned());
        }
        is_ours
    }

    #[inline(always)]
    pub(super) fn is_own(&self, core: u64) -> bool {
        owner_of(self.tag()) == core
    }

    /// Whether the chunk is of another core than this one.
    #[inline]
    pub(super) fn is_anothers(&self, core: u64) -> bool {
        names_another(self.tag(), core)
    }

    /// Whether the giver has given back what is in this state.
    pub(super) fn is_given(&self, page: u64, state: State) -> bool {
        (get(self.given(word_of(page))) >> (page % WORD_PAGES)) & 1 != state.turn()
    }

    /// Makes the caller the chunk's giver if there is none: whether it is.
    pub(super) fn become_giver(&self, shared: &Shared) -> bool {
        // Acquire: what the last giver wrote is seen.
        self.tag() & GIVER == 0 && self.mark(shared, GIVER) & GIVER == 0
    }

    /// Sets a mark in the tag, and says so to the owner if it has none yet; the tag as it was.
    fn mark(&self, shared: &Shared, mark: u64) -> u64 {
        let before = self.tag_word().fetch_or(mark, Ordering::AcqRel);
        if before & MARKS == 0 {
            shared.tell(owner_of(before));
        }
        before
    }

    /// The giver lets go.
    pub(super) fn let_go(&self) {
        // Release: the next giver and the owner see what this one gave.
        let _ = self
            .tag_word()
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |tag| {
                Some(tag & !GIVER | PENDING)
            });
    }

    /// Gives what is allocated at a page, in this state, back to its owner, another core than the
    /// giver, `core`, who calls; `false` where the slow path must find out what is wrong or
    /// special.
    #[inline(always)]
    pub(super) fn give(&self, core: u64, page: u64, state: State) -> bool {
        let (word, at) = (word_of(page), page % WORD_PAGES);
        let (now, given) = (self.tag(), get(self.given(word)));
        let is_given = (given >> at ^ state.turn()) & 1 != 0;
        if !names_another(now, core) || is_given {
            return false;
        }
        // Whatever the tag says: an owner who looks clears `PENDING` first and may set it again.
        if (get(self.claimed(word)) | get(self.freed(word))) >> at & 1 != 0 {
            return false;
        }
        // Release: what we did with the range comes before its next use.
        self.given(word).store(given ^ 1 << at, Ordering::Release);
        true
    }

    /// Whether exactly `range` is allocated and not pinned in a chunk of another core, as far as
    /// can be seen. Whether it was freed is not looked at: that line is written next, and to read
    /// it first would fetch it twice.
    pub(super) fn check_foreign(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let is_claimed = get(self.claimed(word_of(page))) & bit_of(page) != 0;
        !is_claimed && self.is_still_out(range)
    }

    /// Whether exactly `range` is allocated, not pinned by its owner, and not given back by the
    /// giver, as far as can be seen.
    pub(super) fn is_still_out(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let state = self.state(page);
        state.is_out_of(range) && !self.is_given(page, state)
    }

    /// Marks a range as freed, for its owner to take back; `false` where it was before.
    pub(super) fn give_back(&self, shared: &Shared, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Release: what we did with the range comes before its next use. Acquire: see `drain`. Only
        // the bit itself is asked of the answer: that is one instruction, not a loop of
        // compare-and-exchange.
        if self.freed(word).fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return false;
        }
        self.notify(shared, word);
        true
    }

    /// Tells the owner to look. After the mark itself: see `drain`.
    pub(super) fn notify(&self, shared: &Shared, word: usize) {
        if self.tag() & pending(word) == 0 {
            self.mark(shared, pending(word));
        }
    }
}

/// Whether a tag names another owner than this core.
#[inline]
fn names_another(tag: u64, core: u64) -> bool {
    let owner = owner_of(tag);
    // Not NOBODY, and not AWAY: no core has a number above it.
    owner.wrapping_sub(1) < AWAY - 1 && owner != core
}
