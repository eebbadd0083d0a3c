//! A disk whose device model has been compromised: it searches its process's memory for data that a
//! guest has not passed to the disk, and overwrites what it finds.
//!
//! Two reads, of the disk's last blocks, trigger an attack. All other requests are passed on.
//!
//! * [`SCAN`]: each readable mapping of the process (`/proc/self/maps`) is searched for two words.
//!   Each that is found in a writable mapping is overwritten with [`OVERWRITTEN`]. The word
//!   [`secret`] is in guest pages that no request names. The word [`own`] is in data that the guest
//!   has written to the disk: that it is found shows that the search works. The read returns a
//!   [`ScanReport`].
//! * [`SCRIBBLE`]: each mapping that is shared and writable is filled with ones, rings included.
//!
//! The process must be able to read its maps and its own memory, as a worker without a filter of
//! system calls can, which is the stronger attacker. Memory is accessed by `process_vm_readv` and
//! `process_vm_writev` on the process itself, so an unmapped address is an error and no fault.

use std::fs;
use std::hint::black_box;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::RawFd;

use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::{Pid, getpid};
use vio::blk::{BlockIo, Completion, Op, Outcome, Piece};
use vio::pass_down;

/// Bytes of a read that triggers an attack.
pub const ATTACK_BYTES: u32 = 512;
/// Distance of the read that starts the search from the end of the disk, in bytes.
pub const SCAN: u64 = 512;
/// Distance of the read that overwrites shared memory from the end of the disk, in bytes.
pub const SCRIBBLE: u64 = 1024;
/// Word that overwrites a word that was found.
pub const OVERWRITTEN: u64 = 0x4141_4141_4141_4141;
/// Serial number that makes `exitless-lab device-worker` use this disk.
pub const SCANNING_ID: &str = "scan-memory";

/// The words are identified by their products with this factor, so that the search code itself does
/// not contain them.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const SECRET_PRODUCT: u64 = 0x5ec2_e7c0_ffee_0001;
const OWN_PRODUCT: u64 = 0x0a11_0fa1_1dea_0003;
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
const PAGE: u64 = 4096;

/// Returns the word in pages that no request names.
pub fn secret() -> u64 {
    word(SECRET_PRODUCT)
}

/// Returns the word in the data of the guest's requests.
pub fn own() -> u64 {
    word(OWN_PRODUCT)
}

fn word(product: u64) -> u64 {
    // Newton's iteration for the inverse of an odd number modulo 2^64. The number of correct bits
    // doubles each time, from 3 at first (an odd x is its own inverse modulo 8).
    let factor = black_box(FACTOR);
    let inverse = (0..5).fold(factor, |inverse, _| {
        inverse.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(inverse)))
    });
    inverse.wrapping_mul(black_box(product))
}

/// Result of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanReport {
    /// Bytes of memory read.
    pub bytes_read: u64,
    /// Bytes found of the word [`secret`].
    pub secret_bytes: u64,
    /// Number of pages that contain it.
    pub secret_pages: u64,
    /// Bytes found of the word [`own`].
    pub own_bytes: u64,
    /// Bytes overwritten, of both kinds.
    pub overwritten: u64,
}

impl ScanReport {
    /// Length of a report in a read's data, in bytes.
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

    /// Decodes a report from a read's data.
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

/// A readable mapping of this process.
struct Mapping {
    start: u64,
    end: u64,
    is_writable: bool,
    is_shared: bool,
}

impl Mapping {
    /// Parses a line of `/proc/self/maps`. Returns `None` for a mapping that is not readable.
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

/// Reads memory of this process. Returns the number of bytes read.
fn peek(pid: Pid, at: u64, bytes: &mut [u8]) -> usize {
    let len = bytes.len();
    let from = RemoteIoVec {
        base: at as usize,
        len,
    };
    process_vm_readv(pid, &mut [IoSliceMut::new(bytes)], &[from]).unwrap_or(0)
}

/// Writes memory of this process. Returns whether all bytes were written.
fn poke(pid: Pid, at: u64, bytes: &[u8]) -> bool {
    let to = RemoteIoVec {
        base: at as usize,
        len: bytes.len(),
    };
    process_vm_writev(pid, &[IoSlice::new(bytes)], &[to]) == Ok(bytes.len())
}

/// Searches all readable memory of this process.
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
                // Skips the buffer that this function reads into.
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
            // Memory that cannot be read is skipped page by page.
            at += (read as u64).max(PAGE);
        }
    }
    report
}

/// Fills all memory that this process shares with others.
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

/// A disk that attacks; see the module's description.
pub struct ScanDisk {
    below: Box<dyn BlockIo>,
    /// Completions of attacks.
    done: Vec<Completion>,
}

impl ScanDisk {
    /// Creates the disk in front of `below`, which transfers data directly.
    pub fn new(below: Box<dyn BlockIo>) -> Self {
        Self {
            below,
            done: Vec::new(),
        }
    }

    /// Returns the distance from the end of the disk if `op` triggers an attack.
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
