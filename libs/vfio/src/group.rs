//! The files of `/dev/vfio`: a group of devices that the IOMMU cannot tell apart, and the container
//! they share.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerocopy::IntoBytes;

use crate::chain::whole_answer;
use crate::device::Device;
use crate::error::{Errno, VfioError, failed};
use crate::host::{self, SYSFS};
use crate::info::IommuInfo;
use crate::sys;
use crate::uapi::{self, Sized32};

/// A group of devices that the IOMMU cannot tell apart, all of them bound to VFIO or to no driver.
#[derive(Debug)]
pub struct Group {
    /// Shared with the container it is attached to.
    file: Arc<File>,
    id: u32,
}

impl Group {
    /// The group of a PCI device, by its address, for example `0000:01:00.0`.
    ///
    /// # Errors
    /// [`VfioError`], which says what is missing and how to get it.
    pub fn of_device(address: &str) -> Result<Self, VfioError> {
        let id = host::group_of(Path::new(SYSFS), address)?;
        let file = open(&PathBuf::from(format!("/dev/vfio/{id}")))?;
        let mut status = uapi::GroupStatus::zeroed();
        let call = &uapi::GROUP_GET_STATUS;
        sys::with_struct(&file, call, &mut status)
            .map_err(failed(call, || format!("group {id}")))?;
        if status.flags & uapi::GROUP_VIABLE == 0 {
            let group = host::group(Path::new(SYSFS), id);
            let others = group.blocking().map(|device| {
                let driver = device.driver.clone().unwrap_or_default();
                (device.address.clone(), driver)
            });
            return Err(VfioError::NotViable {
                group: id,
                others: others.collect(),
            });
        }
        let file = Arc::new(file);
        Ok(Self { file, id })
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// File of the group, which KVM's VFIO device is given.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
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
        Device::new(file, address.to_owned())
    }
}

/// An IO address space for the devices of one group or several.
///
/// The groups that are attached stay open for as long as the container, since the address space
/// lasts until the last of them is closed.
#[derive(Debug)]
pub struct Container {
    pub(crate) file: File,
    attached: Mutex<Attached>,
}

/// Groups of a container.
#[derive(Debug, Default)]
struct Attached {
    groups: Vec<(u32, Arc<File>)>,
    /// Its kind of IOMMU is set, which is done with the first group.
    has_iommu: bool,
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
            attached: Mutex::default(),
        })
    }

    /// File of the container.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Has the devices of a group translate by this container.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn attach(&self, group: &Group) -> Result<(), VfioError> {
        let mut attached = self.attached();
        let subject = || format!("group {}", group.id);
        let call = &uapi::GROUP_SET_CONTAINER;
        sys::with_descriptor(&group.file, call, self.file.as_fd())
            .map_err(failed(call, subject))?;
        attached.groups.push((group.id, Arc::clone(&group.file)));
        if !attached.has_iommu {
            let call = &uapi::SET_IOMMU;
            sys::with_value(&self.file, call, uapi::TYPE1V2_IOMMU)
                .map_err(failed(call, subject))?;
            attached.has_iommu = true;
        }
        Ok(())
    }

    /// Takes all groups off the container, which unmaps everything that is mapped in it: no device
    /// reaches anything then.
    ///
    /// # Errors
    /// [`VfioError::Call`]: a device of a group is still open (EBUSY). Groups before it have been
    /// taken off.
    pub fn detach_all(&self) -> Result<(), VfioError> {
        let call = &uapi::GROUP_UNSET_CONTAINER;
        self.take_groups_off()
            .map_err(|(id, errno)| failed(call, || format!("group {id}"))(errno))
    }

    /// The same; an error with the number of the group.
    pub(crate) fn take_groups_off(&self) -> Result<(), (u32, Errno)> {
        let mut attached = self.attached();
        while let Some((id, group)) = attached.groups.last() {
            let done = sys::without_argument(group, &uapi::GROUP_UNSET_CONTAINER);
            done.map_err(|errno| (*id, errno))?;
            attached.groups.pop();
        }
        // The kernel gives the type of IOMMU up with the last group.
        attached.has_iommu = false;
        Ok(())
    }

    /// Whether DMA of every attached device is coherent with the processors' caches
    /// (`VFIO_DMA_CC_IOMMU`): false before a group is attached. Where it is false, a device may be
    /// made to bypass the caches, and a hypervisor has to honour the guest's memory types (KVM's
    /// VFIO device).
    pub fn is_coherent(&self) -> bool {
        let call = &uapi::CHECK_EXTENSION;
        sys::with_value(&self.file, call, uapi::DMA_CC_IOMMU) == Ok(1)
    }

    fn attached(&self) -> MutexGuard<'_, Attached> {
        // Each step leaves it whole.
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel's information about the IOMMU. To be read when all groups are attached, since
    /// each may take away IOVAs.
    ///
    /// # Errors
    /// [`VfioError`].
    pub fn info(&self) -> Result<IommuInfo, VfioError> {
        Ok(IommuInfo::parse(&self.info_bytes()?)?)
    }

    /// The same in the kernel's bytes: `struct vfio_iommu_type1_info` with its capabilities.
    ///
    /// # Errors
    /// [`VfioError::Call`].
    pub fn info_bytes(&self) -> Result<Vec<u8>, VfioError> {
        let call = &uapi::IOMMU_GET_INFO;
        let head = uapi::IommuType1Info::zeroed();
        let ask = |bytes: &mut [u8]| sys::with_buffer(&self.file, call, bytes);
        whole_answer(head.as_bytes(), ask).map_err(failed(call, || "the container".into()))
    }
}

fn open(path: &Path) -> Result<File, VfioError> {
    let opened = File::options().read(true).write(true).open(path);
    opened.map_err(|error| VfioError::Open {
        path: path.to_owned(),
        errno: error.into(),
    })
}
