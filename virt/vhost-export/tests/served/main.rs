//! Exports and their guests, good and hostile ones. One binary, since each would compile the whole
//! server anew; what needs the process or the processors for itself is in the one beside this.

#[path = "../common/mod.rs"]
mod common;
mod good;
mod hostile_calls;
mod hostile_messages;
mod hostile_rings;
mod net;
mod tickets;
mod viommu;
