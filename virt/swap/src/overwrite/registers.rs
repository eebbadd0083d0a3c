//! The part of a vCPU's state that determines the effect of its next instruction.

/// Trap Flag, bit 8 of RFLAGS: a debug exception after every iteration.
pub(super) const RFLAGS_TF: u64 = 1 << 8;
/// Direction Flag, bit 10 of RFLAGS: string instructions go down.
pub(super) const RFLAGS_DF: u64 = 1 << 10;
/// Resume Flag, bit 16 of RFLAGS: no instruction breakpoint at the next instruction.
pub(super) const RFLAGS_RF: u64 = 1 << 16;
/// Alignment Check / access control, bit 18 of RFLAGS.
pub(super) const RFLAGS_AC: u64 = 1 << 18;

/// Alignment Mask, bit 18 of CR0: RFLAGS.AC makes user-mode accesses be checked for alignment.
pub(super) const CR0_AM: u64 = 1 << 18;

/// L0, G0 to L3, G3: bits 0 to 7 of DR7. A breakpoint is enabled.
const DR7_ENABLED: u64 = 0xff;

/// Registers of a vCPU that is not running: those that STOS and MOVS use, and those that say in
/// which mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Linear address of the instruction, its prefixes included.
    pub rip: u64,
    /// Value that STOS stores, from its lowest byte on.
    pub rax: u64,
    /// Iterations that are left.
    pub rcx: u64,
    /// Linear address that MOVS loads from.
    pub rsi: u64,
    /// Linear address of the next store.
    pub rdi: u64,
    /// Flags.
    pub rflags: u64,
    /// Protection and paging, WP and AM.
    pub cr0: u64,
    /// Address of the page tables; PCID.
    pub cr3: u64,
    /// Enabled features of paging and of the processor.
    pub cr4: u64,
    /// Long mode (LMA), execute-disable (NXE).
    pub efer: u64,
    /// Enabled breakpoints.
    pub dr7: u64,
    /// Rights of the protection keys, where they are known. Asked for only if CR4.PKE is set and a
    /// page is a user's.
    pub pkru: Option<u32>,
    /// Current privilege level, 0 to 3: the DPL of SS.
    pub cpl: u8,
    /// L of CS: 64-bit code.
    pub cs_l: bool,
    /// D of CS, which is clear in 64-bit code.
    pub cs_d: bool,
    /// Whether the instruction at RIP is the very next thing the vCPU does. It is not:
    /// * while the vCPU is halted, or waits for INIT or SIPI (with KVM: an MP state other than
    ///   runnable): it has not come to that instruction yet;
    /// * while an exception (a triple fault is one), interrupt or NMI is being delivered: then the
    ///   store that faulted is the delivery's;
    /// * under an interrupt shadow (after STI or MOV SS), which ends with the instruction and is
    ///   not ended here;
    /// * in system-management mode, which may have other memory at the same addresses;
    /// * while an exit to the VMM (port, MMIO) is still to be completed, which may yet change these
    ///   registers.
    pub is_at_instruction: bool,
}

impl Registers {
    /// Returns whether nothing comes between two iterations except effects of the memory accesses
    /// themselves.
    pub(super) fn iterates_undisturbed(&self) -> bool {
        self.is_at_instruction && self.rflags & RFLAGS_TF == 0 && self.dr7 & DR7_ENABLED == 0
    }

    /// Returns whether an access that is not aligned to its size is an alignment-check exception.
    pub(super) fn checks_alignment(&self) -> bool {
        self.cpl == 3 && self.cr0 & CR0_AM != 0 && self.rflags & RFLAGS_AC != 0
    }
}
