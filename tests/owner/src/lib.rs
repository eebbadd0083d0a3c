//! Tests alone, in `tests/`: `machine` names no unit and no device, so its own tests cannot put an
//! owner together without a circle between crates.
//! - `owner`: the VT-d unit behind its front ends, virtio disks, and a driver that the tests play;
//! - `pager`: all of it over memory of which any page may be absent at any access;
//! - `assign`: physical devices behind a caching unit, over a kernel and devices that tests
//!   control;
//! - `probes`: four systems of other kinds, plugged in without touching the library.
#![forbid(unsafe_code)]
