//! Exports and their guests, good and hostile ones. One binary, since each would compile the whole server anew; what
//! measures the process (its heap, its processor time, its log) is a binary of its own beside this directory.

#[path = "../common/mod.rs"]
mod common;
mod good;
mod hostile_messages;
mod hostile_rings;
mod net;
mod tickets;
