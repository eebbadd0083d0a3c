//! Physical devices in a guest, whole: the unit with caching mode, the owner, the functions, their
//! shadows, call threads and tables are the real ones. The kernel behind the tables, the devices
//! and the interrupt lines are fakes; the test is the guest's driver.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod boot;
mod end;
mod failures;
mod fakes;
mod images;
mod mappings;
mod memory;
mod pager;
mod policies;
mod refused;
mod registers;
mod sleep;
mod world;
