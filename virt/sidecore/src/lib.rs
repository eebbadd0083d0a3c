//! A sidecore: one thread on one host core that **owns** emulated devices and polls them, so that
//! guests reach them without an exit. It sleeps when there is nothing to do, without losing a
//! wake-up.
//!
//! The idea is that of sidecore emulation (Amit et al., vIOMMU, USENIX ATC 2011) and of ELVIS
//! (Har'El et al., SYSTOR 2012 and USENIX ATC 2013). This crate does not depend on the devices
//! polled: see `ARCHITECTURE.md` for what it must not know.
//!
//! ```text
//!  vCPU thread ── Handle::send / call ──▶ mailbox ─┐              ┌─ busy: at once
//!  sockets, kicks, disks: epoll, every 100 µs ─────┤              │
//!  guest: rings, register pages ──▶ probes, 1 ns ──┴▶ round: poll() of each active Poller, by deficit ─┐
//!                                                   ▲                                                  │ idle
//!                                                   └─ spin │ pause ◀── idle policy ◀──────────────────┘
//!                                                   └─ arm what moved, fence, re-check, sleep ◀──┘
//! ```
//! - [`Poller`]: interface of the owner of a VM's devices. It does a bounded batch per `poll`,
//!   charged to its [`PollContext`]; its [`Probe`] tells in a nanosecond whether an idle one has
//!   work; its [`Wakes`] are the descriptors that may wake it.
//! - [`SidecoreBuilder`], [`Sidecore`]: one core: it starts with pollers, adds and removes some,
//!   and returns them when it stops.
//! - [`Fleet`]: several cores; pollers move between them without losing messages; a [`Controller`]
//!   adds and retires cores by load.
//! - [`Group`]: several pollers as one, which stay on one core and move together.
//! - [`Handle`]: sends to one poller, from any thread, on whichever core the poller is. A message
//!   to a sidecore that polls costs no system call; to one that sleeps, one eventfd write by the
//!   first sender. [`Handle::call`] waits for an answer through a [`Reply`] and learns if none will
//!   come.
//! - [`IdlePolicy`], [`IdleState`]: spin, pause, sleep: a pure state machine, with a trade-off of
//!   CPU time against latency ([`CpuLatencyTradeoff`]).
//! - [`Monitor`]: reports a sidecore that has stopped sweeping.
//! - [`Stats`]: counted by the owner, readable by any thread.
//!
//! Threads: pollers and their state are accessed by their sidecore's thread only, so that they need
//! neither locks nor atomics. Shared are the mailbox with its state word (`gate.rs`, which has the
//! argument for its orderings), each poller's route (`handle.rs`), the reply slots, and the
//! statistics.
//!
//! Costs, on a 2.5 GHz Xeon (`examples/costs.rs`): an idle sweep 53 ns and 1.1 ns per poller, 2.5
//! ns where 256 probed words stand at the beginning of pages; a turn 50 to 100 ns, and a reading of
//! the clock where others have work; a sleep and wake 2.2 µs of CPU time, and 4.9 µs with 256
//! pollers.
//!
//! Checked by a loom model of the sleeping protocol (`src/park/tests/model.rs`; its mutants are in
//! `tests/mutants`; run with `RUSTFLAGS="--cfg loom" cargo test -p sidecore --lib --release
//! model`), by forced sleeps with real descriptors (`tests/threads/forced_sleep.rs`), by property
//! tests of the scheduler (`src/drr/tests.rs`) and a simulator of the idle policy
//! (`src/idle/tests/price.rs`).
//!
//! Left out: NUMA beyond pinning (memory stays where its owner put it).

mod clock;
mod control;
mod drr;
mod fleet;
mod gate;
mod group;
mod handle;
mod idle;
mod mailbox;
mod migrate;
mod monitor;
mod park;
mod pause;
mod poll_context;
mod poller;
mod pollers;
mod reply;
mod run;
mod serve;
mod sidecore;
mod signal;
mod stats;
mod sync;
mod sys;
mod transit;
mod wake_calibration;
mod wakes;

pub use clock::Nanos;
pub use control::{ControlConfig, Controller, CoreSample, Decision, PollerSample};
pub use fleet::{Fleet, FleetBuilder, FleetCounts, MoveError};
pub use group::{ChildWaker, ChildWakers, Group, GroupProbe, ToChild};
pub use handle::{CallError, Handle, SendError};
pub use idle::{Adaptive, CpuLatencyTradeoff, CpuPerLatency, Hints, IdlePolicy, IdleState, Wait};
pub use monitor::{Monitor, StallCause, StallReport, Watch};
pub use poll_context::{PollContext, REQUEST_COST, bytes_cost};
pub use poller::{Activity, AlwaysPoll, ArmError, DetachReason, Poller, Probe};
pub use reply::{Answer, Reply};
pub use sidecore::{AddError, Sidecore, SidecoreBuilder, SpawnError};
pub use signal::{
    PeerEventFd, WritePermit, drain_eventfd, never_waits, signal_eventfd, writes_are_watched,
};
pub use stats::{CoreStats, PollerActivity, PollerState, PollerStats, Stats};
pub use sys::pin_this_thread;
pub use wakes::Wakes;
