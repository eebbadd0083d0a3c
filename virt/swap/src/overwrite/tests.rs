//! A guest whose memory and tables are laid out by hand, and checks against it.
//!
//! Table entries and instructions are literals worked out from the manuals, not made of the
//! constants that they test.

mod decisions;
mod encodings;
mod hostile;
mod replay;
mod walks;

use std::collections::BTreeSet;

use super::*;

/// Bytes of a page, as an index.
const PAGE_LEN: usize = 4096;
/// Frames of the guest: 1 to 4 are tables, the others can be mapped.
const FRAMES: usize = 128;
/// Linear address of the first page of the last table: PML4 entry 256, the lowest of the upper
/// half.
const BASE: u64 = 0xffff_8000_0000_0000;
/// Pages of code, in frames that do not follow each other.
const CODE: u64 = BASE;
const CODE_FRAMES: [u64; 2] = [8, 11];
/// The page that is overwritten, and its frame.
const TARGET: u64 = BASE + 0x10_000;
const TARGET_FRAME: u64 = 20;
/// Pages that are copied from, in frames that do not follow each other.
const SOURCE: u64 = BASE + 0x20_000;
const SOURCE_FRAMES: [u64; 2] = [24, 27];
/// Entries of a kernel's tables: present, writable, accessed, dirty; and the same for a user.
const KERNEL: u64 = 0x063;
const USER: u64 = 0x067;

/// Memory of a few frames, some of them absent.
struct Guest {
    bytes: Vec<u8>,
    absent: BTreeSet<u64>,
    /// Frame that must not be accessed.
    forbidden: Option<u64>,
    asked: usize,
}

impl Guest {
    /// Creates memory with tables that map code, source and target.
    fn new() -> Self {
        let mut guest = Self {
            bytes: vec![0; FRAMES * PAGE_LEN],
            absent: BTreeSet::new(),
            forbidden: None,
            asked: 0,
        };
        guest.put(0x1800, 0x2000 | KERNEL);
        guest.put(0x2000, 0x3000 | KERNEL);
        guest.put(0x3000, 0x4000 | KERNEL);
        for (at, frame) in [
            (CODE, CODE_FRAMES[0]),
            (CODE + 0x1000, CODE_FRAMES[1]),
            (TARGET, TARGET_FRAME),
            (SOURCE, SOURCE_FRAMES[0]),
            (SOURCE + 0x1000, SOURCE_FRAMES[1]),
        ] {
            guest.map(at, frame, KERNEL);
        }
        guest
    }

    /// Maps a page of the last table's first 2 MiB.
    fn map(&mut self, linear: u64, frame: u64, flags: u64) {
        self.put(
            0x4000 + (linear - BASE) / 0x1000 * 8,
            (frame * 0x1000) | flags,
        );
    }

    fn put(&mut self, gpa: u64, word: u64) {
        self.store(gpa, &word.to_le_bytes());
    }

    fn store(&mut self, gpa: u64, bytes: &[u8]) {
        self.bytes[gpa as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Places an instruction at a linear address of the code's two pages.
    fn code(&mut self, linear: u64, bytes: &[u8]) {
        for (linear, byte) in (linear..).zip(bytes) {
            let frame = CODE_FRAMES[((linear - CODE) / 0x1000) as usize];
            self.store(frame * 0x1000 + linear % 0x1000, &[*byte]);
        }
    }

    fn frame(&self, frame: u64) -> &[u8] {
        &self.bytes[frame as usize * PAGE_LEN..][..PAGE_LEN]
    }

    /// Returns the position of `len` bytes at `at`.
    fn find(&mut self, at: Gpa, len: usize) -> Option<usize> {
        self.asked += 1;
        let frame = at.raw() / 0x1000;
        assert_ne!(Some(frame), self.forbidden);
        assert!(at.raw() % 0x1000 + len as u64 <= 0x1000, "in one page");
        let is_present = frame < FRAMES as u64 && !self.absent.contains(&frame);
        is_present.then_some(at.raw() as usize)
    }
}

impl Memory for Guest {
    fn word(&mut self, at: Gpa) -> Option<u64> {
        assert_eq!(at.raw() % 8, 0);
        let mut word = [0; 8];
        self.bytes(at, &mut word)?;
        Some(u64::from_le_bytes(word))
    }

    fn bytes(&mut self, at: Gpa, into: &mut [u8]) -> Option<()> {
        let start = self.find(at, into.len())?;
        into.copy_from_slice(&self.bytes[start..][..into.len()]);
        Some(())
    }
}

/// Returns the registers of a Linux kernel on a processor with SMEP, SMAP, PCID and UMIP, without a
/// hypervisor of its own.
fn kernel() -> Registers {
    Registers {
        rip: CODE + 0x100,
        rax: 0x1122_3344_5566_7788,
        rcx: 0x10_0000,
        rsi: SOURCE,
        rdi: TARGET,
        rflags: 0x1_0246,
        cr0: 0x8005_0033,
        cr3: 0x1000,
        cr4: 0x0037_0ef0,
        efer: 0xd01,
        dr7: 0x400,
        pkru: None,
        cpl: 0,
        cs_l: true,
        cs_d: false,
        is_at_instruction: true,
    }
}

/// Returns the same registers in user mode.
fn user() -> Registers {
    Registers { cpl: 3, ..kernel() }
}
