//! A device without a bus, and interrupt lines without a hypervisor: both record their calls. A
//! thread that makes calls, of which it is known whether it has made them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use assign::calls::{Call, CallId, CallThread, Caller, Done};
use assign::hardware::{Hardware, HostEvent, Vectors};
use platform::interrupt::{InterruptLines, Message};

/// State of the device, and a record of the calls to it.
#[derive(Default)]
pub struct Device {
    /// Memory Space and Bus Master.
    pub command: (bool, bool),
    pub vectors: Option<Vectors>,
    /// Vectors that were set, in order.
    pub vectors_set: Vec<Vectors>,
    pub refuses_vectors: bool,
    pub is_stopped: bool,
    /// Registers by BAR and offset; those that are not named hold the low byte of their offset.
    pub registers: BTreeMap<(u8, u64), u8>,
    /// Accesses: BAR, offset, bytes; whether it was a write.
    pub accesses: Vec<(u8, u64, usize, bool)>,
    pub notice: Option<HostEvent>,
    /// Configuration space, word by word; zero elsewhere.
    pub config: BTreeMap<u16, u16>,
}

/// A clone is the same device.
#[derive(Clone, Default)]
pub struct FakeHardware(Arc<Mutex<Device>>);

impl FakeHardware {
    pub fn device(&self) -> MutexGuard<'_, Device> {
        self.0.lock().unwrap()
    }
}

impl Hardware for FakeHardware {
    fn read_config(&self, at: u16) -> u16 {
        self.device().config.get(&at).copied().unwrap_or(0)
    }

    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        let mut device = self.device();
        device.accesses.push((bar, offset, data.len(), false));
        for (at, byte) in (offset..).zip(data) {
            *byte = device
                .registers
                .get(&(bar, at))
                .copied()
                .unwrap_or(at as u8);
        }
    }

    fn write_bar(&mut self, bar: u8, offset: u64, data: &[u8]) {
        let mut device = self.device();
        device.accesses.push((bar, offset, data.len(), true));
        for (at, byte) in (offset..).zip(data) {
            device.registers.insert((bar, at), *byte);
        }
    }

    fn set_command(&mut self, memory: bool, bus_master: bool) {
        let mut device = self.device();
        assert!(
            !(device.is_stopped && bus_master),
            "a device that was stopped is a bus master again"
        );
        device.command = (memory, bus_master);
    }

    fn set_vectors(&mut self, vectors: Vectors) -> io::Result<()> {
        let mut device = self.device();
        device.vectors_set.push(vectors);
        if device.refuses_vectors && vectors != Vectors::Off {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        device.vectors = Some(vectors);
        Ok(())
    }

    fn stop(&mut self) {
        let mut device = self.device();
        device.is_stopped = true;
        device.command.1 = false;
        device.vectors = Some(Vectors::Off);
    }

    fn notice(&mut self) -> Option<HostEvent> {
        self.device().notice.take()
    }
}

/// State of the lines, and a record of the calls that connect them.
#[derive(Default)]
pub struct LineState {
    pub messages: BTreeMap<u16, Option<Message>>,
    /// Lines of each call.
    pub batches: Vec<Vec<u16>>,
    /// Signals that are kept.
    pub kept: BTreeSet<u16>,
    pub sent: Vec<Message>,
}

/// A clone is the same lines.
#[derive(Clone, Default)]
pub struct FakeLines(Arc<Mutex<LineState>>);

impl FakeLines {
    pub fn state(&self) -> MutexGuard<'_, LineState> {
        self.0.lock().unwrap()
    }

    /// The device signals.
    pub fn signal(&self, line: u16) {
        let mut state = self.state();
        match state.messages.get(&line).copied().flatten() {
            Some(message) => state.sent.push(message),
            None => {
                state.kept.insert(line);
            }
        }
    }
}

impl InterruptLines for FakeLines {
    fn connect(&mut self, lines: &[(u16, Option<Message>)]) {
        let mut state = self.state();
        state
            .batches
            .push(lines.iter().map(|(line, _)| *line).collect());
        for (line, message) in lines {
            state.messages.insert(*line, *message);
            if let Some(message) = message
                && state.kept.remove(line)
            {
                state.sent.push(*message);
            }
        }
    }

    fn is_pending(&self, line: u16) -> bool {
        self.state().kept.contains(&line)
    }

    fn forget(&mut self, line: u16) {
        self.state().kept.remove(&line);
    }
}

/// A container's thread, and the number of calls that were asked for and whose ends were not taken.
pub struct CountedCalls {
    thread: CallThread,
    open: OpenCalls,
}

/// Calls that are under way; a clone is the same number.
#[derive(Clone, Default)]
pub struct OpenCalls(Arc<AtomicUsize>);

impl OpenCalls {
    // All of it is of one thread, the test's.
    pub fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl CountedCalls {
    pub fn new(thread: CallThread, open: OpenCalls) -> Self {
        Self { thread, open }
    }
}

impl Caller for CountedCalls {
    fn submit(&mut self, id: CallId, call: Call) {
        self.open.0.fetch_add(1, Ordering::Relaxed);
        self.thread.submit(id, call);
    }

    fn take(&mut self) -> Option<Done> {
        let done = self.thread.take()?;
        self.open.0.fetch_sub(1, Ordering::Relaxed);
        Some(done)
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.thread.wake_fd()
    }

    fn has_done(&mut self) -> bool {
        self.thread.has_done()
    }

    fn quiet(&mut self) {
        self.thread.quiet();
    }
}

/// Ends are not taken any more: no call counts as open.
impl Drop for CountedCalls {
    fn drop(&mut self) {
        self.open.0.store(0, Ordering::Relaxed);
    }
}
