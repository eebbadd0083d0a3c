//! A disk whose operations end when and how the input says, and which checks its requests.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use guest_mem::KeepAlive;
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// With a private buffer of so many bytes.
    Reserved(u32),
    /// With its buffer, if it has one.
    Running(u32),
}

/// Shared with the harness.
#[derive(Debug)]
struct Shared {
    slots: Vec<Slot>,
    /// Slots in flight, in the order of submission.
    running: Vec<u32>,
    done: Vec<Completion>,
    is_attached: bool,
    /// Whether there is room for buffers.
    has_room: bool,
    /// Whether what is asked to be cancelled is.
    cancels: bool,
    /// Whether operations are done at once.
    is_quick: bool,
    submitted: u64,
}

/// The harness's end.
#[derive(Clone, Debug)]
pub(crate) struct Control(Arc<Mutex<Shared>>);

impl Control {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().expect("a panic has ended the run")
    }

    /// Sets the behaviour of the disk from now on: three bits.
    pub(crate) fn behave(&self, how: u8) {
        let mut shared = self.shared();
        shared.has_room = how & 1 == 0;
        shared.cancels = how & 2 == 0;
        shared.is_quick = how & 4 != 0;
    }

    /// Ends one of the operations in flight; whether there was one.
    pub(crate) fn end_one(&self, which: u8, how: u8) -> bool {
        let mut shared = self.shared();
        if shared.running.is_empty() {
            return false;
        }
        let at = usize::from(which) % shared.running.len();
        let slot = shared.running.remove(at);
        let outcome = match how % 4 {
            0 | 1 => Outcome::Done,
            2 => Outcome::Failed(libc::EIO),
            _ => Outcome::Failed(libc::EOPNOTSUPP),
        };
        shared.done.push(Completion { slot, outcome });
        true
    }
}

/// The disk.
pub(crate) struct HeldDisk {
    control: Control,
    transfer: Transfer,
    read_only: bool,
    sectors: u64,
    depth: u32,
    /// The longest part of a buffer that is handed out.
    part: u32,
    buffers: Vec<Vec<u8>>,
}

impl HeldDisk {
    pub(crate) fn new(
        transfer: Transfer,
        read_only: bool,
        sectors: u64,
        depth: u32,
        part: u32,
    ) -> (Self, Control) {
        let control = Control(Arc::new(Mutex::new(Shared {
            slots: vec![Slot::Free; depth as usize],
            running: Vec::new(),
            done: Vec::new(),
            is_attached: false,
            has_room: true,
            cancels: true,
            is_quick: false,
            submitted: 0,
        })));
        let disk = Self {
            control: control.clone(),
            transfer,
            read_only,
            sectors,
            depth,
            part,
            buffers: vec![Vec::new(); depth as usize],
        };
        (disk, control)
    }

    /// An operation lies inside the disk, and its pieces are as long as it is.
    fn check(&self, op: Op, pieces: &[Piece], buffer: Option<u32>) {
        let bytes = self.sectors * 512;
        let (offset, len, is_write) = match op {
            Op::Read { offset, len } => (offset, u64::from(len), false),
            Op::Write { offset, len, .. } => (offset, u64::from(len), true),
            Op::Flush => {
                assert!(pieces.is_empty());
                return;
            }
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                assert!(!self.read_only && pieces.is_empty());
                assert!(len != 0 && offset <= bytes && len <= bytes - offset);
                return;
            }
        };
        assert!(len != 0 && offset <= bytes && len <= bytes - offset);
        assert!(!(is_write && self.read_only), "a read-only disk is written");
        let sum: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        match self.transfer {
            Transfer::Direct => assert_eq!(sum, len, "{pieces:?}"),
            _ => assert!(pieces.is_empty()),
        }
        if self.transfer == Transfer::Bounce {
            assert_eq!(buffer, Some(len as u32), "the buffer");
        }
    }
}

impl BlockIo for HeldDisk {
    fn capacity(&self) -> u64 {
        self.sectors * 512
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn depth(&self) -> u32 {
        self.depth
    }

    fn transfer(&self) -> Transfer {
        self.transfer
    }

    // Not true: it shows that the device keeps the order all the same.
    fn completes_in_order(&self) -> bool {
        true
    }

    fn run_now(&mut self, op: Op, pieces: &[Piece]) -> Option<Outcome> {
        assert!(self.transfer != Transfer::Bounce);
        self.check(op, pieces, None);
        let is_quick = self.control.shared().is_quick || self.transfer == Transfer::Nothing;
        is_quick.then_some(Outcome::Done)
    }

    fn attach(&mut self, _keep: KeepAlive) {
        let mut shared = self.control.shared();
        assert!(shared.running.is_empty());
        shared.is_attached = true;
    }

    fn detach(&mut self) {
        let mut shared = self.control.shared();
        assert!(shared.running.is_empty() && shared.done.is_empty());
        assert!(shared.slots.iter().all(|slot| *slot == Slot::Free));
        shared.is_attached = false;
    }

    fn reserve(&mut self, slot: u32, len: u32) -> bool {
        let mut shared = self.control.shared();
        let own = &mut shared.slots[slot as usize];
        assert_eq!(*own, Slot::Free);
        *own = Slot::Reserved(len);
        // An idle one always has room.
        if !shared.has_room && !shared.running.is_empty() {
            shared.slots[slot as usize] = Slot::Free;
            return false;
        }
        self.buffers[slot as usize].resize(len as usize, 0x5a);
        true
    }

    fn buffer(&mut self, slot: u32, offset: u32) -> &mut [u8] {
        let own = self.control.shared().slots[slot as usize];
        assert!(
            matches!(own, Slot::Reserved(len) if offset < len),
            "{own:?}"
        );
        let rest = &mut self.buffers[slot as usize][offset as usize..];
        let len = rest.len().min(self.part as usize);
        &mut rest[..len]
    }

    fn unreserve(&mut self, slot: u32) {
        let mut shared = self.control.shared();
        let own = &mut shared.slots[slot as usize];
        assert!(!matches!(own, Slot::Running(_)));
        *own = Slot::Free;
        self.buffers[slot as usize].clear();
    }

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        let mut shared = self.control.shared();
        assert!(shared.is_attached);
        let buffer = match shared.slots[slot as usize] {
            Slot::Free => None,
            Slot::Reserved(len) => Some(len),
            Slot::Running(_) => panic!("slot {slot} is in flight"),
        };
        shared.slots[slot as usize] = Slot::Running(buffer.unwrap_or(0));
        shared.running.push(slot);
        shared.submitted += 1;
        drop(shared);
        self.check(op, pieces, buffer);
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut shared = self.control.shared();
        let Shared {
            slots, done: own, ..
        } = &mut *shared;
        for completion in own.drain(..) {
            if completion.outcome != Outcome::NotCancellable {
                let slot = &mut slots[completion.slot as usize];
                *slot = match *slot {
                    Slot::Running(0) => Slot::Free,
                    Slot::Running(len) => Slot::Reserved(len),
                    other => panic!("{other:?} has ended"),
                };
            }
            done.push(completion);
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.control.shared().done.is_empty()
    }

    fn cancel(&mut self, slot: u32) {
        let mut shared = self.control.shared();
        let Some(at) = shared.running.iter().position(|&own| own == slot) else {
            // It has ended, and its completion has not been polled yet.
            return;
        };
        let outcome = if shared.cancels {
            shared.running.remove(at);
            Outcome::Failed(libc::ECANCELED)
        } else {
            Outcome::NotCancellable
        };
        shared.done.push(Completion { slot, outcome });
    }

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
}
