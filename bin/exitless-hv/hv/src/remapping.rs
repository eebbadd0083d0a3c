//! The machine's DMA remapping unit (Intel VT-d, revision 4.1, legacy mode): the assigned device
//! reaches the guest's memory and nothing else, no other function reaches anything, and no message
//! is an interrupt but by an entry of a table that the hypervisor writes.
//!
//! ```text
//! device ── address ─▶ context of its function ─▶ second-level tables: the guest's memory  [`tables`]
//!        ── message: a handle ─▶ interrupt entry: vector, processor, this source ─▶ local APIC
//! ```
//! The guest sees neither the unit nor its formats: firmware's table is hidden, the unit's page is
//! not mapped, and what the guest writes into the device's message table or the I/O APIC is
//! answered from what it wrote ([`Msix`](crate::msix), [`IoApic`](crate::io_apic)).
//!
//! **Bounds.** Each wait for the unit is a number of reads; recorded faults are taken at the
//! watchdog's ticks, as many as the unit has registers.
//!
//! **Left out.** More than one unit, or one that does not cover the assigned device; scalable mode.

pub mod firmware;
mod tables;

use core::sync::atomic::{Ordering, fence};

use vtd_spec::fault::{FRCD_LEN, FaultReason, FaultRecording};
use vtd_spec::invalidate::{
    ContextDescriptor, Granularity, InterruptEntryDescriptor, IotlbDescriptor, WaitDescriptor,
};
use vtd_spec::registers::{
    CAP, Capability, ECAP, ExtendedCapability, FSTS, FaultStatus, GCMD, GSTS, GlobalCommand,
    GlobalStatus, IQA, IQT, IRTA, InterruptTableAddress, QueueAddress, RTADDR,
};
use vtd_spec::remap::{InterruptEntry, RemappableAddress, RemappableRedirection, SourceValidation};
use vtd_spec::tables::{ContextEntry, RootEntry, TranslationType};

use self::firmware::Firmware;
use self::tables::SecondLevel;
use crate::memory::{self, Guest, PAGE, Page};

/// Handles of the device's messages are their numbers; those of the I/O APIC's pins begin here.
const FIRST_PIN: u16 = 224;
/// Entries of the interrupt table: one page.
const HANDLES: u16 = 256;
/// Reads of a register that a wait may take. The unit answers in microseconds.
const PATIENCE: u32 = 10_000_000;
/// The domain of the assigned device. 0 is the unit's own where CAP.CM is set.
const DOMAIN: u16 = 1;

/// Reason why DMA is not contained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is left out (`defend=`).
    NotAsked,
    /// There is none.
    None,
    /// It does not cover a function: bus << 8 | device << 3 | function.
    Uncovered(u16),
    /// More than one.
    Several(u32),
    /// It lacks something.
    Lacks(&'static str),
    /// It does not act on a command.
    Silent(&'static str),
    /// Firmware wants a function to reach the hypervisor's memory.
    Reserved,
    /// The guest's memory has too many pieces.
    Pieces,
    /// No device is assigned.
    NoDevice,
}

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::NotAsked => f.write_str("it is left out"),
            Self::None => {
                f.write_str("there is no IOMMU (QEMU: -device intel-iommu,intremap=on,eim=on)")
            }
            Self::Uncovered(function) => {
                write!(f, "function {function:#x} is not behind the IOMMU")
            }
            Self::Several(units) => write!(f, "there are {units} IOMMUs, and one is understood"),
            Self::Lacks(what) => write!(f, "the IOMMU has no {what}"),
            Self::Silent(what) => write!(f, "the IOMMU does not {what}"),
            Self::Reserved => {
                f.write_str("firmware reserves memory for DMA (RMRR) where the hypervisor is")
            }
            Self::Pieces => f.write_str("the guest's memory has too many pieces for the tables"),
            Self::NoDevice => f.write_str("no device is assigned"),
        }
    }
}

/// Memory that the unit reads.
#[repr(C, align(4096))]
pub struct Pages {
    root: Page,
    contexts: Page,
    second: SecondLevel,
    interrupts: Page,
    queue: Page,
    /// Written by the unit: a wait is over.
    status: Page,
}

impl Pages {
    /// Nothing is reached.
    pub const ZERO: Self = Self {
        root: Page::ZERO,
        contexts: Page::ZERO,
        second: SecondLevel::EMPTY,
        interrupts: Page::ZERO,
        queue: Page::ZERO,
        status: Page::ZERO,
    };
}

/// A fault that the unit recorded.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Whose request: bus << 8 | device << 3 | function.
    pub source: u16,
    /// The page's address, or, of an interrupt, its handle.
    pub at: u64,
    /// The unit's reason code.
    pub reason: FaultReason,
    /// A read.
    pub is_read: bool,
}

impl Fault {
    /// Returns whether it is of an interrupt, not of an access to memory.
    pub fn is_interrupt(&self) -> bool {
        self.reason.0 >= FaultReason::MESSAGE_RESERVED.0
    }
}

impl core::fmt::Display for Fault {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (bus, slot) = (self.source >> 8, self.source & 0xff);
        let (device, function) = (slot >> 3, slot & 7);
        write!(f, "{bus:02x}:{device:02x}.{function} ")?;
        if self.is_interrupt() {
            write!(f, "message with handle {:#x}", self.at)?;
        } else {
            let kind = if self.is_read { "read of" } else { "write to" };
            write!(f, "{kind} {:#x}", self.at)?;
        }
        write!(f, " blocked, reason {:#x}", self.reason.0)
    }
}

/// The unit, on.
pub struct Remapping {
    base: u64,
    pages: &'static mut Pages,
    /// Descriptors written so far.
    tail: u16,
    /// Waits so far: what the next one writes.
    waits: u32,
    device: u16,
    io_apic: Option<u16>,
    /// The first recording register's offset, and how many there are.
    faults: (u16, u16),
    /// The tables are not read by way of the processors' caches.
    is_incoherent: bool,
}

impl Remapping {
    /// Takes the unit over, and turns it on: function `device` reaches `guest`'s memory, and its
    /// messages, and those of the I/O APIC, are interrupts by [`message`](Self::message) and
    /// [`redirection`](Self::redirection).
    ///
    /// # Errors
    /// The reason why it is not turned on: the unit is off, or works as before.
    ///
    /// # Safety
    /// Firmware's table says that the unit is there, and no other code uses it or `pages`.
    pub unsafe fn start(
        firmware: &Firmware,
        pages: &'static mut Pages,
        guest: &Guest,
        device: Option<u16>,
    ) -> Result<Self, Unfit> {
        let base = firmware.unit.ok_or(Unfit::None)?;
        if firmware.units != 1 {
            return Err(Unfit::Several(firmware.units));
        }
        if firmware.is_reserved_here {
            return Err(Unfit::Reserved);
        }
        if let Some(function) = firmware.uncovered() {
            return Err(Unfit::Uncovered(function));
        }
        let device = device.ok_or(Unfit::NoDevice)?;
        let capability = Capability::from_bits(read64(base, CAP));
        let extended = ExtendedCapability::from_bits(read64(base, ECAP));
        let levels = levels(capability, extended)?;
        for (start, end) in guest.ranges() {
            let allowed = pages.second.allow(start, end);
            allowed.map_err(|_| Unfit::Pieces)?;
        }
        let second = pages.second.address(levels);
        pages.let_in(device, second, levels);
        let mut unit = Self {
            base,
            pages,
            tail: 0,
            waits: 0,
            device,
            io_apic: firmware.io_apic,
            faults: (capability.fro() * 16, u16::from(capability.nfr()) + 1),
            is_incoherent: !extended.c(),
        };
        unit.flush(
            core::ptr::from_ref::<Pages>(unit.pages).cast(),
            size_of::<Pages>(),
        );
        unit.turn_on(capability)?;
        Ok(unit)
    }

    fn turn_on(&mut self, capability: Capability) -> Result<(), Unfit> {
        // As firmware left it, it may translate, or have a queue elsewhere.
        self.command(
            |_| GlobalCommand::new(),
            |status| !status.tes() && !status.qies() && !status.ires(),
            "stop",
        )?;
        if capability.rwbf() {
            let done = |status: GlobalStatus| !status.wbfs();
            self.command(|on| on.with_wbf(true), done, "flush its write buffer")?;
        }
        let queue = QueueAddress::new().with_iqa(self.pages.queue.address() / PAGE);
        self.write64(IQT, 0);
        self.write64(IQA, queue.into_bits());
        self.command(
            |on| on.with_qie(true),
            |status| status.qies(),
            "take a queue",
        )?;
        self.write64(RTADDR, self.pages.root.address());
        self.command(
            |on| on.with_srtp(true),
            |status| status.rtps(),
            "take a root table",
        )?;
        self.forget_translations()?;
        let interrupts = InterruptTableAddress::new()
            .with_irta(self.pages.interrupts.address() / PAGE)
            .with_eime(true)
            .with_s(HANDLES.ilog2() as u8 - 1);
        self.write64(IRTA, interrupts.into_bits());
        self.command(
            |on| on.with_sirtp(true),
            |status| status.irtps(),
            "take an interrupt table",
        )?;
        self.forget_entries(None)?;
        self.command(|on| on.with_te(true), |status| status.tes(), "translate")?;
        // CFI stays clear: a message in the other format is no interrupt.
        self.command(
            |on| on.with_ire(true),
            |status| status.ires(),
            "remap interrupts",
        )
    }

    /// Has the device's message `index` be the interrupt `vector` at processor `to`. Returns its
    /// address and data.
    pub fn message(&mut self, index: u16, to: u32, vector: u8) -> (u64, u32) {
        let entry = InterruptEntry::new().with_v(vector).with_dst(to);
        self.enter(index, self.device, entry);
        (u64::from(RemappableAddress::of(index).into_bits()), 0)
    }

    /// Has the I/O APIC's `pin` be the interrupt of this entry, which policy has made: its vector,
    /// delivery mode, trigger and processor. Returns the chip's entry, unmasked; none where
    /// firmware does not say what the chip sends as.
    pub fn redirection(&mut self, pin: u8, made: u64) -> Option<u64> {
        let handle = FIRST_PIN + u16::from(pin);
        if handle >= HANDLES {
            return None;
        }
        let (low, to) = (made as u32, (made >> 56) as u32);
        let (vector, mode) = (low as u8, (low >> 8 & 7) as u8);
        let (is_low, is_level) = (low >> 13 & 1 != 0, low >> 15 & 1 != 0);
        let entry = InterruptEntry::new()
            .with_v(vector)
            .with_dlm(mode)
            .with_dst(to);
        self.enter(handle, self.io_apic?, entry.with_tm(is_level));
        let entry = RemappableRedirection::new()
            .with_vector(vector)
            .with_is_level(is_level)
            .with_is_low(is_low)
            .with_is_remappable(true)
            .with_handle_low(handle);
        Some(entry.into_bits())
    }

    /// Puts an entry, of `source`'s messages, into the table.
    fn enter(&mut self, handle: u16, source: u16, entry: InterruptEntry) {
        let entry = entry
            .with_p(true)
            .with_sid(source)
            .with_svt(SourceValidation::Requester)
            .into_bits();
        let at = usize::from(handle) * 16;
        let bytes = &mut self.pages.interrupts.0[at..at + 16];
        if bytes == entry.to_le_bytes() {
            return;
        }
        let place = bytes.as_mut_ptr().cast::<u64>();
        let [low, high] = [entry as u64, (entry >> 64) as u64];
        // Not present while its halves are of two entries. The unit may read it at any time.
        for (half, word) in [(0, 0), (1, high), (0, low)] {
            // SAFETY: the entry's 16 bytes, which are aligned.
            unsafe { place.add(half).write_volatile(word) }
            fence(Ordering::SeqCst);
        }
        self.flush(place.cast(), 16);
        // A unit that has stopped blocks, which is reported when its faults are read.
        let _ = self.forget_entries(Some(handle));
    }

    /// Takes recorded faults. Returns whether some were lost, since all registers were full.
    pub fn faults(&mut self, mut each: impl FnMut(Fault)) -> bool {
        let status = FaultStatus::from_bits(self.read32(FSTS));
        if !status.ppf() && !status.pfo() {
            return false;
        }
        let (first, count) = self.faults;
        for index in 0..count {
            let at = first + index * FRCD_LEN;
            let words = [0, 4, 8, 12].map(|word| u128::from(self.read32(at + word)));
            let bits = words.iter().rev().fold(0, |bits, word| bits << 32 | word);
            let record = FaultRecording::from_bits(bits);
            if !record.f() {
                continue;
            }
            let mut fault = Fault {
                source: record.sid(),
                at: record.fi() * PAGE,
                reason: record.fr(),
                is_read: record.t(),
            };
            if fault.is_interrupt() {
                fault.at >>= 48;
            }
            each(fault);
            // Written 1 it is free again.
            self.write32(at + 12, 1 << 31);
        }
        self.write32(FSTS, FaultStatus::new().with_pfo(true).into_bits());
        status.pfo()
    }

    fn forget_translations(&mut self) -> Result<(), Unfit> {
        let contexts = ContextDescriptor::new()
            .with_kind(1)
            .with_g(Granularity::GLOBAL);
        let translations = IotlbDescriptor::new()
            .with_kind(2)
            .with_g(Granularity::GLOBAL)
            .with_dw(true)
            .with_dr(true);
        self.submit(contexts.into_bits());
        self.submit(translations.into_bits());
        self.wait()
    }

    /// Has it forget one interrupt entry, or all.
    fn forget_entries(&mut self, handle: Option<u16>) -> Result<(), Unfit> {
        let descriptor = InterruptEntryDescriptor::new()
            .with_kind(4)
            .with_is_selective(handle.is_some())
            .with_iidx(handle.unwrap_or(0));
        self.submit(descriptor.into_bits());
        self.wait()
    }

    fn submit(&mut self, descriptor: u128) {
        const PLACES: u16 = 256;
        let at = usize::from(self.tail % PLACES) * 16;
        self.pages.queue.0[at..at + 16].copy_from_slice(&descriptor.to_le_bytes());
        self.flush(self.pages.queue.0[at..].as_ptr(), 16);
        self.tail = (self.tail + 1) % PLACES;
    }

    /// Hands over what was submitted, and waits until it is done.
    fn wait(&mut self) -> Result<(), Unfit> {
        self.waits = self.waits.wrapping_add(1).max(1);
        let descriptor = WaitDescriptor::new()
            .with_kind(5)
            .with_sw(true)
            .with_data(self.waits)
            .with_addr(self.pages.status.address() / 4);
        self.submit(descriptor.into_bits());
        // The unit reads descriptors once it has the tail.
        fence(Ordering::SeqCst);
        self.write64(IQT, u64::from(self.tail) * 16);
        let status = self.pages.status.address() as *const u32;
        // SAFETY: our own page; the unit writes it meanwhile.
        let is_done = || unsafe { status.read_volatile() } == self.waits;
        match (0..PATIENCE).any(|_| is_done()) {
            true => Ok(()),
            false => Err(Unfit::Silent("complete invalidations")),
        }
    }

    /// Changes what is on, and waits until it is so.
    fn command(
        &self,
        change: impl FnOnce(GlobalCommand) -> GlobalCommand,
        is_done: impl Fn(GlobalStatus) -> bool,
        what: &'static str,
    ) -> Result<(), Unfit> {
        let status = || GlobalStatus::from_bits(self.read32(GSTS));
        let now = status();
        let on = GlobalCommand::new()
            .with_te(now.tes())
            .with_qie(now.qies())
            .with_ire(now.ires());
        self.write32(GCMD, change(on).into_bits());
        match (0..PATIENCE).any(|_| is_done(status())) {
            true => Ok(()),
            false => Err(Unfit::Silent(what)),
        }
    }

    /// Writes back what the unit is to read, where it does not snoop the caches.
    fn flush(&self, first: *const u8, len: usize) {
        const LINE: usize = 64;
        if !self.is_incoherent {
            return;
        }
        let first = first as usize & !(LINE - 1);
        let end = first.wrapping_add(len + LINE);
        for line in (first..end).step_by(LINE) {
            // SAFETY: a line of our own memory; nothing changes but where it is.
            unsafe { core::arch::x86_64::_mm_clflush(line as *const u8) }
        }
        fence(Ordering::SeqCst);
    }

    fn read32(&self, register: u16) -> u32 {
        // SAFETY: `start`'s caller: it is the unit's, and reading its registers changes nothing.
        unsafe { memory::read32(self.base + u64::from(register)) }
    }

    fn write32(&self, register: u16, value: u32) {
        // SAFETY: as above; the unit is ours.
        unsafe { memory::write32(self.base + u64::from(register), value) }
    }

    fn write64(&self, register: u16, value: u64) {
        // Halves: the unit reads each of these registers at a command, but for the queue's tail,
        // whose upper half is 0.
        self.write32(register + 4, (value >> 32) as u32);
        self.write32(register, value as u32);
    }
}

impl Pages {
    /// Lets `device` in: a context for it, and for no other function.
    fn let_in(&mut self, device: u16, second: u64, levels: u8) {
        let context = ContextEntry::new()
            .with_p(true)
            .with_tt(TranslationType::SecondLevel)
            .with_slptptr(second / PAGE)
            .with_aw(levels - 2)
            .with_did(DOMAIN);
        let root = RootEntry::new()
            .with_p(true)
            .with_ctp(self.contexts.address() / PAGE);
        for (page, index, entry) in [
            (&mut self.contexts, device & 0xff, context.into_bits()),
            (&mut self.root, device >> 8, root.into_bits()),
        ] {
            let at = usize::from(index) * 16;
            page.0[at..at + 16].copy_from_slice(&entry.to_le_bytes());
        }
    }
}

/// Levels of the tables, 3 or 4.
fn levels(capability: Capability, extended: ExtendedCapability) -> Result<u8, Unfit> {
    const LARGE_PAGES: u8 = 3;
    for (has, what) in [
        (extended.qi(), "invalidation queue"),
        (extended.ir(), "interrupt remapping (QEMU: intremap=on)"),
        (extended.eim(), "x2APIC mode (QEMU: eim=on)"),
        (
            capability.sllps() & LARGE_PAGES == LARGE_PAGES,
            "large pages",
        ),
    ] {
        if !has {
            return Err(Unfit::Lacks(what));
        }
    }
    match capability.sagaw() {
        sagaw if sagaw & 2 != 0 => Ok(3),
        sagaw if sagaw & 4 != 0 => Ok(4),
        _ => Err(Unfit::Lacks("tables of three or four levels")),
    }
}

fn read64(base: u64, register: u16) -> u64 {
    let half = |at: u16| {
        // SAFETY: `start`'s caller: the unit is there, and reading its registers changes nothing.
        u64::from(unsafe { memory::read32(base + u64::from(at)) })
    };
    half(register) | half(register + 4) << 32
}
