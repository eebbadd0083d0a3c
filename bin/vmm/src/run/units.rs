//! Remapping units of a machine: one that covers all functions, and a second one that assigned
//! functions are under.
//!
//! Both are polled by one owner and have register pages of the same mode. The second exists only in
//! a machine with assigned functions ([`assigned`](super::assigned)), and the DMAR table names
//! these before the unit of all others.

use std::ops::Range;

use anyhow::{Context, Result, anyhow};
use guest_mem::{NoIommu, PhysMem, SourceId};
use kvm::register_page;
use platform::acpi::viot;
use platform::layout;
use pv_iommu::{Hints, PvIommu};
use vtd::{Unit, dmar};
use vtd_port::VtdPort;

use super::args::IdleArg;
use super::attach::Parts;
use super::composed::{Functions, MAX_LEASES, Owner, Units};
use super::config::{Config, IommuMode, Remapping};
use super::pending_functions::Assigned;
use crate::messages;

/// Physical addresses the guest's IO page tables may hold, in bits.
const HOST_ADDRESS_WIDTH: u8 = 48;

/// Options on which the units of a machine depend.
#[derive(Clone, Copy, Debug)]
pub struct UnitOptions {
    /// The kind of IOMMU.
    pub remapping: Remapping,
    /// Longest time that an invalidation may wait for stale leases, in ns.
    pub drain_limit_ns: u64,
    pub idle: IdleArg,
}

impl UnitOptions {
    /// Takes those of a machine's configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            remapping: config.iommu,
            drain_limit_ns: u64::try_from(config.drain_limit.as_nanos()).unwrap_or(u64::MAX),
            idle: config.idle,
        }
    }

    /// Returns the configuration of every unit.
    pub fn unit(&self) -> vtd::Config {
        vtd::Config {
            max_leases: MAX_LEASES,
            drain_limit_ns: self.drain_limit_ns,
            ..vtd::Config::default()
        }
    }
}

/// Makes the unit of all functions, in the mode asked for; a paravirtual one takes `hints`.
///
/// # Errors
/// Names what the host lacks or refuses.
pub fn iommu(options: &UnitOptions, hints: Hints, parts: &Parts<'_>) -> Result<Units> {
    if matches!(options.remapping, Remapping::Virtio(_)) {
        messages::say!(
            "--iommu virtio: the guest's devices do no DMA before it has a driver for virtio-iommu \
             (Linux 6.12 has one, which \
             belongs into its initramfs: virtio_iommu)"
        );
        let unit = PvIommu::new(pv_iommu::Config {
            max_leases: MAX_LEASES,
            drain_limit_ns: options.drain_limit_ns,
            ..pv_iommu::Config::default()
        });
        return Ok(Units::Paravirtual(unit.with_hints(hints)));
    }
    let units = unit(options.remapping.vtd(), options.unit(), layout::VTD, parts)?;
    // Another unit in the same mode would say the same.
    if let Units::Vtd(port) = &units
        && let Some(line) = sleepless(options.idle, port.keeps_awake())
    {
        messages::say!("{line}");
    }
    Ok(units)
}

/// Makes a unit with `config`, its registers at `at`, in a memory slot where the mode has one.
///
/// # Errors
/// Names what the host lacks or refuses.
pub fn unit(
    mode: Option<IommuMode>,
    config: vtd::Config,
    at: u64,
    parts: &Parts<'_>,
) -> Result<Units> {
    let Some(mode) = mode else {
        return Ok(Units::None(NoIommu::new(MAX_LEASES)));
    };
    let unit = Unit::new(config);
    let port = match mode {
        IommuMode::Trap => VtdPort::trap(unit),
        IommuMode::Logged => logged(unit, at, parts).map_err(|error| {
            anyhow!("{error:#} (--iommu-mode trap does without, at an exit for each access)")
        })?,
        IommuMode::Shared => register_page::shared(unit, at, parts.vm)?,
    };
    Ok(Units::Vtd(port))
}

fn logged(unit: Unit, at: u64, parts: &Parts<'_>) -> Result<VtdPort> {
    let ring = parts.ring().context("KVM's coalesced MMIO ring")?;
    Ok(register_page::logged(unit, at, parts.vm, &ring)?)
}

/// Returns a message about a sidecore that nothing could wake, unless it is meant to poll.
fn sleepless(idle: IdleArg, why: Option<&str>) -> Option<String> {
    let why = why.filter(|_| idle != IdleArg::Poll)?;
    Some(format!(
        "--iommu-mode shared: the sidecore never sleeps and takes a host CPU, since nothing here \
         could wake it ({why}); \
         `exitless doctor` says what userfaultfd takes, and --iommu-mode logged needs none"
    ))
}

/// Tells the paravirtual unit, number `unit`, and its function, of that number, of their endpoints:
/// every function of the bus but the host bridge, itself, and those of `beside`, which nothing
/// stands before. The table that tells the guest.
pub fn describe_endpoints<F: Functions, M: PhysMem>(
    owner: &mut Owner<F, M>,
    unit: usize,
    function: usize,
    beside: &[SourceId],
) -> Vec<u8> {
    let own = owner
        .function(function)
        .map(|function| function.get().source());
    let own = own.expect("the function was added");
    let bridge = SourceId::new(0, 0, 0);
    let others: Vec<u16> = beside
        .iter()
        .chain([&own, &bridge])
        .map(|id| id.0)
        .collect();
    let endpoints = viot::ranges_without(&others);
    let table = viot::build(own.0, &endpoints);
    if let Some(iommu) = owner.function(function).and_then(F::iommu) {
        iommu.class_mut().set_endpoints(endpoints.clone());
    }
    if let Some(Units::Paravirtual(unit)) = owner.unit(unit) {
        unit.set_endpoints(endpoints);
    }
    table
}

/// Returns the range of the register pages of all units.
pub fn register_pages(assigned: Option<&Assigned>) -> Range<u64> {
    let last = match assigned {
        None => layout::VTD,
        Some(_) => layout::VTD_ASSIGNED,
    };
    layout::VTD..last + layout::VTD_SIZE
}

/// Returns the table that describes the units to the guest.
pub fn dmar_table(assigned: Option<&Assigned>) -> Vec<u8> {
    let mut config = dmar::DmarConfig::single_unit(HOST_ADDRESS_WIDTH, layout::VTD);
    if let Some(Assigned { functions, .. }) = assigned {
        config = config.with_unit_for(layout::VTD_ASSIGNED, functions);
    }
    dmar::build(&config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecore_that_never_sleeps_is_no_secret() {
        for idle in [IdleArg::Adaptive, IdleArg::Sleep] {
            let line = sleepless(idle, Some("not permitted")).unwrap();
            for word in ["--iommu-mode shared", "never sleeps", "(not permitted)"] {
                assert!(line.contains(word), "{line}");
            }
            assert_eq!(sleepless(idle, None), None);
        }
        // It was asked for.
        assert_eq!(sleepless(IdleArg::Poll, Some("not permitted")), None);
    }
}
