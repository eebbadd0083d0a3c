//! A disk that takes its time: it moves the data of a request piece by piece, poll after poll, at
//! the addresses that it was given when it began.
#![expect(unsafe_code, reason = "a device's accesses to leased memory")]

use std::os::fd::RawFd;

use guest_mem::{KeepAlive, keeps_mapped};
use seeded::Random;
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece, Transfer};

struct Flying {
    slot: u32,
    op: Op,
    /// Pieces left to move, in reverse order.
    pieces: Vec<Piece>,
    moved: usize,
    polls: u64,
}

pub struct LateDisk {
    bytes: Vec<u8>,
    transfer: Transfer,
    random: Random,
    keep: Option<KeepAlive>,
    buffers: Vec<Vec<u8>>,
    flying: Vec<Flying>,
    done: Vec<Completion>,
}

impl LateDisk {
    pub fn new(bytes: usize, transfer: Transfer, seed: u64) -> Self {
        Self {
            bytes: vec![0; bytes],
            transfer,
            random: Random::new(seed),
            keep: None,
            buffers: vec![Vec::new(); 16],
            flying: Vec::new(),
            done: Vec::new(),
        }
    }

    fn finish(&mut self, slot: u32, outcome: Outcome) {
        self.done.push(Completion { slot, outcome });
    }

    /// Moves a piece; whether the request is over.
    fn step(&mut self, flying: &mut Flying) -> bool {
        if flying.polls > 0 {
            flying.polls -= 1;
            return false;
        }
        let (offset, len, is_read) = match flying.op {
            Op::Read { offset, len } => (offset as usize, len as usize, true),
            Op::Write { offset, len, .. } => (offset as usize, len as usize, false),
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                self.bytes[offset as usize..][..len as usize].fill(0);
                return true;
            }
            Op::Flush => return true,
        };
        if self.transfer != Transfer::Direct {
            let buffer = &mut self.buffers[flying.slot as usize][..len];
            let bytes = &mut self.bytes[offset..][..len];
            match is_read {
                true => buffer.copy_from_slice(bytes),
                false => bytes.copy_from_slice(buffer),
            }
            return true;
        }
        let Some(piece) = flying.pieces.pop() else {
            return true;
        };
        let len = piece.len as usize;
        let keep = self.keep.as_ref().expect("attached");
        assert!(
            keeps_mapped(keep, piece.hva, len as u64),
            "a lease's address"
        );
        let at = std::ptr::with_exposed_provenance_mut::<u8>(piece.hva.raw() as usize);
        let bytes = &mut self.bytes[offset + flying.moved..][..len];
        // SAFETY: mapped, as asserted; no code makes references into guest memory, and the test has
        // one thread.
        unsafe {
            match is_read {
                true => at.copy_from_nonoverlapping(bytes.as_ptr(), len),
                false => bytes.as_mut_ptr().copy_from_nonoverlapping(at, len),
            }
        }
        flying.moved += len;
        flying.polls = self.random.below(4);
        false
    }
}

impl BlockIo for LateDisk {
    fn capacity(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn depth(&self) -> u32 {
        self.buffers.len() as u32
    }

    fn transfer(&self) -> Transfer {
        self.transfer
    }

    fn contents(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn attach(&mut self, keep: KeepAlive) {
        self.keep = Some(keep);
    }

    fn detach(&mut self) {
        assert!(self.flying.is_empty(), "detached in flight");
        self.keep = None;
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

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        let polls = self.random.below(24);
        self.flying.push(Flying {
            slot,
            op,
            pieces: pieces.iter().rev().copied().collect(),
            moved: 0,
            polls,
        });
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        for mut flying in std::mem::take(&mut self.flying) {
            match self.step(&mut flying) {
                true => self.finish(flying.slot, Outcome::Done),
                false => self.flying.push(flying),
            }
        }
        done.append(&mut self.done);
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty() || !self.flying.is_empty()
    }

    fn cancel(&mut self, slot: u32) {
        if let Some(at) = self.flying.iter().position(|flying| flying.slot == slot) {
            self.flying.remove(at);
            self.finish(slot, Outcome::Failed(libc::ECANCELED));
        }
    }

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _: &mut Vec<RawFd>) {}
}
