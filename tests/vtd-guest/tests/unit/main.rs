//! The unit as its guest, its functions and its host see it. One binary, since each would compile
//! the unit anew.

mod absent;
mod caches;
mod defects;
mod follow;
mod follow_model;
mod hostile_leases;
mod model;
mod races;
mod recorded;
mod scripts;
