//! Stores that are about to overwrite a whole absent page: decided from the vCPU's registers, so
//! that the page is not read first.
//!
//! The part of VSwapper's False Reads Preventer that needs to examine one instruction: one that
//! stores all of a page by itself, REP STOS (zeroing, filling) or REP MOVS (copying). Instructions
//! are described after the *Intel 64 and IA-32 Architectures Software Developer's Manual*, named by
//! titles, as its chapters' numbers move: vol. 2, «Instruction Format», «REP», «STOS», «MOVS»; vol.
//! 3, «Paging»; and AMD's *Architecture Programmer's Manual* where the two differ.
//!
//! A vCPU's store meets an absent page. The pager, which resolves that fault, stops the vCPU, takes
//! its [`Registers`], and calls [`decide`]. Either the instruction at RIP is certain to overwrite
//! the page, and no other vCPU or device can observe a step in between; then the page, still
//! absent, gets [`Overwrite::content`], and the vCPU [`Overwrite::after`], as if the processor had
//! done that many iterations and been interrupted, or had completed the instruction. Or it is
//! undecided, `None` throughout this module, and the page is fetched: always right, only slower. So
//! every unusual, rare or unknown case is undecided.
//!
//! ```text
//! decide ─ mode known? RDI at the page's start, going up? ─ walk RDI: this page? ─ fetch at RIP, decode ─ RCX enough for a page?
//!                                                      MOVS: walk RSI, twice if it lies across pages ─ all of it in memory?
//! ```
//!
//! * It does not matter which vCPU faulted: any vCPU that is about to overwrite the page may do so
//!   now.
//! * The instruction has stored nothing of the page yet, since RDI is at its start, and the page is
//!   absent.
//! * A copy whose source is the page itself, by whatever linear address, is undecided. Any other
//!   source is read at some moment while the vCPU is stopped, as a processor would read it at some
//!   moment: stores of other vCPUs come before or after that.
//! * Other vCPUs go on meanwhile and may change tables and code. Of those each word is read once,
//!   and what has been read stays good until the stopped vCPU takes part in the invalidation
//!   (paging) or serializes (code).
//!
//! Called by the pager. No page that is present may leave from [`decide`] on until content and
//! registers are both in place. No system call, thread or time; it never waits. Bound: 25 table
//! entries, 15 bytes of instruction, and the source's page.
//!
//! Left out: a page whose start lies in the middle of an element (RDI is never at its start); plain
//! stores and those of vectors, of which a page takes many; REP STOS and MOVS going down; modes
//! other than 64-bit mode; 32-bit addresses, FS and GS. Known only to the caller: a debugger of the
//! VMM's that steps the vCPU. Not seen: a branch target that CET would refuse, if the vCPU was
//! stopped right before it; instructions that a guest's performance counters count.

mod instruction;
mod memory;
mod paging;
mod registers;
#[cfg(test)]
mod tests;

use guest_mem::{Gpa, PAGE_SIZE};

use instruction::{Decoded, MAX_LEN, Operation, Repeated, decode};
pub use memory::Memory;
use memory::Without;
use paging::{Access, Paging};
pub use registers::Registers;
use registers::{RFLAGS_DF, RFLAGS_RF};

/// Content that a page is overwritten with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The same eight bytes repeated: STOS.
    Fill([u8; 8]),
    /// A page's worth of bytes from elsewhere: MOVS.
    Copy(Source),
}

/// The 4096 bytes that a page is a copy of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of the first byte. The bytes go on to the end of the 4 KiB page that this lies in.
    pub start: Gpa,
    /// The page whose first bytes are the rest, unless `start` is the start of a page.
    pub rest: Option<Gpa>,
}

/// An instruction's effect on one whole page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overwrite {
    effect: Effect,
    after: Registers,
}

/// Decides whether the instruction that a vCPU is at overwrites all of the 4 KiB page at `page`,
/// and does so next.
///
/// `None`: undecided. Nothing was changed, and nothing of that page was read.
pub fn decide(registers: &Registers, memory: &mut impl Memory, page: Gpa) -> Option<Overwrite> {
    let paging = Paging::of(registers)?;
    let goes_down = registers.rflags & RFLAGS_DF != 0;
    if !registers.iterates_undisturbed() || goes_down || !registers.rdi.is_multiple_of(PAGE_SIZE) {
        return None;
    }
    let memory = &mut Without { memory, page };
    if paging.translate(memory, registers.rdi, Access::Write)? != page {
        return None;
    }
    let instruction = fetch(&paging, memory, registers.rip)?;
    // Elements are 1, 2, 4 or 8 bytes: as many as fill the page end where it ends.
    let iterations = PAGE_SIZE / instruction.size;
    let left = registers.rcx.checked_sub(iterations)?;
    let effect = match instruction.operation {
        Operation::Stos => Effect::Fill(pattern(registers.rax, instruction.size)),
        Operation::Movs => {
            let is_aligned = registers.rsi.is_multiple_of(instruction.size);
            if registers.checks_alignment() && !is_aligned {
                return None;
            }
            Effect::Copy(source(&paging, memory, registers.rsi)?)
        }
    };
    // A vCPU cannot be resumed at an address that is not canonical.
    let next = registers.rip.checked_add(instruction.len)?;
    if !paging.is_canonical(next) {
        return None;
    }

    // Neither STOS nor MOVS changes the flags of arithmetic. RF is clear after any instruction that
    // completes, and set in what is saved between two iterations. Addresses wrap at 2^64, as the
    // processor's do.
    let mut after = *registers;
    after.rcx = left;
    after.rdi = registers.rdi.wrapping_add(PAGE_SIZE);
    if instruction.operation == Operation::Movs {
        after.rsi = registers.rsi.wrapping_add(PAGE_SIZE);
    }
    if left == 0 {
        after.rip = next;
        after.rflags &= !RFLAGS_RF;
    } else {
        after.rflags |= RFLAGS_RF;
    }
    Some(Overwrite { effect, after })
}

impl Overwrite {
    /// Returns the content that is stored.
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// Writes the page's content after the overwrite to `into`. `None` if a page of the source has
    /// left memory since it was [decided](decide); then part of `into` has been written.
    pub fn content(
        &self,
        memory: &mut impl Memory,
        into: &mut [u8; PAGE_SIZE as usize],
    ) -> Option<()> {
        match self.effect {
            Effect::Fill(pattern) => {
                for chunk in into.chunks_exact_mut(pattern.len()) {
                    chunk.copy_from_slice(&pattern);
                }
            }
            Effect::Copy(Source { start, rest }) => {
                let (first, second) = into.split_at_mut(start.left_in_page() as usize);
                memory.bytes(start, first)?;
                if let Some(rest) = rest {
                    memory.bytes(rest, second)?;
                }
            }
        }
        Some(())
    }

    /// Returns the registers once the page is overwritten: RCX, RDI, RSI (MOVS), and RIP and
    /// RFLAGS.RF have changed, the others have not.
    pub fn after(&self) -> &Registers {
        &self.after
    }
}

/// Fetches the instruction at RIP. Its second page, if it may have one, is read only if the first
/// does not suffice.
fn fetch(paging: &Paging, memory: &mut impl Memory, rip: u64) -> Option<Repeated> {
    let mut bytes = [0; MAX_LEN];
    let mut len = 0;
    while len < MAX_LEN {
        let linear = rip.checked_add(len as u64)?;
        let at = paging.translate(memory, linear, Access::Fetch)?;
        let end = MAX_LEN.min(len + at.left_in_page() as usize);
        memory.bytes(at, &mut bytes[len..end])?;
        len = end;
        match decode(&bytes[..len]) {
            Decoded::Repeated(instruction) => return Some(instruction),
            Decoded::Other => return None,
            Decoded::Truncated => {}
        }
    }
    None
}

/// Returns the eight bytes that result when the lowest `size` bytes of RAX are stored repeatedly.
fn pattern(rax: u64, size: u64) -> [u8; 8] {
    let rax = rax.to_le_bytes();
    std::array::from_fn(|i| rax[i % size as usize])
}

/// Returns the location of the 4096 bytes from `rsi` on, all of them in memory.
fn source(paging: &Paging, memory: &mut impl Memory, rsi: u64) -> Option<Source> {
    let start = readable(paging, memory, rsi)?;
    let rest = match start.left_in_page() {
        PAGE_SIZE => None,
        first => Some(readable(paging, memory, rsi.checked_add(first)?)?),
    };
    Some(Source { start, rest })
}

/// Returns the location of a linear address that can be read, in a page that is in memory.
fn readable(paging: &Paging, memory: &mut impl Memory, linear: u64) -> Option<Gpa> {
    let at = paging.translate(memory, linear, Access::Read)?;
    memory.word(at.align_down(8))?;
    Some(at)
}
