//! The virtual machine control block (APM 2, appendix B): what exits, how an entry begins, and the
//! guest's state that VMRUN loads.

use crate::memory::Page;

/// A field: its offset, bytes, and its type.
pub struct Field<T>(usize, core::marker::PhantomData<T>);

const fn at<T>(offset: usize) -> Field<T> {
    Field(offset, core::marker::PhantomData)
}

/// Control registers whose accesses exit: reads, and 16 bits above them writes.
pub const CR: Field<u32> = at(0x00);
/// Debug registers whose accesses exit: reads, and 16 bits above them writes.
pub const DR: Field<u32> = at(0x04);
/// Exceptions that exit.
pub const EXCEPTIONS: Field<u32> = at(0x08);
/// Instructions and interrupts that exit.
pub const INTERCEPTS: Field<u32> = at(0x0c);
/// The same, SVM's own instructions.
pub const INTERCEPTS_SVM: Field<u32> = at(0x10);
/// Physical address of the map of I/O ports.
pub const IO_MAP: Field<u64> = at(0x40);
/// Physical address of the map of model-specific registers.
pub const MSR_MAP: Field<u64> = at(0x48);
/// Address space identifier.
pub const ASID: Field<u32> = at(0x58);
/// Effect of VMRUN on the TLB.
pub const TLB: Field<u8> = at(0x5c);
/// Virtual interrupts.
pub const INTERRUPTS: Field<u32> = at(0x60);
/// Bit 0: the guest is behind STI or a load of SS.
pub const SHADOW: Field<u32> = at(0x68);
/// Reason of the exit; three words about it follow.
pub const EXIT: Field<u64> = at(0x70);
/// The first.
pub const EXIT_INFO1: Field<u64> = at(0x78);
/// The second.
pub const EXIT_INFO2: Field<u64> = at(0x80);
/// Event whose delivery the exit interrupted.
pub const EXIT_DURING: Field<u64> = at(0x88);
/// Nested paging.
pub const NESTED: Field<u64> = at(0x90);
/// Address to which an injected INT instruction's event returns, for processors that save it.
pub const NEXT_RIP: Field<u64> = at(0xc8);
/// An event to begin with.
pub const EVENT: Field<u64> = at(0xa8);
/// Physical address of the nested page tables.
pub const NESTED_CR3: Field<u64> = at(0xb0);

/// Attributes of CS.
pub const CS_ATTRIBUTES: Field<u16> = at(0x412);
/// Limit of the interrupt descriptor table.
pub const IDTR_LIMIT: Field<u32> = at(0x484);
/// Base of it.
pub const IDTR_BASE: Field<u64> = at(0x488);
/// Base of the code segment.
pub const CS_BASE: Field<u64> = at(0x418);
/// Current privilege level.
pub const CPL: Field<u8> = at(0x4cb);
/// Extended features.
pub const EFER: Field<u64> = at(0x4d0);
/// CR4.
pub const CR4: Field<u64> = at(0x548);
/// CR3.
pub const CR3: Field<u64> = at(0x550);
/// CR0.
pub const CR0: Field<u64> = at(0x558);
/// Debug control.
pub const DR7: Field<u64> = at(0x560);
/// Debug status.
pub const DR6: Field<u64> = at(0x568);
/// Flags.
pub const RFLAGS: Field<u64> = at(0x570);
/// Instruction pointer.
pub const RIP: Field<u64> = at(0x578);
/// Stack pointer.
pub const RSP: Field<u64> = at(0x5d8);
/// rax; the other registers are not in the block.
pub const RAX: Field<u64> = at(0x5f8);
/// CR2.
pub const CR2: Field<u64> = at(0x640);
/// Page attribute table.
pub const PAT: Field<u64> = at(0x668);

/// In [`INTERCEPTS`].
pub mod intercept {
    /// Physical interrupts.
    pub const INTR: u32 = 1;
    /// Non-maskable ones.
    pub const NMI: u32 = 1 << 1;
    /// The guest could take the virtual interrupt.
    pub const VINTR: u32 = 1 << 4;
    /// System management interrupts.
    pub const SMI: u32 = 1 << 2;
    /// INIT.
    pub const INIT: u32 = 1 << 3;
    /// Writes of CR0 that change more than TS and MP.
    pub const CR0_WRITE: u32 = 1 << 5;
    /// SIDT.
    pub const IDTR_READ: u32 = 1 << 6;
    /// LIDT.
    pub const IDTR_WRITE: u32 = 1 << 10;
    /// CPUID.
    pub const CPUID: u32 = 1 << 18;
    /// IRET.
    pub const IRET: u32 = 1 << 20;
    /// RSM.
    pub const RSM: u32 = 1 << 19;
    /// INVD.
    pub const INVD: u32 = 1 << 22;
    /// INVLPGA.
    pub const INVLPGA: u32 = 1 << 26;
    /// Ports of the map.
    pub const IO: u32 = 1 << 27;
    /// Model-specific registers of the map.
    pub const MSR: u32 = 1 << 28;
    /// Task switches.
    pub const TASK_SWITCH: u32 = 1 << 29;
    /// Shutdown.
    pub const SHUTDOWN: u32 = 1 << 31;
    /// VMRUN, VMMCALL, VMLOAD, VMSAVE, STGI, CLGI, SKINIT: in the second word.
    pub const SVM: u32 = 0x7f;
    /// MONITOR and MWAIT, armed or not: in the second word.
    pub const MONITOR: u32 = 7 << 10;
    /// Reads and writes of CR8, in the word for control registers.
    pub const CR8: u32 = 1 << 8 | 1 << 24;
    /// Writes of CR4, in the word for control registers.
    pub const CR4_WRITE: u32 = 1 << 20;
    /// Reads and writes of DR7, in the word for debug registers.
    pub const DR7: u32 = 1 << 7 | 1 << 23;
}

/// In [`INTERRUPTS`].
pub mod interrupts {
    /// Virtual task priority.
    pub const TPR: u32 = 0xf;
    /// A virtual interrupt is requested.
    pub const IRQ: u32 = 1 << 8;
    /// Its priority, the highest.
    pub const PRIORITY: u32 = 0xf << 16;
    /// It does not ask the task priority.
    pub const IGNORE_TPR: u32 = 1 << 20;
    /// The guest's flag does not mask physical interrupts; the host's does.
    pub const MASKING: u32 = 1 << 24;
}

/// DR7 without breakpoints.
pub const DR7_RESET: u64 = 0x400;
/// RFLAGS.IF.
pub const FLAG_INTERRUPTS: u64 = 1 << 9;
/// RFLAGS.TF.
pub const FLAG_TRAP: u64 = 1 << 8;

/// The block.
#[repr(transparent)]
pub struct Vmcb(pub Page);

/// A type of a field.
pub trait Word: Copy {
    /// Loads it from the block.
    fn load(bytes: &[u8], offset: usize) -> Self;
    /// Stores it to the block.
    fn store(self, bytes: &mut [u8], offset: usize);
}

macro_rules! word {
    ($($word:ty)*) => {$(
        impl Word for $word {
            fn load(bytes: &[u8], offset: usize) -> Self {
                let mut word = [0; size_of::<Self>()];
                word.copy_from_slice(&bytes[offset..][..size_of::<Self>()]);
                Self::from_le_bytes(word)
            }
            fn store(self, bytes: &mut [u8], offset: usize) {
                bytes[offset..][..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
word!(u8 u16 u32 u64);

impl Vmcb {
    /// Returns a field.
    pub fn get<T: Word>(&self, field: Field<T>) -> T {
        T::load(&self.0.0, field.0)
    }

    /// Sets one.
    pub fn set<T: Word>(&mut self, field: Field<T>, value: T) {
        value.store(&mut self.0.0, field.0);
    }

    /// Sets bits of one, or clears them.
    pub fn put(&mut self, field: Field<u32>, bits: u32, on: bool) {
        let Field(offset, kind) = field;
        let old = self.get(Field(offset, kind));
        let new = if on { old | bits } else { old & !bits };
        self.set(Field(offset, kind), new);
    }

    /// A segment register: the offset of its 16 bytes.
    pub fn segment(&mut self, offset: usize, selector: u16, attributes: u16, limit: u32) {
        self.set(at(offset), selector);
        self.set(at(offset + 2), attributes);
        self.set(at(offset + 4), limit);
        self.set::<u64>(at(offset + 8), 0);
    }

    /// Sets the state in which a boot loader of the 32-bit protocol enters a kernel: flat segments,
    /// no paging.
    pub fn protected_mode(&mut self, entry: u64) {
        const DATA: u16 = 0xc93;
        const CODE: u16 = 0xc9b;
        // ES, SS, DS, FS, GS.
        for offset in [0x400, 0x420, 0x430, 0x440, 0x450] {
            self.segment(offset, 0x18, DATA, u32::MAX);
        }
        self.segment(0x410, 0x10, CODE, u32::MAX);
        // LDTR, TR.
        self.segment(0x470, 0, 0x82, 0);
        self.segment(0x490, 0, 0x8b, 0);
        const SVME: u64 = 1 << 12;
        self.set(EFER, SVME);
        self.set(CR0, 0x11);
        self.set(RFLAGS, 2);
        self.set(RIP, entry);
        self.set(DR6, 0xffff_0ff0);
        self.set(DR7, DR7_RESET);
        self.set(PAT, 0x0007_0406_0007_0406);
    }

    /// Sets the state in which a processor begins behind a start-up at this page: real mode.
    pub fn real_mode(&mut self, page: u8) {
        const DATA: u16 = 0x93;
        const CODE: u16 = 0x9b;
        const LIMIT: u32 = 0xffff;
        for offset in [0x400, 0x420, 0x430, 0x440, 0x450] {
            self.segment(offset, 0, DATA, LIMIT);
        }
        self.segment(0x410, u16::from(page) << 8, CODE, LIMIT);
        self.set(CS_BASE, u64::from(page) << 12);
        // GDTR, LDTR, IDTR, TR.
        self.segment(0x460, 0, 0, LIMIT);
        self.segment(0x470, 0, 0x82, LIMIT);
        self.segment(0x480, 0, 0, LIMIT);
        self.segment(0x490, 0, 0x8b, LIMIT);
        const SVME: u64 = 1 << 12;
        self.set(EFER, SVME);
        // Not cached, as after INIT.
        self.set(CR0, 0x6000_0010);
        self.set(CR2, 0);
        self.set(CR3, 0);
        self.set(CR4, 0);
        self.set(CPL, 0);
        self.set(RFLAGS, 2);
        self.set(RIP, 0);
        self.set(RSP, 0);
        self.set(RAX, 0);
        self.set(DR6, 0xffff_0ff0);
        self.set(DR7, DR7_RESET);
        self.set(PAT, 0x0007_0406_0007_0406);
        self.set(SHADOW, 0);
        self.set(EVENT, 0);
    }

    /// Has the TLB flushed at the next entry.
    pub fn flush(&mut self) {
        self.set(TLB, 1);
    }

    /// Moves behind an instruction of `len` bytes.
    pub fn skip(&mut self, len: u64) {
        let next = self.get(RIP).wrapping_add(len);
        self.set(RIP, next);
        self.set(SHADOW, 0);
    }

    /// Returns whether the next entry begins with an event.
    pub fn has_event(&self) -> bool {
        self.get(EVENT) >> 31 & 1 != 0
    }

    /// Returns whether the guest takes interrupts.
    pub fn interrupts(&self) -> bool {
        self.get(RFLAGS) & FLAG_INTERRUPTS != 0
    }
}
