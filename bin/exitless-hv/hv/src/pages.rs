//! Pages that the hardware reads, and copies that the guest sees: those of one processor
//! ([`Pages`]), and those of the machine ([`Shared`]).

use crate::block_pages::BlockPages;
use crate::memory::Page;
use crate::nested::Nested;
use crate::vmcb::Vmcb;

/// Registers of the guest that are not in its control block, by number, and its SSE state.
#[repr(C, align(16))]
pub struct Registers {
    /// rcx is 1, rdx 2, rbx 3, rbp 5, rsi 6, rdi 7; rax (0) and rsp (4) are in the block.
    pub words: [u64; 16],
    /// FXSAVE's area.
    pub sse: [u8; 512],
}

pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSI: usize = 6;
pub const RDI: usize = 7;

impl Pages {
    /// Whether writes (and reads) of a model-specific register reach the real one. It is in the
    /// map.
    pub fn let_through(&mut self, register: u32, through: bool, writes_only: bool) {
        /// Bytes of the map for 0 to 0x1fff, and behind them for the others.
        const PART: usize = 0x800;
        let part = match register >> 16 {
            0xc000 => PART,
            0xc001 => 2 * PART,
            _ => 0,
        };
        let (byte, shift) = (part + (register & 0x1fff) as usize / 4, register % 4 * 2);
        let bits = if writes_only { 2 } else { 3 } << shift;
        let map = &mut self.msr_map[byte / 4096].0[byte % 4096];
        *map = if through { *map & !bits } else { *map | bits };
    }
}

/// Everything that the hardware reads about one of the guest's processors. It stays where it is.
pub struct Pages {
    /// The guest's control block.
    pub vmcb: Vmcb,
    /// The host's, for VMSAVE and VMLOAD.
    pub host: Vmcb,
    /// VMRUN's own.
    pub save: Page,
    /// Two bits per model-specific register.
    pub msr_map: [Page; 2],
    /// The host's interrupt descriptor table.
    pub handlers: Page,
    /// The shadow of the guest's.
    pub shadow: Page,
    /// Page under an instruction that reaches no device.
    pub scratch: Page,
    /// Nested page tables.
    pub nested: Nested,
    /// The guest's registers.
    pub registers: Registers,
}

impl Pages {
    /// All zero.
    pub const ZERO: Self = Self {
        vmcb: Vmcb(Page::ZERO),
        host: Vmcb(Page::ZERO),
        save: Page::ZERO,
        msr_map: [Page::ZERO; 2],
        handlers: Page::ZERO,
        shadow: Page::ZERO,
        scratch: Page::ZERO,
        nested: Nested::EMPTY,
        registers: Registers {
            words: [0; 16],
            sse: [0; 512],
        },
    };
}

/// Pages that all of the guest's processors have. They stay where they are.
pub struct Shared {
    /// A bit per port.
    pub io_map: [Page; 3],
    /// The guest's view of the device's message table.
    pub messages: Page,
    /// Page that the guest sees where the HPET is, and the local APIC's registers in memory.
    pub nothing: Page,
    /// Those of the block function.
    pub block: BlockPages,
}

impl Shared {
    /// All zero.
    pub const ZERO: Self = Self {
        io_map: [Page::ZERO; 3],
        messages: Page::ZERO,
        nothing: Page::ZERO,
        block: BlockPages::ZERO,
    };
}
