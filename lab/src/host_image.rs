//! The initramfs of the emulated host (L1): the files that `exitless` needs to run guests on
//! `kvm-amd`.
//!
//! | path inside | content |
//! |---|---|
//! | `/bin/exitless`, `/bin/exitless-lab` | the programs under test, with the libraries they link to |
//! | `/boot/vmlinuz`, `/boot/vmlinux` | the guest's kernel, as bzImage and as ELF (PVH) |
//! | `/boot/guest.img` | the guest's initramfs ([`crate::guest_image`]) |
//! | `/bin/workload` | the guest's program, for the other end of its connections |
//! | `/bin/lab-dm` | device-mapper devices: storage that is slow, fails or is cut off when a test asks for it |
//! | `/bin/lab-load` | loads the modules that a test needs in addition: `lab-load storage`, `faults`, `zram`, `net`, `vhost` |
//! | `/modules/LIST` | the modules of such a list, in load order |
//! | `/root` | working directory of programs |
//! | `/etc/exitless-lab` | exists: this machine is the lab |
//!
//! `/init` loads the modules, mounts proc, sysfs, devtmpfs, devpts, cgroup 2, tracefs and debugfs,
//! and runs the agent. When the agent ends, the machine ends.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::Archive;
use crate::guest_image::{ModuleList, VFIO, add_program, base};
use crate::guest_module::GuestModule;
use crate::kernel::Modules;
use crate::packages::Packages;
use crate::{LabConfig, LabError, build, guest_image};

/// Modules for KVM, TAP, the control channel, and device assignment; those built in are skipped.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "irqbypass",
    "kvm",
    "kvm_amd",
    "tun",
    "vfio",
    "vfio_iommu_type1",
    "vfio_pci",
];

/// Modules that are loaded on request (`lab-load NAME`): every module takes an emulated processor a
/// while. zram compresses by `lzo_rle`, which newer kernels have inside it. Another target of
/// device-mapper is one more name here. `xts`, by which dm-crypt encrypts, needs `ecb` but does not
/// declare it as other modules do, so that it must be listed.
const ON_DEMAND: &[ModuleList] = &[
    ("storage", &["loop", "dm_mod"]),
    (
        "faults",
        &[
            "loop",
            "dm_mod",
            "dm_delay",
            "dm_flakey",
            "ecb",
            "xts",
            "dm_crypt",
        ],
    ),
    ("zram", &["lzo_rle", "zram"]),
    ("net", &["virtio_net"]),
    ("vhost", &["vhost_net"]),
    // Loaded at the start; scripts that also run in guests request it.
    VFIO,
];

const INIT: &str = include_str!("host_init.sh");

/// Builds the image for this configuration; its guests have the module.
///
/// # Errors
/// A program that cannot be built, a file that cannot be read, a library that is missing.
pub fn build(
    packages: &Packages,
    config: &LabConfig,
    module: Option<&GuestModule>,
) -> Result<Archive, LabError> {
    let mut archive = Archive::new();
    let modules = Modules::below(&packages.host().modules())?;
    base(&mut archive, packages, &modules, MODULES, ON_DEMAND)?;
    archive.file("init", 0o755, INIT);
    archive.file("etc/exitless-lab", 0o644, packages.host().release());
    add_program(&mut archive, "bin/lab-agent", &build::agent()?)?;
    add_program(&mut archive, "bin/lab-dm", &build::device_mapper()?)?;
    add_program(&mut archive, "bin/workload", &build::workload()?)?;
    for (at, file) in [
        ("boot/vmlinuz", packages.guest().vmlinuz()),
        ("boot/vmlinux", packages.guest().vmlinux()),
    ] {
        let data = fs::read(&file).map_err(LabError::host("read", &file))?;
        archive.file(at, 0o644, data);
    }
    let guest = match module {
        Some(module) => guest_image::build_with_module(packages, module)?,
        None => guest_image::build(packages)?,
    };
    archive.file("boot/guest.img", 0o644, guest.to_bytes());
    for (at, program) in [
        ("bin/exitless", &config.exitless),
        ("bin/exitless-lab", &config.exitless_lab),
    ] {
        if let Some(program) = program {
            with_libraries(&mut archive, at, program)?;
        }
    }
    for (host, inside) in &config.files {
        if is_program(host) {
            with_libraries(&mut archive, inside, host)?;
        }
    }
    Ok(archive)
}

/// Returns whether this is a program, which brings its libraries: it is put into the image. Other
/// files are copied after the start.
pub(crate) fn is_program(file: &Path) -> bool {
    let mut magic = [0; 4];
    let read = fs::File::open(file).and_then(|mut f| std::io::Read::read_exact(&mut f, &mut magic));
    read.is_ok() && magic == *b"\x7fELF"
}

/// Adds a program without its debugging sections, and the libraries that `ldd` lists.
fn with_libraries(archive: &mut Archive, at: &str, program: &Path) -> Result<(), LabError> {
    archive.file(at, 0o755, build::stripped(program)?);
    let out = Command::new("ldd")
        .arg(program)
        .output()
        .map_err(LabError::host("run ldd on", program))?;
    for library in parse_ldd(&String::from_utf8_lossy(&out.stdout))
        .map_err(|missing| LabError::Config(format!("{} lacks {missing}", program.display())))?
    {
        let inside = library.to_string_lossy().into_owned();
        if !archive.contains(&inside) {
            add_program(archive, &inside, &library)?;
        }
    }
    Ok(())
}

/// Parses the files in `ldd`'s output; the error is the name of a library that was not found.
fn parse_ldd(text: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut files = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        let (name, target) = line.split_once(" => ").unwrap_or((line, line));
        if target.starts_with("not found") {
            return Err(name.to_owned());
        }
        // "linux-vdso.so.1 (0x…)" has no file; "statically linked" has none either.
        if let Some(file) = target
            .split(" (")
            .next()
            .filter(|file| file.starts_with('/'))
        {
            files.insert(PathBuf::from(file));
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_output_gives_files_and_the_loader() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let files = parse_ldd(text).unwrap();
        let names: Vec<_> = files.iter().map(|f| f.to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib/x86_64-linux-gnu/libgcc_s.so.1",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }

    #[test]
    fn a_static_program_has_none_and_a_missing_one_is_named() {
        assert!(parse_ldd("\tstatically linked\n").unwrap().is_empty());
        assert_eq!(
            parse_ldd("\tlibx.so.1 => not found\n").unwrap_err(),
            "libx.so.1"
        );
    }
}
