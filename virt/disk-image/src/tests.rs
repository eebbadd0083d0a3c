//! Tests that need something in the file's place: what a power cut leaves, a sync that fails, a
//! write that fails.

mod failed_sync;
mod failed_write;
mod naive;
mod power_cut;
mod recorder;
