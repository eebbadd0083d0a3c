//! A TAP interface of the host (Linux `Documentation/networking/tuntap.rst`).
//!
//! Opened without packet information and, where we open it, with a 12-byte virtio-net header in front of each
//! frame, which stays zero: no offloads are negotiated, so the host's kernel checksums and segments itself.
//! Reading never blocks; what the guest has no buffer for waits in the interface's own bounded queue.
//!
//! UNSAFETY: `ioctl` with the requests of such a descriptor, which no safe wrapper has.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use guest_mem::KeepAlive;

use super::NetHeader;
use super::port::{FrameData, FrameReceiver, NetPort, PLAIN_FRAME, RxFrame, TxFrame, Waits};

/// Length of the header in front of each frame of an interface with IFF_VNET_HDR, ours and the longest we take.
const HEADER: usize = 12;

/// Why a TAP interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// Longer than the kernel takes, empty, or with a zero byte.
    #[error("{0:?} is no interface name (1 to 15 bytes)")]
    Name(String),
    /// `/dev/net/tun` cannot be opened: no such module, or no permission.
    #[error("cannot open /dev/net/tun")]
    Open(#[source] io::Error),
    /// The kernel refuses the interface: no permission (CAP_NET_ADMIN, or an interface made for this user), or busy.
    #[error("cannot attach to interface {name:?}")]
    Attach {
        /// The interface.
        name: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The descriptor is no TAP interface without packet information.
    #[error("the descriptor is no TAP interface without packet information")]
    Kind,
    /// The interface cannot be set up.
    #[error("cannot set up the TAP interface")]
    Setup(#[source] io::Error),
}

/// A TAP interface.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// Bytes in front of each frame: 0, 10 or 12.
    header: usize,
    /// A frame that was read and that the driver has not taken.
    held: Option<usize>,
    frame: Box<[u8; PLAIN_FRAME]>,
}

impl Tap {
    /// Attaches to interface `name`, which is made if it does not exist and we may.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(TapError::Open)?;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let mut request = empty_request();
        let bytes = name.as_bytes();
        if bytes.is_empty() || bytes.len() >= request.ifr_name.len() || bytes.contains(&0) {
            return Err(TapError::Name(name.to_owned()));
        }
        for (to, &from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: TUNSETIFF reads and writes an `ifreq`, which `request` is; the descriptor is ours.
        let attached = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) };
        if attached < 0 {
            let source = io::Error::last_os_error();
            return Err(TapError::Attach {
                name: name.to_owned(),
                source,
            });
        }
        Self::set_up(file, HEADER)
    }

    /// Takes an open TAP descriptor, made by somebody with the permission.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let file = File::from(fd);
        let mut request = empty_request();
        // SAFETY: TUNGETIFF writes an `ifreq`, which `request` is.
        if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &mut request) } < 0 {
            return Err(TapError::Kind);
        }
        // SAFETY: the kernel has filled in the flags, and any bytes are a valid integer.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        if flags & libc::IFF_TAP == 0 || flags & libc::IFF_NO_PI == 0 {
            return Err(TapError::Kind);
        }
        let set = fcntl_getfl(&file).and_then(|set| fcntl_setfl(&file, set | OFlags::NONBLOCK));
        set.map_err(|errno| TapError::Setup(errno.into()))?;
        let header = if flags & libc::IFF_VNET_HDR != 0 {
            HEADER
        } else {
            0
        };
        Self::set_up(file, header)
    }

    /// Header length, and no offloads.
    fn set_up(file: File, header: usize) -> Result<Self, TapError> {
        if header != 0 {
            let size = header as libc::c_int;
            // SAFETY: TUNSETVNETHDRSZ reads an int.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &size) };
            if done < 0 {
                return Err(TapError::Setup(io::Error::last_os_error()));
            }
            let none: libc::c_ulong = 0;
            // SAFETY: TUNSETOFFLOAD takes its argument by value.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, none) };
            if done < 0 {
                return Err(TapError::Setup(io::Error::last_os_error()));
            }
        }
        Ok(Self {
            file,
            header,
            held: None,
            frame: Box::new([0; PLAIN_FRAME]),
        })
    }
}

fn empty_request() -> libc::ifreq {
    // SAFETY: all zero bytes are a valid `ifreq`: an array of characters and a union of plain data.
    unsafe { std::mem::zeroed() }
}

impl Tap {
    /// Reads the next frame into `frame`, if there is one.
    fn read(&mut self) -> Option<usize> {
        // Each turn takes one frame out of the interface's queue; those too long are dropped.
        for _ in 0..4 {
            let mut header = [0u8; HEADER];
            let mut spill = [0u8; 1];
            let mut vectors = [
                IoSliceMut::new(&mut header[..self.header]),
                IoSliceMut::new(&mut self.frame[..]),
                IoSliceMut::new(&mut spill),
            ];
            let read = (&self.file).read_vectored(&mut vectors).ok()?;
            let len = read.checked_sub(self.header)?;
            if len <= PLAIN_FRAME {
                return Some(len);
            }
        }
        None
    }

    fn write(&self, frame: &[u8]) -> bool {
        let header = [0u8; HEADER];
        let vectors = [IoSlice::new(&header[..self.header]), IoSlice::new(frame)];
        (&self.file).write_vectored(&vectors).is_ok()
    }
}

impl NetPort for Tap {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut buf = [0; PLAIN_FRAME];
        let sent = frames.iter().filter(|frame| {
            let len = frame.read(0, &mut buf);
            self.write(&buf[..len])
        });
        frames.len() - sent.count()
    }

    /// A system call, until the interface is read ahead of need.
    fn has_frames(&mut self, pair: u16) -> bool {
        if pair != 0 {
            return false;
        }
        if self.held.is_some() {
            return true;
        }
        let mut polled = [PollFd::new(&self.file, PollFlags::IN)];
        let ready = poll(&mut polled, Some(&Timespec::default()));
        ready == Ok(1) && polled[0].revents().contains(PollFlags::IN)
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        while to.room() != 0 {
            let Some(len) = self.held.take().or_else(|| self.read()) else {
                return;
            };
            let frame = RxFrame {
                header: NetHeader::PLAIN,
                data: FrameData::Bytes(&self.frame[..len]),
            };
            if to.deliver(&[frame]) == 0 {
                self.held = Some(len);
                return;
            }
        }
    }

    fn wake_fds(&self, pair: u16, waits: Waits, fds: &mut Vec<RawFd>) {
        if pair == 0 && waits.receive {
            fds.push(self.file.as_raw_fd());
        }
    }

    fn reset(&mut self) {
        // What was meant for the driver before is stale for the next one; bounded by the queue's length.
        self.held = None;
        for _ in 0..1024 {
            if self.read().is_none() {
                break;
            }
        }
    }
}
