//! One network device of the kernel's vhost-net.
#![expect(
    unsafe_code,
    reason = "the kernel is given addresses of guest memory, which are computed here"
)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use guest_mem::{Gpa, GuestRam, Iova};
use net_offload::Offloads;
use net_ports::TapQueues;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_import::{ImportError, KernelBackEnd, KernelRing};
use vhost_user::wire::{IotlbAccess, IotlbRange};
use vio::feature;

use crate::sys;
use crate::uapi::{
    BACKEND_IOTLB_MSG_V2, GET_BACKEND_FEATURES, GET_FEATURES, GET_VRING_BASE, INVALIDATE,
    IOTLB_MSG_V2, IotlbMsg, MAX_REGIONS, MISS, MemoryRegion, MemoryTable, NET_SET_BACKEND,
    RingAddr, RingFile, RingState, SET_BACKEND_FEATURES, SET_FEATURES, SET_VRING_BASE,
    SET_VRING_CALL, SET_VRING_ERR, SET_VRING_KICK, SET_VRING_NUM, UPDATE,
};

const DEVICE: &str = "/dev/vhost-net";
/// VIRTIO_NET_F_MRG_RXBUF: the only feature of the network header that vhost itself implements. The
/// others are the TAP interface's.
const MRG_RXBUF: u64 = 1 << 15;
/// Ring features that are passed on if vhost offers them.
const RING: u64 = feature::VERSION_1
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::IN_ORDER
    | feature::ACCESS_PLATFORM;
/// Number of queues: one receives frames, one sends them.
const QUEUES: u16 = 2;

/// Reason why the kernel's vhost-net cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VhostNetError {
    /// The device file does not exist, or may not be opened.
    #[error("{DEVICE} cannot be opened")]
    Open(#[source] io::Error),
    /// A call was refused that the device needs.
    #[error("the kernel's vhost refuses {what}")]
    Refused {
        /// Call that was refused.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel lacks a feature that the device needs.
    #[error("the kernel's vhost-net does not offer {what}")]
    NotOffered {
        /// Missing feature.
        what: &'static str,
    },
    /// The interface was opened with several queues.
    #[error("the kernel's vhost-net serves one queue of an interface here, not {0}")]
    Queues(usize),
    /// Guest memory has more regions than this crate's table.
    #[error("guest memory has {0} regions, and the kernel's vhost is told of {MAX_REGIONS}")]
    Regions(usize),
}

/// A device of vhost-net: see the crate's head. Fields are dropped in this order: the kernel stops
/// to use guest memory before that is unmapped.
#[derive(Debug)]
pub struct VhostNet {
    file: File,
    tap: TapQueues,
    ram: GuestRam,
    /// Features that vhost offers.
    theirs: u64,
    /// Features of the network header that the interface offers.
    frames: u64,
    has_iommu: bool,
}

impl VhostNet {
    /// Opens a device for `tap`, which has one queue, with guest memory `ram`. The kernel starts a
    /// thread for it.
    ///
    /// # Errors
    /// See [`VhostNetError`].
    pub fn open(tap: TapQueues, ram: GuestRam, has_iommu: bool) -> Result<Self, VhostNetError> {
        if tap.queues() != 1 {
            return Err(VhostNetError::Queues(tap.queues()));
        }
        let table = memory_table(&ram)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(DEVICE)
            .map_err(VhostNetError::Open)?;
        let refused = |what| move |source| VhostNetError::Refused { what, source };
        sys::set_owner(&file).map_err(refused("to be owned (VHOST_SET_OWNER)"))?;
        let theirs = sys::get(&file, &GET_FEATURES, 0).map_err(refused("to say its features"))?;
        if has_iommu {
            let backend = sys::get(&file, &GET_BACKEND_FEATURES, 0).map_err(refused(
                "to say the messages of its IOTLB (a kernel from 4.20 on does)",
            ))?;
            if backend & BACKEND_IOTLB_MSG_V2 == 0 {
                let what = "messages of an IOTLB (VHOST_BACKEND_F_IOTLB_MSG_V2)";
                return Err(VhostNetError::NotOffered { what });
            }
            sys::set(&file, &SET_BACKEND_FEATURES, &BACKEND_IOTLB_MSG_V2)
                .map_err(refused("the messages of its IOTLB"))?;
        }
        // SAFETY: the table describes regions of `ram`, which stays mapped as long as one clone of
        // it exists; `Self` has a clone that is dropped after the descriptor. No code has
        // references into guest memory.
        unsafe { sys::set_memory(&file, &table) }
            .map_err(refused("guest memory (VHOST_SET_MEM_TABLE)"))?;
        let frames = offloads(tap.has_uso());
        Ok(Self {
            file,
            ram,
            theirs,
            frames: frames.device_features() | frames.guest_features(),
            tap,
            has_iommu,
        })
    }

    /// Returns the interface's MTU in bytes, without the Ethernet header.
    pub fn mtu(&self) -> u16 {
        self.tap.mtu()
    }

    /// Returns the address of guest memory in this process, if `len` bytes from `gpa` on are in one
    /// region.
    fn user_addr(&self, gpa: Gpa, len: u64) -> Option<u64> {
        self.ram.regions().iter().find_map(|region| {
            let inside = gpa.raw().checked_sub(region.gpa.raw())?;
            let room = region.len.checked_sub(inside)?;
            (len <= room).then(|| region.hva.raw() + inside)
        })
    }

    /// Returns the address of a part of a ring as the kernel expects it: the IOVA if there is an
    /// IOMMU, else the address in this process.
    fn ring_addr(&self, at: Iova, len: u64) -> Result<u64, ImportError> {
        if self.has_iommu {
            return Ok(at.raw());
        }
        let found = self.user_addr(Gpa::new(at.raw()), len);
        found.ok_or(ImportError::Rings)
    }

    fn tell(&mut self, message: &IotlbMsg) -> io::Result<()> {
        // SAFETY: only `update` makes an update with an access. Its addresses are those of a region
        // of `ram`, which is dropped after the descriptor.
        unsafe { sys::tell_iotlb(&self.file, message) }
    }

    fn set_backend(&self, index: u16, fd: i32) -> io::Result<()> {
        let index = u32::from(index);
        sys::set(&self.file, &NET_SET_BACKEND, &RingFile { index, fd })
    }
}

/// Returns the offloads that a TAP interface supports.
fn offloads(has_uso: bool) -> Offloads {
    match has_uso {
        true => Offloads::ALL,
        false => Offloads::CSUM
            .with(Offloads::TSO4)
            .with(Offloads::TSO6)
            .with(Offloads::ECN),
    }
}

fn memory_table(ram: &GuestRam) -> Result<MemoryTable, VhostNetError> {
    let regions = ram.regions();
    let mut table = MemoryTable {
        regions: regions.len() as u32,
        ..MemoryTable::default()
    };
    if regions.len() > MAX_REGIONS {
        return Err(VhostNetError::Regions(regions.len()));
    }
    for (told, region) in table.region.iter_mut().zip(regions) {
        *told = MemoryRegion {
            gpa: region.gpa.raw(),
            len: region.len,
            user_addr: region.hva.raw(),
            flags: 0,
        };
    }
    Ok(table)
}

fn refused(what: &'static str) -> impl FnOnce(io::Error) -> ImportError {
    move |source| ImportError::Kernel { what, source }
}

/// Returns an IOTLB message for a range.
fn message(what: u8, range: IotlbRange, user_addr: u64, access: IotlbAccess) -> IotlbMsg {
    IotlbMsg {
        kind: IOTLB_MSG_V2,
        iova: range.first,
        // Ranges are below 2^63, so the sum does not wrap.
        size: (range.last - range.first).saturating_add(1),
        user_addr,
        perm: match access {
            IotlbAccess::None => 0,
            IotlbAccess::Read => 1,
            IotlbAccess::Write => 2,
            IotlbAccess::ReadWrite => 3,
        },
        what,
        ..IotlbMsg::default()
    }
}

impl KernelBackEnd for VhostNet {
    fn features(&self) -> u64 {
        self.theirs & (RING | MRG_RXBUF) | self.frames
    }

    fn set_features(&mut self, features: u64) -> Result<(), ImportError> {
        let offloads = Offloads::of_guest_features(features);
        self.tap
            .set_offloads(offloads)
            .map_err(refused("the offloads of its interface (TUNSETOFFLOAD)"))?;
        let theirs = features & self.theirs;
        sys::set(&self.file, &SET_FEATURES, &theirs)
            .map_err(refused("features (VHOST_SET_FEATURES)"))
    }

    fn start_ring(&mut self, ring: &KernelRing<'_>) -> Result<(), ImportError> {
        if ring.index >= QUEUES {
            return Err(ImportError::Rings);
        }
        let (index, size) = (u32::from(ring.index), u64::from(ring.size));
        let state = |num| RingState { index, num };
        let file = |fd: BorrowedFd<'_>| RingFile {
            index,
            fd: fd.as_raw_fd(),
        };
        // Sizes by Virtio 1.2 §2.7, with the event words of VIRTIO_F_EVENT_IDX.
        let addr = RingAddr {
            index,
            desc: self.ring_addr(ring.desc, 16 * size)?,
            avail: self.ring_addr(ring.avail, 6 + 2 * size)?,
            used: self.ring_addr(ring.used, 6 + 8 * size)?,
            ..RingAddr::default()
        };
        sys::set(&self.file, &SET_VRING_NUM, &state(ring.size.into()))
            .map_err(refused("a ring's size (VHOST_SET_VRING_NUM)"))?;
        sys::set(&self.file, &SET_VRING_BASE, &state(ring.base.into()))
            .map_err(refused("a ring's index (VHOST_SET_VRING_BASE)"))?;
        // SAFETY: the addresses are IOVAs, or parts of `ram` by `ring_addr`, which is unmapped
        // after the descriptor is closed.
        unsafe { sys::set_ring_addr(&self.file, &addr) }
            .map_err(refused("a ring's addresses (VHOST_SET_VRING_ADDR)"))?;
        sys::set(&self.file, &SET_VRING_ERR, &file(ring.err))
            .map_err(refused("an eventfd (VHOST_SET_VRING_ERR)"))?;
        sys::set(&self.file, &SET_VRING_CALL, &file(ring.call))
            .map_err(refused("an eventfd (VHOST_SET_VRING_CALL)"))?;
        sys::set(&self.file, &SET_VRING_KICK, &file(ring.kick))
            .map_err(refused("an eventfd (VHOST_SET_VRING_KICK)"))?;
        let tap = self.tap.queue().as_raw_fd();
        self.set_backend(ring.index, tap)
            .map_err(refused("to serve a ring (VHOST_NET_SET_BACKEND)"))
    }

    fn stop_ring(&mut self, index: u16) -> Result<u16, ImportError> {
        self.set_backend(index, -1)
            .map_err(refused("to stop a ring (VHOST_NET_SET_BACKEND)"))?;
        let state = RingState {
            index: index.into(),
            num: 0,
        };
        let state = sys::get(&self.file, &GET_VRING_BASE, state)
            .map_err(refused("to say where a ring stands (VHOST_GET_VRING_BASE)"))?;
        // The index of a split ring: the kernel has no packed rings.
        Ok(state.num as u16)
    }

    fn update(
        &mut self,
        range: IotlbRange,
        gpa: Gpa,
        access: IotlbAccess,
    ) -> Result<(), ImportError> {
        let len = (range.last - range.first).saturating_add(1);
        let user_addr = self.user_addr(gpa, len).ok_or(ImportError::Rings)?;
        self.tell(&message(UPDATE, range, user_addr, access))
            .map_err(refused("an entry of its IOTLB"))
    }

    fn invalidate(&mut self, range: IotlbRange) -> Result<(), ImportError> {
        self.tell(&message(INVALIDATE, range, 0, IotlbAccess::None))
            .map_err(refused("to forget entries of its IOTLB"))
    }

    /// Refuses the address: an entry without access ends the kernel's requests for it, and is then
    /// removed.
    fn refuse(&mut self, iova: u64) -> Result<(), ImportError> {
        let range = IotlbRange {
            first: iova,
            last: iova,
        };
        self.tell(&message(UPDATE, range, 0, IotlbAccess::None))
            .map_err(refused("an entry of its IOTLB that allows nothing"))?;
        self.invalidate(range)
    }

    fn take_miss(&mut self) -> Result<Option<(u64, IotlbAccess)>, ImportError> {
        let asked = sys::ask_iotlb(&self.file).map_err(refused("to say what it has missed"))?;
        let access = |perm| match perm {
            1 => Some(IotlbAccess::Read),
            2 => Some(IotlbAccess::Write),
            3 => Some(IotlbAccess::ReadWrite),
            _ => None,
        };
        match asked {
            None => Ok(None),
            Some(IotlbMsg {
                kind: IOTLB_MSG_V2,
                what: MISS,
                iova,
                perm,
                ..
            }) if access(perm).is_some() => Ok(access(perm).map(|access| (iova, access))),
            Some(other) => {
                let other = io::Error::other(format!("{other:x?}"));
                Err(refused("to ask of its IOTLB what it may ask")(other))
            }
        }
    }

    fn requests(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(self.tap.queue(), PollFlags::empty())];
        let looked = poll(&mut fds, Some(&Timespec::default()));
        looked.is_ok() && fds[0].revents().contains(PollFlags::ERR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_headers_layout() {
        let range = IotlbRange {
            first: 0x1000,
            last: 0x2fff,
        };
        let message = message(UPDATE, range, 0x7f00_0000_0000, IotlbAccess::Write);
        let expected = IotlbMsg {
            kind: 2,
            iova: 0x1000,
            size: 0x2000,
            user_addr: 0x7f00_0000_0000,
            perm: 2,
            what: 2,
            ..IotlbMsg::default()
        };
        assert_eq!(message, expected);
    }

    #[test]
    fn the_kernel_is_told_where_this_process_has_memory() {
        let (low, high) = (0x10_0000, 1 << 32);
        let ram = GuestRam::new(&[(Gpa::new(0), low), (Gpa::new(high), low)]).unwrap();
        let table = memory_table(&ram).unwrap();
        let told = table.region.map(|region| (region.gpa, region.len));
        assert_eq!(table.regions, 2);
        assert_eq!(told[..3], [(0, low), (high, low), (0, 0)]);
        let mapped = ram.regions()[1].hva.raw();
        assert_eq!(table.region[1].user_addr, mapped);
    }
}
