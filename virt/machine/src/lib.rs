//! The single owner of a virtual machine's remapping units and functions, as one poller of a
//! sidecore.
//!
//! ```text
//! vCPU thread ─ access ─▶ port (FunctionPort, BusDevice) ─ Request::Access ─┐
//! pager, ledger, end ─ TicketDone, Evict, Inspect, End ─────────────────────┤
//!                                                                           ▼
//!                       Owner ─ poll ─▶ RemappingUnit: registers, queue ─▶ UnitSink: events, invalidations, answers
//!                             ─ poll ─▶ Function(FunctionContext: its unit, memory) ──▶ Effects: interrupts, routes, commands
//! ```
//!
//! * [`mod@unit`]: interface of a remapping unit ([`RemappingUnit`]) and of its reports
//!   ([`UnitSink`]), and the macro that makes a closed set of units ([`units!`]).
//! * [`function`]: interface of a function ([`Function`]), the resources of one call
//!   ([`FunctionContext`]) and its effects ([`Effects`]); [`functions!`].
//! * [`owner`]: [`Owner`], the poller. [`request`]: requests of other threads. [`port`]: handles
//!   that send them.
//!
//! **Extending it.** A remapping unit, a device class, or a kind of memory is a crate that
//! implements [`RemappingUnit`], [`Function`] or [`PhysMem`](guest_mem::PhysMem), and an arm of the
//! enums that a program composes with the two macros. Nothing here changes.
//!
//! **Cost.** The unit and the function are resolved once per poll. From there on the code is
//! generic over the concrete types, so that no access looks anything up or goes through a pointer.
//! A view of memory has no state.
//!
//! **Threads.** One owner thread. Other threads send requests and wait for answers.
//!
//! **Left out.** The hypervisor: doorbells and interrupt lines are traits of `platform`, which the
//! hypervisor's crate implements.
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
    DataPath, Effects, Function, FunctionContext, FunctionCounts, FunctionShape, NoFunction,
    Progress, ResolveFunction,
};
pub use owner::{FunctionLines, Owner, Totals};
pub use request::{Absent, Op, Request, Target, TicketResult};
pub use unit::{
    Command, CommandId, CommandResult, Hold, HoldId, Invalidation, RefusedAccess, RemappingUnit,
    ResolveUnit, Scope, UnitControl, UnitEvent, UnitPoll, UnitSink, UnitVisitor,
};
