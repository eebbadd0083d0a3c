//! Only tests, in `tests/`: the crate `machine` depends on no unit and no device, so its own tests
//! cannot assemble a complete owner without a cycle between crates.
//! - `owner`: the VT-d unit behind its front ends, virtio disks, and a driver whose role the tests
//!   take;
//! - `pager`: the same with memory of which any page may be absent at any access;
//! - `assign`: assigned devices behind a unit in caching mode, over a fake kernel and fake devices
//!   that tests control;
//! - `probes`: four systems of other kinds, assembled without a change to the library.
#![forbid(unsafe_code)]
