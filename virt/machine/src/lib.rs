//! The single owner of a virtual machine's remapping units and functions, as one poller of a
//! sidecore.
//!
//! ```text
//! vCPU thread ─ access ─▶ port (FunctionPort, BusDevice) ─ Request::Access ─┐
//! pager, ledger, end ─ TicketDone, Evict, Inspect, End ─────────────────────┤
//!                                                                           ▼
//!                       Owner ─ poll ─▶ RemappingUnit: registers, queue ─▶ UnitSink: events, invalidations, answers
//!                             ─ poll ─▶ Function(Cx: its unit, memory) ──▶ Effects: interrupts, routes, commands
//! ```
//!
//! * [`mod@unit`]: what a remapping unit is ([`RemappingUnit`]), what it tells ([`UnitSink`]), and
//!   how a closed set of them is made ([`units!`]).
//! * [`function`]: what a function is ([`Function`]), what it is lent for one call ([`Cx`]) and
//!   asks for ([`Effects`]); [`functions!`].
//! * [`owner`]: [`Owner`], the poller. [`request`]: what other threads ask of it. [`port`]: their
//!   doors.
//!
//! **How a new system plugs in.** A remapping unit, a device class, or a kind of memory is a crate
//! that implements [`RemappingUnit`], [`Function`] or [`PhysMem`](guest_mem::PhysMem), and an arm
//! of the enums that a program composes with the two macros. Nothing here changes.
//!
//! **Cost.** Which unit and which function is decided once per poll; from there on the code is
//! generic over the concrete types, so that no access looks anything up or goes through a pointer.
//! A view of memory has no state.
//!
//! **Threads.** The owner's: one. Others send requests and wait for answers.
//!
//! **Left out.** Which hypervisor it is: doorbells and interrupt lines are traits of `platform`,
//! which it implements.
#![forbid(unsafe_code)]

pub mod function;
mod interrupts;
pub mod owner;
pub mod port;
pub mod request;
#[cfg(feature = "testing")]
pub mod testing;
pub mod unit;

pub use function::{
    Cx, DataPath, Effects, Function, FunctionCounts, FunctionShape, NoFunction, Progress,
    ResolveFunction,
};
pub use owner::{Owner, Totals, Wires};
pub use request::{Absent, Op, Request, Target, TicketResult};
pub use unit::{
    Command, CommandId, CommandResult, Hold, HoldId, Invalidation, RefusedAccess, RemappingUnit,
    ResolveUnit, Scope, UnitControl, UnitEvent, UnitPoll, UnitSink, UnitVisitor,
};
