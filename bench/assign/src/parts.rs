//! Stubs of a device, its interrupts and the host's kernel. They do nothing and return at once.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use assign::calls::{Call, CallId, Caller, Done, Table};
use assign::hardware::{Hardware, Vectors};
use assign::vfio_device::{Held, VfioTable};
use dma_map::iova::{Access, IovaRange};
use guest_mem::SourceId;
use platform::interrupt::{InterruptLines, InterruptSink, Message};
use vfio::Errno;

/// Stub of the kernel's VFIO container: maps nothing and reports success, so that only this
/// project's code is measured. (`vfio::testing` records each call under a lock, in a list that
/// grows.)
pub struct NullKernel;

#[expect(
    unsafe_code,
    reason = "it answers for a device, of which there is none"
)]
// SAFETY: no device accesses memory through it.
unsafe impl vfio::Kernel for NullKernel {
    unsafe fn map_dma(&self, _: IovaRange, _: u64, _: Access) -> Result<(), Errno> {
        Ok(())
    }

    fn unmap_dma(&self, range: IovaRange) -> Result<u64, Errno> {
        // The ranges unmapped here are whole mappings.
        Ok(range.len().unwrap_or(0))
    }

    fn detach_all(&self) -> Result<(), Errno> {
        Ok(())
    }
}

/// Returns the mapping table of a container with that kernel.
pub fn table() -> VfioTable<NullKernel> {
    VfioTable::new(NullKernel, Held::new(|| Ok(()), || ()), None)
}

/// Caller that makes calls on the submitting thread. The difference from a call thread is the cost
/// of the hand-over.
pub struct InPlace {
    table: VfioTable<NullKernel>,
    done: VecDeque<Done>,
}

impl InPlace {
    /// Creates a caller with a container of its own.
    pub fn new() -> Self {
        Self {
            table: table(),
            done: VecDeque::new(),
        }
    }
}

impl Caller for InPlace {
    fn submit(&mut self, id: CallId, call: Call) {
        let began = Instant::now();
        let result = match call {
            Call::Map {
                range,
                memory,
                access,
            } => self.table.map(range, memory, access),
            Call::Unmap { range, pages } => self.table.unmap(range, pages),
            Call::Reset => self.table.reset(),
            Call::Close => self.table.close(),
        };
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.done.push_back(Done { id, result, ns });
    }

    fn take(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    fn has_done(&mut self) -> bool {
        !self.done.is_empty()
    }
}

/// A device without registers.
pub struct NoHardware;

impl Hardware for NoHardware {
    fn read_config(&self, _: u16) -> u16 {
        0
    }

    fn read_bar(&self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write_bar(&mut self, _: u8, _: u64, _: &[u8]) {}

    fn set_command(&mut self, _: bool, _: bool) {}

    fn set_vectors(&mut self, _: Vectors) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) {}
}

/// Interrupt lines and messages that are dropped.
pub struct NoLines;

impl InterruptLines for NoLines {
    fn connect(&mut self, _: &[(u16, Option<Message>)]) {}

    fn is_pending(&self, _: u16) -> bool {
        false
    }

    fn forget(&mut self, _: u16) {}
}

impl InterruptSink for NoLines {
    fn send(&self, _: SourceId, _: Message) {}
}
