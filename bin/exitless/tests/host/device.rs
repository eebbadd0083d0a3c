//! `--device` on hosts that do not give the device: `/sys` and `/dev/vfio` show what such a host
//! has.
//!
//! Each refusal is one line that names the device and the remedy, of `--check` and of the machine
//! alike, before a guest runs.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use denied::Denied;
use tempfile::TempDir;

use crate::program::has_kvm;
use crate::{ended, run::MachineDir};

const ADDRESS: &str = "0000:00:04.0";
/// Folder of the files of groups.
const DEV: &str = "/dev/vfio";
/// Request of a group.
const VFIO_GROUP_GET_STATUS: u32 = 0x3b67;

/// Folders in the places of `/sys` and `/dev/vfio`.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        for folder in [
            "dev",
            "sys/bus/pci/drivers/vfio-pci",
            "sys/bus/pci/drivers/nvme",
        ] {
            fs::create_dir_all(tree.path(folder)).unwrap();
        }
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// With the device, in no group.
    fn with_device(self) -> Self {
        fs::create_dir_all(self.device()).unwrap();
        self
    }

    /// With the device in group 7, bound to this driver.
    fn with_group(self, driver: &str) -> Self {
        let tree = self.with_device();
        let group = tree.path("sys/kernel/iommu_groups/7");
        fs::create_dir_all(group.join("devices")).unwrap();
        let device = tree.device();
        symlink(&device, group.join("devices").join(ADDRESS)).unwrap();
        symlink("/sys/kernel/iommu_groups/7", device.join("iommu_group")).unwrap();
        symlink(
            Path::new("/sys/bus/pci/drivers").join(driver),
            device.join("driver"),
        )
        .unwrap();
        tree
    }

    /// With files in the places of the group and the container, which are no devices.
    fn with_files(self) -> Self {
        for name in ["dev/vfio", "dev/7"] {
            File::create(self.path(name)).unwrap();
        }
        self
    }

    fn device(&self) -> PathBuf {
        self.path("sys/bus/pci/devices").join(ADDRESS)
    }

    /// A host that shows this. Where `/dev/vfio` is absent nothing can be mounted over it, nor need
    /// be if it is to be empty.
    fn denied(&self) -> Denied {
        let shown = |name| self.path(name).to_str().unwrap().to_owned();
        let denied = Denied::default().replaced("/sys", &shown("sys"));
        if self.path("dev/7").exists() || Path::new(DEV).exists() {
            denied.replaced(DEV, &shown("dev"))
        } else {
            denied
        }
    }
}

#[test]
fn a_device_that_the_host_does_not_give_is_refused_with_what_is_missing() {
    let ioctl =
        |denied: Denied| denied.call_with(libc::SYS_ioctl, 1, VFIO_GROUP_GET_STATUS, libc::EPERM);
    let as_it_is: fn(Denied) -> Denied = |denied| denied;
    let hosts = [
        (
            "no such device",
            Tree::new(),
            as_it_is,
            &["no PCI device"][..],
        ),
        (
            "no IOMMU",
            Tree::new().with_device(),
            as_it_is,
            &["no IOMMU group", "intel_iommu=on", "firmware"],
        ),
        (
            "bound to its own driver",
            Tree::new().with_group("nvme"),
            as_it_is,
            &["bound to nvme, not to vfio-pci", "driver_override"],
        ),
        (
            "no /dev/vfio/7",
            Tree::new().with_group("vfio-pci"),
            as_it_is,
            &["/dev/vfio/7", "modprobe vfio-pci"],
        ),
        (
            "requests of the group denied",
            Tree::new().with_group("vfio-pci").with_files(),
            ioctl,
            &["VFIO_GROUP_GET_STATUS", "group 7", "not permitted"],
        ),
    ];
    if !has_kvm() {
        return;
    }
    let place = MachineDir::new();
    let mut wrong = Vec::new();
    for (name, tree, denied, words) in hosts {
        let denied = denied(tree.denied());
        if !denied.is_possible() {
            println!("skipped: {name}: it takes root, and a folder to mount over");
            continue;
        }
        for check in [true, false] {
            let device = format!("vfio={ADDRESS}");
            let mut command =
                place.command(denied.clone(), &["--iommu", "vtd", "--device", &device]);
            if check {
                command.arg("--check");
            }
            let output = ended(command);
            let said = String::from_utf8_lossy(&output.stderr);
            let is_right = output.status.code() == Some(2)
                && said.trim_end().lines().count() == 1
                && said.contains(&device)
                && words.iter().all(|word| said.contains(word));
            if !is_right {
                wrong.push(format!(
                    "{name}, check {check}: {:?}: {said}",
                    output.status
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
