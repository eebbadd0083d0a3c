//! The register file: reset values, reads, and writes with their side effects.
//!
//! Accesses are 4 or 8 bytes, aligned. An 8-byte one is two of 4 bytes, low half first, which is
//! right for every register whose trigger lies in the high half (CCMD, IOTLB) and lets guests write
//! FEADDR and FEUADDR in one go (Xen does). Other accesses read 0 and write nothing.
//!
//! Writes never touch memory: work that needs memory is recorded here and done by [`Unit::step`].

use super::faults::Event;
use super::{AccessLen, Unit};
use crate::config::Config;
use crate::spec::fault::FRCD_LEN;
use crate::spec::registers::{
    self as spec, CAP, CCMD, Capability, CompletionStatus, ContextCommand, ECAP,
    ExtendedCapability, FEADDR, FECTL, FEDATA, FEUADDR, FSTS, GCMD, GSTS, GlobalCommand,
    GlobalStatus, ICS, IEADDR, IECTL, IEDATA, IEUADDR, IQA, IQH, IQT, IRTA, IotlbInvalidate,
    RTADDR, VER, Version,
};

/// Offset of Invalidate Address: the reserved hole before the recording registers.
pub const IVA: u16 = 0x0f0;
/// Offset of IOTLB Invalidate.
pub const IOTLB: u16 = IVA + 8;
/// Offset of the first fault recording register.
pub const FRCD: u16 = 0x220;
/// Most recording registers that fit behind [`FRCD`]: (0x1000 - 0x220) / 16.
pub const MAX_FAULT_RECORDS: usize = ((spec::PAGE_LEN - FRCD) / FRCD_LEN) as usize;
/// CAP.MAMV: up to 2^18 pages, a 1 GiB page.
pub const MAX_ADDRESS_MASK: u8 = 18;

/// Version 1.0. Major version 6 and up would imply ESRTPS, which polled registers cannot offer.
const VERSION: Version = Version::new().with_max(1).with_min(0);

/// Extended capabilities of every unit.
const EXTENDED: ExtendedCapability = ExtendedCapability::new()
    // Our walks are plain loads of guest memory; without C Linux flushes a cache line per entry.
    .with_c(true)
    .with_qi(true)
    // Pass-through contexts, for `iommu=pt`.
    .with_pt(true)
    .with_iro(IVA / 16)
    .with_mhmv(15)
    // Interrupt remapping comes later: module `remap` has its place.
    .with_ir(false)
    // Only together with IR.
    .with_eim(false)
    // No device here has a TLB of its own.
    .with_dt(false)
    // Stock kernels use scalable mode wherever they see it.
    .with_smts(false);

/// Extended capabilities of a unit with this configuration.
fn extended_capability(config: &Config) -> ExtendedCapability {
    // Emulated devices need not check SNP: all their accesses are coherent.
    EXTENDED.with_sc(config.snoop_control)
}

/// Capabilities of a unit with this configuration.
fn capability(config: &Config) -> Capability {
    Capability::new()
        // 64 Ki domains: DID has 16 bits and costs nothing here.
        .with_nd(6)
        .with_cm(config.caching_mode)
        .with_sagaw(config.width.sagaw())
        .with_mgaw(config.width.bits() - 1)
        // Else Linux maps write-only buffers readable.
        .with_zlr(true)
        .with_fro(FRCD / 16)
        .with_sllps(config.large_pages.sllps())
        .with_psi(true)
        // `Unit::new` has checked the count.
        .with_nfr((config.fault_records - 1) as u8)
        .with_mamv(MAX_ADDRESS_MASK)
        // Leases: see the head of `unit`.
        .with_dwd(true)
        .with_drd(true)
        // With ESRTPS, Linux would not flush after SRTP, and the store that follows SRTP could
        // overwrite it unseen in a polled register page.
        .with_esrtps(false)
        .with_esirtps(false)
        .with_pi(false)
}

/// Registers with plain state; those of faults are in [`Faults`](super::faults::Faults).
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    /// GSTS bits in effect. TES is the bit that the guest sees; `Unit::te` controls translation.
    pub(crate) gsts: GlobalStatus,
    pub(crate) rtaddr: u64,
    pub(crate) irta: u64,
    pub(crate) ccmd: ContextCommand,
    pub(crate) iva: u64,
    pub(crate) iotlb: IotlbInvalidate,
    /// Byte offset of the descriptor to process next.
    pub(crate) iqh: u32,
    /// Byte offset behind the last descriptor, as the guest wrote it.
    pub(crate) iqt: u32,
    pub(crate) iqa: u64,
    pub(crate) iwc: bool,
}

/// IQT and IQH hold bits 18:4.
const QUEUE_POINTER_MASK: u32 = 0x7_fff0;
const FRAME_MASK: u64 = !0xfff;
/// IQA: frame and QS; DW is reserved without scalable mode.
const IQA_MASK: u64 = FRAME_MASK | 7;
/// IRTA: frame, EIME and S.
const IRTA_MASK: u64 = FRAME_MASK | 1 << 11 | 0xf;
/// IVA: frame, IH and AM.
const IVA_MASK: u64 = FRAME_MASK | 0x7f;
/// Message data: bits 31:16 are reserved without EIM.
const MESSAGE_DATA_MASK: u32 = 0xffff;
const MESSAGE_ADDRESS_MASK: u32 = !3;

fn low(value: u64) -> u32 {
    value as u32
}

fn high(value: u64) -> u32 {
    (value >> 32) as u32
}

fn with_half(old: u64, is_high: bool, half: u32) -> u64 {
    if is_high {
        old & 0xffff_ffff | u64::from(half) << 32
    } else {
        old & !0xffff_ffff | u64::from(half)
    }
}

impl Unit {
    /// Returns the value that the guest reads at `offset`, for the trap front end.
    pub fn read(&self, offset: u16, len: AccessLen) -> u64 {
        if !is_aligned(offset, len) {
            return 0;
        }
        match len {
            AccessLen::B4 => u64::from(self.read_dword(offset)),
            AccessLen::B8 => {
                u64::from(self.read_dword(offset)) | u64::from(self.read_dword(offset + 4)) << 32
            }
        }
    }

    /// A guest's write at `offset`. Nothing that needs memory is done: call [`step`](Unit::step)
    /// after it.
    pub fn write(&mut self, offset: u16, len: AccessLen, value: u64) {
        if !is_aligned(offset, len) {
            return;
        }
        self.stats.register_writes += 1;
        self.changes += 1;
        self.write_dword(offset, low(value));
        if len == AccessLen::B8 {
            self.write_dword(offset + 4, high(value));
        }
    }

    fn read_dword(&self, offset: u16) -> u32 {
        let word = match offset & !7 {
            // Pairs of 32-bit registers, and single ones, by their own offset.
            _ if offset == VER => return VERSION.into_bits(),
            _ if offset == GSTS => return self.registers.gsts.into_bits(),
            _ if offset == FSTS => return self.faults.fsts().into_bits(),
            _ if offset == ICS => {
                return CompletionStatus::new()
                    .with_iwc(self.registers.iwc)
                    .into_bits();
            }
            _ if (FECTL..=FEUADDR).contains(&offset) => {
                return read_event(&self.faults.event, offset - FECTL);
            }
            _ if (IECTL..=IEUADDR).contains(&offset) => {
                return read_event(&self.completion, offset - IECTL);
            }
            _ if offset >= FRCD => return self.read_record(offset - FRCD),
            CAP => capability(&self.config).into_bits(),
            ECAP => extended_capability(&self.config).into_bits(),
            RTADDR => self.registers.rtaddr,
            CCMD => self.registers.ccmd.into_bits(),
            IQH => u64::from(self.registers.iqh),
            IQT => u64::from(self.registers.iqt),
            IQA => self.registers.iqa,
            IRTA => self.registers.irta,
            IOTLB => self.registers.iotlb.into_bits(),
            // GCMD and IVA are write-only; IQER has nothing to say; the rest is reserved or not
            // offered.
            _ => 0,
        };
        if offset & 4 == 0 {
            low(word)
        } else {
            high(word)
        }
    }

    fn read_record(&self, offset: u16) -> u32 {
        let record = self.faults.records.get(usize::from(offset / FRCD_LEN));
        let bits = record.map_or(0, |record| record.into_bits());
        (bits >> (u32::from(offset % FRCD_LEN) * 8)) as u32
    }

    fn write_dword(&mut self, offset: u16, value: u32) {
        let is_high = offset & 4 != 0;
        let queue_is_off = !self.registers.gsts.qies();
        match offset & !7 {
            _ if offset == GCMD => self.set_global_command(GlobalCommand::from_bits(value)),
            _ if offset == FSTS => self.faults.write_fsts(value),
            _ if offset == ICS => self.clear_completion_status(value),
            _ if (FECTL..=FEUADDR).contains(&offset) => {
                write_event(&mut self.faults.event, offset - FECTL, value);
            }
            _ if (IECTL..=IEUADDR).contains(&offset) => {
                write_event(&mut self.completion, offset - IECTL, value);
            }
            _ if offset >= FRCD => self.write_record(offset - FRCD, value),
            _ if offset == IQT => self.registers.iqt = value & QUEUE_POINTER_MASK,
            RTADDR => {
                let rtaddr = with_half(self.registers.rtaddr, is_high, value);
                self.registers.rtaddr = rtaddr & FRAME_MASK;
            }
            IRTA => {
                let irta = with_half(self.registers.irta, is_high, value);
                self.registers.irta = irta & IRTA_MASK;
            }
            IQA if queue_is_off => {
                let iqa = with_half(self.registers.iqa, is_high, value);
                self.registers.iqa = iqa & IQA_MASK;
            }
            IVA => {
                let iva = with_half(self.registers.iva, is_high, value);
                self.registers.iva = iva & IVA_MASK;
            }
            CCMD => self.set_context_command(is_high, value),
            IOTLB => self.set_iotlb_command(is_high, value),
            _ => {}
        }
    }

    fn write_record(&mut self, offset: u16, value: u32) {
        let index = usize::from(offset / FRCD_LEN);
        if offset % FRCD_LEN == 12 && index < self.faults.records.len() {
            self.faults.write_record(index, value);
        }
    }

    fn clear_completion_status(&mut self, value: u32) {
        if CompletionStatus::from_bits(value).iwc() {
            self.registers.iwc = false;
            self.completion.ip = false;
        }
    }

    fn set_context_command(&mut self, is_high: bool, value: u32) {
        let old = self.registers.ccmd;
        if old.icc() {
            return; // software may not write while a request is in progress
        }
        let new = ContextCommand::from_bits(with_half(old.into_bits(), is_high, value));
        self.registers.ccmd = ContextCommand::new()
            .with_did(new.did())
            .with_sid(new.sid())
            .with_fm(new.fm())
            .with_caig(old.caig())
            .with_cirg(new.cirg())
            .with_icc(new.icc());
    }

    fn set_iotlb_command(&mut self, is_high: bool, value: u32) {
        let old = self.registers.iotlb;
        if old.ivt() {
            return;
        }
        let new = IotlbInvalidate::from_bits(with_half(old.into_bits(), is_high, value));
        self.registers.iotlb = IotlbInvalidate::new()
            .with_did(new.did())
            .with_dw(new.dw())
            .with_dr(new.dr())
            .with_iaig(old.iaig())
            .with_iirg(new.iirg())
            .with_ivt(new.ivt());
    }

    /// GCMD: one-shots act once, levels follow. WBF and the fault log are not offered: no effect,
    /// and their status bits stay 0.
    fn set_global_command(&mut self, command: GlobalCommand) {
        let gsts = self.registers.gsts;
        if command.srtp() {
            self.latch_root_table();
        }
        if command.qie() != gsts.qies() {
            self.enable_queue(command.qie());
        }
        // SIRTP, IRE and CFI belong here, with module `remap`; until ECAP.IR is set they are
        // reserved.
        if command.te() != self.te {
            self.switch_translation(command.te());
        }
    }
}

fn is_aligned(offset: u16, len: AccessLen) -> bool {
    offset < spec::PAGE_LEN && offset.is_multiple_of(len.bytes())
}

/// The four registers of an event, by offset from its control register.
fn read_event(event: &Event, offset: u16) -> u32 {
    match offset {
        0 => event.control(),
        4 => event.data,
        8 => event.address,
        _ => event.upper_address,
    }
}

fn write_event(event: &mut Event, offset: u16, value: u32) {
    match offset {
        0 => event.set_control(value),
        4 => event.data = value & MESSAGE_DATA_MASK,
        8 => event.address = value & MESSAGE_ADDRESS_MASK,
        // The upper address is reserved without EIM.
        _ if EXTENDED.eim() => event.upper_address = value & !0xff,
        _ => {}
    }
}

const _: () = {
    assert!(FECTL + 4 == FEDATA && FEDATA + 4 == FEADDR && FEADDR + 4 == FEUADDR);
    assert!(IECTL + 4 == IEDATA && IEDATA + 4 == IEADDR && IEADDR + 4 == IEUADDR);
};
