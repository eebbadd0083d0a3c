//! Ports of network devices ([`vio::net::NetPort`]): [`TapPort`], an interface of the host,
//! [`SwitchPort`], a port of a switch between guests, [`Captured`], which writes a port's frames to
//! a file; and, for measurements, [`Sink`], [`Source`] and [`Loop`].
//!
//! The switch decides by `net-switch`, and `net-offload` does the work that a receiver does not do
//! itself. This crate moves the bytes.
#![deny(unsafe_code)]

mod capture;
mod fabric;
mod patterns;
#[expect(unsafe_code, reason = "system calls on the interface; see the module")]
mod tap;
mod uplink;

pub use capture::{CaptureError, CaptureOptions, Captured, Existing};
pub use fabric::{Fabric, FabricCounters, SwitchPort};
pub use patterns::{Loop, Sink, Source};
pub use tap::{TapCounters, TapError, TapOptions, TapPort, TapQueues};
pub use uplink::{Uplink, UplinkCounters};
