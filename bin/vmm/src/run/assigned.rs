//! Assigned functions of a machine: devices of the host that the guest drives itself.
//!
//! They are under a remapping unit of their own ([`assigned_unit`]), since their mappings are shadowed into the host's IOMMU: the
//! guest has to invalidate after it has made an entry present, too (CAP.CM), which a system applies to a whole unit, and the
//! unit offers no more than the host's IOMMU can follow. The unit exists only in a machine that has such functions.

use anyhow::{Result, bail};
use guest_mem::SourceId;
use platform::layout;
use vtd::AddressWidth;

use super::attach::Parts;
use super::composed::Units;
use super::units::{self, UnitOptions};

/// The unit of assigned functions, and these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Number of the unit, at the owner.
    pub unit: usize,
    /// Requesters of the functions.
    pub functions: Vec<SourceId>,
}

/// Limits of the host's IOMMU, as far as the guest's unit depends on them: what all containers of a machine have in common.
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

#[cfg(test)]
mod tests;
