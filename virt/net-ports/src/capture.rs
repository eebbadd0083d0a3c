//! Capture of a port's frames in a file, as `tcpdump` and Wireshark read it (pcap, microseconds,
//! Ethernet).
//!
//! Each frame is written as the device sees it, cut at [`SNAP`] bytes: frames that the guest sends,
//! with checksums that it leaves undone, and frames for the guest, before the filters of its device
//! or its driver have taken them. Bound: [`CaptureOptions::limit`]; once the file has that size,
//! the port continues and nothing more is written.
//!
//! The file is complete up to the last frame whenever the device's core goes to sleep, and at the
//! end.
//!
//! A write may wait for the file system, and the core with it: a capture is for diagnosis, not for
//! measurements.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use guest_mem::KeepAlive;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, PcapError};
use vio::net::{
    Collected, FrameReceiver, NetPort, Offloads, PortCapabilities, RxFrame, TxFrame, Waits,
};

/// Most bytes of a frame that are written.
const SNAP: usize = net_offload::MAX_FRAME;
const FILE_HEADER: u64 = 24;
const FRAME_HEADER: u64 = 16;

/// Reason why there is no capture.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file exists, and must not be replaced.
    #[error("the capture file is there already")]
    Exists,
    /// The file exists, and is no capture of ours that could be continued.
    #[error("the file is no capture that can be continued")]
    Foreign,
    /// The file cannot be made.
    #[error("cannot create the capture file")]
    Create(#[source] io::Error),
    /// Its header cannot be written.
    #[error("cannot write the capture file")]
    Write(#[source] PcapError),
}

/// Treatment of a file that exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is an error.
    Refused,
    /// It is removed, and so is a link, which is never followed.
    Replaced,
    /// It is continued, if it is a capture as made here.
    Continued,
}

/// The file of a capture.
#[derive(Clone, Copy, Debug)]
pub struct CaptureOptions<'p> {
    /// Its path. Only its owner can read the file, since it has the guests' frames.
    pub path: &'p Path,
    /// Its largest size in bytes.
    pub limit: u64,
    /// Treatment of a file that exists already.
    pub existing: Existing,
}

fn header() -> PcapHeader {
    PcapHeader {
        snaplen: SNAP as u32,
        datalink: DataLink::ETHERNET,
        ..PcapHeader::default()
    }
}

/// The file, at its beginning, and its length.
fn open(options: &CaptureOptions<'_>) -> Result<(File, u64), CaptureError> {
    let mut new = File::options();
    new.read(true).write(true).mode(0o600);
    match options.existing {
        Existing::Refused => {}
        Existing::Replaced => match fs::remove_file(options.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(CaptureError::Create(error));
            }
            _ => {}
        },
        Existing::Continued => match new.custom_flags(libc::O_NOFOLLOW).open(options.path) {
            Ok(file) => return continued(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(CaptureError::Create(error)),
        },
    }
    let file = new.create_new(true).open(options.path);
    let file = file.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CaptureError::Exists,
        _ => CaptureError::Create(error),
    })?;
    Ok((file, 0))
}

fn continued(file: File) -> Result<(File, u64), CaptureError> {
    let mut expected = Vec::new();
    header()
        .write_to(&mut expected)
        .map_err(CaptureError::Write)?;
    let mut found = [0; FILE_HEADER as usize];
    let len = file.metadata().map_err(CaptureError::Create)?.len();
    match file.read_exact_at(&mut found, 0) {
        Ok(()) if found[..] == expected => Ok((file, len)),
        _ => Err(CaptureError::Foreign),
    }
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

/// The file behind a writer that cannot be asked to flush it. One thread has both ends.
#[derive(Clone)]
struct Output(Arc<Mutex<BufWriter<File>>>);

impl Output {
    fn lock(&self) -> MutexGuard<'_, BufWriter<File>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seek_to_end(&mut self) -> io::Result<u64> {
        // This writes the buffered bytes first.
        self.lock().seek(SeekFrom::End(0))
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

struct CaptureFile {
    path: PathBuf,
    /// `None` when the file is full, or cannot be written.
    writer: Option<PcapWriter<Output>>,
    output: Output,
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
            if self.writer.is_some() {
                tracing::warn!(
                    "pcap {}: full; frames go on, unwritten",
                    self.path.display()
                );
                self.flush();
            }
            self.end();
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
        let written = writer.write_packet(&packet);
        drop(packet);
        match written {
            Ok(_) => self.left = left,
            Err(error) => self.fail(&error),
        }
    }

    fn end(&mut self) {
        self.writer = None;
        self.missed += 1;
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        tracing::warn!(
            "pcap {}: cannot be written ({error}); frames go on, unwritten",
            self.path.display()
        );
        self.end();
    }

    /// Flushes the file, so that it can be read while the port is idle.
    fn flush(&mut self) {
        if self.writer.is_some()
            && let Err(error) = self.output.flush()
        {
            self.fail(&error);
        }
    }
}

impl<P: NetPort> Captured<P> {
    /// Creates a port that forwards to `port` and writes its frames to a new file.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn new(port: P, options: &CaptureOptions<'_>) -> Result<Self, CaptureError> {
        let (file, len) = open(options)?;
        let mut output = Output(Arc::new(Mutex::new(BufWriter::new(file))));
        // Over the same header, in a file that is continued.
        let writer = PcapWriter::with_header(output.clone(), header());
        let writer = writer.map_err(CaptureError::Write)?;
        output.seek_to_end().map_err(CaptureError::Create)?;
        Ok(Self {
            port,
            file: CaptureFile {
                path: options.path.to_owned(),
                writer: Some(writer),
                output,
                left: options.limit.saturating_sub(len.max(FILE_HEADER)),
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

/// Receiver that writes the frames given to a device to the capture.
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

    fn has_own_events(&self) -> bool {
        self.port.has_own_events()
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
        self.file.flush();
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
