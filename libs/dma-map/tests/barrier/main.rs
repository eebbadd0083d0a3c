//! `flush`, `park` and the drop of a core are barriers: mappings unmapped before are out of the
//! device's reach when they return `Ok`, whatever other threads are in the middle of; and mappings
//! that the device reaches are counted.
//!
//! The cores of a test, and the threads that tick and flush, are coroutines of one thread
//! (`turns`): each may be stopped at every step, in the hardware, at the clock, at the table,
//! before a lock, while others go on. The hardware fails, takes its time and completes in any order
//! (`hardware`), and its IOTLB holds what it has seen until an invalidation has covered it.
//!
//! `stops` has the stops that once broke a barrier, one test each; `any_stop` searches for others
//! under every policy. `make soak` runs that for longer: `BARRIER_OPERATIONS` (10^8)
//! `cargo test --release -p dma-map --test barrier -- --ignored`.
#![cfg(not(any(loom, shuttle)))]

mod any_stop;
mod hardware;
mod stops;
mod turns;
mod world;
