//! KVM's notice of the VFIO groups whose devices a machine has
//! (Documentation/virt/kvm/devices/vfio.rst).
//!
//! Where a device's DMA is not coherent with the processors' caches, KVM lets the guest's choice of
//! memory types and its `WBINVD` take effect only while such a group is known to it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_DEV_VFIO_GROUP, KVM_DEV_VFIO_GROUP_ADD, KVM_DEV_VFIO_GROUP_DEL, kvm_create_device,
    kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::DeviceFd;

use crate::vm::{KvmError, Vm, refused};

/// KVM's VFIO device of one machine, which has at most one.
pub struct VfioDevice(DeviceFd);

impl VfioDevice {
    /// Creates it.
    ///
    /// # Errors
    /// KVM has none, or the machine has one already.
    pub fn new(vm: &Vm) -> Result<Self, KvmError> {
        let mut device = kvm_create_device {
            type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
            fd: 0,
            flags: 0,
        };
        let fd = vm.fd().create_device(&mut device);
        fd.map(Self).map_err(refused("its VFIO device"))
    }

    /// Makes a VFIO group known to KVM, which keeps it open, until the value is dropped.
    ///
    /// # Errors
    /// KVM refuses: it is no VFIO group, or known already; or there is no descriptor left.
    pub fn add_group(self: &Arc<Self>, group: BorrowedFd<'_>) -> Result<KnownGroup, KvmError> {
        let no_descriptor = |error: io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            refused("a VFIO group")(kvm_ioctls::Error::new(errno))
        };
        // KVM knows the group by its open file, which the clone shares.
        let group = group.try_clone_to_owned().map_err(no_descriptor)?;
        self.set(KVM_DEV_VFIO_GROUP_ADD, group.as_fd())
            .map_err(refused("a VFIO group"))?;
        Ok(KnownGroup {
            device: self.clone(),
            group,
        })
    }

    fn set(&self, attribute: u32, group: BorrowedFd<'_>) -> Result<(), kvm_ioctls::Error> {
        let fd: i32 = group.as_raw_fd();
        // KVM reads the descriptor's number from there, during the call.
        let attribute = kvm_device_attr {
            group: KVM_DEV_VFIO_GROUP,
            attr: u64::from(attribute),
            addr: (&raw const fd).expose_provenance() as u64,
            flags: 0,
        };
        self.0.set_device_attr(&attribute)
    }
}

/// VFIO group that KVM knows. It has to go before another process can open the group: an ejected
/// device's does so while the machine runs.
pub struct KnownGroup {
    device: Arc<VfioDevice>,
    group: OwnedFd,
}

impl Drop for KnownGroup {
    fn drop(&mut self) {
        if let Err(error) = self.device.set(KVM_DEV_VFIO_GROUP_DEL, self.group.as_fd()) {
            tracing::warn!(%error, "KVM keeps a VFIO group open until the machine has ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EventFd;

    use super::*;

    #[test]
    fn descriptor_that_is_no_group_is_refused_and_not_kept() {
        let Ok(kvm) = crate::vm::open_any() else {
            eprintln!("skipped: no /dev/kvm");
            return;
        };
        let vm = Vm::bare(&kvm).unwrap();
        let device = match VfioDevice::new(&vm) {
            Ok(device) => Arc::new(device),
            Err(error) => {
                eprintln!("skipped: {error}");
                return;
            }
        };
        let eventfd = EventFd::new(0).unwrap();
        // SAFETY: `eventfd` is open for as long as the borrow.
        let other = unsafe { BorrowedFd::borrow_raw(eventfd.as_raw_fd()) };
        for fd in [other, io::stderr().as_fd()] {
            assert!(device.add_group(fd).is_err());
            assert_eq!(Arc::strong_count(&device), 1);
        }
        // A second device of one machine is refused too, and says what was.
        let again = VfioDevice::new(&vm).err().map(|error| error.to_string());
        assert!(again.is_some_and(|text| text.contains("VFIO device")));
    }
}
