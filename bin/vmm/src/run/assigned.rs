//! Assigned functions of a machine: devices of the host that the guest drives itself.
//!
//! They are under a remapping unit of their own ([`assigned_unit`]), since their mappings are
//! shadowed into the host's IOMMU: the guest has to invalidate after it has made an entry present,
//! too (CAP.CM), which a system applies to a whole unit, and the unit offers no more than the
//! host's IOMMU can follow. The unit exists only in a machine that has such functions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use assign::calls::CallThread;
use assign::function::Parts as FunctionParts;
use assign::reach::Reach;
use assign::shadow::{Limits, Shadow};
use assign::vfio_device::{OpenError, Opened};
use guest_mem::{GuestRam, HugePages, PAGE_SIZE, PhysMem, SlotMapping};
use kvm::bar_memory::{BarMemory, BarPiece};
use kvm::lines::KvmLines;
use kvm::vfio_device::{KnownGroup, VfioDevice};
use machine::Request as Ask;
use platform::layout;
use platform::memory::PlaceMemory;
use vfio::VfioError;
use vtd::{AddressWidth, LargePages};

use super::attach::Parts;
use super::composed::{AssignedDevice, Functions, Owner, Units};
use super::device::DeviceConfig;
use super::eventfds::clones;
use super::memory::OwnerHandle;
use super::pending_functions::PendingFunctions;
use super::units::{self, UnitOptions};
use crate::messages::say;

/// Time that a machine that is started again waits for its devices: the kernel may still be closing
/// those that the last one had open.
const PATIENCE: Duration = Duration::from_secs(5);

/// Limits of the host's IOMMU, as far as the guest's unit depends on them: what all containers of a
/// machine have in common.
#[derive(Clone, Copy, Debug)]
pub struct HostIommu {
    /// Highest address that a device can be given memory at.
    pub last_iova: u64,
    /// Large pages that its tables have.
    pub large_pages: LargePages,
    /// DMA snoops the processors' caches, whatever a device asks for.
    pub is_coherent: bool,
}

impl HostIommu {
    /// Returns the limits that all of these devices' containers have in common.
    fn of(devices: &[(DeviceConfig, Opened)]) -> Self {
        let infos = || devices.iter().map(|(_, opened)| &opened.info);
        let has = |bytes| infos().all(|info| info.has_page_size(bytes));
        let bits = infos().map(|info| info.address_bits()).min().unwrap_or(0);
        Self {
            last_iova: u64::MAX.checked_shr(64 - bits).unwrap_or(0),
            large_pages: match (has(2 << 20), has(1 << 30)) {
                (true, true) => LargePages::OneG,
                (true, false) => LargePages::TwoM,
                (false, _) => LargePages::None,
            },
            is_coherent: devices.iter().all(|(_, opened)| opened.is_coherent),
        }
    }
}

/// Devices of a machine that has been built.
#[derive(Default)]
pub struct Devices {
    /// By number of function: its configuration, with the address on the host and the file of its
    /// policy.
    pub numbers: Vec<(usize, DeviceConfig)>,
}

/// Memory of a device's BARs, shown to the guest. It is dropped when the device is ejected.
struct DeviceMemory {
    bars: BarMemory,
    /// KVM's knowledge of the group, where its DMA is not coherent with the processors' caches.
    _group: Option<KnownGroup>,
}

impl PlaceMemory for DeviceMemory {
    fn place(&self, bar: u8, at: Option<u64>) {
        self.bars.place(bar, at);
    }
}

impl Devices {
    /// Returns the numbers of functions, and addresses on the host.
    pub fn addresses(&self) -> Vec<(usize, String)> {
        let numbers = self.numbers.iter();
        numbers
            .map(|(number, config)| (*number, config.address.clone()))
            .collect()
    }
}

/// Opens all devices, and adds them as functions. Their pages will be in use in `reach`.
///
/// # Errors
/// Names the device, what is missing and how to get it.
pub fn add_all<F: Functions, M: PhysMem>(
    pending: &mut PendingFunctions<'_, F, M>,
    configs: Vec<DeviceConfig>,
    options: &UnitOptions,
    parts: &Parts<'_>,
    reach: &Reach,
    restarts: u64,
) -> Result<Devices> {
    let opened = configs
        .into_iter()
        .map(|config| {
            let opened = open(&config.address, restarts)?;
            Ok((config, opened))
        })
        .collect::<Result<Vec<_>>>()?;
    if opened.is_empty() {
        return Ok(Devices::default());
    }
    one_of_each_group(&opened)?;
    let host = HostIommu::of(&opened);
    let groups = match host.is_coherent {
        true => None,
        false => Some(Arc::new(VfioDevice::new(parts.vm)?)),
    };
    let mut devices = Devices::default();
    for (config, opened) in opened {
        let on_device = || format!("--device vfio={}", config.address);
        let groups = groups.as_ref().filter(|_| !opened.is_coherent);
        let known = groups.map(|groups| groups.add_group(opened.group.as_fd()));
        let memory = DeviceMemory {
            _group: known.transpose().with_context(on_device)?,
            bars: bar_memory(&opened, parts).with_context(on_device)?,
        };
        let number = add(
            pending,
            &config,
            (opened, memory),
            options,
            parts,
            reach,
            &host,
        )
        .with_context(on_device)?;
        devices.numbers.push((number, config));
    }
    Ok(devices)
}

fn open(address: &str, restarts: u64) -> Result<Opened> {
    let since = Instant::now();
    loop {
        match Opened::new(address) {
            Err(OpenError::Vfio(VfioError::Open { errno, .. }))
                if restarts > 0 && errno.0 == libc::EBUSY && since.elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            opened => return opened.with_context(|| format!("--device vfio={address}")),
        }
    }
}

/// Refuses two devices of one group: they are in one container, and a guest may attach them to two
/// domains.
fn one_of_each_group(devices: &[(DeviceConfig, Opened)]) -> Result<()> {
    for (at, (config, opened)) in devices.iter().enumerate() {
        let others = &devices[..at];
        let same = |(_, other): &&(DeviceConfig, Opened)| other.group.id() == opened.group.id();
        if let Some((other, _)) = others.iter().find(same) {
            bail!(
                "--device vfio={} and vfio={} are in one IOMMU group ({}), which the host cannot \
                 tell apart: give the guest one of them",
                other.address,
                config.address,
                opened.group.id()
            );
        }
    }
    Ok(())
}

fn add<F: Functions, M: PhysMem>(
    pending: &mut PendingFunctions<'_, F, M>,
    config: &DeviceConfig,
    (opened, memory): (Opened, DeviceMemory),
    options: &UnitOptions,
    parts: &Parts<'_>,
    reach: &Reach,
    host: &HostIommu,
) -> Result<usize> {
    let source = parts.bus.reserve()?;
    say_what_is_missing(&opened);
    let vectors = AssignedDevice::lines_of(&opened.config);
    let lines = KvmLines::new(parts.vm.clone(), parts.routes.clone(), vectors)
        .context("interrupt lines")?;
    let limits = Limits {
        ram: pages_of(parts.ram),
        allowed: opened.allowed(),
        allows_pass_through: !config.requires_dma_domains,
        maps_while_off: !options.remapping.is_there() || config.dma_before_te,
    };
    let memory = Arc::new(memory);
    let shown = memory.clone();
    let hide = move || shown.bars.end();
    let (hardware, table, space, areas) = opened.split(clones(lines.fds())?, hide)?;
    let name = format!("vfio-{}", config.address.trim_start_matches("0000:"));
    let calls = CallThread::start(&name, table).context("the thread of its container")?;
    let mut shadow = Shadow::new(source, limits, config.policy, reach.clone(), calls);
    // A unit that is off, or none, reports nothing.
    shadow.look();
    let function = AssignedDevice::new(FunctionParts {
        source,
        hardware,
        config: space,
        areas,
        lines: Box::new(lines),
        shadow,
        reach: reach.clone(),
    });
    pending.add_assigned(function, memory, || assigned_unit(options, parts, host))
}

/// Logs the features of the device that the guest does not see.
fn say_what_is_missing(opened: &Opened) {
    for what in opened.config.unsupported() {
        tracing::info!(device = %opened.address, "{what}");
    }
    if !opened.device.info().can_reset {
        say!(
            "device {}: it cannot be reset by itself, so that the next guest finds it as this one \
             leaves it",
            opened.address
        );
    }
}

/// Returns its BARs as memory slots, as far as they can be.
fn bar_memory(opened: &Opened, parts: &Parts<'_>) -> Result<BarMemory> {
    let pieces = opened.slots().map(|(bar, bytes, offset)| {
        let len = bytes.end - bytes.start;
        let mapping = SlotMapping::new(opened.device.as_fd(), offset, len, HugePages::Never);
        let mapping = Arc::new(mapping.with_context(|| format!("mapping BAR {bar}"))?);
        Ok(BarPiece {
            bar,
            offset: bytes.start,
            mapping,
        })
    });
    let pieces = pieces.collect::<Result<_>>()?;
    Ok(BarMemory::new(parts.vm.clone(), pieces))
}

/// Runs of pages of guest memory: first page and pages.
fn pages_of(ram: &GuestRam) -> Vec<(u64, u64)> {
    let regions = ram.regions().iter();
    regions
        .map(|region| (region.gpa.raw() / PAGE_SIZE, region.len / PAGE_SIZE))
        .collect()
}

/// Has the devices' policies follow their files, now that the owner runs.
///
/// # Errors
/// A file cannot be watched.
pub fn follow_policies<F: Functions, M: PhysMem + Send + 'static>(
    devices: &Devices,
    owner: &OwnerHandle<F, M>,
) -> Result<()> {
    for (number, config) in &devices.numbers {
        let (owner, number) = (owner.clone(), *number);
        config.follow_policy(Box::new(move |new| {
            let set = move |owner: &mut Owner<F, M>| {
                if let Some(device) = owner.function(number).and_then(Functions::assigned) {
                    device.shadow_mut().set_policy(new);
                }
            };
            // An owner that has ended has no devices.
            let _ = owner.send(Ask::Inspect(Box::new(set)));
        }))?;
    }
    Ok(())
}

/// Makes the unit of assigned functions.
///
/// # Errors
/// Names what the host lacks or refuses.
pub fn assigned_unit(options: &UnitOptions, parts: &Parts<'_>, host: &HostIommu) -> Result<Units> {
    let config = unit_config(options, host)?;
    units::unit(options.remapping.vtd(), config, layout::VTD_ASSIGNED, parts)
}

fn unit_config(options: &UnitOptions, host: &HostIommu) -> Result<vtd::Config> {
    let reaches = |width: AddressWidth| {
        host.last_iova >> width.bits() != 0 || host.last_iova == (1 << width.bits()) - 1
    };
    let widths = [AddressWidth::Bits48, AddressWidth::Bits39];
    let Some(width) = widths.into_iter().find(|width| reaches(*width)) else {
        bail!(
            "the host's IOMMU gives devices addresses up to {:#x}, and a guest's unit has at least \
             {} bits",
            host.last_iova,
            AddressWidth::Bits39.bits()
        );
    };
    Ok(vtd::Config {
        width,
        caching_mode: true,
        large_pages: host.large_pages,
        snoop_control: host.is_coherent,
        ..options.unit()
    })
}

#[cfg(test)]
mod tests;
