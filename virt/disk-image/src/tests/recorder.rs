//! A file in memory that remembers what was written to it, and when it was synced.

use std::io::{self, ErrorKind, Read, Seek};
use std::sync::{Arc, Mutex, MutexGuard};

use nix::fcntl::FallocateFlags;

use crate::file_io::FileIo;

/// Unit of atomic writes of a disk, in bytes.
pub const SECTOR: usize = 512;

/// Event in the history of the file.
pub enum Event {
    /// Sectors, each as it was after the write. The kernel writes whole sectors of what is in its
    /// cache, so a later one contains what was written to the same sector earlier.
    Write(Vec<(usize, Box<[u8; SECTOR]>)>),
    /// The file has this length. A file system may lose it and keep the sectors, or the other way
    /// round.
    Grow(usize),
    /// Everything before is on the disk.
    Sync,
    /// Nothing happened; a point in time for the test.
    Mark,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    log: Vec<Event>,
}

/// The file. Clones are the same file.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<State>>);

impl Recorder {
    /// Takes over the contents of a file.
    pub fn load(file: &mut (impl Read + Seek)) -> Self {
        let mut state = State::default();
        file.rewind().expect("a file can be rewound");
        file.read_to_end(&mut state.bytes).expect("it can be read");
        Self(Arc::new(Mutex::new(state)))
    }

    /// A file of these bytes.
    pub fn of(bytes: Vec<u8>) -> Self {
        let log = Vec::new();
        Self(Arc::new(Mutex::new(State { bytes, log })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics while it holds this")
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.state().bytes.clone()
    }

    /// Marks this point in time, which is after all before it and before all after it.
    pub fn mark(&self) -> usize {
        let mut state = self.state();
        state.log.push(Event::Mark);
        state.log.len()
    }

    pub fn syncs(&self) -> usize {
        let is_sync = |event: &&Event| matches!(event, Event::Sync);
        self.state().log.iter().filter(is_sync).count()
    }

    pub fn take_log(&self) -> Vec<Event> {
        std::mem::take(&mut self.state().log)
    }
}

impl State {
    fn grow(&mut self, len: usize) {
        if len > self.bytes.len() {
            self.bytes.resize(len, 0);
            self.log.push(Event::Grow(len));
        }
    }

    /// Records the sectors of a range that has changed.
    fn changed(&mut self, offset: usize, len: usize) {
        let sector = |at: usize| {
            let mut sector = Box::new([0; SECTOR]);
            let from = at * SECTOR;
            let to = self.bytes.len().min(from + SECTOR);
            sector[..to - from].copy_from_slice(&self.bytes[from..to]);
            (at, sector)
        };
        let sectors = offset / SECTOR..(offset + len).div_ceil(SECTOR);
        let event = Event::Write(sectors.map(sector).collect());
        self.log.push(event);
    }
}

impl FileIo for Recorder {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.state();
        let rest = state.bytes.get(offset as usize..).unwrap_or_default();
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.state();
        let offset = offset as usize;
        state.grow(offset + bytes.len());
        state.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        state.changed(offset, bytes.len());
        Ok(())
    }

    fn grow(&self, len: u64) -> io::Result<()> {
        self.state().grow(len as usize);
        Ok(())
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        if !mode.contains(FallocateFlags::FALLOC_FL_PUNCH_HOLE) {
            return Err(ErrorKind::Unsupported.into());
        }
        let mut state = self.state();
        let (offset, len) = (offset as usize, len as usize);
        let end = state.bytes.len().min(offset + len);
        if offset < end {
            state.bytes[offset..end].fill(0);
            state.changed(offset, end - offset);
        }
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.state().log.push(Event::Sync);
        Ok(())
    }
}
