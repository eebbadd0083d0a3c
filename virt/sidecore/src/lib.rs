//! A sidecore: one thread that owns emulated devices and polls them, so that their guests need no
//! exit to reach them, and that sleeps when there is nothing to do without losing a wake-up.
mod clock;
mod gate;
mod handle;
mod helpers;
mod idle;
mod mailbox;
mod monitor;
mod park;
mod pause;
mod poller;
mod reply;
mod run;
mod sidecore;
mod stats;
mod sync;
mod sys;

pub use clock::Nanos;
pub use handle::{CallError, Handle, SendError};
pub use helpers::{Helpers, JobPanicked, SubmitError};
pub use idle::{Adaptive, Hints, IdlePolicy, IdleState, Wait};
pub use monitor::{Monitor, Stuck, StuckCause, Watch};
pub use poller::{Activity, ArmError, Poller};
pub use reply::Reply;
pub use sidecore::{Sidecore, SidecoreBuilder, SpawnError};
pub use stats::{CoreStats, PollerActivity, PollerStats, Stats};
