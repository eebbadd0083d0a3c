//! Ports of network devices ([`vio::net::NetPort`]): [`SwitchPort`], a port of a switch between guests, and [`Captured`], which
//! writes a port's frames to a file.
//!
//! The switch decides by `net-switch`, and `net-offload` does what a receiver does not do itself. This crate moves the bytes.
#![forbid(unsafe_code)]

mod capture;
mod fabric;

pub use capture::{CaptureError, Captured};
pub use fabric::{Fabric, FabricCounters, SwitchPort};
