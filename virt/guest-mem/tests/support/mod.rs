//! A VMM's side: memory files that it may resize under us.

#![allow(dead_code, reason = "each test file uses some of it")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_mem::{ForeignRegion, Gpa};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// A memory file of `bytes` zeroes, without seals.
pub fn memfd(bytes: u64) -> Arc<OwnedFd> {
    let file = memfd_create(c"vmm-ram", MemfdFlags::CLOEXEC).expect("a memory file");
    ftruncate(&file, bytes).expect("its size");
    Arc::new(file)
}

/// The VMM puts bytes into its file.
pub fn put(file: &OwnedFd, offset: u64, bytes: &[u8]) {
    assert_eq!(
        rustix::io::pwrite(file, bytes, offset).expect("inside the file"),
        bytes.len()
    );
}

/// Reads the file as the VMM does.
pub fn get(file: &OwnedFd, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(
        rustix::io::pread(file, &mut bytes, offset).expect("inside the file"),
        len
    );
    bytes
}

/// `len` bytes at `offset` of `file`, at `gpa`.
pub fn region(gpa: u64, len: u64, file: &Arc<OwnedFd>, offset: u64) -> ForeignRegion {
    ForeignRegion {
        gpa: Gpa::new(gpa),
        len,
        file: file.clone(),
        offset,
    }
}
