//! Registers of a remapping unit, in the order of the specification's register chapter (§11.4).
//!
//! Offsets are bytes from the base of the unit's 4 KiB page. Access classes: RO read-only, WO
//! write-only, RW read and write, RW1C cleared by writing 1. Field names are those of the
//! specification, in lower case.

use bitfield_struct::bitfield;

/// Size of the register page of one unit, in bytes.
pub const PAGE_LEN: u16 = 0x1000;

/// Version (0x000, 32-bit, RO).
pub const VER: u16 = 0x000;
/// Capability (0x008, 64-bit, RO).
pub const CAP: u16 = 0x008;
/// Extended Capability (0x010, 64-bit, RO).
pub const ECAP: u16 = 0x010;
/// Global Command (0x018, 32-bit, WO).
pub const GCMD: u16 = 0x018;
/// Global Status (0x01c, 32-bit, RO).
pub const GSTS: u16 = 0x01c;
/// Root Table Address (0x020, 64-bit, RW, latched by `GCMD.SRTP`).
pub const RTADDR: u16 = 0x020;
/// Context Command (0x028, 64-bit, RW; ICC clears itself).
pub const CCMD: u16 = 0x028;
/// Fault Status (0x034, 32-bit, RW1C; PPF and FRI are RO).
pub const FSTS: u16 = 0x034;
/// Fault Event Control (0x038, 32-bit, RW).
pub const FECTL: u16 = 0x038;
/// Fault Event Data (0x03c, 32-bit, RW).
pub const FEDATA: u16 = 0x03c;
/// Fault Event Address (0x040, 32-bit, RW).
pub const FEADDR: u16 = 0x040;
/// Fault Event Upper Address (0x044, 32-bit, RW).
pub const FEUADDR: u16 = 0x044;
/// Invalidation Queue Head (0x080, 64-bit, RO).
pub const IQH: u16 = 0x080;
/// Invalidation Queue Tail (0x088, 64-bit, RW).
pub const IQT: u16 = 0x088;
/// Invalidation Queue Address (0x090, 64-bit, RW while the queue is off).
pub const IQA: u16 = 0x090;
/// Invalidation Completion Status (0x09c, 32-bit, RW1C).
pub const ICS: u16 = 0x09c;
/// Invalidation Event Control (0x0a0, 32-bit, RW).
pub const IECTL: u16 = 0x0a0;
/// Invalidation Event Data (0x0a4, 32-bit, RW).
pub const IEDATA: u16 = 0x0a4;
/// Invalidation Event Address (0x0a8, 32-bit, RW).
pub const IEADDR: u16 = 0x0a8;
/// Invalidation Event Upper Address (0x0ac, 32-bit, RW).
pub const IEUADDR: u16 = 0x0ac;
/// Invalidation Queue Error Record (0x0b0, 64-bit, RO).
pub const IQER: u16 = 0x0b0;
/// Interrupt Remapping Table Address (0x0b8, 64-bit, RW, latched by `GCMD.SIRTP`).
pub const IRTA: u16 = 0x0b8;

/// Version (0x000, 32-bit, RO).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Version {
    /// MIN: minor version.
    #[bits(4)]
    pub min: u8,
    /// MAX: major version. 6 and above imply ESRTPS.
    #[bits(4)]
    pub max: u8,
    #[bits(24)]
    __: u32,
}

/// Capability (0x008, 64-bit, RO).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Capability {
    /// ND: domains supported, 2^(4 + 2·ND).
    #[bits(3)]
    pub nd: u8,
    /// AFL: advanced fault logging.
    pub afl: bool,
    /// RWBF: the write buffer needs flushing by software.
    pub rwbf: bool,
    /// PLMR: protected low-memory region.
    pub plmr: bool,
    /// PHMR: protected high-memory region.
    pub phmr: bool,
    /// CM: caching mode; not-present entries may be cached.
    pub cm: bool,
    /// SAGAW: adjusted guest address widths; bit 1 is 39-bit, bit 2 is 48-bit, bit 3 is 57-bit.
    #[bits(5)]
    pub sagaw: u8,
    #[bits(3)]
    __: u8,
    /// MGAW: maximum guest address width, minus one.
    #[bits(6)]
    pub mgaw: u8,
    /// ZLR: zero-length reads of write-only pages are allowed.
    pub zlr: bool,
    #[bits(1)]
    __: u8,
    /// FRO: offset of the fault recording registers, in units of 16 bytes.
    #[bits(10)]
    pub fro: u16,
    /// SLLPS: large pages; bit 0 is 2 MiB, bit 1 is 1 GiB.
    #[bits(4)]
    pub sllps: u8,
    #[bits(1)]
    __: u8,
    /// PSI: page-selective invalidation.
    pub psi: bool,
    /// NFR: fault recording registers, minus one.
    pub nfr: u8,
    /// MAMV: maximum address mask of a page-selective invalidation.
    #[bits(6)]
    pub mamv: u8,
    /// DWD: writes are drained.
    pub dwd: bool,
    /// DRD: reads are drained.
    pub drd: bool,
    /// FS1GP: 1 GiB pages in first-stage tables.
    pub fs1gp: bool,
    #[bits(2)]
    __: u8,
    /// PI: posted interrupts.
    pub pi: bool,
    /// FS5LP: five-level first-stage tables.
    pub fs5lp: bool,
    /// ECMDS: enhanced commands.
    pub ecmds: bool,
    /// ESIRTPS: setting the interrupt table pointer also invalidates.
    pub esirtps: bool,
    /// ESRTPS: setting the root table pointer also invalidates.
    pub esrtps: bool,
}

/// Extended Capability (0x010, 64-bit, RO). Of the fields of scalable mode only SMTS is named.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct ExtendedCapability {
    /// C: accesses to the tables are coherent with the processors' caches.
    pub c: bool,
    /// QI: queued invalidation.
    pub qi: bool,
    /// DT: device TLBs.
    pub dt: bool,
    /// IR: interrupt remapping.
    pub ir: bool,
    /// EIM: extended interrupt mode (x2APIC destinations).
    pub eim: bool,
    #[bits(1)]
    __: u8,
    /// PT: pass-through contexts.
    pub pt: bool,
    /// SC: snoop control.
    pub sc: bool,
    /// IRO: offset of the IVA and IOTLB registers, in units of 16 bytes.
    #[bits(10)]
    pub iro: u16,
    #[bits(2)]
    __: u8,
    /// MHMV: maximum handle mask of an interrupt-entry invalidation.
    #[bits(4)]
    pub mhmv: u8,
    #[bits(19)]
    __: u32,
    /// SMTS: scalable mode.
    pub smts: bool,
    #[bits(20)]
    __: u32,
}

/// Global Command (0x018, 32-bit, WO). SRTP, SFL, WBF and SIRTP trigger an action; the others are
/// levels.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GlobalCommand {
    #[bits(23)]
    __: u32,
    /// CFI: allow compatibility-format interrupts.
    pub cfi: bool,
    /// SIRTP: set interrupt remapping table pointer.
    pub sirtp: bool,
    /// IRE: interrupt remapping enable.
    pub ire: bool,
    /// QIE: queued invalidation enable.
    pub qie: bool,
    /// WBF: write buffer flush.
    pub wbf: bool,
    /// EAFL: enable advanced fault logging.
    pub eafl: bool,
    /// SFL: set fault log.
    pub sfl: bool,
    /// SRTP: set root table pointer.
    pub srtp: bool,
    /// TE: translation enable.
    pub te: bool,
}

/// Global Status (0x01c, 32-bit, RO).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct GlobalStatus {
    #[bits(23)]
    __: u32,
    /// CFIS: compatibility-format interrupts are allowed.
    pub cfis: bool,
    /// IRTPS: the interrupt remapping table pointer is set.
    pub irtps: bool,
    /// IRES: interrupt remapping is on.
    pub ires: bool,
    /// QIES: queued invalidation is on.
    pub qies: bool,
    /// WBFS: a write buffer flush is in progress.
    pub wbfs: bool,
    /// AFLS: advanced fault logging is on.
    pub afls: bool,
    /// FLS: the fault log is set.
    pub fls: bool,
    /// RTPS: the root table pointer is set.
    pub rtps: bool,
    /// TES: translation is on.
    pub tes: bool,
}

/// Context Command (0x028, 64-bit, RW).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct ContextCommand {
    /// DID: domain of a domain- or device-selective request.
    pub did: u16,
    /// SID: source of a device-selective request.
    pub sid: u16,
    /// FM: function bits of SID to ignore.
    #[bits(2)]
    pub fm: u8,
    #[bits(25)]
    __: u32,
    /// CAIG: granularity performed; 0 means the request was refused.
    #[bits(2)]
    pub caig: u8,
    /// CIRG: requested granularity; see [`Granularity`](crate::invalidate::Granularity).
    #[bits(2)]
    pub cirg: u8,
    /// ICC: invalidate; clears when done.
    pub icc: bool,
}

/// Fault Status (0x034, 32-bit).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct FaultStatus {
    /// PFO: a fault was lost for lack of a free recording register (RW1C).
    pub pfo: bool,
    /// PPF: some recording register holds a fault (RO, derived).
    pub ppf: bool,
    #[bits(2)]
    __: u8,
    /// IQE: the invalidation queue has stopped at an error (RW1C).
    pub iqe: bool,
    /// ICE: a device answered an invalidation with an error (RW1C).
    pub ice: bool,
    /// ITE: a device did not answer an invalidation (RW1C).
    pub ite: bool,
    /// PRO: page request overflow (RW1C).
    pub pro: bool,
    /// FRI: the first recording register with a fault, valid while PPF is set (RO).
    pub fri: u8,
    #[bits(16)]
    __: u16,
}

/// Fault or Invalidation Event Control (FECTL 0x038, IECTL 0x0a0, 32-bit).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct EventControl {
    #[bits(30)]
    __: u32,
    /// IP: a message is pending (RO).
    pub ip: bool,
    /// IM: messages are masked (RW, reset 1).
    pub im: bool,
}

/// Invalidation Queue Address (0x090, 64-bit).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct QueueAddress {
    /// QS: the queue has 2^QS pages of 4 KiB.
    #[bits(3)]
    pub qs: u8,
    #[bits(8)]
    __: u8,
    /// DW: descriptors of 256 bits (scalable mode).
    pub dw: bool,
    /// IQA: number of the queue's first 4 KiB frame.
    #[bits(52)]
    pub iqa: u64,
}

/// Interrupt Remapping Table Address (0x0b8, 64-bit).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct InterruptTableAddress {
    /// S: the table has 2^(S + 1) entries.
    #[bits(4)]
    pub s: u8,
    #[bits(7)]
    __: u8,
    /// EIME: extended interrupt mode; destinations have 32 bits (x2APIC), and messages in
    /// compatibility format are blocked.
    pub eime: bool,
    /// IRTA: number of the table's 4 KiB frame.
    #[bits(52)]
    pub irta: u64,
}

/// Invalidation Completion Status (0x09c, 32-bit).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct CompletionStatus {
    /// IWC: a wait descriptor with IF completed (RW1C).
    pub iwc: bool,
    #[bits(31)]
    __: u32,
}

/// Invalidate Address (IRO·16, 64-bit, W).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct InvalidateAddress {
    /// AM: 2^AM pages.
    #[bits(6)]
    pub am: u8,
    /// IH: only leaf entries changed.
    pub ih: bool,
    #[bits(5)]
    __: u8,
    /// ADDR: first page, aligned to the mask.
    #[bits(52)]
    pub addr: u64,
}

/// IOTLB Invalidate (IRO·16 + 8, 64-bit, RW).
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct IotlbInvalidate {
    #[bits(32)]
    __: u32,
    /// DID: domain of a domain- or page-selective request.
    pub did: u16,
    /// DW: drain writes.
    pub dw: bool,
    /// DR: drain reads.
    pub dr: bool,
    #[bits(7)]
    __: u8,
    /// IAIG: granularity performed; 0 means the request was refused.
    #[bits(2)]
    pub iaig: u8,
    #[bits(1)]
    __: u8,
    /// IIRG: requested granularity.
    #[bits(2)]
    pub iirg: u8,
    #[bits(1)]
    __: u8,
    /// IVT: invalidate; clears when done.
    pub ivt: bool,
}

#[cfg(test)]
mod tests;
