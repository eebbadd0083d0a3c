//! Interface of the network behind a device, which takes and delivers frames: a TAP interface, a
//! switch, a peer.
//!
//! ```text
//! device's visit                                     port
//!   transmit queue: send_room ◀───────────────────── how many frames it takes now
//!     chains ─▶ TxFrame × n ───── send ────────────▶ all of them are its business
//!     tokens ◀──────────────────── collect ───────── of those it kept, how many it has done with
//!   receive queue:  has_frames ◀──────────────────── one load
//!     FrameReceiver ───────────── receive ─────────▶ deliver(RxFrame × n), as often as it likes
//! ```
//! **Bursts.** Frames come and go up to [`BURST`] at a time, so that a call through a table, a lock
//! or a system call is one for all of them, and copies overlap.
//!
//! **One copy.** A frame of the guest is shown where it lies ([`TxFrame::data`], translated), and
//! one for the guest is copied from where the port has it ([`FrameData`]), which may be another
//! guest's memory. A port that [keeps](PortCapabilities::keeps_frames) frames may look at them
//! until it says by [`collect`](NetPort::collect) that it has done with them; then the device holds
//! leases on them. The guest may change a frame while it is read: copy the bytes that decisions
//! depend on.
//!
//! **Headers.** The 12-byte header goes beside the frame. A device has checked it as far as
//! [`NetHeader::check`] goes, against what its driver may leave over; whether it fits the frame's
//! own headers, the port checks. A port hands over nothing that the receiver has not taken on
//! ([`start`](NetPort::start), [`set_receiver`](NetPort::set_receiver)): it completes the checksum,
//! or segments, before.
//!
//! All calls come from the device's thread, and none waits.

use std::os::fd::RawFd;

use guest_mem::{KeepAlive, VolatileSlice};
use net_offload::{NetHeader, Offloads};

/// Frames of one call at most.
pub const BURST: usize = 32;

/// Largest frame, with its Ethernet header, of a port that segments or takes segments to be made:
/// 64 KiB of IP packet, and 14 bytes and a VLAN tag before it.
pub const MAX_FRAME: u32 = net_offload::MAX_FRAME as u32;

/// Largest frame of a network whose MTU is 1,500: 14 bytes of Ethernet header, a VLAN tag, 1,500
/// bytes.
pub const PLAIN_FRAME: usize = 1518;

/// Capabilities of a port; fixed when its device is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortCapabilities {
    /// Work that it does for frames sent to it: their headers may leave that over.
    pub send: Offloads,
    /// Work that it leaves to a receiver that takes it on.
    pub receive: Offloads,
    /// Largest payload of a frame that leaves nothing over, without the Ethernet header: 68 to
    /// 65,535.
    pub mtu: u16,
    /// Queue pairs that it has a use for, at least 1.
    pub pairs: u16,
    /// It looks at frames sent to it after [`send`](NetPort::send) has returned.
    pub keeps_frames: bool,
    /// Frames of so many bytes at most it does not keep, even so: it has copied them when `send`
    /// returns, and says there which of them it has dropped. 0 where it keeps none, or all.
    pub copies_up_to: u32,
}

impl PortCapabilities {
    /// Nothing but frames of 1,500 bytes, one pair, and all that is sent copied at once.
    pub const PLAIN: Self = Self {
        send: Offloads::NONE,
        receive: Offloads::NONE,
        mtu: 1500,
        pairs: 1,
        keeps_frames: false,
        copies_up_to: 0,
    };

    /// Largest frame that may be sent to it, or come from it, where segments may be made by either.
    pub fn max_frame(&self, offloads: Offloads) -> u32 {
        let plain = u32::from(self.mtu) + 18;
        match offloads.and(Offloads::SEGMENTING) == Offloads::NONE {
            true => plain,
            false => plain.max(MAX_FRAME),
        }
    }
}

/// A frame that the guest sends: the network's bytes, without the header.
#[derive(Clone, Copy, Debug)]
pub struct TxFrame<'a> {
    /// Work that is left to the port, within its [`PortCapabilities::send`].
    pub header: NetHeader,
    /// Length in bytes, 14 at least.
    pub len: u32,
    /// The bytes in guest memory, in order: `len` of them.
    pub data: &'a [VolatileSlice<'a>],
}

impl TxFrame<'_> {
    /// Copies bytes from `offset` on. Returns their number.
    #[inline]
    pub fn read(&self, offset: u32, buf: &mut [u8]) -> usize {
        read_slices(self.data, offset, buf)
    }
}

/// A frame for the guest.
#[derive(Clone, Copy, Debug)]
pub struct RxFrame<'a> {
    /// Work that is left to the receiver, within the offloads that it has taken on.
    pub header: NetHeader,
    /// Its bytes.
    pub data: FrameData<'a>,
}

/// The bytes of a frame, where they lie.
#[derive(Clone, Copy, Debug)]
pub enum FrameData<'a> {
    /// In memory of this process.
    Bytes(&'a [u8]),
    /// In a guest's.
    Guest(&'a [VolatileSlice<'a>]),
}

impl FrameData<'_> {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Guest(slices) => slices.iter().map(|slice| slice.len() as usize).sum(),
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes from `offset` on. Returns their number.
    pub fn read(&self, offset: u32, buf: &mut [u8]) -> usize {
        match self {
            Self::Guest(slices) => read_slices(slices, offset, buf),
            Self::Bytes(bytes) => {
                let rest = bytes.get(offset as usize..).unwrap_or_default();
                let len = rest.len().min(buf.len());
                buf[..len].copy_from_slice(&rest[..len]);
                len
            }
        }
    }
}

#[inline]
fn read_slices(slices: &[VolatileSlice<'_>], offset: u32, buf: &mut [u8]) -> usize {
    // As a small frame is, and is read.
    if let ([only], 0) = (slices, offset) {
        let len = buf.len().min(only.len() as usize);
        only.read(0, &mut buf[..len]);
        return len;
    }
    read_pieces(slices, offset, buf)
}

fn read_pieces(slices: &[VolatileSlice<'_>], offset: u32, buf: &mut [u8]) -> usize {
    let (mut skip, mut done) = (offset, 0);
    for slice in slices {
        if skip >= slice.len() {
            skip -= slice.len();
            continue;
        }
        let len = ((slice.len() - skip) as usize).min(buf.len() - done);
        slice.read(skip, &mut buf[done..done + len]);
        done += len;
        skip = 0;
    }
    done
}

/// Receive buffers of one pair, lent to a port for one [`NetPort::receive`].
pub trait FrameReceiver {
    /// Returns the number of frames to offer next, at most [`BURST`]: no more are worth fetching.
    /// 0: the visit is over, or the driver has no buffer.
    fn room(&mut self) -> usize;

    /// Gives frames to the guest, and returns the number of those, from the first on, that are
    /// over: copied, or dropped because the driver does not want them or they fit into no buffers
    /// it could offer. The others stay the port's, to be offered again.
    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize;
}

/// Frames that were kept and are done with since the last call, in the order in which they were
/// sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Frames done with, those dropped included.
    pub frames: usize,
    /// Of those, dropped.
    pub dropped: usize,
}

/// Descriptors that a port is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Readable while there are frames to receive.
    pub receive: bool,
    /// Readable, by whatever means, once there is room to send.
    pub send: bool,
}

/// Network behind one device, to which its frames go and from which they come.
pub trait NetPort: Send {
    /// Returns its capabilities; always the same.
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::PLAIN
    }

    /// A driver begins, with one pair in use, and takes `receiver` on for frames that it receives,
    /// which is part of the [capabilities](PortCapabilities::receive).
    fn start(&mut self, _receiver: Offloads) {}

    /// The driver takes that on from now on.
    fn set_receiver(&mut self, _receiver: Offloads) {}

    /// The driver uses so many pairs from now on, no more than there are.
    fn set_pairs(&mut self, _pairs: u16) {}

    /// The driver is gone: frames for it are stale, and nothing is kept any more.
    fn reset(&mut self);

    /// Whether the link is up. Asked once a visit: a load.
    fn is_up(&self) -> bool {
        true
    }

    /// Returns the number of frames that [`send`](Self::send) takes now, at most [`BURST`] of which
    /// will be sent. 0: the driver's frames stay where they are until a descriptor of
    /// [`wake_fds`](Self::wake_fds) or a further call reports room.
    fn send_room(&mut self, _pair: u16) -> usize {
        BURST
    }

    /// Sends frames of `pair`, no more than there was [room](Self::send_room) for, and returns the
    /// number of those that had to be dropped. `keep` keeps the frames' memory mapped: a port that
    /// keeps frames keeps it too.
    fn send(&mut self, pair: u16, frames: &[TxFrame<'_>], keep: &KeepAlive) -> usize;

    /// Takes the counts of frames of `pair` that were kept and are done with.
    fn collect(&mut self, _pair: u16) -> Collected {
        Collected::default()
    }

    /// Whether frames of `pair` are kept, or are done with and not collected by
    /// [`collect`](Self::collect) yet. The device is then checked again soon: a port keeps frames
    /// for microseconds.
    fn has_kept(&self, _pair: u16) -> bool {
        false
    }

    /// Releases all frames of `pair` that are kept: the next [`collect`](Self::collect) returns all
    /// of them.
    fn cancel(&mut self, _pair: u16) {}

    /// Whether [`receive`](Self::receive) would offer a frame. Asked whenever the device is looked
    /// at: a load, never a system call.
    fn has_frames(&mut self, pair: u16) -> bool;

    /// Whether there may be frames, or room to send, that nothing in the guest's rings shows: each
    /// sweep of a core that is awake then checks the device, and not only when a ring has changed.
    /// Always the same.
    fn has_own_events(&self) -> bool {
        true
    }

    /// Offers frames for `pair` while there are some and there is [room](FrameReceiver::room).
    fn receive(&mut self, pair: u16, to: &mut dyn FrameReceiver);

    /// The device will sleep: [`has_frames`](Self::has_frames) is called once more after this, and
    /// from then on the descriptors of [`wake_fds`](Self::wake_fds) announce frames.
    fn arm(&mut self) {}

    /// The device is visited again.
    fn disarm(&mut self) {}

    /// Appends descriptors that are readable while the conditions that the device waits for on
    /// `pair` hold.
    fn wake_fds(&self, _pair: u16, _waits: Waits, _fds: &mut Vec<RawFd>) {}

    /// Another thread will visit the device from now on.
    fn rebind(&mut self) {}
}
