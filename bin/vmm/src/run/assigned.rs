//! Assigned functions of a machine: devices of the host that the guest drives itself.
//!
//! They are under a remapping unit of their own ([`assigned_unit`]), since their mappings are
//! shadowed into the host's IOMMU: the guest has to invalidate after it has made an entry present,
//! too (CAP.CM), which a system applies to a whole unit, and the unit offers no more than the
//! host's IOMMU can follow. The unit exists only in a machine that has such functions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use anyhow::{Result, bail};
use guest_mem::{PhysMem, SourceId};
use machine::Request;
use pci::bus::PciBus;
use platform::layout;
use platform::power::EjectSink;
use vtd::AddressWidth;

use super::attach::{Ejectable, Parts};
use super::composed::{Functions, Owner, Units};
use super::memory::OwnerHandle;
use super::plugs::Plug;
use super::units::{self, UnitOptions};

/// Limits of the host's IOMMU, as far as the guest's unit depends on them: what all containers of a
/// machine have in common.
#[derive(Clone, Copy, Debug)]
pub struct HostIommu {
    /// Highest address that a device can be given memory at.
    pub last_iova: u64,
}

/// Makes the unit of assigned functions.
///
/// # Errors
/// Names what the host lacks or refuses.
#[cfg_attr(not(test), expect(dead_code, reason = "no function is assigned yet"))]
pub fn assigned_unit(options: &UnitOptions, parts: &Parts<'_>, host: &HostIommu) -> Result<Units> {
    let config = unit_config(options, host)?;
    units::unit(options.mode, config, layout::VTD_ASSIGNED, parts)
}

fn unit_config(options: &UnitOptions, host: &HostIommu) -> Result<vtd::Config> {
    let reaches = |width: AddressWidth| {
        host.last_iova >> width.bits() != 0 || host.last_iova == (1 << width.bits()) - 1
    };
    let widths = [AddressWidth::Bits48, AddressWidth::Bits39];
    let Some(width) = widths.into_iter().find(|width| reaches(*width)) else {
        bail!(
            "the host's IOMMU gives devices addresses up to {:#x}, and a guest's unit has at least {} bits",
            host.last_iova,
            AddressWidth::Bits39.bits()
        );
    };
    Ok(vtd::Config {
        width,
        caching_mode: true,
        // Large pages and snoop control, as far as the host's IOMMU has them, belong here.
        ..options.unit()
    })
}

/// The assigned ones among `plugged`, which the guest may eject.
pub fn ejectable<F: Functions, M: PhysMem + Send + 'static>(
    plugged: &[Plug],
    owner: &OwnerHandle<F, M>,
    bus: &Arc<PciBus>,
) -> Option<Ejectable> {
    let assigned = plugged.iter().filter(|plug| plug.memory.is_some());
    let by_slot = |plug: &Plug| (plug.source.devfn() >> 3, (plug.source, plug.number));
    let functions: BTreeMap<_, _> = assigned.map(by_slot).collect();
    if functions.is_empty() {
        return None;
    }
    let slots = functions.keys().copied().collect();
    let sink = Arc::new(Ejector {
        owner: owner.clone(),
        bus: bus.clone(),
        functions: Mutex::new(functions),
    });
    Some(Ejectable { slots, sink })
}

/// Removes functions that the guest ejects: from the bus at once, from their owner as soon as
/// nothing of them is in flight.
struct Ejector<F, M> {
    owner: OwnerHandle<F, M>,
    bus: Arc<PciBus>,
    /// Those that are still there, by slots: requester, and number at the owner.
    functions: Mutex<BTreeMap<u8, (SourceId, usize)>>,
}

impl<F: Functions, M: PhysMem + Send + 'static> EjectSink for Ejector<F, M> {
    fn eject(&self, slot: u8) {
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Each once: the owner may give the number to another function.
        let Some((source, number)) = functions.remove(&slot) else {
            return;
        };
        drop(functions);
        // First, so that no access is on its way to a function that is being removed.
        self.bus.unplug(source);
        let remove = move |owner: &mut Owner<F, M>| {
            // No thread waits for the end of it: the device is closed when the owner drops its
            // function.
            let (tell, _) = mpsc::channel();
            owner.remove(number, tell);
        };
        // An owner that has ended has removed everything.
        let _ = self.owner.send(Request::Inspect(Box::new(remove)));
        tracing::info!(slot, "the guest has ejected an assigned function");
    }
}

#[cfg(test)]
mod tests;
