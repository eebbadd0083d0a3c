//! Ports of network devices ([`vio::net::NetPort`]): [`TapPort`], an interface of the host, [`SwitchPort`], a port of a switch between
//! guests, and [`Captured`], which writes a port's frames to a file.
//!
//! The switch decides by `net-switch`, and `net-offload` does what a receiver does not do itself. This crate moves the bytes.
#![deny(unsafe_code)]

mod capture;
mod fabric;
#[expect(unsafe_code, reason = "system calls on the interface; see the module")]
mod tap;
mod uplink;

pub use capture::{CaptureError, Captured};
pub use fabric::{Fabric, FabricCounters, SwitchPort};
pub use tap::{TapCounters, TapError, TapPort};
pub use uplink::{Uplink, UplinkCounters};
