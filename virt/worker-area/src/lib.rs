//! The memory between the owner of an emulated device and the process that is its device model.
//!
//! The owner has the guest's memory, the device's rings and its view through the IOMMU. The worker
//! has none of them: it is given the *bytes* of requests, in slots of this area, and answers with
//! bytes. So a device model that a guest has taken over reaches what its own requests carry, and
//! nothing else of the guest.
//!
//! ```text
//! owner: chain ─ View, copy ─▶ slot ─ submit, publish ─▶ submission ring ─ next ─▶ worker
//!        chain ◀─ View, copy ─ slot ◀─ next_answer ── answer ring ◀─ answer, publish ─┘
//! ```
//! A request is a row of bytes that the device reads, then a row that it writes. The first bytes of
//! the one (the *head*: a request header) and the last of the other (the *foot*: a status) have
//! places of their own in a slot; those between them pass through the slot's data in *windows*, one
//! after the other, so a request may be larger than a slot ([`Shape::window`]).
//!
//! **The owner trusts nothing here.** The area is a sealed memory file, so the worker cannot shrink
//! it. Each word of the worker's is loaded once, into a local, and checked against what the owner
//! keeps in its own memory: how many answers there can be, which slots are out, how many bytes a
//! window had room for ([`Misbehaviour`]). What the worker writes into the owner's words is never
//! read back. Bytes of an answer are data of the device's, whatever they are.
//!
//! **Waking.** Each side says in a word that it sleeps, a SeqCst fence before it looks once more;
//! the other publishes its index, a fence, and looks at that word. So either the sleeper sees the
//! index, or the publisher sees that it must write the other's eventfd. The model is in
//! `src/tests/sleep.rs` (loom), for which each fence is needed.
//!
//! Threads: each side is used by one thread. *Left out*: descriptors, processes, and what a
//! request means. *Bounds*: as many submissions are out as there are slots, so no ring overflows.
#![forbid(unsafe_code)]

mod layout;
mod owner;
mod shape;
mod words;
mod worker;

pub use owner::{Answer, Misbehaviour, Owner, Start};
pub use shape::{MAX_DATA, MAX_SLOTS, Shape, ShapeError, Totals, Window};
pub use words::Words;
pub use worker::{FACTS, OpenError, OwnerError, Submission, TEXT_LEN, Worker};

/// Verdict of a worker about a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is done with this window, and wants the next.
    GoesOn,
    /// The request is over: its foot is there.
    Over,
}

#[cfg(test)]
mod tests;
