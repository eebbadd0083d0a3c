//! Capture of a port's frames in a file, as `tcpdump` and Wireshark read it (pcap, microseconds, Ethernet).
//!
//! Each frame as the device sees it, cut at [`SNAP`] bytes: what the guest sends, with checksums that it leaves undone, and
//! what it is given, before its driver or the filters of its device have taken it.
//! Bound: the file has at most the bytes it was given; behind that the port goes on and nothing more is written.
//!
//! A write may wait for the file system, and the core with it: a capture is for a look at what goes on, and not for measurements.

use std::fs::File;
use std::io::BufWriter;
use std::os::fd::RawFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use guest_mem::KeepAlive;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError};
use vio::net::{
    Collected, FrameReceiver, NetPort, Offloads, PortCapabilities, RxFrame, TxFrame, Waits,
};

/// Bytes of a frame that are written at most.
const SNAP: usize = 65_550;
const FILE_HEADER: u64 = 24;
const FRAME_HEADER: u64 = 16;

/// Reason why there is no capture.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file cannot be made.
    #[error("cannot create the capture file")]
    Create(#[source] std::io::Error),
    /// Its header cannot be written.
    #[error("cannot write the capture file")]
    Write(#[source] PcapError),
}

/// A port whose frames are written to a file.
pub struct Captured<P> {
    port: P,
    file: CaptureFile,
}

impl<P: std::fmt::Debug> std::fmt::Debug for Captured<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Captured")
            .field("port", &self.port)
            .field("left", &self.file.left)
            .finish_non_exhaustive()
    }
}

struct CaptureFile {
    /// `None` when the file is full, or cannot be written.
    writer: Option<PcapWriter<BufWriter<File>>>,
    left: u64,
    /// Reused: a frame.
    bytes: Vec<u8>,
    missed: u64,
}

impl CaptureFile {
    fn write(&mut self, len: usize, read: impl FnOnce(&mut [u8]) -> usize) {
        let kept = len.min(SNAP);
        let Some(left) = self.left.checked_sub(FRAME_HEADER + kept as u64) else {
            // The first that does not fit is the last: a file without holes.
            self.writer = None;
            self.missed += 1;
            return;
        };
        let Some(writer) = &mut self.writer else {
            self.missed += 1;
            return;
        };
        self.bytes.resize(kept, 0);
        let seen = read(&mut self.bytes);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let packet = PcapPacket::new(now.unwrap_or_default(), len as u32, &self.bytes[..seen]);
        match writer.write_packet(&packet) {
            Ok(_) => self.left = left,
            Err(_) => {
                self.writer = None;
                self.missed += 1;
            }
        }
    }
}

impl<P: NetPort> Captured<P> {
    /// Writes what goes through `port` to a new file at `path`, of at most `limit` bytes.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn new(port: P, path: &Path, limit: u64) -> Result<Self, CaptureError> {
        let file = File::create(path).map_err(CaptureError::Create)?;
        let header = PcapHeader {
            snaplen: SNAP as u32,
            datalink: DataLink::ETHERNET,
            ..PcapHeader::default()
        };
        let writer = PcapWriter::with_header(BufWriter::new(file), header);
        Ok(Self {
            port,
            file: CaptureFile {
                writer: Some(writer.map_err(CaptureError::Write)?),
                left: limit.saturating_sub(FILE_HEADER),
                bytes: Vec::new(),
                missed: 0,
            },
        })
    }

    /// Frames that are not in the file because it is full or could not be written.
    pub fn missed(&self) -> u64 {
        self.file.missed
    }
}

/// Sees what is given to a device.
struct Tee<'t> {
    to: &'t mut dyn FrameReceiver,
    file: &'t mut CaptureFile,
}

impl FrameReceiver for Tee<'_> {
    fn room(&mut self) -> usize {
        self.to.room()
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let over = self.to.deliver(frames);
        for frame in &frames[..over.min(frames.len())] {
            self.file
                .write(frame.data.len(), |buf| frame.data.read(0, buf));
        }
        over
    }
}

impl<P: NetPort> NetPort for Captured<P> {
    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn start(&mut self, receiver: Offloads) {
        self.port.start(receiver);
    }

    fn set_receiver(&mut self, receiver: Offloads) {
        self.port.set_receiver(receiver);
    }

    fn set_pairs(&mut self, pairs: u16) {
        self.port.set_pairs(pairs);
    }

    fn reset(&mut self) {
        self.port.reset();
    }

    fn is_up(&self) -> bool {
        self.port.is_up()
    }

    fn send_room(&mut self, pair: u16) -> usize {
        self.port.send_room(pair)
    }

    fn send(&mut self, pair: u16, frames: &[TxFrame<'_>], keep: &KeepAlive) -> usize {
        for frame in frames {
            self.file
                .write(frame.len as usize, |buf| frame.read(0, buf));
        }
        self.port.send(pair, frames, keep)
    }

    fn collect(&mut self, pair: u16) -> Collected {
        self.port.collect(pair)
    }

    fn has_kept(&self, pair: u16) -> bool {
        self.port.has_kept(pair)
    }

    fn cancel(&mut self, pair: u16) {
        self.port.cancel(pair);
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        self.port.has_frames(pair)
    }

    fn receive(&mut self, pair: u16, to: &mut dyn FrameReceiver) {
        let file = &mut self.file;
        self.port.receive(pair, &mut Tee { to, file });
    }

    fn arm(&mut self) {
        self.port.arm();
    }

    fn disarm(&mut self) {
        self.port.disarm();
    }

    fn wake_fds(&self, pair: u16, waits: Waits, fds: &mut Vec<RawFd>) {
        self.port.wake_fds(pair, waits, fds);
    }

    fn rebind(&mut self) {
        self.port.rebind();
    }
}
