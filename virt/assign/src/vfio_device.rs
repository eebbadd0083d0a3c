//! A device of VFIO, type 1 version 2: opened, as [`Hardware`], and its container as the [`Table`]
//! of a thread.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use dma_map::address::PAGE_SIZE;
use dma_map::iova::{Access, IovaRange};
use pci::bars::BARS;
use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;
use vfio::{
    Container, Device, ExternalMap, ExternalMapError, Group, IommuInfo, IrqIndex, Kernel, Region,
    VfioError,
};

use crate::areas::Areas;
use crate::calls::{Refusal, Table};
use crate::config::{self, GuestConfig};
use crate::hardware::{Hardware, HostEvent, Vectors};
use crate::pin::Pinned;

/// Index of the region that is configuration space.
const CONFIG_REGION: u32 = 7;
/// Command register, and its bits.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
const COMMAND_PIN_OFF: u16 = 1 << 10;

/// Reason why a device cannot be assigned.
#[derive(Debug, Error)]
pub enum OpenError {
    /// VFIO refuses it.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// It is not fit for a guest.
    #[error("{address} cannot be assigned: {refusal}")]
    Refused {
        /// Its address.
        address: String,
        /// Reason.
        refusal: config::Refusal,
    },
    /// No pages of 4 KiB, or no word about which IOVAs are allowed.
    #[error("{address}: the host's IOMMU")]
    Iommu {
        /// The device's address.
        address: String,
        /// Reason.
        source: vfio::InfoError,
    },
    /// The host has no more descriptors.
    #[error("an eventfd")]
    Descriptor(#[from] io::Error),
}

/// A device that is open, in a container of its own.
pub struct Opened {
    /// Its address.
    pub address: String,
    /// The device.
    pub device: Arc<Device>,
    /// Its group.
    pub group: Group,
    /// Nothing is mapped in it.
    pub container: Container,
    /// Limits of the host's IOMMU.
    pub info: IommuInfo,
    /// Its DMA snoops the processors' caches, even without a request for snooping.
    pub is_coherent: bool,
    /// Configuration space, as the guest sees it.
    pub config: GuestConfig,
    /// Areas of its BARs, and which of them trap.
    pub areas: Areas,
    bars: [Option<Region>; BARS],
}

impl Opened {
    /// Opens the device of this address, and resets it if it can be. Its bus mastering is off.
    ///
    /// # Errors
    /// [`OpenError`], whose message names the missing part and the way to get it.
    pub fn new(address: &str) -> Result<Self, OpenError> {
        let group = Group::of_device(address)?;
        let container = Container::open()?;
        container.attach(&group)?;
        let info = container.info()?;
        info.aperture().map_err(|source| OpenError::Iommu {
            address: address.to_owned(),
            source,
        })?;
        let device = group.device(address)?;
        device.reset()?;
        let space = device.region(CONFIG_REGION)?;
        let mut image = vec![0xff; usize::try_from(space.size).unwrap_or(0).min(4096)];
        device.read(&space, 0, &mut image)?;
        let mut bars = [const { None }; BARS];
        for (index, bar) in (0..).zip(&mut bars) {
            let region = device.region(index)?;
            *bar = (region.size > 0).then_some(region);
        }
        let bar_sizes = std::array::from_fn(|bar| bars[bar].as_ref().map_or(0, |bar| bar.size));
        let config = GuestConfig::new(&config::Device {
            image: &image,
            bar_sizes,
            can_reset: device.info().can_reset,
        })
        .map_err(|refusal| OpenError::Refused {
            address: address.to_owned(),
            refusal,
        })?;
        let mappable = std::array::from_fn(|bar| {
            bars[bar]
                .as_ref()
                .map_or_else(Vec::new, |bar| bar.mappable(&[]))
        });
        Ok(Self {
            address: address.to_owned(),
            is_coherent: container.is_coherent(),
            areas: Areas::new(config.bar_sizes(), config.msix(), &mappable),
            device: Arc::new(device),
            group,
            container,
            info,
            config,
            bars,
        })
    }

    /// Pieces of BARs that may be memory slots: a BAR, bytes in it, and where they begin in the
    /// device's file.
    pub fn slots(&self) -> impl Iterator<Item = (u8, Range<u64>, u64)> + '_ {
        (0..).zip(&self.bars).flat_map(move |(index, region)| {
            let slots = region.iter().flat_map(move |region| {
                let slots = self.areas.slots(index).iter();
                slots.map(|bytes| (bytes.clone(), region.offset + bytes.start))
            });
            slots.map(move |(bytes, offset)| (index, bytes, offset))
        })
    }

    /// Runs of pages of IOVA that the host's IOMMU allows: first page and pages, sorted.
    pub fn allowed(&self) -> Vec<(u64, u64)> {
        let ranges = self.info.allowed.iter().flatten();
        let mut runs: Vec<_> = ranges
            .filter_map(|range| {
                let first = range.start.div_ceil(PAGE_SIZE);
                // The last page that lies in it whole.
                let end = match range.last.checked_add(1) {
                    Some(end) => end / PAGE_SIZE,
                    None => u64::MAX / PAGE_SIZE + 1,
                };
                (first < end).then(|| (first, end - first))
            })
            .collect();
        runs.sort_unstable();
        runs
    }

    /// Parts: the device, which signals `lines`, and the container. The latter's thread closes the
    /// device, and calls `hide` before, which ends all mappings of its BARs.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn split(
        self,
        lines: Vec<OwnedFd>,
        hide: impl FnOnce() + Send + 'static,
    ) -> Result<(VfioHardware, VfioTable<Container>, GuestConfig, Areas), OpenError> {
        let hardware = VfioHardware::new(self.device.clone(), self.bars, lines)?;
        let device = self.device;
        let reset = move || device.reset().map(drop).map_err(|error| error.to_string());
        let device = Held::new(reset, hide);
        let table = VfioTable::new(self.container, device, Some(self.group));
        Ok((hardware, table, self.config, self.areas))
    }
}

/// A device of VFIO.
pub struct VfioHardware {
    /// Until it is stopped: a container is closed by force only when its device is open nowhere.
    device: Option<Arc<Device>>,
    space: Region,
    bars: [Option<Region>; BARS],
    lines: Vec<OwnedFd>,
    on: Vectors,
    memory: bool,
    notices: [(IrqIndex, HostEvent, OwnedFd); 2],
}

impl VfioHardware {
    fn new(
        device: Arc<Device>,
        bars: [Option<Region>; BARS],
        lines: Vec<OwnedFd>,
    ) -> Result<Self, OpenError> {
        let space = device.region(CONFIG_REGION)?;
        let eventfd =
            || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(io::Error::from);
        let notices = [
            (IrqIndex::Err, HostEvent::Error, eventfd()?),
            (IrqIndex::Req, HostEvent::Request, eventfd()?),
        ];
        for (index, _, fd) in &notices {
            if device.irq(*index).is_ok_and(|irq| irq.count > 0) {
                device.set_irqs(*index, &[Some(fd.as_fd())])?;
            }
        }
        let mut new = Self {
            device: Some(device),
            space,
            bars,
            lines,
            on: Vectors::Off,
            memory: true,
            notices,
        };
        new.set_command(false, false);
        Ok(new)
    }

    fn bar(&self, bar: u8) -> Option<(&Device, &Region)> {
        let region = self.bars.get(usize::from(bar))?.as_ref()?;
        Some((self.device.as_deref()?, region))
    }

    fn write_command(&self, memory: bool, bus_master: bool) {
        let bit = |is_on, bit| if is_on { bit } else { 0 };
        let command =
            bit(memory, COMMAND_MEMORY) | bit(bus_master, COMMAND_MASTER) | COMMAND_PIN_OFF;
        let Some(device) = &self.device else {
            return;
        };
        if let Err(error) = device.write(&self.space, COMMAND, &command.to_le_bytes()) {
            tracing::error!(%error, "the command register is not written");
        }
    }

    fn turn_off(&mut self) {
        let index = match std::mem::replace(&mut self.on, Vectors::Off) {
            Vectors::Off => return,
            Vectors::Msi(_) => IrqIndex::Msi,
            Vectors::Msix(_) => IrqIndex::Msix,
        };
        let Some(device) = &self.device else {
            return;
        };
        if let Err(error) = device.set_irqs(index, &[]) {
            tracing::warn!(%error, "the device's interrupts stay on");
        }
    }
}

impl Hardware for VfioHardware {
    fn read_config(&self, at: u16) -> u16 {
        let mut bytes = [0xff; 2];
        let device = self.device.as_ref();
        match device.map(|device| device.read(&self.space, at.into(), &mut bytes)) {
            Some(Ok(())) => u16::from_le_bytes(bytes),
            Some(Err(_)) | None => u16::MAX,
        }
    }

    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        let read = self
            .bar(bar)
            .map(|(device, region)| device.read(region, offset, data));
        if !matches!(read, Some(Ok(()))) {
            // As from a device that does not answer.
            data.fill(0xff);
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if let Some((device, region)) = self.bar(bar) {
            // A write that the device does not accept is lost on hardware, too.
            let _ = device.write(region, offset, data);
        }
    }

    fn set_command(&mut self, memory: bool, bus_master: bool) {
        self.memory = memory;
        self.write_command(memory, bus_master);
    }

    fn set_vectors(&mut self, vectors: Vectors) -> io::Result<()> {
        self.turn_off();
        let (index, count) = match vectors {
            Vectors::Off => return Ok(()),
            Vectors::Msi(count) => (IrqIndex::Msi, count),
            Vectors::Msix(count) => (IrqIndex::Msix, count),
        };
        let fds: Vec<_> = self
            .lines
            .iter()
            .take(count.into())
            .map(|fd| Some(fd.as_fd()))
            .collect();
        let Some(device) = &self.device else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        device.set_irqs(index, &fds).map_err(io::Error::other)?;
        self.on = vectors;
        Ok(())
    }

    fn stop(&mut self) {
        self.write_command(self.memory, false);
        self.turn_off();
        self.device = None;
    }

    fn wake_fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.notices
            .iter()
            .for_each(|(_, _, fd)| add(fd.as_raw_fd()));
    }

    fn notice(&mut self) -> Option<HostEvent> {
        // If nothing is there, the read fails.
        let has_said = |fd: &OwnedFd| rustix::io::read(fd, &mut [0; 8]).is_ok();
        let said = self.notices.iter().find(|(_, _, fd)| has_said(fd));
        said.map(|(_, notice, _)| *notice)
    }
}

impl Drop for VfioHardware {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Handle of a device for the thread of its container: resets the device and keeps it open, beside
/// its [`Hardware`].
pub struct Held {
    reset: Box<dyn FnMut() -> Result<(), String> + Send>,
    hide: Box<dyn FnOnce() + Send>,
}

impl Held {
    /// Creates the handle from `reset`, which resets the device and keeps it open, and `hide`,
    /// which ends all mappings of its BARs, each of which keeps it open as well.
    pub fn new(
        reset: impl FnMut() -> Result<(), String> + Send + 'static,
        hide: impl FnOnce() + Send + 'static,
    ) -> Self {
        Self {
            reset: Box::new(reset),
            hide: Box::new(hide),
        }
    }
}

/// A container, for the thread that makes its calls.
pub struct VfioTable<K: Kernel> {
    map: Option<ExternalMap<K>>,
    device: Option<Held>,
    group: Option<Group>,
}

impl<K: Kernel> VfioTable<K> {
    /// Over this container, with its device.
    pub fn new(kernel: K, device: Held, group: Option<Group>) -> Self {
        Self {
            map: Some(ExternalMap::over(kernel)),
            device: Some(device),
            group,
        }
    }
}

fn closed() -> Refusal {
    Refusal {
        is_full: false,
        text: "the container is closed".into(),
    }
}

impl<K: Kernel + 'static> Table for VfioTable<K> {
    fn map(&mut self, range: IovaRange, memory: Pinned, access: Access) -> Result<(), Refusal> {
        let map = self.map.as_ref().ok_or_else(closed)?;
        let mapped = map.map(range, Arc::new(memory), 0, access);
        mapped.map_err(|error| Refusal {
            is_full: matches!(&error, ExternalMapError::Call(refused) if refused.is_full()),
            text: error.to_string(),
        })
    }

    fn unmap(&mut self, range: IovaRange, pages: u64) -> Result<(), Refusal> {
        let map = self.map.as_ref().ok_or_else(closed)?;
        let refusal = |text| Refusal {
            is_full: false,
            text,
        };
        match map.unmap(range) {
            Ok(bytes) if bytes == pages * PAGE_SIZE => Ok(()),
            Ok(bytes) => Err(refusal(format!(
                "{bytes:#x} bytes of {range} were unmapped instead of {pages} pages"
            ))),
            Err(error) => Err(refusal(error.to_string())),
        }
    }

    fn reset(&mut self) -> Result<(), Refusal> {
        let device = self.device.as_mut().ok_or_else(closed)?;
        (device.reset)().map_err(|text| Refusal {
            is_full: false,
            text,
        })
    }

    fn close(&mut self) -> Result<(), Refusal> {
        // If the mappings cannot be ended, the groups have to be taken off the container, for which
        // no device may be open: its hardware has been stopped, this was the last.
        if let Some(Held { reset, hide }) = self.device.take() {
            hide();
            drop(reset);
        }
        let closed = self.map.take().map_or(Ok(()), ExternalMap::close);
        self.group = None;
        closed.map_err(|error| Refusal {
            is_full: false,
            text: error.to_string(),
        })
    }
}
