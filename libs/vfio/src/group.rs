//! The files of `/dev/vfio`: a group of devices that the IOMMU cannot tell apart, and the container they share.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::device::Device;
use crate::error::{Errno, VfioError, failed};
use crate::info::IommuInfo;
use crate::sys;
use crate::uapi::{self, Sized32};

/// Where the kernel shows devices and groups.
const SYSFS: &str = "/sys";
/// The drivers that a group may have beside VFIO's own, since they use no DMA.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];
/// More than any kernel says of an IOMMU, in bytes.
const INFO_MAX: usize = 1 << 20;

/// A group of devices that the IOMMU cannot tell apart, all of them bound to VFIO or to no driver.
#[derive(Debug)]
pub struct Group {
    file: File,
    id: u32,
}

impl Group {
    /// The group of a PCI device, by its address, for example `0000:01:00.0`.
    ///
    /// # Errors
    /// [`VfioError`], which says what is missing and how to get it.
    pub fn of_device(address: &str) -> Result<Self, VfioError> {
        let id = group_of(Path::new(SYSFS), address)?;
        let file = open(&PathBuf::from(format!("/dev/vfio/{id}")))?;
        let mut status = uapi::GroupStatus::zeroed();
        let call = &uapi::GROUP_GET_STATUS;
        sys::with_struct(&file, call, &mut status)
            .map_err(failed(call, || format!("group {id}")))?;
        if status.flags & uapi::GROUP_VIABLE == 0 {
            let others = others(Path::new(SYSFS), id);
            return Err(VfioError::NotViable { group: id, others });
        }
        Ok(Self { file, id })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Opens a device of the group, which has to be [attached](Container::attach) before.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn device(&self, address: &str) -> Result<Device, VfioError> {
        let no_device = || VfioError::NoDevice {
            address: address.to_owned(),
        };
        let name = CString::new(address).map_err(|_| no_device())?;
        let call = &uapi::GROUP_GET_DEVICE_FD;
        let file = sys::open_by_name(&self.file, call, &name)
            .map_err(failed(call, || address.to_owned()))?;
        Ok(Device::new(file, address.to_owned()))
    }
}

/// An IO address space for the devices of one group or several.
#[derive(Debug)]
pub struct Container {
    pub(crate) file: File,
    /// Its kind of IOMMU is set, which is done with the first group.
    has_iommu: Mutex<bool>,
}

impl Container {
    /// A new one without groups.
    ///
    /// # Errors
    /// [`VfioError`]: there is no VFIO, or another.
    pub fn open() -> Result<Self, VfioError> {
        let file = open(Path::new("/dev/vfio/vfio"))?;
        let ask = |call, value| sys::with_value(&file, call, value);
        if ask(&uapi::GET_API_VERSION, 0) != Ok(uapi::API_VERSION)
            || ask(&uapi::CHECK_EXTENSION, uapi::TYPE1V2_IOMMU) != Ok(1)
        {
            return Err(VfioError::NoType1);
        }
        Ok(Self {
            file,
            has_iommu: Mutex::new(false),
        })
    }

    /// Has the devices of a group translate by this container.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn attach(&self, group: &Group) -> Result<(), VfioError> {
        let mut has_iommu = self
            .has_iommu
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let subject = || format!("group {}", group.id);
        let call = &uapi::GROUP_SET_CONTAINER;
        sys::with_descriptor(&group.file, call, self.file.as_fd())
            .map_err(failed(call, subject))?;
        if !*has_iommu {
            let call = &uapi::SET_IOMMU;
            sys::with_value(&self.file, call, uapi::TYPE1V2_IOMMU)
                .map_err(failed(call, subject))?;
            *has_iommu = true;
        }
        Ok(())
    }

    /// What the kernel says of the IOMMU: to be asked when all groups are attached, since each may take away IOVAs.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn info(&self) -> Result<IommuInfo, VfioError> {
        Ok(IommuInfo::parse(&self.info_bytes()?)?)
    }

    /// The same as the kernel says it: `struct vfio_iommu_type1_info` with its capabilities.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn info_bytes(&self) -> Result<Vec<u8>, VfioError> {
        let call = &uapi::IOMMU_GET_INFO;
        let mut bytes = vec![0; size_of::<uapi::IommuType1Info>()];
        loop {
            sys::with_buffer(&self.file, call, &mut bytes)
                .map_err(failed(call, || "the container".into()))?;
            let wanted = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
            if wanted <= bytes.len() {
                return Ok(bytes);
            }
            if wanted > INFO_MAX {
                return Err(failed(call, || format!("{wanted} bytes"))(Errno(
                    libc::E2BIG,
                )));
            }
            // There may be more by then.
            bytes = vec![0; wanted];
        }
    }
}

fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|error| VfioError::Open {
        path: path.to_owned(),
        errno: error.into(),
    })
}

/// The last part of what a link leads to; `None` where there is none.
fn target(link: &Path) -> io::Result<String> {
    let target = fs::read_link(link)?;
    let name = target.file_name().unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}

/// `vfio-pci`, or a driver of some vendor's that is the same and more (`mlx5_vfio_pci`).
fn is_vfios(driver: &str) -> bool {
    driver == "vfio-pci" || driver.ends_with("_vfio_pci")
}

/// The number of the group of a device that is bound to VFIO.
fn group_of(sysfs: &Path, address: &str) -> Result<u32, VfioError> {
    let address = address.to_owned();
    let device = sysfs.join("bus/pci/devices").join(&address);
    // Nothing but an address: it becomes part of paths.
    let is_one = address.len() >= 12
        && address
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
        && !address.contains("..");
    if !is_one || !device.exists() {
        return Err(VfioError::NoDevice { address });
    }
    let Some(id) = target(&device.join("iommu_group"))
        .ok()
        .and_then(|id| id.parse().ok())
    else {
        return Err(VfioError::NoGroup { address });
    };
    let driver = target(&device.join("driver")).ok();
    match driver.as_deref() {
        Some(driver) if is_vfios(driver) => Ok(id),
        _ => Err(VfioError::NotBound { address, driver }),
    }
}

/// Devices of a group with drivers that keep it from being used, and those drivers.
fn others(sysfs: &Path, group: u32) -> Vec<(String, String)> {
    let folder = sysfs.join(format!("kernel/iommu_groups/{group}/devices"));
    let mut found: Vec<(String, String)> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let driver = target(&entry.path().join("driver")).ok()?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_harmless = is_vfios(&driver) || HARMLESS.contains(&driver.as_str());
            (!is_harmless).then_some((name, driver))
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// As the kernel shows a device with this driver, in group 4.
    fn show(sysfs: &Path, address: &str, driver: Option<&str>) {
        let device = sysfs.join("bus/pci/devices").join(address);
        let group = sysfs.join("kernel/iommu_groups/4/devices");
        fs::create_dir_all(&device).expect("a directory");
        fs::create_dir_all(&group).expect("a directory");
        symlink("../../../kernel/iommu_groups/4", device.join("iommu_group")).expect("a link");
        symlink(&device, group.join(address)).expect("a link");
        if let Some(driver) = driver {
            symlink(format!("../../drivers/{driver}"), device.join("driver")).expect("a link");
        }
    }

    #[test]
    fn a_device_is_found_by_its_address_alone_and_has_to_be_bound() {
        let dir = tempfile::tempdir().expect("a directory");
        let sysfs = dir.path();
        show(sysfs, "0000:01:00.0", Some("vfio-pci"));
        show(sysfs, "0000:01:00.1", Some("nvme"));
        show(sysfs, "0000:01:00.2", None);
        fs::create_dir_all(sysfs.join("bus/pci/devices/0000:02:00.0")).expect("a directory");
        show(sysfs, "0000:01:00.3", Some("mlx5_vfio_pci"));
        for bound in ["0000:01:00.0", "0000:01:00.3"] {
            assert_eq!(group_of(sysfs, bound).expect("bound"), 4);
        }
        let error = |address| group_of(sysfs, address).expect_err("not to be had");
        assert!(matches!(
            error("0000:01:00.1"),
            VfioError::NotBound { driver: Some(driver), .. } if driver == "nvme"
        ));
        assert!(matches!(
            error("0000:01:00.2"),
            VfioError::NotBound { driver: None, .. }
        ));
        assert!(matches!(error("0000:02:00.0"), VfioError::NoGroup { .. }));
        for no_address in ["", "0000:09:00.0", "../devices/0000:01:00.0", "01:00.0"] {
            assert!(
                matches!(error(no_address), VfioError::NoDevice { .. }),
                "{no_address}"
            );
        }
    }

    #[test]
    fn who_makes_a_group_unusable_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let sysfs = dir.path();
        show(sysfs, "0000:01:00.0", Some("vfio-pci"));
        show(sysfs, "0000:01:00.1", Some("snd_hda_intel"));
        show(sysfs, "0000:01:00.2", None);
        show(sysfs, "0000:00:01.0", Some("pcieport"));
        assert_eq!(
            others(sysfs, 4),
            [("0000:01:00.1".to_owned(), "snd_hda_intel".to_owned())]
        );
        assert_eq!(others(sysfs, 5), []);
    }
}
