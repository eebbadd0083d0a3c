//! The owner against a guest that the tests play: its unit behind each front end, a virtio disk,
//! and real tables.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arming;
mod balloon;
mod doorbells;
mod drain;
mod end;
mod hostile;
mod interrupts;
mod remote;
mod sleep;
mod slow_storage;
mod stop;
mod support;
