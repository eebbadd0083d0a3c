//! A remapping unit's register page in a memory slot of a KVM machine, for the two modes that have one.
//!
//! The slot gets a mapping of its own ([`SlotMapping`]): arming protects that one, and the owner, which uses
//! the page's first mapping, never meets the protection.
//!
//! Called while the machine is built. `trap` needs no slot: [`VtdPort::trap`].

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use guest_mem::{Gpa, RegisterPage, SlotMapping};
use kvm_bindings::KVM_MEM_READONLY;
use platform::layout;
use vtd::Unit;
use vtd::front::LogEntry;
use vtd_port::{VtdPort, WriteLog};

use crate::coalesced::{CoalescedRing, CoalescedZone};
use crate::{KvmError, Vm};

/// Why a register page cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// No shared memory for it.
    #[error("the IOMMU's register page: {0}")]
    Page(String),
    /// It cannot be mapped again for the slot.
    #[error("mapping the IOMMU's register page")]
    Mapping(#[source] io::Error),
    /// No memory slot.
    #[error(transparent)]
    Slot(#[from] KvmError),
    /// KVM's log of writes.
    #[error("KVM's coalesced MMIO ring")]
    Log(#[source] io::Error),
}

/// `unit` behind a page that the guest reads without an exit and whose writes KVM logs. `vcpu` is any of the
/// machine's vCPUs.
///
/// # Errors
/// The host lacks something.
pub fn logged(unit: Unit, vm: &Arc<Vm>, vcpu: BorrowedFd<'_>) -> Result<VtdPort, PageError> {
    let (page, _) = slot(vm, KVM_MEM_READONLY)?;
    let ring = CoalescedRing::map(vcpu).map_err(PageError::Log)?;
    let zone = CoalescedZone::new(vm.clone(), layout::VTD, layout::VTD_SIZE as u32);
    let mut log = KvmLog { ring, zone };
    log.register().map_err(PageError::Log)?;
    Ok(VtdPort::logged(unit, page, Box::new(log)))
}

/// `unit` behind a page that is the guest's memory.
///
/// # Errors
/// The host lacks something.
pub fn shared(unit: Unit, vm: &Vm) -> Result<VtdPort, PageError> {
    let (page, mapping) = slot(vm, 0)?;
    Ok(VtdPort::shared(unit, page, mapping))
}

/// A register page in a memory slot.
fn slot(vm: &Vm, flags: u32) -> Result<(RegisterPage, Arc<SlotMapping>), PageError> {
    let page = RegisterPage::new().map_err(|error| PageError::Page(error.to_string()))?;
    let mapping = SlotMapping::of_page(page.memfd()).map_err(PageError::Mapping)?;
    let mapping = Arc::new(mapping);
    vm.map(Gpa::new(layout::VTD), &mapping, flags)?;
    Ok((page, mapping))
}

/// KVM's coalesced-MMIO ring as a log of register writes.
struct KvmLog {
    ring: CoalescedRing,
    zone: CoalescedZone,
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
