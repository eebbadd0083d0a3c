//! The processor's tables: pages, segments, and two interrupt tables, the own one and the thief's.
//!
//! Both interrupt tables are a page each, as Linux's is. The 2 MiB around the own one are mapped by
//! 4 KiB pages, so that its virtual page can be made to show the thief's without an instruction
//! that a hypervisor could intercept.
//!
//! Handlers have stacks of their own, by the task state segment: the precompiled core writes below
//! its stack pointer (the red zone), where the processor would put an interrupt's frame. Interrupts
//! nest only into a higher class, so one stack for each class in use is enough.

use core::arch::asm;
use core::cell::UnsafeCell;

const PAGE: usize = 4096;
/// In a page table: present, writable.
const MAPPED: u64 = 3;
/// In a page directory: a page itself, not a table of them.
const LARGE: u64 = 1 << 7;
/// In a gate: present.
const PRESENT: u64 = 1 << 47;
/// In a gate: present, an interrupt gate, for the code segment 8 (boot.s).
const GATE: u64 = 0x8e << 40 | 8 << 16;

/// A page of memory that the processor or a device reads, as 64-bit words.
#[repr(C, align(4096))]
pub struct Page(UnsafeCell<[u64; PAGE / 8]>);

// SAFETY: it is only ever read and written by its raw pointer.
unsafe impl Sync for Page {}

impl Page {
    /// All zero.
    pub const fn new() -> Self {
        Self(UnsafeCell::new([0; PAGE / 8]))
    }

    /// Returns its address: virtual and, but for the thief's trick, physical.
    pub fn address(&self) -> u64 {
        self.0.get() as u64
    }

    /// Reads a word.
    pub fn get(&self, index: usize) -> u64 {
        // SAFETY: within the page; volatile, since others write it too.
        unsafe {
            self.0
                .get()
                .cast::<u64>()
                .add(index % (PAGE / 8))
                .read_volatile()
        }
    }

    /// Writes a word.
    pub fn set(&self, index: usize, value: u64) {
        // SAFETY: within the page, to which there are no references; what a processor's table does
        // with the value is this module's concern.
        unsafe {
            self.0
                .get()
                .cast::<u64>()
                .add(index % (PAGE / 8))
                .write_volatile(value)
        }
    }
}

/// The first GiB, by 2 MiB.
static DIRECTORY: Page = Page::new();
/// The 2 MiB around the own interrupt table, by 4 KiB.
static TABLE: Page = Page::new();
/// The guest's interrupt table.
static OWN: Page = Page::new();
/// The thief's.
static THIEF: Page = Page::new();
/// Segments, and behind them, from [`STATE`] on, the task state.
static SEGMENTS: Page = Page::new();
/// The handlers' stacks, two pages each.
static STACKS: [Page; 2 * STACKS_LEN] = [const { Page::new() }; 2 * STACKS_LEN];

const STACKS_LEN: usize = 7;
/// The task state's offset in [`SEGMENTS`], bytes.
const STATE: u64 = 2048;
/// Its length, bytes.
const STATE_LEN: u64 = 104;
/// Its selector.
const STATE_SELECTOR: u16 = 24;
/// The selector of 32-bit code: the last.
pub const CODE_32: u64 = 40;

unsafe extern "C" {
    /// The third level of the tables that boot.s makes.
    static bare_pdpt: Page;
    /// The first of 512 entries of 16 bytes.
    static attacks_stubs: u8;
}

/// Returns the stack for a vector, from 1 on: no two that can nest have the same.
fn stack(vector: usize) -> usize {
    match vector {
        2 => 1,
        0..0x20 => 2,
        0x20..0x40 => 3,
        0x40..0x60 => 4,
        0x60..0x80 => 5,
        0x80..0xf0 => 6,
        _ => 7,
    }
}

/// Builds the tables, and makes the processor use them.
///
/// # Safety
/// Once, with interrupts off, in the tables of boot.s.
pub unsafe fn init() {
    let around = OWN.address() >> 21;
    for index in 0..512 {
        DIRECTORY.set(index, (index as u64) << 21 | MAPPED | LARGE);
        TABLE.set(index, around << 21 | (index as u64) << 12 | MAPPED);
    }
    // The image is in the first GiB: it lies at 1 MiB (build.rs).
    DIRECTORY.set(around as usize, TABLE.address() | MAPPED);
    for number in 0..256 {
        set_gate(&OWN, number, number);
        set_gate(&THIEF, number, number + 256);
    }

    SEGMENTS.set(1, 0x00af_9b00_0000_ffff);
    SEGMENTS.set(2, 0x00cf_9300_0000_ffff);
    let state = SEGMENTS.address() + STATE;
    let low = (state & 0xff_ffff) << 16 | (state >> 24 & 0xff) << 56;
    SEGMENTS.set(3, low | 0x89 << 40 | (STATE_LEN - 1));
    SEGMENTS.set(4, state >> 32);
    SEGMENTS.set(CODE_32 as usize / 8, 0x00cf_9b00_0000_ffff);
    for index in 0..STACKS_LEN {
        // The stacks' addresses begin at offset 36, which is odd: low half, high half (it is 0: the
        // image is low).
        let top = STACKS[2 * index].address() + 2 * PAGE as u64;
        let at = (STATE as usize + 36 + 8 * index) / 8;
        SEGMENTS.set(at, SEGMENTS.get(at) & 0xffff_ffff | top << 32);
        SEGMENTS.set(at + 1, top >> 32);
    }

    // SAFETY: the caller's: the new tables map what the old ones did, and the segments are the
    // same.
    unsafe {
        bare_pdpt.set(0, DIRECTORY.address() | MAPPED);
        asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _, options(nostack));
        load(
            &SEGMENTS,
            CODE_32 as u16 + 7,
            |at| asm!("lgdt [{}]", in(reg) at, options(nostack)),
        );
        asm!("ltr {0:x}", in(reg) STATE_SELECTOR, options(nostack));
        load(
            &OWN,
            PAGE as u16 - 1,
            |at| asm!("lidt [{}]", in(reg) at, options(nostack)),
        );
    }
}

fn load(page: &Page, limit: u16, instruction: impl FnOnce(*const u8)) {
    load_at(page.address(), limit, instruction);
}

/// Calls with the address of a table's limit and address, as LGDT and LIDT read it.
fn load_at(address: u64, limit: u16, instruction: impl FnOnce(*const u8)) {
    let mut operand = [0; 10];
    operand[..2].copy_from_slice(&limit.to_le_bytes());
    operand[2..].copy_from_slice(&address.to_le_bytes());
    instruction(operand.as_ptr());
}

fn set_gate(table: &Page, vector: usize, number: usize) {
    let handler = &raw const attacks_stubs as u64 + 16 * number as u64;
    let low = handler & 0xffff | (handler >> 16 & 0xffff) << 48;
    table.set(2 * vector + 1, handler >> 32);
    table.set(2 * vector, GATE | (stack(vector) as u64) << 32 | low);
}

/// Makes the stack of exceptions another one, which ends at `top`.
pub fn set_exceptions_stack(top: u64) {
    let at = (STATE as usize + 36 + 8 * (stack(6) - 1)) / 8;
    SEGMENTS.set(at, SEGMENTS.get(at) & 0xffff_ffff | top << 32);
    SEGMENTS.set(at + 1, SEGMENTS.get(at + 1) & !0xffff_ffff | top >> 32);
}

/// Returns the end of the stack of exceptions, as it is at first.
pub fn exceptions_stack() -> u64 {
    STACKS[2 * (stack(6) - 1)].address() + 2 * PAGE as u64
}

/// Loads an interrupt table from another address; the own one's is [`own_table`]. A short limit
/// leaves no gate.
pub fn load_interrupts(address: u64, limit: u16) {
    load_at(
        address,
        limit,
        // SAFETY: what becomes of the guest is the caller's purpose.
        |at| unsafe { asm!("lidt [{}]", in(reg) at, options(nostack)) },
    );
}

/// Returns the address of the own interrupt table.
pub fn own_table() -> u64 {
    OWN.address()
}

/// Returns the place of the page table entry of the own interrupt table, and its value.
pub fn own_slot() -> (u64, u64) {
    let index = (OWN.address() >> 12) as usize % 512;
    (TABLE.address() + 8 * index as u64, TABLE.get(index))
}

/// Returns the page directory of the first GiB, and the root of the page tables.
pub fn directory() -> u64 {
    DIRECTORY.address()
}

/// See [`directory`].
pub fn root() -> u64 {
    let root;
    // SAFETY: reading it changes nothing.
    unsafe { asm!("mov {}, cr3", out(reg) root, options(nomem, nostack, preserves_flags)) }
    root
}

/// Returns a virtual address whose page table is at the physical `table`.
pub fn map_through(table: u64) -> u64 {
    const INDEX: usize = 256;
    DIRECTORY.set(INDEX, table | MAPPED);
    let address = (INDEX as u64) << 21;
    // SAFETY: nothing uses the 2 MiB.
    unsafe { asm!("invlpg [{}]", in(reg) address, options(nostack, preserves_flags)) }
    address
}

/// Makes a gate of the own table present, or not.
pub fn set_present(vector: u8, is_present: bool) {
    let at = 2 * usize::from(vector);
    let others = OWN.get(at) & !PRESENT;
    OWN.set(at, if is_present { others | PRESENT } else { others });
}

/// Makes the own table's virtual page show the thief's, or the own one again.
pub fn show_thief(is_thief: bool) {
    let page = if is_thief { &THIEF } else { &OWN };
    TABLE.set(
        (OWN.address() >> 12) as usize % 512,
        page.address() | MAPPED,
    );
    // SAFETY: the page's translation was changed; both pages hold an interrupt table.
    unsafe { asm!("invlpg [{}]", in(reg) OWN.address(), options(nostack, preserves_flags)) }
}
