//! The IOMMU's register page in a memory slot of a KVM machine, for the two modes that have one.
//!
//! The slot gets a mapping of its own ([`SlotMapping`]): arming protects that one, and the owner, which uses
//! the page's first mapping, never meets the protection.
//!
//! Called while the machine is built. `trap` needs no slot: [`IommuPort::trap`].
//!
//! UNSAFETY: a memory slot hands a host address to KVM; both functions say what keeps it mapped.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::{Context, Result};
use guest_mem::{Gpa, RegisterPage};
use kvm_bindings::KVM_MEM_READONLY;
use kvm_ioctls::VmFd;
use uffd::SlotMapping;
use vtd::Unit;
use vtd::front::LogEntry;

use super::coalesced::{CoalescedRing, CoalescedZone};
use super::iommu_port::{IommuPort, WriteLog};
use super::{kvm, layout};

/// `unit` behind a page that the guest reads without an exit and whose writes KVM logs. `vcpu` is any of the
/// machine's vCPUs.
///
/// # Safety
/// The answer must outlive the last vCPU's run: it holds the slot's memory.
pub unsafe fn logged(unit: Unit, vm: &Arc<VmFd>, vcpu: BorrowedFd<'_>) -> Result<IommuPort> {
    // SAFETY: the mapping goes into the log below, and so into the answer, which the caller keeps.
    let (page, mapping) = unsafe { slot(vm, KVM_MEM_READONLY) }?;
    let ring = CoalescedRing::map(vcpu).context("KVM's coalesced MMIO ring")?;
    let zone = CoalescedZone::new(vm.clone(), layout::VTD, layout::VTD_SIZE as u32);
    let mut log = KvmLog {
        ring,
        zone,
        _mapping: mapping,
    };
    log.register()
        .context("registering the IOMMU's page for logging")?;
    Ok(IommuPort::logged(unit, page, Box::new(log)))
}

/// `unit` behind a page that is the guest's memory.
///
/// # Safety
/// The answer must outlive the last vCPU's run: it holds the slot's memory.
pub unsafe fn shared(unit: Unit, vm: &VmFd) -> Result<IommuPort> {
    // SAFETY: the mapping goes into the answer, which the caller keeps.
    let (page, mapping) = unsafe { slot(vm, 0) }?;
    Ok(IommuPort::shared(unit, page, mapping))
}

/// A register page in a memory slot.
///
/// # Safety
/// The mapping must outlive the last vCPU's run.
unsafe fn slot(vm: &VmFd, flags: u32) -> Result<(RegisterPage, SlotMapping)> {
    let page = RegisterPage::new().context("the IOMMU's register page")?;
    let mapping = SlotMapping::new(page.memfd()).context("mapping the IOMMU's register page")?;
    let (gpa, hva) = (Gpa::new(layout::VTD), mapping.hva());
    // SAFETY: the mapping is one page of a memfd, which the caller keeps mapped; nothing of this process keeps
    // data there.
    unsafe { kvm::map_slot(vm, kvm::FIRST_FREE_SLOT, gpa, layout::VTD_SIZE, hva, flags) }?;
    Ok((page, mapping))
}

/// KVM's coalesced-MMIO ring as a log of register writes.
struct KvmLog {
    ring: CoalescedRing,
    zone: CoalescedZone,
    /// The read-only slot's memory.
    _mapping: SlotMapping,
}

impl WriteLog for KvmLog {
    fn drain(&mut self, max: usize, take: &mut dyn FnMut(LogEntry)) -> usize {
        self.ring.drain(max, |address, bytes| {
            // The only zone is ours, so the subtraction holds; a wrong entry would be ignored by the unit.
            let offset = address.wrapping_sub(layout::VTD) as u16;
            let mut data = [0; 8];
            data[..bytes.len()].copy_from_slice(bytes);
            take(LogEntry {
                offset,
                len: bytes.len() as u8,
                data: u64::from_le_bytes(data),
            });
        })
    }

    fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    fn unregister(&mut self) -> io::Result<()> {
        Ok(self.zone.unregister()?)
    }

    fn register(&mut self) -> io::Result<()> {
        Ok(self.zone.register()?)
    }
}
