//! A disk whose device model has been taken over: it searches its process's memory for what a guest
//! keeps to itself, and overwrites what it finds.
//!
//! Two reads, of the disk's last blocks, make it attack; every other request passes.
//!
//! * [`SCAN`]: each readable mapping of the process (`/proc/self/maps`) is searched for two words,
//!   and each that is found in a writable one is overwritten with [`OVERWRITTEN`]. [`secret`] is
//!   what the guest has in pages that no request names, [`own`] what it has written to the disk:
//!   that the latter is found shows that the search works. The read's data are a [`ScanReport`].
//! * [`SCRIBBLE`]: each mapping that is shared and writable is filled with ones, rings and all.
//!
//! The process has to be able to read its maps and its own memory: of a worker, one without a
//! filter of system calls, which is the stronger attacker. Memory is accessed by `process_vm_readv`
//! and `process_vm_writev` on this process, so what is not there is an error and no fault.

use std::fs;
use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::RawFd;

use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::{Pid, getpid};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

/// Bytes of a read that attacks.
pub const ATTACK_BYTES: u32 = 512;
/// Distance of the read that searches from the end of the disk, in bytes.
pub const SCAN: u64 = 512;
/// Distance of the read that fills shared memory from the end of the disk, in bytes.
pub const SCRIBBLE: u64 = 1024;
/// Word in the place of one that was found.
pub const OVERWRITTEN: u64 = 0x4141_4141_4141_4141;
/// Serial number of a disk that `exitless-lab device-worker` attacks with.
pub const SCANNING_ID: &str = "scan-memory";

/// Words are known by their products with this, so that the search itself holds none.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const SECRET_PRODUCT: u64 = 0x5ec2_e7c0_ffee_0001;
const OWN_PRODUCT: u64 = 0x0a11_0fa1_1dea_0003;
/// Bytes that are read at a time.
const CHUNK: usize = 1 << 20;
const PAGE: u64 = 4096;

/// Returns the word of pages that no request names.
pub fn secret() -> u64 {
    word(SECRET_PRODUCT)
}

/// Returns the word of the guest's requests.
pub fn own() -> u64 {
    word(OWN_PRODUCT)
}

fn word(product: u64) -> u64 {
    // Newton's iteration for the inverse modulo 2^64 of an odd number: the number of right bits,
    // 3 at first (x is its own inverse modulo 8), doubles each time.
    let factor = black_box(FACTOR);
    let inverse = (0..5).fold(factor, |inverse, _| {
        inverse.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(inverse)))
    });
    inverse.wrapping_mul(black_box(product))
}

/// Result of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanReport {
    /// Bytes of memory that were read.
    pub bytes_read: u64,
    /// Bytes found of words that no request names.
    pub secret_bytes: u64,
    /// Pages with such words.
    pub secret_pages: u64,
    /// Bytes found of words of requests.
    pub own_bytes: u64,
    /// Bytes overwritten, of either.
    pub overwritten: u64,
}

impl ScanReport {
    /// Bytes of a report in a read's data.
    pub const BYTES: usize = 40;

    fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [
            self.bytes_read,
            self.secret_bytes,
            self.secret_pages,
            self.own_bytes,
            self.overwritten,
        ];
        for (to, word) in bytes.chunks_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a report from a read's data.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * at..][..8]);
            u64::from_le_bytes(word)
        };
        Self {
            bytes_read: word(0),
            secret_bytes: word(1),
            secret_pages: word(2),
            own_bytes: word(3),
            overwritten: word(4),
        }
    }
}

/// A mapping of this process.
struct Mapping {
    start: u64,
    end: u64,
    is_writable: bool,
    is_shared: bool,
}

impl Mapping {
    /// Reads a line of `/proc/self/maps`; `None` for one that cannot be read.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?.as_bytes();
        let address = |text| u64::from_str_radix(text, 16).ok();
        (rights[0] == b'r').then_some(Self {
            start: address(start)?,
            end: address(end)?,
            is_writable: rights[1] == b'w',
            is_shared: rights[3] == b's',
        })
    }
}

fn mappings() -> Vec<Mapping> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(Mapping::parse).collect()
}

/// Reads memory of this process; the number of bytes that are there.
fn peek(pid: Pid, at: u64, bytes: &mut [u8]) -> usize {
    let len = bytes.len();
    let from = RemoteIoVec {
        base: at as usize,
        len,
    };
    process_vm_readv(pid, &mut [IoSliceMut::new(bytes)], &[from]).unwrap_or(0)
}

/// Writes memory of this process; whether it could be.
fn poke(pid: Pid, at: u64, bytes: &[u8]) -> bool {
    let to = RemoteIoVec {
        base: at as usize,
        len: bytes.len(),
    };
    process_vm_writev(pid, &[IoSlice::new(bytes)], &[to]) == Ok(bytes.len())
}

/// Searches all of memory.
fn scan() -> ScanReport {
    let pid = getpid();
    let mut report = ScanReport::default();
    let mut chunk = vec![0; CHUNK];
    let chunk_start = chunk.as_ptr() as u64;
    let factor = black_box(FACTOR);
    for mapping in mappings() {
        let mut at = mapping.start;
        while at < mapping.end {
            let wanted = (mapping.end - at).min(CHUNK as u64) as usize;
            let read = peek(pid, at, &mut chunk[..wanted]);
            report.bytes_read += read as u64;
            let mut last_page = None;
            for (index, bytes) in chunk[..read].chunks_exact(8).enumerate() {
                let mut word = [0; 8];
                word.copy_from_slice(bytes);
                let product = u64::from_le_bytes(word).wrapping_mul(factor);
                let address = at + 8 * index as u64;
                // Its own copy of what it reads.
                let is_chunk = (chunk_start..chunk_start + CHUNK as u64).contains(&address);
                if is_chunk || ![SECRET_PRODUCT, OWN_PRODUCT].contains(&product) {
                    continue;
                }
                if product == SECRET_PRODUCT {
                    report.secret_bytes += 8;
                    let page = Some(address / PAGE);
                    report.secret_pages += u64::from(last_page != page);
                    last_page = page;
                } else {
                    report.own_bytes += 8;
                }
                if mapping.is_writable && poke(pid, address, &OVERWRITTEN.to_le_bytes()) {
                    report.overwritten += 8;
                }
            }
            // What cannot be read is passed over by pages.
            at += (read as u64).max(PAGE);
        }
    }
    report
}

/// Fills all that this process shares with others.
fn scribble() {
    let pid = getpid();
    let ones = vec![0xff; CHUNK];
    for mapping in mappings() {
        if !(mapping.is_shared && mapping.is_writable) {
            continue;
        }
        let mut at = mapping.start;
        while at < mapping.end {
            let len = (mapping.end - at).min(CHUNK as u64);
            let _ = poke(pid, at, &ones[..len as usize]);
            at += len;
        }
    }
}

/// A disk that attacks. See the head of the module.
pub struct ScanDisk {
    below: Box<dyn BlockIo>,
    /// Attacks that are over.
    done: Vec<Completion>,
}

impl ScanDisk {
    /// Attacks from above `below`, which moves data directly.
    pub fn new(below: Box<dyn BlockIo>) -> Self {
        Self {
            below,
            done: Vec::new(),
        }
    }

    /// Returns whether `op` is an attack: its distance from the end.
    fn attack(&self, op: Op) -> Option<u64> {
        let Op::Read { offset, len } = op else {
            return None;
        };
        let distance = self.below.capacity().checked_sub(offset)?;
        let is_attack = len == ATTACK_BYTES && [SCAN, SCRIBBLE].contains(&distance);
        is_attack.then_some(distance)
    }
}

impl BlockIo for ScanDisk {
    pass_down!();

    fn submit(&mut self, slot: u32, op: Op, pieces: &[Piece]) {
        match self.attack(op) {
            None => return self.below.submit(slot, op, pieces),
            Some(SCAN) => {
                let report = scan().bytes();
                if let Some(piece) = pieces.first() {
                    poke(getpid(), piece.hva.raw(), &report);
                }
            }
            Some(_) => scribble(),
        }
        let outcome = Outcome::Done;
        self.done.push(Completion { slot, outcome });
    }

    fn flush(&mut self) {
        self.below.flush();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
        self.below.poll(done);
    }

    fn has_completions(&mut self) -> bool {
        !self.done.is_empty() || self.below.has_completions()
    }

    fn cancel(&mut self, slot: u32) {
        self.below.cancel(slot);
    }

    fn arm(&mut self) {
        self.below.arm();
    }

    fn disarm(&mut self) {
        self.below.disarm();
    }

    fn wake_fds(&self, fds: &mut Vec<RawFd>) {
        self.below.wake_fds(fds);
    }
}
