//! The initramfs of the guest (L2): busybox, the kernel package's virtio modules, `workload`.
//!
//! What its `/init` does is chosen on the guest's kernel command line:
//!
//! | option | meaning |
//! |---|---|
//! | `exitless.run="COMMANDS"` | run this shell script ([`run_option`] writes it), else a shell on the console |
//! | `exitless.run64=BASE64` | the same, for scripts with quotes or line ends |
//! | `exitless.end=poweroff\|reboot\|halt` | what to do afterwards; power off if absent |
//!
//! After the script the line `exitless-guest: status=N` appears on the console; [`run_status`] finds
//! it among kernel messages. `lab-load vfio` loads what a guest needs that gives a device to a
//! program of its own, `lab-load vlan` the one for VLANs. Modules are loaded in the order of their dependencies: on 6.1.192
//! `virtio` needs `virtio_ring` first.

use std::fs;
use std::path::Path;

use crate::cpio::Archive;
use crate::kernel::{Module, Modules};
use crate::packages::Packages;
use crate::{LabError, build};

/// Drivers for the devices a guest may be given, assigned ones among them, for its power button
/// (with what shows it to programs), and for telling of a panic; those the kernel has built in are
/// skipped. `virtio_iommu` is the first: the kernel binds no driver to a device that an ACPI table
/// places behind such an IOMMU, before that has one. Debian's cloud kernels have it from 6.12 on.
const MODULES: &[&str] = &[
    "virtio_iommu",
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
    "virtio_rng",
    "nvme",
    "button",
    "evdev",
    "pvpanic_mmio",
];

/// Modules that are loaded on request, by `lab-load NAME`: guests that do not ask start without
/// them.
const ON_DEMAND: &[ModuleList] = &[VFIO, VLAN];

/// List of the modules that give a device to a program.
pub(crate) const VFIO: ModuleList = ("vfio", &["vfio", "vfio_iommu_type1", "vfio_pci"]);

/// List of the modules for interfaces in a VLAN.
const VLAN: ModuleList = ("vlan", &["8021q"]);

/// Modules that are loaded together on request, and the name to ask by.
pub(crate) type ModuleList = (&'static str, &'static [&'static str]);

/// Program that loads a list of modules, but for those that are loaded already.
const LOAD: &str = "#!/bin/sh
[ -f \"/modules/$1\" ] || { echo \"lab-load: no list $1\" >&2; exit 2; }
while read -r module; do
    grep -q \"^$module \" /proc/modules || insmod \"/modules/$module.ko\" || exit 1
done < \"/modules/$1\"
";

const INIT: &str = include_str!("guest_init.sh");

/// Longest kernel command line of x86 Linux, bytes (`COMMAND_LINE_SIZE`).
pub(crate) const COMMAND_LINE_MAX: usize = 2048;

/// Builds the image.
///
/// # Errors
/// A program that cannot be built or a file that cannot be read.
pub fn build(packages: &Packages) -> Result<Archive, LabError> {
    build_with(packages, &packages.guest().modules())
}

/// Builds the image for another kernel, whose modules are below `modules`.
///
/// # Errors
/// As [`build`].
pub(crate) fn build_with(packages: &Packages, modules: &Path) -> Result<Archive, LabError> {
    let mut archive = Archive::new();
    base(
        &mut archive,
        packages,
        &Modules::below(modules)?,
        MODULES,
        ON_DEMAND,
    )?;
    archive.file("init", 0o755, INIT);
    add_program(&mut archive, "bin/workload", &build::workload()?)?;
    Ok(archive)
}

/// Adds what both images share: directories, console, busybox with its applets, modules in load
/// order, and those that `lab-load` loads.
pub(crate) fn base(
    archive: &mut Archive,
    packages: &Packages,
    modules: &Modules,
    wanted: &[&str],
    on_demand: &[ModuleList],
) -> Result<(), LabError> {
    for dir in [
        "dev", "proc", "sys", "run", "tmp", "root", "etc", "sbin", "usr/bin", "modules",
    ] {
        archive.dir(dir);
    }
    // The kernel opens it before /init can mount devtmpfs.
    archive.char_device("dev/console", 0o600, 5, 1);
    archive.file("etc/passwd", 0o644, *b"root:x:0:0:root:/root:/bin/sh\n");
    let busybox = packages.busybox();
    add_program(archive, "bin/busybox", &busybox)?;
    for applet in applets(&busybox)? {
        archive.symlink(&format!("bin/{applet}"), "busybox");
    }
    add_modules(archive, "order", modules.in_load_order(wanted)?);
    for (list, wanted) in on_demand {
        add_modules(archive, list, modules.in_load_order(wanted)?);
    }
    archive.file("bin/lab-load", 0o755, LOAD);
    Ok(())
}

/// Adds `modules`, each once, and the file `modules/LIST` that names them in this order.
fn add_modules(archive: &mut Archive, list: &str, modules: Vec<Module>) {
    let mut order = String::new();
    for module in modules {
        order.push_str(&module.name);
        order.push('\n');
        let file = format!("modules/{}.ko", module.name);
        if !archive.contains(&file) {
            archive.file(&file, 0o644, module.data);
        }
    }
    archive.file(&format!("modules/{list}"), 0o644, order);
}

pub(crate) fn add_program(archive: &mut Archive, at: &str, file: &Path) -> Result<(), LabError> {
    let data = fs::read(file).map_err(LabError::host("read", file))?;
    archive.file(at, 0o755, data);
    Ok(())
}

fn applets(busybox: &Path) -> Result<Vec<String>, LabError> {
    let out = std::process::Command::new(busybox)
        .arg("--list")
        .output()
        .map_err(LabError::host("run", busybox))?;
    let names = String::from_utf8_lossy(&out.stdout);
    Ok(names
        .lines()
        .filter(|name| *name != "busybox")
        .map(str::to_owned)
        .collect())
}

/// The command-line option that makes the guest run `script` (busybox `sh`).
///
/// # Errors
/// [`LabError::Config`] when the script does not fit into a kernel command line.
pub fn run_option(script: &str) -> Result<String, LabError> {
    // The kernel knows double quotes but no escape; a `'` or `$` is ordinary to it.
    let plain = !script.contains(['"', '\n', '\t']) && script.is_ascii();
    let option = if plain {
        format!("exitless.run=\"{script}\"")
    } else {
        format!("exitless.run64={}", base64(script.as_bytes()))
    };
    // Leave room for the other options.
    let limit = COMMAND_LINE_MAX - 512;
    if option.len() > limit {
        let len = option.len();
        return Err(LabError::Config(format!(
            "a guest script of {len} bytes (encoded) is above the {limit} a command line can carry"
        )));
    }
    Ok(option)
}

/// The status of the guest's script, from the text of its console; `None` if it never ended.
/// Kernel messages may precede or follow the report on the same line.
#[must_use]
pub fn run_status(console: &str) -> Option<u8> {
    const KEY: &str = "exitless-guest: status=";
    let rest = &console[console.rfind(KEY)? + KEY.len()..];
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// RFC 4648, with padding.
fn base64(data: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in data.chunks(3) {
        let mut group = [0; 3];
        group[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, group[0], group[1], group[2]]);
        for (at, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let digit = DIGITS[usize::from((bits >> shift).to_le_bytes()[0] & 63)];
            text.push(if at <= chunk.len() {
                char::from(digit)
            } else {
                '='
            });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of [`MODULES`] in load order, of a kernel that has these modules.
    fn load_order(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, depends) in files {
            let text = format!("\0depends={depends}\0");
            fs::write(dir.path().join(format!("{name}.ko")), text).unwrap();
        }
        let modules = Modules::below(dir.path()).unwrap();
        let order = modules.in_load_order(MODULES).unwrap();
        order.into_iter().map(|module| module.name).collect()
    }

    #[test]
    fn the_iommus_driver_comes_before_those_of_its_endpoints() {
        // Debian's 6.12: virtio and virtio_pci are built in.
        let order = load_order(&[
            ("virtio_net", "net_failover"),
            ("net_failover", ""),
            ("virtio_blk", ""),
            ("virtio-iommu", ""),
        ]);
        let expected = ["virtio_iommu", "virtio_blk", "net_failover", "virtio_net"];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_kernel_without_the_iommus_driver_loads_the_others() {
        // Debian's 6.1.
        let order = load_order(&[
            ("virtio_blk", "virtio_ring,virtio"),
            ("virtio_pci", "virtio_ring,virtio"),
            ("virtio", "virtio_ring"),
            ("virtio_ring", ""),
        ]);
        let expected = ["virtio_ring", "virtio", "virtio_pci", "virtio_blk"];
        assert_eq!(order, expected);
    }

    #[test]
    fn base64_matches_the_rfcs_vectors() {
        let vectors = [
            "", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy",
        ];
        for (len, expected) in vectors.into_iter().enumerate() {
            assert_eq!(base64(&b"foobar"[..len]), expected);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    #[test]
    fn plain_scripts_stay_readable_and_others_are_encoded() {
        let plain = run_option("workload reads /dev/vda; echo $?").unwrap();
        assert_eq!(plain, "exitless.run=\"workload reads /dev/vda; echo $?\"");
        let quoted = run_option("echo \"a\"").unwrap();
        assert_eq!(quoted, "exitless.run64=ZWNobyAiYSI=");
        assert!(run_option("a\nb").unwrap().starts_with("exitless.run64="));
        assert!(run_option(&"x".repeat(2000)).is_err());
    }

    #[test]
    fn status_is_found_between_kernel_messages() {
        let console = "x\r\n[   1.5] virtio_blk: exitless-guest: status=7[    1.6] sysrq: off\r\n";
        assert_eq!(run_status(console), Some(7));
        assert_eq!(
            run_status("exitless-guest: status=1\nexitless-guest: status=0\n"),
            Some(0)
        );
        assert_eq!(run_status("exitless-guest: status="), None);
        assert_eq!(run_status("exitless-guest: status=999"), None);
        assert_eq!(run_status("nothing"), None);
    }
}
