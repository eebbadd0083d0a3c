//! Files that the lab is made of, for tests that start their own virtual machines.
//!
//! [`write()`] leaves these files in a directory; scripts and other VMMs take what they need:
//!
//! | file | content |
//! |---|---|
//! | `vmlinuz` | the stock kernel (bzImage) |
//! | `guest.img` | its initramfs, as [`guest_image`] describes it |
//! | `qemu` | a shell script that starts `qemu-system-x86_64` with its libraries and firmware |
//! | `uml.img` | the same initramfs with the modules of user-mode Linux; only where that is installed |
//!
//! Left out: starting anything.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::packages::{Needs, Packages};
use crate::{LabError, guest_image};

/// Directory of the kernels' modules in Debian's package `user-mode-linux`.
const UML_MODULES: &str = "/usr/lib/uml/modules";

/// Writes all files into `dir`, over those of an earlier call.
///
/// # Errors
/// Packages or programs that are not available; a directory that cannot be written.
pub fn write(dir: &Path, notice: &dyn Fn(&str)) -> Result<(), LabError> {
    fs::create_dir_all(dir).map_err(LabError::host("create", dir))?;
    let packages = Packages::get(&Needs::default(), notice)?;
    let kernel = dir.join("vmlinuz");
    // The link of an earlier call may point to a kernel that is gone.
    let _ = fs::remove_file(&kernel);
    let vmlinuz = packages.guest().vmlinuz();
    let vmlinuz = vmlinuz
        .canonicalize()
        .map_err(LabError::host("find", &vmlinuz))?;
    symlink(vmlinuz, &kernel).map_err(LabError::host("link", &kernel))?;
    let guest = guest_image::build(&packages)?;
    put(&dir.join("guest.img"), &guest.to_bytes(), 0o644)?;
    put(&dir.join("qemu"), &qemu_script(&packages), 0o755)?;
    let modules = Path::new(UML_MODULES);
    if modules.is_dir() {
        let uml = guest_image::build_for(&packages, modules)?;
        put(&dir.join("uml.img"), &uml.to_bytes(), 0o644)?;
    }
    Ok(())
}

fn put(path: &Path, data: &[u8], mode: u32) -> Result<(), LabError> {
    fs::write(path, data)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .map_err(LabError::host("write", path))
}

fn qemu_script(packages: &Packages) -> Vec<u8> {
    let (program, args, environment) = packages.qemu();
    let mut script = b"#!/bin/sh\nexec env".to_vec();
    for (name, value) in environment {
        script.push(b' ');
        script.extend(name.bytes());
        script.push(b'=');
        script.extend(quoted(&value));
    }
    for word in [program.into_os_string()].into_iter().chain(args) {
        script.push(b' ');
        script.extend(quoted(&word));
    }
    script.extend(b" \"$@\"\n");
    script
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &OsStr) -> Vec<u8> {
    let mut text = vec![b'\''];
    for byte in word.as_bytes() {
        match byte {
            b'\'' => text.extend(b"'\\''"),
            other => text.push(*other),
        }
    }
    text.push(b'\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_single_words_in_a_shell() {
        assert_eq!(quoted(OsStr::new("a b$c")), b"'a b$c'");
        assert_eq!(quoted(OsStr::new("it's")), b"'it'\\''s'");
    }
}
