//! Images, files that pass for kernels, and a user without rights.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;

/// A user without rights.
pub const NOBODY: u32 = 65534;

/// Returns a path of `file`, which stays open, for programs that are started from here, also as
/// another user.
pub fn inheritable(file: &File) -> String {
    rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).expect("a descriptor has flags");
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether qemu-img is on the PATH; says so if not.
pub fn has_qemu_img() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        println!("skipped: no qemu-img on the PATH (Debian: qemu-utils)");
    }
    found
}

/// Makes a qcow2 image in `folder`: `args` are options of `qemu-img create`, the name and the size.
pub fn make_qcow2(folder: &Path, args: &[&str]) {
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).args(args);
    let created = create.current_dir(folder).output().expect("qemu-img");
    assert!(created.status.success(), "{args:?}: {created:?}");
}

/// Changes a file's bytes.
pub fn patch(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).expect("it reads");
    change(&mut bytes);
    fs::write(file, bytes).expect("it is written");
}

/// A file that passes for a kernel until it is started.
pub fn kernel() -> Vec<u8> {
    let mut kernel = vec![0; 4096];
    kernel[0x1f1] = 1;
    kernel[0x1f4..0x1f8].copy_from_slice(&((4096 - 1024) / 16u32).to_le_bytes());
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    kernel[0x211] = 1;
    kernel[0x236] = 1;
    kernel
}
