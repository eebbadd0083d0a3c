//! The soak's remapping unit and its owner.

use std::convert::Infallible;

use guest_mem::GuestRam;
use machine::{NoFunction, units};
use vtd_port::VtdPort;

units! {
    /// The soak's unit.
    pub enum SoakUnit: Infallible {
        /// Behind any of the three front ends.
        Vtd(VtdPort),
    }
}

/// Owner of the unit alone.
pub type Owner = machine::Owner<SoakUnit, NoFunction, GuestRam>;

/// Request of another thread to the owner.
pub type Request = machine::Request<Owner>;
