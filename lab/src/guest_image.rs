//! The initramfs of the guest (L2): busybox, the kernel package's virtio modules, `workload`.
//!
//! Options of its `/init`, on the guest's kernel command line:
//!
//! | option | meaning |
//! |---|---|
//! | `exitless.run="COMMANDS"` | run this shell script ([`run_option`] writes it), else a shell on the console |
//! | `exitless.run64=BASE64` | the same, for scripts with quotes or line ends |
//! | `exitless.end=poweroff\|reboot\|halt` | what to do afterwards; power off if absent |
//! | `exitless.cpus=late` | with `maxcpus=1`: the other processors start before any driver is loaded |
//! | `exitless.iommu=stock\|module\|none` | the driver of a virtio-iommu: see below |
//! | `MODULE.PARAMETER=VALUE` | as `modprobe` takes it; underscores in the name, no quotes |
//!
//! After the script the line `exitless-guest: status=N` appears on the console; [`run_status`]
//! finds it among kernel messages. `lab-load vfio` loads the modules of a guest that gives a device
//! to one of its programs, `lab-load vlan` the one for VLANs. Modules are loaded in the order of
//! their dependencies: on 6.1.192 `virtio` needs `virtio_ring` first.
//!
//! # Drivers of a virtio-iommu
//! An image has Linux's own if the kernel has one (`stock`), and the module of
//! [`build_with_module`] (`module`), which is the default if there is one. After
//! `exitless.iommu=none` a script loads either by `lab-load iommu-stock` or
//! `lab-load iommu-module [PARAMETER=VALUE …]`, waits for its devices by `lab-bind`, and unloads it
//! by `rmmod`.
//!
//! Either is loaded before the drivers of endpoints. A kernel that parses the ACPI table VIOT (from
//! 6.12 on) binds no driver to an endpoint before the IOMMU has one. A kernel that does not (6.1)
//! binds all virtio functions, the IOMMU's too, as soon as it has `virtio_pci`, which is a module
//! there. That is loaded first, since a module may need it to reach its device: the module takes
//! over functions that `virtio_pci` has bound and that are not in use yet.

use std::fs;
use std::path::Path;

use crate::cpio::Archive;
use crate::guest_module::GuestModule;
use crate::kernel::{Module, Modules};
use crate::packages::Packages;
use crate::{LabError, build};

/// Drivers for the devices that a guest may have, assigned ones included, for its power button
/// (with the module that reports it to programs), and for reporting a panic; those built into the
/// kernel are skipped.
const MODULES: &[&str] = &[
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

/// Modules that are loaded on request, by `lab-load NAME`: a guest that does not need them starts
/// without them. A driver of the IOMMU is requested by the command line.
const ON_DEMAND: &[ModuleList] = &[VFIO, VLAN, IOMMU_STOCK];

/// List of Linux's own driver of a virtio-iommu, which Debian's cloud kernels have from 6.12 on.
const IOMMU_STOCK: ModuleList = ("iommu-stock", &["virtio_iommu"]);

/// List of the [`GuestModule`], after the driver by which it reaches its device.
const IOMMU_MODULE: &str = "iommu-module";
/// Driver of virtio's PCI functions.
const TRANSPORT: &str = "virtio_pci";

/// List of the modules with which a guest gives a device to a program.
pub(crate) const VFIO: ModuleList = ("vfio", &["vfio", "vfio_iommu_type1", "vfio_pci"]);

/// List of the modules for interfaces in a VLAN.
const VLAN: ModuleList = ("vlan", &["8021q"]);

/// Name by which modules are requested, and the modules that it loads together.
pub(crate) type ModuleList = (&'static str, &'static [&'static str]);

/// Program that loads a list of modules, except those that are loaded already.
const LOAD: &str = include_str!("lab_load.sh");

/// Program that binds functions that have waited for an IOMMU's driver.
const BIND: &str = include_str!("lab_bind.sh");

const INIT: &str = include_str!("guest_init.sh");

/// Longest kernel command line of x86 Linux, bytes (`COMMAND_LINE_SIZE`).
pub(crate) const COMMAND_LINE_MAX: usize = 2048;

/// Builds the image.
///
/// # Errors
/// A program that cannot be built or a file that cannot be read.
pub fn build(packages: &Packages) -> Result<Archive, LabError> {
    build_with(packages, &packages.guest().modules(), None)
}

/// Builds the image with a module that was [built](crate::guest_module::build()) for its kernel, in
/// which guests choose between both drivers of a virtio-iommu.
///
/// # Errors
/// As [`build()`].
pub fn build_with_module(packages: &Packages, module: &GuestModule) -> Result<Archive, LabError> {
    build_with(packages, &packages.guest().modules(), Some(module))
}

/// Builds the image for another kernel, whose modules are below `modules`.
///
/// # Errors
/// As [`build`].
pub(crate) fn build_for(packages: &Packages, modules: &Path) -> Result<Archive, LabError> {
    build_with(packages, modules, None)
}

fn build_with(
    packages: &Packages,
    modules: &Path,
    module: Option<&GuestModule>,
) -> Result<Archive, LabError> {
    let mut archive = Archive::new();
    let mut modules = Modules::below(modules)?;
    base(&mut archive, packages, &modules, MODULES, ON_DEMAND)?;
    if let Some(module) = module {
        let name = modules.add(module.path())?;
        let order = modules.in_load_order(&[TRANSPORT, &name])?;
        add_modules(&mut archive, IOMMU_MODULE, order);
    }
    archive.file("init", 0o755, INIT);
    add_program(&mut archive, "bin/workload", &build::workload()?)?;
    Ok(archive)
}

/// Adds the parts that both images share: directories, console, busybox with its applets, modules
/// in load order, and those that `lab-load` loads.
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
    archive.file("bin/lab-bind", 0o755, BIND);
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

/// Returns the command-line option that makes the guest run `script` (busybox `sh`).
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

/// Returns the status of the guest's script, from the text of its console; `None` if it never
/// ended. Kernel messages may precede or follow the report on the same line.
#[must_use]
pub fn run_status(console: &str) -> Option<u8> {
    const KEY: &str = "exitless-guest: status=";
    let rest = &console[console.rfind(KEY)? + KEY.len()..];
    let end = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// Encodes by RFC 4648, with padding.
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A kernel's modules, each with its dependencies, and the scripts of the image, with paths
    /// into a directory.
    struct Root {
        dir: tempfile::TempDir,
        modules: Modules,
    }

    impl Root {
        /// Creates it with the lists of an image; `module` is in it, and depends on these.
        fn new(files: &[(&str, &str)], module: Option<(&str, &str)>) -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["kernel", "modules", "sys/module", "bin"] {
                fs::create_dir_all(dir.path().join(name)).unwrap();
            }
            let put = |name: &str, depends: &str| {
                let path = dir.path().join(format!("{name}.ko"));
                fs::write(&path, format!("\0depends={depends}\0")).unwrap();
                path
            };
            for (name, depends) in files {
                put(&format!("kernel/{name}"), depends);
            }
            let mut modules = Modules::below(&dir.path().join("kernel")).unwrap();
            let module = module.map(|(name, depends)| modules.add(&put(name, depends)).unwrap());
            let root = Self { dir, modules };
            root.list("order", MODULES);
            root.list(IOMMU_STOCK.0, IOMMU_STOCK.1);
            if let Some(module) = module {
                root.list(IOMMU_MODULE, &[TRANSPORT, &module]);
            }
            // Acts as if each module were loaded, with these parameters.
            let insmod = "#!/bin/sh\nname=${1##*/}; name=${name%.ko}; shift\n\
                [ $name != broken ] || exit 1\n\
                mkdir -p /sys/module/$name; touch /sys/module/$name/initstate\n\
                echo $name \"$@\"\n";
            for (name, text) in [
                ("insmod", insmod),
                ("lab-load", LOAD),
                ("lab-bind", "#!/bin/sh\n"),
            ] {
                let path = root.dir.path().join("bin").join(name);
                fs::write(&path, root.here(text)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            }
            root
        }

        fn list(&self, list: &str, wanted: &[&str]) {
            let order = self.modules.in_load_order(wanted).unwrap();
            let names = order.into_iter().map(|module| module.name + "\n");
            let path = self.dir.path().join("modules").join(list);
            fs::write(path, names.collect::<String>()).unwrap();
        }

        /// Returns a script of the image with this root's paths.
        fn here(&self, script: &str) -> String {
            let root = self.dir.path().display().to_string();
            script
                .replace("/modules", &format!("{root}/modules"))
                .replace("/proc/cmdline", &format!("{root}/cmdline"))
                .replace("/sys/module/", &format!("{root}/sys/module/"))
        }

        /// Returns the modules that the script loads, with their parameters, a line each.
        fn run(&self, command_line: &str, script: &str) -> Vec<String> {
            fs::write(self.dir.path().join("cmdline"), format!("{command_line}\n")).unwrap();
            let path = std::env::var("PATH").unwrap();
            let out = std::process::Command::new("sh")
                .args(["-c", &self.here(script)])
                .env("PATH", format!("{}/bin:{path}", self.dir.path().display()))
                .stderr(std::process::Stdio::null())
                .output()
                .unwrap();
            let text = String::from_utf8(out.stdout).unwrap();
            text.lines()
                .map(|line| line.trim_end().to_owned())
                .collect()
        }

        /// Returns the modules that the guest's init loads.
        fn start(&self, command_line: &str) -> Vec<String> {
            let from = INIT.find("option() {").unwrap();
            let to = INIT.find("script=$(sed").unwrap();
            self.run(command_line, &INIT[from..to])
        }
    }

    /// Debian's 6.12: virtio and virtio_pci are built in.
    const NEWER: [(&str, &str); 4] = [
        ("virtio_net", "net_failover"),
        ("net_failover", ""),
        ("virtio_blk", ""),
        ("virtio-iommu", ""),
    ];
    /// Debian's 6.1 has no driver of a virtio-iommu.
    const OLDER: [(&str, &str); 4] = [
        ("virtio_blk", "virtio_ring,virtio"),
        ("virtio_pci", "virtio_ring,virtio"),
        ("virtio", "virtio_ring"),
        ("virtio_ring", ""),
    ];

    #[test]
    fn the_iommus_driver_comes_before_those_of_its_endpoints() {
        let stock = ["virtio_iommu", "virtio_blk", "net_failover", "virtio_net"];
        assert_eq!(Root::new(&NEWER, None).start("quiet"), stock);
        let both = Root::new(&NEWER, Some(("exitless-iommu", "")));
        let expected = ["exitless_iommu", "virtio_blk", "net_failover", "virtio_net"];
        assert_eq!(both.start("quiet"), expected);
        let both = Root::new(&NEWER, Some(("exitless-iommu", "")));
        assert_eq!(both.start("exitless.iommu=stock quiet"), stock);
        let none = Root::new(&NEWER, Some(("exitless-iommu", "")));
        assert_eq!(none.start("exitless.iommu=none"), stock[1..]);
        // Then by the guest's own script.
        let loaded = none.run("", "lab-load iommu-module; lab-load iommu-module x=1");
        assert_eq!(loaded, ["exitless_iommu"], "once");
    }

    #[test]
    fn a_kernel_without_the_iommus_driver_loads_the_others() {
        let expected = ["virtio_ring", "virtio", "virtio_pci", "virtio_blk"];
        assert_eq!(Root::new(&OLDER, None).start("quiet"), expected);
        // The module comes after the driver of its device, and before the endpoints' drivers.
        let module = Some(("exitless-iommu", "virtio,virtio_ring"));
        let expected = [
            "virtio_ring",
            "virtio",
            "virtio_pci",
            "exitless_iommu",
            "virtio_blk",
        ];
        assert_eq!(Root::new(&OLDER, module).start("quiet"), expected);
    }

    #[test]
    fn a_driver_that_is_not_in_the_image_is_told_of_and_the_others_load() {
        let root = Root::new(&NEWER, None);
        let said = root.start("exitless.iommu=module");
        assert!(said[0].contains("exitless.iommu=module failed"), "{said:?}");
        assert_eq!(said[1..], ["virtio_blk", "net_failover", "virtio_net"]);
    }

    #[test]
    fn modules_take_their_parameters_from_the_command_line() {
        let line = "exitless_iommu.reuse=optimistic virtio_blk.queue_depth=64 \
             exitless_iommu.quota=4096 \
            exitless_iommu. exitless_iommu exitless_iommux.reuse=1 exitless.run=\"echo *; true\"";
        let root = Root::new(&NEWER[2..], Some(("exitless-iommu", "")));
        let expected = [
            "exitless_iommu reuse=optimistic quota=4096",
            "virtio_blk queue_depth=64",
        ];
        assert_eq!(root.start(line), expected);
        // Parameters in a script apply to the module that it loads, and come last: they win.
        let root = Root::new(&OLDER, Some(("exitless-iommu", "virtio")));
        let loaded = root.run(
            "virtio.x=1 exitless_iommu.y=2",
            "lab-load iommu-module y=3 z",
        );
        assert_eq!(
            loaded,
            [
                "virtio_ring",
                "virtio x=1",
                "virtio_pci",
                "exitless_iommu y=2 y=3 z"
            ]
        );
    }

    #[test]
    fn a_module_that_fails_does_not_keep_others_from_being_loaded() {
        let root = Root::new(&[("broken", ""), ("virtio_blk", "")], None);
        root.list("some", &["broken", "virtio_blk"]);
        let loaded = root.run("", "lab-load some; echo $?; lab-load absent; echo $?");
        assert_eq!(loaded, ["virtio_blk", "1", "2"]);
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
