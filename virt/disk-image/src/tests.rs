//! Tests that need something in the file's place: what a power cut leaves, and a sync that fails.

mod failed_sync;
mod naive;
mod power_cut;
mod recorder;
