//! A user-space driver's skeleton: `cargo run -p dma-map --example user_driver`.
//!
//! The IOMMU belongs to the kernel: each map and unmap is a system call (`VFIO_IOMMU_MAP_DMA`, or iommufd's
//! `IOMMU_IOAS_MAP`). What such a driver takes from this crate is the bookkeeping: which IOVAs there are (the ranges
//! that the kernel reports, reserved windows left out), who has which, and above all **reuse**: a buffer that comes
//! round again costs no system call, under a stated bound on how long an idle buffer stays within the device's reach.
//!
//! 1. The kernel's answer to "which IOVAs?" becomes an [`Aperture`] ([`from_iommufd`], [`from_vfio`]).
//! 2. An [`IoMap`] that is the kernel: map and unmap are ioctls ([`IoctlTable`]). The kernel invalidates when it
//!    unmaps, so the invalidator is [`NullInvalidator`]. Here the kernel is a fake one that counts, and checks.
//! 3. A ring for descriptors, mapped once for long ([`MapperCore::map_coherent`]), and packets through it, with
//!    `STRICT` and with `optimistic`: the same driver, another value.
//!
//! Left out: opening the device, interrupts, and a real descriptor format.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use address::{Iova, PAGE_SHIFT, PhysAddr};
use dma_map::invalidate::NullInvalidator;
use dma_map::table::{MapError, Translation, UnmapError};
use dma_map::{
    DeviceLimits, Direction, DmaMapError, DmaMapper, Domain, IoMap, MapperCore, Mapping, Policy,
    Segment, TickClock,
};
use iova::{
    Access, Aperture, ApertureError, CoreId, IovaAllocator, IovaPfn, IovaRange, TreeAllocator,
};

/// One element of the list that `IOMMU_IOAS_IOVA_RANGES` fills (`struct iommu_iova_range`): first and last byte, inclusive.
#[derive(Clone, Copy)]
struct IommufdRange {
    start: u64,
    last: u64,
}

/// What is allowed becomes an aperture: from the first allowed page to the last, the gaps reserved.
///
/// Both interfaces report allowed ranges, so whatever lies between two of them is reserved (on x86 the
/// interrupt window). Pages that are allowed only in part are not used; nor is page 0, which devices
/// take for "none".
fn from_iommufd(ranges: &[IommufdRange]) -> Result<Aperture, ApertureError> {
    let mut pages: Vec<(u64, u64)> = ranges
        .iter()
        .filter_map(|range| {
            let first = range.start.div_ceil(1 << PAGE_SHIFT).max(1);
            // One past the last whole page; the last byte of the space ends one.
            let end = match range.last.checked_add(1) {
                Some(end) => end >> PAGE_SHIFT,
                None => IovaPfn::MAX.raw() + 1,
            };
            (first < end).then(|| (first, end - 1))
        })
        .collect();
    pages.sort_unstable();
    let empty = (IovaPfn::new(1), IovaPfn::new(0));
    let (first, last) = match (pages.first(), pages.iter().map(|(_, last)| *last).max()) {
        (Some((first, _)), Some(last)) => (IovaPfn::new(*first), IovaPfn::new(last)),
        _ => empty,
    };
    let mut reserved = Vec::new();
    let mut next = first.raw();
    for (start, last) in pages {
        if start > next {
            reserved.extend(IovaRange::new(IovaPfn::new(next), start - next));
        }
        next = next.max(last + 1);
    }
    Aperture::new(first, last, &reserved)
}

/// The same from VFIO: the capability `VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE` (id 1, version 1) in the chain
/// behind `struct vfio_iommu_type1_info`: a header (u16 id, u16 version, u32 offset of the next capability from
/// the start of the buffer), then u32 `nr_iovas`, u32 reserved, then pairs of u64 (start, end), inclusive.
///
/// `info` is what the ioctl wrote. `None`: it has no such capability, or is malformed: offsets that lead
/// outside, or in circles, end the walk.
fn from_vfio(info: &[u8]) -> Option<Result<Aperture, ApertureError>> {
    const CAP_OFFSET: usize = 16;
    const CAP_IOVA_RANGE: u32 = 1;
    let u32_at = |at: usize| {
        let bytes = info.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let u64_at = |at: usize| {
        let bytes = info.get(at..at.checked_add(8)?)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let mut at = u32_at(CAP_OFFSET)? as usize;
    // Each header takes 8 bytes: more hops than that are a circle.
    for _ in 0..info.len() / 8 {
        if at == 0 {
            return None;
        }
        let header = u32_at(at)?;
        if header & 0xffff == CAP_IOVA_RANGE {
            let count = u32_at(at + 8)? as usize;
            let ranges: Option<Vec<_>> = (0..count)
                .map_while(|i| Some(at + 16 + i.checked_mul(16)?))
                .map(|at| {
                    let (start, last) = (u64_at(at)?, u64_at(at + 8)?);
                    Some(IommufdRange { start, last })
                })
                .collect();
            return Some(from_iommufd(&ranges?));
        }
        at = u32_at(at + 4)? as usize;
    }
    None
}

/// What an ioctl sets `errno` to.
#[derive(Debug, thiserror::Error)]
#[error("errno {0}")]
struct Errno(i32);

impl Errno {
    const EEXIST: Self = Self(17);
    const EINVAL: Self = Self(22);
}

/// The kernel, faked: it keeps mappings as VFIO does, refuses what VFIO refuses, and counts.
#[derive(Default)]
struct Kernel {
    mappings: Mutex<BTreeMap<u64, (u64, u64, Access)>>,
    ioctls: Mutex<(u64, u64)>,
}

impl Kernel {
    /// `VFIO_IOMMU_MAP_DMA`: iova, size, vaddr, flags.
    fn map_dma(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), Errno> {
        self.ioctls.lock().expect("no panics").0 += 1;
        let mut mappings = self.mappings.lock().expect("no panics");
        let (first, last) = (range.first().raw(), range.last().raw());
        if let Some((start, (pages, ..))) = mappings.range(..=last).next_back()
            && start + pages > first
        {
            return Err(Errno::EEXIST);
        }
        mappings.insert(first, (range.pages(), phys.raw(), access));
        Ok(())
    }

    /// `VFIO_IOMMU_UNMAP_DMA`, which also invalidates.
    fn unmap_dma(&self, range: IovaRange) -> Result<(), Errno> {
        self.ioctls.lock().expect("no panics").1 += 1;
        let mut mappings = self.mappings.lock().expect("no panics");
        match mappings.get(&range.first().raw()) {
            Some((pages, ..)) if *pages == range.pages() => {
                mappings.remove(&range.first().raw());
                Ok(())
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

/// The kernel as a table: what a mapper changes, it asks for by ioctl. The "physical" addresses are our own virtual
/// ones here; the kernel pins what is behind them.
struct IoctlTable(Arc<Kernel>);

impl IoMap for IoctlTable {
    type Error = Errno;

    fn map(&self, range: IovaRange, phys: PhysAddr, access: Access) -> Result<(), MapError<Errno>> {
        let done = self.0.map_dma(range, phys, access);
        done.map_err(MapError::Backend)
    }

    fn unmap(&self, range: IovaRange) -> Result<(), UnmapError<Errno>> {
        self.0.unmap_dma(range).map_err(UnmapError::Backend)
    }

    fn lookup(&self, iova: Iova) -> Option<Translation> {
        let mappings = self.0.mappings.lock().expect("no panics");
        let page = IovaPfn::of(iova).raw();
        let (start, (pages, phys, access)) = mappings.range(..=page).next_back()?;
        (page - start < *pages).then(|| Translation {
            phys: PhysAddr::new(phys + (iova.raw() - (start << PAGE_SHIFT))),
            access: *access,
            leaf_pages: 1,
        })
    }
}

/// What the device reads: where the buffer is.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Descriptor {
    iova: u64,
    len: u64,
}

const RING: usize = 64;
const BUFFERS: usize = 96;
const BUFFER_LEN: usize = 2048;
const PACKETS: usize = 10_000;

type Core<A, C> = MapperCore<A, IoctlTable, NullInvalidator, C>;

/// A driver with a transmit ring. It keeps each buffer's mapping until the device has sent it.
struct Driver<A: IovaAllocator, C: dma_map::Clock> {
    core: Core<A, C>,
    ring: Box<[Descriptor; RING]>,
    ring_mapping: Mapping,
    in_flight: Vec<Option<Mapping>>,
    buffers: Vec<u8>,
}

fn address_of<T>(memory: &[T]) -> PhysAddr {
    PhysAddr::new(memory.as_ptr().addr() as u64)
}

impl<A: IovaAllocator, C: dma_map::Clock> Driver<A, C> {
    fn new(mut core: Core<A, C>) -> Result<Self, DmaMapError<Errno>> {
        let ring = Box::new([Descriptor::default(); RING]);
        let memory = Segment::new(address_of(&ring[..]), size_of_val(&*ring) as u64);
        // The device reads descriptors and writes their status.
        let ring_mapping = core.map_coherent(&[memory], Direction::Bidirectional)?;
        Ok(Self {
            core,
            ring,
            ring_mapping,
            in_flight: (0..RING).map(|_| None).collect(),
            buffers: vec![0; BUFFERS * BUFFER_LEN],
        })
    }

    /// One packet: the slot's former occupant has been sent, its mapping ends.
    fn send(&mut self, packet: usize) -> Result<(), Box<dyn std::error::Error>> {
        let slot = packet % RING;
        if let Some(sent) = self.in_flight[slot].take() {
            self.core.unmap(sent)?;
        }
        let start = packet % BUFFERS * BUFFER_LEN;
        let buffer = &self.buffers[start..start + 1500];
        let memory = Segment::new(address_of(buffer), buffer.len() as u64);
        let mapping = self.core.map(&[memory], Direction::ToDevice)?;
        self.ring[slot] = Descriptor {
            iova: mapping.iova().raw(),
            len: mapping.len(),
        };
        self.in_flight[slot] = Some(mapping);
        Ok(())
    }

    /// The device is stopped: everything goes.
    fn stop(mut self) -> Result<(), Box<dyn std::error::Error>> {
        for mapping in self.in_flight.drain(..).flatten() {
            self.core.unmap(mapping)?;
        }
        self.core.unmap(self.ring_mapping)?;
        self.core.park()?;
        Ok(())
    }
}

fn drive(
    aperture: &Aperture,
    name: &str,
    policy: Policy,
) -> Result<(), Box<dyn std::error::Error>> {
    let kernel = Arc::new(Kernel::default());
    let start = Instant::now();
    let now = move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let domain = Domain {
        allocator: TreeAllocator::new(aperture.clone(), 1)?,
        table: IoctlTable(Arc::clone(&kernel)),
        invalidator: NullInvalidator,
        clock: TickClock::new(now),
    };
    let mapper = DmaMapper::new(domain, policy, DeviceLimits::of_bits(39))?;
    let mut driver = Driver::new(mapper.core(CoreId(0))?)?;
    let ring = driver.ring_mapping.iova();
    for packet in 0..PACKETS {
        driver.send(packet)?;
        if packet % 256 == 0 {
            // A driver has a timer, or an idle loop.
            mapper.tick(now())?;
        }
    }
    driver.stop()?;
    let (maps, unmaps) = *kernel.ioctls.lock().map_err(|_| "a panic")?;
    let left = kernel.mappings.lock().map_err(|_| "a panic")?.len();
    let risk = mapper.risk();
    println!(
        "{name:<16} ring at {ring:#x}; {PACKETS} packets: {maps} map and {unmaps} unmap ioctls; {left} mappings left; \
         most idle mappings {}, longest {} us",
        risk.stale_max,
        risk.windows.max_ns / 1000,
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What iommufd says on an ordinary PC: all of 39 bits but the interrupt window.
    let ranges = [
        IommufdRange {
            start: 0,
            last: 0xfedf_ffff,
        },
        IommufdRange {
            start: 0xfef0_0000,
            last: (1 << 39) - 1,
        },
    ];
    let aperture = from_iommufd(&ranges)?;
    // The same as VFIO says it: `struct vfio_iommu_type1_info`, then the capability.
    let mut info = vec![0_u8; 24];
    info[16..20].copy_from_slice(&24_u32.to_le_bytes());
    info.extend([1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    for range in ranges {
        info.extend(range.start.to_le_bytes());
        info.extend(range.last.to_le_bytes());
    }
    let same = from_vfio(&info).ok_or("no IOVA ranges")??;
    assert_eq!(aperture, same);
    for range in aperture.usable() {
        println!("usable {range}");
    }
    drive(&aperture, "strict", Policy::STRICT)?;
    drive(&aperture, "optimistic(256)", Policy::optimistic(256))?;
    Ok(())
}
