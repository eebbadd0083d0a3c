//! Who takes pages of a running guest's memory away: `run --punch`, for tests.
//!
//! Only with the feature `punch`, which builds the owner and its devices a second time, over memory that may be absent.

#[cfg(feature = "punch")]
pub use punch::{PunchedRam, Puncher};

/// Nobody.
#[cfg(not(feature = "punch"))]
pub enum Puncher {}

#[cfg(not(feature = "punch"))]
impl Puncher {
    /// Never called.
    pub fn rest(&self) {
        match *self {}
    }

    /// Never called.
    pub fn stop(self) -> String {
        match self {}
    }
}
