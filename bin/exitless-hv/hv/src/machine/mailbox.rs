//! Requests of the guest's processors to each other: each alone has access to its own state.
//!
//! ```text
//!   asker:  ask: requests ─▶ a ticket ── kick: NMI and message ─▶ (wait: served past the ticket, serving its own meanwhile)
//!   owner:  at each exit, and while it waits itself:
//!           begin: the tickets so far ─▶ take: requests ─▶ does it ─▶ finish: served
//! ```
//! A request says which state to read anew, never what to do with a value. Two of a kind are one,
//! and the state is read after the request was taken. Interrupts that the guest's processors send
//! each other are a set of vectors.
//!
//! **Bound.** A processor that is asked exits, since an NMI does so whatever its guest does. It
//! serves before it enters again, and it enters the guest in no other state. One that waits serves
//! others meanwhile, so two that ask each other go on. No core asks with a lock held.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use eli::{Vector, VectorSet};

/// Requests, a bit each.
pub mod request {
    /// The device's message table was written.
    pub const MESSAGES: u32 = 1;
    /// An entry of the I/O APIC that is this processor's was written.
    pub const PINS: u32 = 1 << 1;
    /// Another processor has its shadow elsewhere: that page must be protected here, too.
    pub const PROTECT: u32 = 1 << 2;
    /// The page of this processor's shadow was written by another, or can be no more from here on.
    pub const REFRESH: u32 = 1 << 3;
    /// Requests that can be served at any moment of an exit.
    pub const LOOKS: u32 = MESSAGES | PINS | PROTECT | REFRESH;
    /// INIT.
    pub const INIT: u32 = 1 << 4;
    /// Start-up: at the page in [`Mailbox::start_page`](super::Mailbox::start_page).
    pub const START_UP: u32 = 1 << 5;
    /// A non-maskable interrupt of the guest's.
    pub const NMI: u32 = 1 << 6;
    /// A tick of the watchdog's.
    pub const WATCHDOG: u32 = 1 << 7;
    /// The guest is over.
    pub const END: u32 = 1 << 8;
}

/// A set of vectors, of which one core at a time changes a bit.
struct SharedSet([AtomicU64; 4]);

impl SharedSet {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; 4])
    }

    fn word(&self, vector: Vector) -> (&AtomicU64, u64) {
        (&self.0[usize::from(vector >> 6)], 1 << (vector & 63))
    }

    fn take(&self) -> VectorSet {
        let mut words = [0; 8];
        for (pair, word) in words.chunks_exact_mut(2).zip(&self.0) {
            // Acquire: what the sender wrote before it is seen by the guest here.
            let bits = match word.load(Ordering::Relaxed) {
                0 => 0,
                _ => word.swap(0, Ordering::Acquire),
            };
            pair[0] = bits as u32;
            pair[1] = (bits >> 32) as u32;
        }
        VectorSet::from_words(words)
    }
}

/// A processor's mailbox.
pub struct Mailbox {
    requests: AtomicU32,
    /// Number of calls of `ask`.
    asked: AtomicU64,
    /// That of the last one that was served.
    served: AtomicU64,
    start_page: AtomicU32,
    /// Interrupts of other processors of the guest's.
    posted: SharedSet,
    /// Vectors that the processor has assigned: the same at its real local APIC for good, so that
    /// one may be sent there.
    direct: SharedSet,
    /// The page of its table, if that is shadowed; else 0.
    shadowed: AtomicU64,
}

impl Mailbox {
    /// Creates an empty one.
    pub const fn new() -> Self {
        Self {
            requests: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            served: AtomicU64::new(0),
            start_page: AtomicU32::new(0),
            posted: SharedSet::new(),
            direct: SharedSet::new(),
            shadowed: AtomicU64::new(0),
        }
    }

    /// Asks for these. Returns the ticket that [`is_served`](Self::is_served) takes. The caller
    /// kicks.
    pub fn ask(&self, requests: u32) -> u64 {
        self.requests.fetch_or(requests, Ordering::Relaxed);
        // Release: with the ticket the request, and what it is about, is seen (`begin`).
        self.asked.fetch_add(1, Ordering::Release) + 1
    }

    /// Asks for a start-up at this page.
    pub fn ask_start(&self, page: u8) -> u64 {
        self.start_page.store(page.into(), Ordering::Relaxed);
        self.ask(request::START_UP)
    }

    /// Returns whether what was asked with this ticket has been done.
    pub fn is_served(&self, ticket: u64) -> bool {
        // Acquire: pairs with `finish`.
        self.served.load(Ordering::Acquire) >= ticket
    }

    /// Returns whether something is asked, or was sent. For the owner.
    pub fn has_any(&self) -> bool {
        self.requests.load(Ordering::Relaxed) != 0
            || self.asked.load(Ordering::Relaxed) != self.served.load(Ordering::Relaxed)
            || self
                .posted
                .0
                .iter()
                .any(|word| word.load(Ordering::Relaxed) != 0)
    }

    /// Returns whether something is asked but a tick of the watchdog's to be taken. For the owner.
    pub fn has_guests(&self) -> bool {
        self.requests.load(Ordering::Relaxed) & !request::WATCHDOG != 0
    }

    /// Returns the last ticket, before requests are taken. For the owner.
    pub fn begin(&self) -> u64 {
        // Acquire: pairs with `ask`.
        self.asked.load(Ordering::Acquire)
    }

    /// Takes those of these that are asked for. For the owner.
    pub fn take(&self, requests: u32) -> u32 {
        self.requests.fetch_and(!requests, Ordering::Relaxed) & requests
    }

    /// Marks what was asked up to this ticket as done, for the owner; of other kinds than were
    /// taken nothing is waited for.
    pub fn finish(&self, ticket: u64) {
        // Release: what was done is seen by the asker. One that waits within a service has served
        // later tickets.
        self.served.fetch_max(ticket, Ordering::Release);
    }

    /// Returns the page of the start-up that was asked for. For the owner.
    pub fn start_page(&self) -> u8 {
        self.start_page.load(Ordering::Relaxed) as u8
    }

    /// Sends an interrupt of the guest's. The caller kicks.
    pub fn post(&self, vector: Vector) {
        let (word, bit) = self.posted.word(vector);
        // Release: what the guest wrote before it is seen with it.
        word.fetch_or(bit, Ordering::Release);
    }

    /// Takes what was sent. For the owner.
    pub fn take_posted(&self) -> VectorSet {
        self.posted.take()
    }

    /// Returns whether the real local APIC may be sent the vector itself.
    pub fn is_direct(&self, vector: Vector) -> bool {
        let (word, bit) = self.direct.word(vector);
        // Relaxed: true for good, since the vector stays the same there.
        word.load(Ordering::Relaxed) & bit != 0
    }

    /// Sets the vectors that are assigned now. For the owner.
    pub fn set_direct(&self, vectors: VectorSet) {
        for (index, word) in (0..).zip(&self.direct.0) {
            let [low, high] = [vectors.word(2 * index), vectors.word(2 * index + 1)];
            word.store(u64::from(low) | u64::from(high) << 32, Ordering::Relaxed);
        }
    }

    /// Returns the page of the processor's table, if that is shadowed.
    pub fn shadowed(&self) -> Option<u64> {
        Some(self.shadowed.load(Ordering::Acquire)).filter(|page| *page != 0)
    }

    /// Sets it, for the owner. Returns whether it was another.
    pub fn set_shadowed(&self, page: Option<u64>) -> bool {
        let page = page.unwrap_or(0);
        self.shadowed.swap(page, Ordering::Release) != page
    }
}
