//! Tests that measure the process (its heap, its processor time, its log) or need the processors
//! for themselves. One binary, since each would compile the whole server anew; the tests take
//! turns.

#![allow(unsafe_code, reason = "an allocator that counts")]

#[path = "../common/mod.rs"]
mod common;
mod idle;
mod policy;
mod sleeps;
mod slow_storage;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Guards no data: a test that failed leaves nothing broken.
static PROCESS: RwLock<()> = RwLock::new(());

/// No other test of this binary runs meanwhile.
fn alone() -> RwLockWriteGuard<'static, ()> {
    PROCESS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Tests that wait more than they work run side by side.
fn among_others() -> RwLockReadGuard<'static, ()> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner)
}
