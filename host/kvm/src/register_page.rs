//! A remapping unit's register page in a memory slot of a KVM machine, for the two modes that have
//! one.
//!
//! The slot gets a mapping of its own ([`SlotMapping`]): arming protects that one, and the owner,
//! which uses the page's first mapping, never meets the protection.
//!
//! Called while the machine is built. `trap` needs no slot: [`VtdPort::trap`].

use std::io;
use std::sync::Arc;

use guest_mem::{Gpa, RegisterPage, SlotMapping};
use kvm_bindings::KVM_MEM_READONLY;
use platform::layout;
use vtd::Unit;
use vtd_port::VtdPort;

use crate::coalesced::CoalescedZone;
use crate::zones::ZonedRing;
use crate::{KvmError, Vm};

/// Reason why a register page cannot be had.
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

/// Puts `unit` behind the page at `at` that the guest reads without an exit and whose writes KVM
/// logs, to be read by `ring` with those of the machine's other units.
///
/// # Errors
/// The host lacks something.
pub fn logged(
    unit: Unit,
    at: u64,
    vm: &Arc<Vm>,
    ring: &Arc<ZonedRing>,
) -> Result<VtdPort, PageError> {
    let (page, _) = slot(at, vm, KVM_MEM_READONLY)?;
    let zone = CoalescedZone::new(vm.clone(), at, layout::VTD_SIZE as u32);
    let log = ring.log(zone).map_err(PageError::Log)?;
    Ok(VtdPort::logged(unit, page, Box::new(log)))
}

/// Puts `unit` behind a page at `at` that is the guest's memory.
///
/// # Errors
/// The host lacks something.
pub fn shared(unit: Unit, at: u64, vm: &Vm) -> Result<VtdPort, PageError> {
    let (page, mapping) = slot(at, vm, 0)?;
    Ok(VtdPort::shared(unit, page, mapping))
}

/// Makes a register page in a memory slot.
fn slot(at: u64, vm: &Vm, flags: u32) -> Result<(RegisterPage, Arc<SlotMapping>), PageError> {
    let page = RegisterPage::new().map_err(|error| PageError::Page(error.to_string()))?;
    let mapping = SlotMapping::of_page(page.memfd()).map_err(PageError::Mapping)?;
    let mapping = Arc::new(mapping);
    vm.map(Gpa::new(at), &mapping, flags)?;
    Ok((page, mapping))
}
