//! The guest's page tables: 4-level and 5-level paging, pages of 4 KiB, 2 MiB and 1 GiB.
//!
//! A walk reads one word per level, each once, changes nothing, and says `None` unless the access
//! is certain to succeed with the tables as they are. That is stricter than a processor:
//! * Accessed has to be set in every entry, Dirty in the last one of a write: a processor would set
//!   them, this does not, and a page that was written without getting dirty would be lost by a
//!   guest that writes back only dirty ones.
//! * A write needs R/W in every entry, whatever CR0.WP and the privilege level say.
//! * A processor that holds an older translation may still use that one; the tables are as good
//!   until the guest has invalidated it, which the vCPU would have to take part in.
//!
//! Bound: five words.
//!
//! Left out, so that nothing is ever translated: modes other than 64-bit mode, and controls in CR4
//! and EFER that this does not know or that would take more than the tables to follow (PKS, LASS,
//! LMSLE; VMXE and SVME, under which the vCPU may be running a guest of its guest, whose
//! guest-physical addresses are others). Address bits above MAXPHYADDR are reserved, but not
//! checked here: there is no memory at such an address.

use guest_mem::Gpa;

use super::memory::Memory;
use super::registers::{RFLAGS_AC, Registers};

/// Protection Enable, Paging.
const CR0_REQUIRED: u64 = 1 << 0 | 1 << 31;

/// Physical Address Extension.
const CR4_PAE: u64 = 1 << 5;
/// 57-bit linear addresses: five levels.
const CR4_LA57: u64 = 1 << 12;
/// Supervisor-Mode Access Prevention.
const CR4_SMAP: u64 = 1 << 21;
/// Protection keys for user pages.
const CR4_PKE: u64 = 1 << 22;
/// Bits that may be set in CR4: the above, bits that do not affect string instructions and their
/// accesses, and bits that only forbid accesses refused here anyway (SMEP: fetches from user pages
/// in supervisor mode).
const CR4_KNOWN: u64 = CR4_PAE
    | CR4_LA57
    | CR4_SMAP
    | CR4_PKE
    // VME, PVI, TSD, DE, PSE
    | 0x1f
    // MCE, PGE, PCE, OSFXSR, OSXMMEXCPT, UMIP
    | 0xfc0
    // FSGSBASE, PCIDE, OSXSAVE
    | 1 << 16 | 1 << 17 | 1 << 18
    // SMEP, CET
    | 1 << 20 | 1 << 23;

/// Long Mode Enable, Long Mode Active.
const EFER_REQUIRED: u64 = 1 << 8 | 1 << 10;
/// No-Execute Enable.
const EFER_NXE: u64 = 1 << 11;
/// Bits that may be set in EFER: the above; SCE; AMD's FFXSR, TCE and AIBRSE.
const EFER_KNOWN: u64 = EFER_REQUIRED | EFER_NXE | 1 << 0 | 1 << 14 | 1 << 15 | 1 << 21;

/// Bits 51:12 of CR3 and of every entry: the next table, or the page.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Present.
const P: u64 = 1 << 0;
/// Read/write: 1 allows writes.
const RW: u64 = 1 << 1;
/// User/supervisor: 1 in every entry makes it a user page.
const US: u64 = 1 << 2;
/// Accessed.
const A: u64 = 1 << 5;
/// Dirty, in an entry that maps a page.
const D: u64 = 1 << 6;
/// Page size, in entries of levels 2 and 3: this entry maps a page. Reserved in levels 4 and 5;
/// part of the memory type in level 1.
const PS: u64 = 1 << 7;
/// Part of the memory type (PAT) in an entry that maps 2 MiB or 1 GiB.
const HUGE_PAT: u64 = 1 << 12;
/// Execute-disable; reserved while EFER.NXE is clear.
const XD: u64 = 1 << 63;
/// Where the protection key of an entry that maps a page starts: bits 62:59.
const KEY_SHIFT: u32 = 59;

/// Bits of a linear address that one level translates.
const LEVEL_SHIFT: u32 = 9;
/// Bits of a linear address below the first level.
const PAGE_SHIFT: u32 = 12;

/// Kind of access at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Fetch,
    Read,
    Write,
}

/// Accesses that the protection keys of user pages allow.
#[derive(Clone, Copy, Debug)]
enum Keys {
    /// They are not in use.
    Off,
    /// PKRU: access-disable in bit 2i, write-disable in bit 2i + 1 of key i.
    Rights(u32),
    /// In use, but the vCPU's rights have not been read.
    Unknown,
}

impl Keys {
    /// Returns whether a key is certain to forbid nothing.
    fn allow(self, key: u64) -> bool {
        match self {
            Self::Off => true,
            Self::Rights(pkru) => u64::from(pkru) >> (2 * key) & 3 == 0,
            Self::Unknown => false,
        }
    }
}

/// The tables of a vCPU in 64-bit mode, and the controls that its accesses need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    root: Gpa,
    /// 4 or 5.
    levels: u32,
    is_user: bool,
    /// SMAP, and not lifted by RFLAGS.AC: no data of user pages for a supervisor.
    prevents_access: bool,
    has_execute_disable: bool,
    keys: Keys,
}

impl Paging {
    /// Returns the tables of a vCPU; `None` outside 64-bit mode, and with controls that are not
    /// known here.
    pub(super) fn of(registers: &Registers) -> Option<Self> {
        let &Registers {
            cr0,
            cr3,
            cr4,
            efer,
            rflags,
            cpl,
            ..
        } = registers;
        let is_64_bit = cr0 & CR0_REQUIRED == CR0_REQUIRED
            && cr4 & CR4_PAE != 0
            && efer & EFER_REQUIRED == EFER_REQUIRED
            && registers.cs_l
            && !registers.cs_d;
        let is_known = cr4 & !CR4_KNOWN == 0 && efer & !EFER_KNOWN == 0 && cpl <= 3;
        if !is_64_bit || !is_known {
            return None;
        }
        Some(Self {
            root: Gpa::new(cr3 & ADDRESS),
            levels: if cr4 & CR4_LA57 != 0 { 5 } else { 4 },
            is_user: cpl == 3,
            prevents_access: cr4 & CR4_SMAP != 0 && rflags & RFLAGS_AC == 0,
            has_execute_disable: efer & EFER_NXE != 0,
            keys: match (cr4 & CR4_PKE != 0, registers.pkru) {
                (false, _) => Keys::Off,
                (true, Some(pkru)) => Keys::Rights(pkru),
                (true, None) => Keys::Unknown,
            },
        })
    }

    /// Returns whether the upper bits of a linear address, from the highest translated one on, are
    /// all the same.
    pub(super) fn is_canonical(&self, linear: u64) -> bool {
        let untranslated = u64::BITS - (PAGE_SHIFT + LEVEL_SHIFT * self.levels);
        let extended = ((linear << untranslated) as i64 >> untranslated) as u64;
        extended == linear
    }

    /// Returns the location of a linear address, if the access is certain to succeed.
    pub(super) fn translate(
        &self,
        memory: &mut impl Memory,
        linear: u64,
        access: Access,
    ) -> Option<Gpa> {
        if !self.is_canonical(linear) {
            return None;
        }
        let mut table = self.root;
        let mut is_user_page = true;
        for level in (1..=self.levels).rev() {
            let shift = PAGE_SHIFT + LEVEL_SHIFT * (level - 1);
            let index = linear >> shift & 0x1ff;
            let entry = memory.word(Gpa::new(table.raw() + 8 * index))?;
            if !self.allows(entry, access) {
                return None;
            }
            is_user_page &= entry & US != 0;
            if level > 1 && entry & PS == 0 {
                table = Gpa::new(entry & ADDRESS);
                continue;
            }
            let page = mapped_page(entry, level, access)?;
            let key = entry >> KEY_SHIFT & 0xf;
            if !self.may_reach(is_user_page, key, access) {
                return None;
            }
            return Some(Gpa::new(page | linear & ((1 << shift) - 1)));
        }
        // Level 1 has mapped a page or nothing.
        None
    }

    /// Returns whether an entry of any level permits this access, and needs no change for it.
    fn allows(&self, entry: u64, access: Access) -> bool {
        let needed = match access {
            Access::Fetch | Access::Read => P | A,
            Access::Write => P | A | RW,
        };
        // While NXE is clear, the bit is reserved.
        let may_disable = self.has_execute_disable && access != Access::Fetch;
        entry & needed == needed && (entry & XD == 0 || may_disable)
    }

    /// Returns whether the vCPU's mode permits this access to a page that is a user's, or a
    /// supervisor's.
    fn may_reach(&self, is_user_page: bool, key: u64, access: Access) -> bool {
        match (self.is_user, is_user_page) {
            (true, false) => false,
            (true, true) => self.keys.allow(key),
            (false, false) => true,
            (false, true) => {
                access != Access::Fetch && !self.prevents_access && self.keys.allow(key)
            }
        }
    }
}

/// Returns the start of the page that an entry maps which points to no table; `None` if reserved
/// bits of it are set, or if a write would have to set Dirty.
fn mapped_page(entry: u64, level: u32, access: Access) -> Option<u64> {
    if access == Access::Write && entry & D == 0 {
        return None;
    }
    let page = match level {
        1 => entry & ADDRESS,
        2 | 3 => entry & ADDRESS & !HUGE_PAT,
        _ => return None,
    };
    let size = 1_u64 << (PAGE_SHIFT + LEVEL_SHIFT * (level - 1));
    (page & (size - 1) == 0).then_some(page)
}
