//! Table walks: root entry, context entry, second-level tables (§3.4, §3.7, §9).
//!
//! A walk reads the current tables, caches nothing, and changes nothing; its callers fill the
//! caches. Each entry is read once into a local variable, checked, then used. If a walk gets
//! `Pending`, the caller later begins it again from the root entry, so no part of it outlives an
//! invalidation.
//!
//! Bound: one root entry, one context entry, at most four second-level entries. The module `follow`
//! searches a range for mappings.
//!
//! Left out: zero-length reads, which never reach an IOMMU here (`CAP.ZLR` promises that those of
//! write-only pages do not fault); translation requests of device TLBs (`ECAP.DT` is 0).

use guest_mem::{Access, Gpa, Iova, PAGE_SIZE, Perm, PhysMem, SourceId, Stop, Ticket};

use crate::config::{AddressWidth, LargePages};
use crate::spec::fault::FaultReason;
use crate::spec::tables::{ContextEntry, ENTRY_LEN, PTE_LEN, RootEntry, SlPte, TranslationType};

/// Host address width, in bits: no table entry may hold an address of more bits. The DMAR table has
/// the same value.
pub const HOST_ADDRESS_WIDTH: u8 = 48;

/// Page sizes of second-level tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageSize {
    FourK,
    TwoM,
    OneG,
}

impl PageSize {
    pub(crate) const fn shift(self) -> u32 {
        match self {
            Self::FourK => 12,
            Self::TwoM => 21,
            Self::OneG => 30,
        }
    }

    pub(crate) const fn bytes(self) -> u64 {
        1 << self.shift()
    }
}

/// Reason why a walk found no mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkStop {
    /// The page of a table is absent.
    Pending(Ticket),
    /// The request is refused.
    Fault(WalkFault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalkFault {
    pub(crate) reason: FaultReason,
    /// The context entry has FPD set, and FPD suppresses the recording of this reason.
    pub(crate) silent: bool,
}

/// A checked context entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) did: u16,
    pub(crate) fpd: bool,
    pub(crate) kind: ContextKind,
    /// Address bits above the width of this context; a request with one of them set is refused.
    pub(crate) beyond: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContextKind {
    PassThrough,
    Table { root: Gpa, levels: u32 },
}

impl Context {
    pub(crate) fn fault(&self, reason: FaultReason) -> WalkStop {
        WalkStop::Fault(WalkFault {
            reason,
            silent: self.fpd && reason.is_qualified(),
        })
    }
}

/// A checked leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First byte of the page.
    pub(crate) page: Gpa,
    pub(crate) size: PageSize,
    /// R in bit 0 and W in bit 1, ANDed over the levels.
    pub(crate) permissions: u64,
}

impl Mapping {
    pub(crate) fn gpa(&self, iova: Iova) -> Gpa {
        Gpa::new(self.page.raw() | iova.offset_in(self.size.bytes()))
    }

    /// Bytes from `iova` to the end of the page.
    pub(crate) fn left(&self, iova: Iova) -> u64 {
        self.size.bytes() - iova.offset_in(self.size.bytes())
    }

    pub(crate) fn allows(&self, perm: Perm) -> bool {
        self.permissions & permission_bit(perm) != 0
    }
}

/// Returns the bit of a table entry that allows an access.
pub(crate) const fn permission_bit(perm: Perm) -> u64 {
    match perm {
        Perm::Read => 1,
        Perm::Write => 2,
    }
}

pub(crate) const fn permission_fault(perm: Perm) -> FaultReason {
    match perm {
        Perm::Read => FaultReason::READ,
        Perm::Write => FaultReason::WRITE,
    }
}

/// Returns the mask of the bits above an address of `width` bits.
const fn bits_above(width: u8) -> u64 {
    !0 << width
}

/// First and last address of the interrupt range. Neither an IOVA nor the address that it maps to
/// may lie there.
pub(super) const INTERRUPT_RANGE: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// Whether `[start, start + len)` touches the interrupt range.
/// `len` is a power of two and `start` aligned to it, so the comparison cannot wrap.
pub(crate) const fn touches_interrupt_range(start: u64, len: u64) -> bool {
    start <= INTERRUPT_RANGE.1 && start + (len - 1) >= INTERRUPT_RANGE.0
}

/// Root table and configuration from which a walk starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walker {
    /// Address of the root table, as latched by `GCMD.SRTP`.
    pub(crate) root: Gpa,
    pub(crate) width: AddressWidth,
    pub(crate) large_pages: LargePages,
    pub(crate) snoop_control: bool,
}

/// A checked second-level entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Neither R nor W is set.
    NotPresent,
    /// A reserved bit is set.
    Reserved,
    /// Address of the next table.
    Table(Gpa),
    /// Address and size of the page.
    Leaf(Gpa, PageSize),
}

impl Walker {
    /// Reads and checks the root and context entries of `source`.
    pub(crate) fn context<M: PhysMem>(
        &self,
        mem: &M,
        source: SourceId,
    ) -> Result<Context, WalkStop> {
        let reserved = bits_above(HOST_ADDRESS_WIDTH);
        let at = entry_address(self.root, source.bus(), ENTRY_LEN);
        let root = entry(mem.read_u128(at), FaultReason::ROOT_ACCESS, false)?;
        let root = RootEntry::from_bits(root);
        if !root.p() {
            return Err(fault(FaultReason::ROOT_NOT_PRESENT, false));
        }
        let table = root.ctp() * PAGE_SIZE;
        if root.rsvd0() != 0 || root.rsvd1() != 0 || table & reserved != 0 {
            return Err(fault(FaultReason::ROOT_RESERVED, false));
        }

        let at = entry_address(Gpa::new(table), source.devfn(), ENTRY_LEN);
        let context = entry(mem.read_u128(at), FaultReason::CONTEXT_ACCESS, false)?;
        let context = ContextEntry::from_bits(context);
        let silent = context.fpd();
        if !context.p() {
            return Err(fault(FaultReason::CONTEXT_NOT_PRESENT, silent));
        }
        let table = context.slptptr() * PAGE_SIZE;
        if context.rsvd0() != 0 || context.rsvd1() || context.rsvd2() != 0 || table & reserved != 0
        {
            return Err(fault(FaultReason::CONTEXT_RESERVED, silent));
        }
        let Some(width) = AddressWidth::from_aw(context.aw()).filter(|w| *w <= self.width) else {
            return Err(fault(FaultReason::CONTEXT_INVALID, silent));
        };
        let (kind, bits) = match context.tt() {
            TranslationType::SecondLevel => {
                let kind = ContextKind::Table {
                    root: Gpa::new(table),
                    levels: width.levels(),
                };
                (kind, width.bits())
            }
            // AW must be the largest width that the unit supports.
            TranslationType::PassThrough if width == self.width => {
                (ContextKind::PassThrough, HOST_ADDRESS_WIDTH)
            }
            _ => return Err(fault(FaultReason::CONTEXT_INVALID, silent)),
        };
        Ok(Context {
            did: context.did(),
            fpd: silent,
            kind,
            beyond: bits_above(bits),
        })
    }

    /// Translates an access with `perm` to `iova` through an already checked context. A missing
    /// permission is a fault, so the permissions of the result include `perm`.
    pub(crate) fn translate<M: PhysMem>(
        &self,
        mem: &M,
        context: &Context,
        iova: Iova,
        perm: Perm,
    ) -> Result<Mapping, WalkStop> {
        if iova.raw() & context.beyond != 0 {
            return Err(context.fault(FaultReason::BEYOND_WIDTH));
        }
        // A device's store in this range is an interrupt message, which does not come here. A data
        // access is refused.
        if touches_interrupt_range(iova.align_down(PAGE_SIZE).raw(), PAGE_SIZE) {
            return Err(context.fault(permission_fault(perm)));
        }
        let (root, levels) = match context.kind {
            ContextKind::PassThrough => {
                return Ok(Mapping {
                    page: Gpa::new(iova.align_down(PAGE_SIZE).raw()),
                    size: PageSize::FourK,
                    permissions: 3,
                });
            }
            ContextKind::Table { root, levels } => (root, levels),
        };
        let mapping = self.second_level(mem, context, root, levels, iova, perm)?;
        if !mapping.allows(perm) {
            return Err(context.fault(permission_fault(perm)));
        }
        if touches_interrupt_range(mapping.gpa(iova).align_down(PAGE_SIZE).raw(), PAGE_SIZE) {
            return Err(context.fault(FaultReason::INTERRUPT_RANGE));
        }
        Ok(mapping)
    }

    fn second_level<M: PhysMem>(
        &self,
        mem: &M,
        context: &Context,
        root: Gpa,
        levels: u32,
        iova: Iova,
        perm: Perm,
    ) -> Result<Mapping, WalkStop> {
        let mut table = root;
        let mut permissions = 3;
        for level in (1..=levels).rev() {
            let at = pte_address(table, iova.raw(), level);
            let pte = entry(mem.read_u64(at), FaultReason::PTE_ACCESS, context.fpd)?;
            permissions &= pte & 3;
            match self.check(pte, level) {
                Entry::NotPresent => return Err(context.fault(permission_fault(perm))),
                Entry::Reserved => return Err(context.fault(FaultReason::PTE_RESERVED)),
                Entry::Table(next) => table = next,
                Entry::Leaf(page, size) => {
                    return Ok(Mapping {
                        page,
                        size,
                        permissions,
                    });
                }
            }
        }
        unreachable!("level 1 is a leaf")
    }

    /// Checks an entry of a table of `level`.
    #[inline]
    pub(super) fn check(&self, pte: u64, level: u32) -> Entry {
        if pte & 3 == 0 {
            return Entry::NotPresent;
        }
        let pte = SlPte::from_bits(pte);
        let size = match (level, pte.ps()) {
            (1, _) => Some(PageSize::FourK),
            (2, true) => Some(PageSize::TwoM),
            (3, true) => Some(PageSize::OneG),
            _ => None,
        };
        let is_ps_reserved = match level {
            1 => false,
            2 => self.large_pages < LargePages::TwoM,
            3 => self.large_pages < LargePages::OneG,
            _ => true,
        };
        // SNP is legal in a leaf if the unit offers it, TM nowhere (`ECAP.DT` is 0).
        let is_snp_reserved = size.is_none() || !self.snoop_control;
        let address = pte.addr() * PAGE_SIZE;
        if address & bits_above(HOST_ADDRESS_WIDTH) != 0
            || size.is_some_and(|size| address & (size.bytes() - 1) != 0)
            || pte.tm()
            || (pte.snp() && is_snp_reserved)
            || (pte.ps() && is_ps_reserved)
        {
            return Entry::Reserved;
        }
        match size {
            Some(size) => Entry::Leaf(Gpa::new(address), size),
            None => Entry::Table(Gpa::new(address)),
        }
    }

    /// Returns whether a part of a lease still translates to the same memory, for the recheck after
    /// an invalidation. Advances `part` past the bytes that do. `walked` is called after each walk,
    /// and returns whether to continue.
    pub(crate) fn still_holds<M: PhysMem>(
        &self,
        mem: &M,
        record: &guest_mem::LeaseRecord,
        part: &mut guest_mem::Part,
        walked: &mut impl FnMut() -> bool,
    ) -> Access<bool> {
        let context = match self.context(mem, record.source) {
            Ok(context) => context,
            Err(WalkStop::Pending(ticket)) => return Err(Stop::Pending(ticket)),
            Err(WalkStop::Fault(_)) => return Ok(false),
        };
        // Each iteration covers at least the rest of a 4 KiB page: at most len / 4096 + 2
        // iterations.
        while part.at < part.end {
            let at = u64::from(part.at);
            let (Some(iova), Some(gpa)) = (record.iova.checked_add(at), record.gpa.checked_add(at))
            else {
                return Ok(false);
            };
            match self.translate(mem, &context, iova, record.perm) {
                Ok(mapping) if mapping.gpa(iova) == gpa => {
                    let left = u64::from(part.end - part.at);
                    // At most `left`, so it fits.
                    part.at += mapping.left(iova).min(left) as u32;
                }
                Ok(_) | Err(WalkStop::Fault(_)) => return Ok(false),
                Err(WalkStop::Pending(ticket)) => return Err(Stop::Pending(ticket)),
            }
            if !walked() {
                break;
            }
        }
        Ok(true)
    }
}

/// Bits of an IOVA below the index into a table of `level`: an entry covers 2^this bytes.
pub(super) const fn level_shift(level: u32) -> u32 {
    12 + 9 * (level - 1)
}

/// Address of the entry for `iova`. A table's address has its low 12 bits clear and at most 48
/// bits, so this cannot wrap.
pub(super) const fn pte_address(table: Gpa, iova: u64, level: u32) -> Gpa {
    let index = iova >> level_shift(level) & 0x1ff;
    Gpa::new(table.raw() + index * PTE_LEN)
}

/// `table` has its low 12 bits clear and at most 48 significant ones (it was checked, or masked
/// when latched to 52), so the sum cannot wrap.
fn entry_address(table: Gpa, index: u8, len: u64) -> Gpa {
    Gpa::new(table.raw() | (u64::from(index) * len))
}

fn fault(reason: FaultReason, fpd: bool) -> WalkStop {
    WalkStop::Fault(WalkFault {
        reason,
        silent: fpd && reason.is_qualified(),
    })
}

fn entry<T>(read: Access<T>, unreadable: FaultReason, fpd: bool) -> Result<T, WalkStop> {
    read.map_err(|stop| match stop {
        Stop::Pending(ticket) => WalkStop::Pending(ticket),
        Stop::Fault(_) => fault(unreadable, fpd),
    })
}
