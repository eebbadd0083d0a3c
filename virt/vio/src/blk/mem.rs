//! Disks without a file: one in memory, and one that is not even there.

use std::os::fd::RawFd;

use guest_mem::KeepAlive;

use super::backend::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

/// A disk in private memory. Operations are done when they are asked for, or when they are
/// submitted.
pub struct MemDisk {
    bytes: Vec<u8>,
    read_only: bool,
    /// Per slot, its private buffer; kept from request to request.
    buffers: Vec<Vec<u8>>,
    done: Vec<Completion>,
}

impl MemDisk {
    /// A disk with these contents and `depth` slots.
    pub fn new(mut bytes: Vec<u8>, depth: u32, read_only: bool) -> Self {
        advise_huge_pages(&mut bytes);
        Self {
            bytes,
            read_only,
            buffers: (0..depth).map(|_| Vec::new()).collect(),
            done: Vec::new(),
        }
    }

    /// The contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn run(&mut self, slot: u32, op: Op) {
        let buffer = &mut self.buffers[slot as usize];
        // The device has checked every range against the capacity, which a usize holds.
        match op {
            Op::Read { offset, len } => {
                buffer.copy_from_slice(&self.bytes[offset as usize..][..len as usize]);
            }
            Op::Write { offset, len, .. } => {
                self.bytes[offset as usize..][..len as usize].copy_from_slice(buffer);
            }
            op => self.run_without_data(op),
        }
    }

    fn run_without_data(&mut self, op: Op) {
        match op {
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                self.bytes[offset as usize..][..len as usize].fill(0);
            }
            Op::Read { .. } | Op::Write { .. } | Op::Flush => {}
        }
    }
}

/// Asks the host to back large contents with huge pages: random reads of a large disk are bound by
/// the TLB otherwise.
#[expect(unsafe_code, reason = "one advisory system call on memory of ours")]
fn advise_huge_pages(bytes: &mut [u8]) {
    const HUGE: usize = 2 << 20;
    let start = bytes.as_ptr().addr().next_multiple_of(HUGE);
    let end = bytes.as_ptr_range().end.addr() / HUGE * HUGE;
    if start >= end {
        return;
    }
    let skip = start - bytes.as_ptr().addr();
    let range = &mut bytes[skip..skip + (end - start)];
    // SAFETY: the range is ours, borrowed exclusively, and whole pages; the advice changes nothing
    // that can be read. A host without huge pages refuses, and nothing is lost.
    unsafe {
        libc::madvise(range.as_mut_ptr().cast(), range.len(), libc::MADV_HUGEPAGE);
    }
}

/// Methods common to disks that never touch guest memory and whose operations are over when they
/// are submitted: these wait in the field `done` to be reported, and no thread need be woken for
/// them.
macro_rules! done_at_submit {
    () => {
        fn completes_in_order(&self) -> bool {
            true
        }

        fn attach(&mut self, _keep: KeepAlive) {}

        fn detach(&mut self) {}

        fn flush(&mut self) {}

        fn poll(&mut self, done: &mut Vec<Completion>) {
            done.append(&mut self.done);
        }

        fn has_completions(&mut self) -> bool {
            !self.done.is_empty()
        }

        fn cancel(&mut self, _slot: u32) {}

        fn arm(&mut self) {}

        fn disarm(&mut self) {}

        fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
    };
}

impl BlockIo for MemDisk {
    done_at_submit!();

    fn capacity(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn depth(&self) -> u32 {
        self.buffers.len() as u32
    }

    fn transfer(&self) -> Transfer {
        Transfer::Memory
    }

    fn run_now(&mut self, op: Op, _pieces: &[Piece]) -> Option<Outcome> {
        self.run_without_data(op);
        Some(Outcome::Done)
    }

    fn contents(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        self.buffers[slot as usize].resize(len as usize, 0);
        true
    }

    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
        &mut self.buffers[slot as usize][offset as usize..]
    }

    fn unreserve(&mut self, slot: u32) {
        self.buffers[slot as usize].clear();
    }

    fn submit(&mut self, slot: u32, op: Op, _pieces: &[Piece]) {
        self.run(slot, op);
        self.done.push(Completion {
            slot,
            outcome: Outcome::Done,
        });
    }
}

/// A disk without contents, for measurements: every request succeeds and moves nothing.
#[derive(Debug)]
pub struct NullDisk {
    capacity: u64,
    done: Vec<Completion>,
}

impl NullDisk {
    /// A disk of `capacity` bytes, a multiple of 512.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            done: Vec::new(),
        }
    }
}

impl BlockIo for NullDisk {
    done_at_submit!();

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        256
    }

    fn transfer(&self) -> Transfer {
        Transfer::Nothing
    }

    fn run_now(&mut self, _op: Op, _pieces: &[Piece]) -> Option<Outcome> {
        Some(Outcome::Done)
    }

    fn reserve(&mut self, _slot: u32, _len: u32) -> bool {
        true
    }

    fn buffer(&mut self, _slot: u32, _offset: u32) -> &mut [u8] {
        unreachable!("data of Transfer::Nothing are not moved")
    }

    fn unreserve(&mut self, _slot: u32) {}

    fn submit(&mut self, slot: u32, _op: Op, _pieces: &[Piece]) {
        self.done.push(Completion {
            slot,
            outcome: Outcome::Done,
        });
    }
}
