//! One queue of a TAP interface, and the buffers into which frames are read.
//!
//! A buffer belongs to the kernel from the submission of its read to the io_uring until the
//! completion has been reaped ([`Slot::is_kernels`]); meanwhile nothing here touches it, and if the
//! queue is dropped first, it is leaked.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{opcode, types};
use net_offload::{HEADER_LEN, MAX_FRAME, NetHeader, Offloads};
use vio::blk::UringShare;
use vio::net::{BURST, FrameData, FrameReceiver, RxFrame, TxFrame};

use super::{SLOTS, open};

/// Bytes of a buffer: the longest frame and its header, with some room.
const BUFFER: usize = HEADER_LEN + MAX_FRAME + 32;
/// Largest number of pieces of a frame that are written by one `writev` without a copy.
const PIECES: usize = 32;
/// Largest number of polls for the completions of cancelled reads, which must arrive.
const LOOKS: usize = 64;
/// Largest number of frames that are discarded from an interface's queue.
const DISCARDED: usize = 1_024;

/// Reason why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The virtio header does not match the frame.
    Header,
    /// The interface is down or full.
    Refused,
    /// The interface has been deleted.
    Gone,
}

#[derive(Debug)]
struct Slot {
    bytes: Box<[u8]>,
    is_kernels: bool,
}

#[derive(Debug)]
pub struct Queue {
    file: File,
    share: UringShare,
    /// The host refuses io_uring: frames are read by system calls.
    is_direct: bool,
    /// The kernel accepts RWF_NOWAIT for a TAP: Linux 6.4 and later.
    has_nowait: bool,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Number of reads that have not completed.
    open: usize,
    /// Indices of buffers that hold a frame, and the number of bytes in each.
    ready: VecDeque<(usize, usize)>,
    /// Number of reads that are posted with RWF_NOWAIT before the one that waits, and number of
    /// reads of the last batch that found a frame.
    ahead: usize,
    found: usize,
    answers: Vec<(u64, i32)>,
    is_gone: bool,
}

impl Queue {
    pub fn new(file: File) -> Self {
        let slot = |_| Slot {
            bytes: vec![0; BUFFER].into(),
            is_kernels: false,
        };
        Self {
            file,
            share: UringShare::default(),
            is_direct: false,
            has_nowait: true,
            slots: (0..SLOTS).map(slot).collect(),
            free: (0..SLOTS).collect(),
            open: 0,
            ready: VecDeque::new(),
            ahead: 0,
            found: 0,
            answers: Vec::new(),
            is_gone: false,
        }
    }

    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    pub fn set_offloads(&self, flags: u32) -> io::Result<()> {
        open::set_offloads(&self.file, flags)
    }

    pub fn set_attached(&self, is_attached: bool) -> io::Result<()> {
        let flags = match is_attached {
            true => libc::IFF_ATTACH_QUEUE,
            false => libc::IFF_DETACH_QUEUE,
        };
        let mut request = open::request("", flags);
        // SAFETY: TUNSETQUEUE reads an `ifreq`, which `request` is.
        open::asked(unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &raw mut request)
        })
    }

    /// Returns whether there is a frame. Posts new reads if none are open.
    pub fn has_frames(&mut self) -> bool {
        if !self.ready.is_empty() {
            return true;
        }
        if self.is_gone {
            return false;
        }
        if self.is_direct {
            self.read_now();
            return !self.ready.is_empty();
        }
        if self.open != 0 && self.share.has_events() {
            self.reap();
        }
        // Also if a read has failed: a read that waits is what wakes a sleeping core.
        if self.open == 0 && self.ready.is_empty() && !self.is_gone {
            self.post();
            if self.share.has_events() {
                self.reap();
            }
        }
        !self.ready.is_empty()
    }

    /// Posts reads that do not wait, as many as found frames lately, and one that waits.
    fn post(&mut self) {
        if self.share.take(SLOTS as u32).is_err() {
            self.is_direct = true;
            return;
        }
        self.ahead = match self.found {
            found if found >= self.ahead => (2 * self.ahead + 1).min(SLOTS - 1),
            found => found,
        };
        self.found = 0;
        if self.has_nowait {
            for _ in 0..self.ahead {
                self.push(libc::RWF_NOWAIT);
            }
        }
        self.push(0);
        self.share.flush();
    }

    fn push(&mut self, flags: libc::c_int) {
        let Some(at) = self.free.pop() else { return };
        let slot = &mut self.slots[at];
        slot.is_kernels = true;
        let fd = types::Fd(self.file.as_raw_fd());
        let read = opcode::Read::new(fd, slot.bytes.as_mut_ptr(), BUFFER as u32);
        // Offset -1: the current position, for a file that has none.
        let read = read.offset(u64::MAX).rw_flags(flags).build();
        self.open += 1;
        // SAFETY: the buffer stays where it is, untouched, while `is_kernels`: until the completion
        // is reaped; if the queue is dropped before, it is leaked.
        unsafe { self.share.push(read, at as u64) };
    }

    fn reap(&mut self) {
        let mut answers = std::mem::take(&mut self.answers);
        self.share.collect(&mut answers);
        let mut found = 0;
        for (data, result) in answers.drain(..) {
            // The user data of a cancellation's completion is larger than any index.
            let Some(slot) = self.slots.get_mut(data as usize) else {
                continue;
            };
            slot.is_kernels = false;
            self.open -= 1;
            if result >= HEADER_LEN as i32 {
                self.ready.push_back((data as usize, result as usize));
                found += 1;
                continue;
            }
            self.free.push(data as usize);
            self.has_nowait &= result != -libc::EOPNOTSUPP;
            self.is_gone |= is_gone(-result);
        }
        // Includes the read that waited, in addition to those that did not.
        self.found += found;
        self.answers = answers;
    }

    /// Reads one frame by a system call that does not wait.
    fn read_now(&mut self) {
        let Some(&at) = self.free.last() else { return };
        let bytes = &mut self.slots[at].bytes;
        let fd = self.file.as_raw_fd();
        // SAFETY: the buffer is ours, and lives through the call.
        let read = unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len()) };
        if read >= HEADER_LEN as isize {
            self.free.pop();
            self.ready.push_back((at, read as usize));
        } else if read < 0 {
            let error = io::Error::last_os_error();
            self.is_gone |= is_gone(error.raw_os_error().unwrap_or(0));
        }
    }

    /// Offers the frames that were read to a driver that accepts the offloads `receiver`. Returns
    /// the number of frames that it took.
    pub fn deliver(&mut self, to: &mut dyn FrameReceiver, receiver: Offloads) -> usize {
        // The kernel sets this regardless of the requested offloads; a driver without GUEST_CSUM
        // must not see it (§5.1.6.4.1).
        let hidden = match receiver.contains(Offloads::CSUM) {
            true => 0,
            false => NetHeader::DATA_VALID,
        };
        let room = to.room().min(BURST).min(self.ready.len());
        let frames = self.ready.iter().take(room).map(|(at, len)| {
            let (header, bytes) = self.slots[*at].bytes[..*len].split_at(HEADER_LEN);
            let header = header.try_into().expect("as long as a header");
            let mut header = NetHeader::from_bytes(header);
            header.flags &= !hidden;
            RxFrame {
                header,
                data: FrameData::Bytes(bytes),
            }
        });
        let frames = Vec::from_iter(frames);
        let over = to.deliver(&frames).min(frames.len());
        let done = self.ready.drain(..over);
        self.free.extend(done.map(|(at, _)| at));
        over
    }

    pub fn send(&self, frame: &TxFrame<'_>) -> Result<(), SendError> {
        let header = frame.header.to_bytes(0);
        let mut vectors = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; PIECES + 1];
        vectors[0] = libc::iovec {
            iov_base: header.as_ptr().cast_mut().cast(),
            iov_len: header.len(),
        };
        let mut whole = Vec::new();
        let count = if frame.data.len() <= PIECES {
            for (vector, piece) in vectors[1..].iter_mut().zip(frame.data) {
                vector.iov_base = piece.hva().raw() as *mut libc::c_void;
                vector.iov_len = piece.len() as usize;
            }
            frame.data.len() + 1
        } else {
            whole.resize(frame.len as usize, 0);
            frame.read(0, &mut whole);
            vectors[1].iov_base = whole.as_mut_ptr().cast();
            vectors[1].iov_len = whole.len();
            2
        };
        let fd = self.file.as_raw_fd();
        // SAFETY: each vector is the header, `whole`, or a slice of guest memory that is mapped for
        // as long as `frame` is borrowed; the kernel reads them during the call.
        let written = unsafe { libc::writev(fd, vectors.as_ptr(), count as i32) };
        if written >= 0 {
            return Ok(());
        }
        Err(match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINVAL) => SendError::Header,
            Some(errno) if is_gone(errno) => SendError::Gone,
            _ => SendError::Refused,
        })
    }

    /// Takes back all buffers, and drops the frames in them. Buffers that the kernel does not give
    /// back are leaked.
    pub fn stop(&mut self) {
        if self.open != 0 {
            for at in 0..self.slots.len() {
                if self.slots[at].is_kernels {
                    self.share.cancel(at as u64);
                }
            }
            for _ in 0..LOOKS {
                self.share.enter();
                self.reap();
                if self.open == 0 {
                    break;
                }
            }
        }
        let ready = self.ready.drain(..);
        self.free.extend(ready.map(|(at, _)| at));
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if std::mem::take(&mut slot.is_kernels) {
                let fresh = vec![0; BUFFER].into();
                std::mem::forget(std::mem::replace(&mut slot.bytes, fresh));
                self.free.push(at);
            }
        }
        self.open = 0;
        self.share = UringShare::default();
    }

    /// Drops the frames in the interface's own queue.
    pub fn discard(&mut self) {
        for _ in 0..DISCARDED {
            self.read_now();
            let Some((at, _)) = self.ready.pop_front() else {
                return;
            };
            self.free.push(at);
        }
    }

    /// From now on a frame makes the descriptor readable: the read that waits for it is posted
    /// first.
    pub fn arm(&mut self) {
        let _ = self.has_frames();
        self.share.arm();
    }

    pub fn disarm(&mut self) {
        self.share.disarm();
    }

    pub fn wake_fd(&self) -> RawFd {
        let wake = self.share.wake_fd();
        wake.unwrap_or_else(|| self.file.as_raw_fd())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns whether an error means that the interface has been deleted.
fn is_gone(errno: i32) -> bool {
    errno == libc::EBADFD || errno == libc::ENODEV
}
