//! Operations on one range of a chunk, by its owner and by remote cores.
//!
//! A remote core frees a range by a mark, which the owner collects later. The first remote core
//! that frees often enough in a chunk becomes its *designated remote freer*. It alone writes
//! `exclusive_freed`, so its marks are plain stores. It keeps the role for as long as the chunk is
//! in its [`DirectoryCache`](super::directory_cache::DirectoryCache). All others mark
//! `shared_freed` by read-modify-write. All cores read both.
//!
//! | free by | cost |
//! |---|---|
//! | the owner | a load and a store of a byte |
//! | the designated remote freer | the same, of a word that the owner reads now and then |
//! | another remote core | a read-modify-write |
//!
//! No fence follows the designated freer's stores, so a mark in the tag does not tell the owner
//! that it has seen all of them. Therefore the freer's bit in the tag is itself a mark: while it is
//! set, the owner reads `exclusive_freed`. A core that gives the role up sets [`PENDING`] in the
//! same read-modify-write that clears its bit, after its last store.

use lines::Ordering;

use super::Shared;
use super::layout::{
    AWAY, Chunk, MARKS, OWNER, PENDING, REMOTE_FREER, WORD_PAGES, bit_of, get, owner_of, pending,
    word_of,
};
use super::state::State;
use crate::IovaRange;

impl Chunk {
    /// Frees `range` if the `owner` calls, exactly that range is allocated and not pinned, and no
    /// remote core has marked it. Returns whether it did.
    pub(super) fn free_marked(&self, owner: u64, range: IovaRange) -> bool {
        self.change_marked(owner, range, State::none)
    }

    /// Pins the range of this order at a page if no remote core has marked anything in the chunk,
    /// and otherwise under the conditions of [`Self::free_marked`].
    #[inline(always)]
    pub(super) fn pin_own(&self, owner: u64, page: u64, order: usize) -> bool {
        let state = self.state(page);
        let is_ours = state.is_out(order) && self.tag() & (OWNER | MARKS) == owner;
        if is_ours {
            self.set_state(page, state.pinned());
        }
        is_ours
    }

    /// Pins a range that [`Self::free_marked`] would free. Returns whether there is one.
    pub(super) fn pin_marked(&self, owner: u64, range: IovaRange) -> bool {
        self.change_marked(owner, range, State::pinned)
    }

    /// Owner: changes the state of exactly `range` unless remote cores have marked it. Returns
    /// whether it did.
    fn change_marked(&self, owner: u64, range: IovaRange, to: impl Fn(State) -> State) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Acquire, and before the load of the state: a core that collects for the owner clears the
        // state before the mark.
        let is_marked = (self.claimed(word).load(Ordering::Acquire)
            | self.shared_freed(word).load(Ordering::Acquire))
            & bit
            != 0;
        let state = self.state(page);
        let is_out = state.is_out_of(range) && !self.is_exclusively_freed(page, state);
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
        // Acquire, and before the load of the state: as in `change_marked`.
        let is_freed = self.shared_freed(word_of(page)).load(Ordering::Acquire) & bit_of(page) != 0;
        let state = self.state(page);
        let is_others = is_freed || self.is_exclusively_freed(page, state);
        // A range that the owner has pinned is collected by no other core.
        let is_ours = state.is_pinned() || state.is_out_of(range) && !is_others;
        if is_ours {
            self.set_state(page, state.none());
        }
        is_ours
    }

    /// Owner: returns whether a remote core has freed or pinned the range at a page, which is in
    /// this state. Reads only the marks that `tag` announces: where it announces none, there is no
    /// mark that the caller must know of.
    #[inline]
    pub(super) fn is_met(&self, tag: u64, page: u64, state: State) -> bool {
        let (word, bit) = (word_of(page), bit_of(page));
        let is_pending = tag & pending(word) != 0;
        // Acquire: if a core that collects for the owner has cleared the mark, its clearing of the
        // state is seen.
        let shared_freed = || self.shared_freed(word).load(Ordering::Acquire);
        is_pending && (get(self.claimed(word)) | shared_freed()) & bit != 0
            || (is_pending || tag & REMOTE_FREER != 0) && self.is_exclusively_freed(page, state)
    }

    /// Releases a pin of the `owner`, which calls. Returns `false` where it does not own the chunk
    /// or has not pinned the range by its state: it may have parked since, which makes a claim of
    /// its pin.
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

    /// Returns whether a core other than `core` owns the chunk.
    #[inline]
    pub(super) fn is_anothers(&self, core: u64) -> bool {
        names_another(self.tag(), core)
    }

    /// Returns whether the designated remote freer has freed the range at a page, which is in this
    /// state.
    pub(super) fn is_exclusively_freed(&self, page: u64, state: State) -> bool {
        (get(self.exclusive_freed(word_of(page))) >> (page % WORD_PAGES)) & 1 != state.turn()
    }

    /// Makes the caller the chunk's designated remote freer if there is none. Returns whether it is
    /// now.
    pub(super) fn become_giver(&self, shared: &Shared) -> bool {
        // Acquire: the stores of the last designated freer are seen.
        self.tag() & REMOTE_FREER == 0 && self.mark(shared, REMOTE_FREER) & REMOTE_FREER == 0
    }

    /// Sets a mark in the tag, and counts it for the owner if the tag had none. Returns the tag
    /// before.
    fn mark(&self, shared: &Shared, mark: u64) -> u64 {
        let before = self.tag_word().fetch_or(mark, Ordering::AcqRel);
        if before & MARKS == 0 {
            shared.tell(owner_of(before));
        }
        before
    }

    /// Gives up the role of the designated remote freer.
    pub(super) fn let_go(&self) {
        // Release: the next designated freer and the owner see the stores of this one.
        let _ = self
            .tag_word()
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |tag| {
                Some(tag & !REMOTE_FREER | PENDING)
            });
    }

    /// Frees the allocated range at a page, which is in this state, as the designated remote freer
    /// `core`, which calls and does not own the chunk. Returns `false` where the slow path must
    /// find out what is wrong or special.
    #[inline(always)]
    pub(super) fn give(&self, core: u64, page: u64, state: State) -> bool {
        let (word, at) = (word_of(page), page % WORD_PAGES);
        let (now, exclusive_freed) = (self.tag(), get(self.exclusive_freed(word)));
        let is_exclusively_freed = (exclusive_freed >> at ^ state.turn()) & 1 != 0;
        if !names_another(now, core) || is_exclusively_freed {
            return false;
        }
        // Regardless of the tag: an owner that collects clears `PENDING` first and may set it
        // again.
        if (get(self.claimed(word)) | get(self.shared_freed(word))) >> at & 1 != 0 {
            return false;
        }
        // Release: the caller's accesses to the range happen before its next use.
        self.exclusive_freed(word)
            .store(exclusive_freed ^ 1 << at, Ordering::Release);
        true
    }

    /// Returns whether exactly `range` is allocated and not pinned in a chunk of another core, as
    /// far as can be seen. Does not read `shared_freed`: that line is written next, and a read
    /// before would fetch it twice.
    pub(super) fn check_foreign(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let is_claimed = get(self.claimed(word_of(page))) & bit_of(page) != 0;
        !is_claimed && self.is_still_out(range)
    }

    /// Returns whether exactly `range` is allocated, not pinned by its owner, and not freed by the
    /// designated remote freer, as far as can be seen.
    pub(super) fn is_still_out(&self, range: IovaRange) -> bool {
        let page = range.first().raw();
        let state = self.state(page);
        state.is_out_of(range) && !self.is_exclusively_freed(page, state)
    }

    /// Marks a range as freed, for its owner to collect. Returns `false` where it was already
    /// marked.
    pub(super) fn give_back(&self, shared: &Shared, range: IovaRange) -> bool {
        let page = range.first().raw();
        let (word, bit) = (word_of(page), bit_of(page));
        // Release: the caller's accesses to the range happen before its next use. Acquire: see
        // `drain`. Of the result only the bit itself is used: that makes one instruction, not a
        // loop of compare-and-exchange.
        if self.shared_freed(word).fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return false;
        }
        self.notify(shared, word);
        true
    }

    /// Marks a word as pending for the owner. Called after the mark of the range itself: see
    /// `drain`.
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
    // Neither none nor `AWAY`: no core has a number above `AWAY`.
    owner.wrapping_sub(1) < AWAY - 1 && owner != core
}
