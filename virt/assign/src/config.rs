//! Configuration space of an assigned function, as the guest sees it.
//!
//! The device's configuration space is read once, when the device is opened. From that image and
//! the sizes of the BARs [`GuestConfig`] makes a space of its own: identification, BARs, and the
//! capabilities that [`SEEN`] shows. The guest reads and writes that one and never the device's,
//! but for bits that are named ([`ReadThrough`]). The effects of a write are returned as values
//! ([`Effects`]), for the function to carry out.
//!
//! **The image is untrusted.** A device may have any bytes there: lists that loop, capabilities
//! that overlap or end behind the space, tables outside their BAR. A malformed capability is hidden
//! and reported ([`Unsupported`]); a defect that makes the function useless is refused
//! ([`Refusal`]).
//!
//! Specification: PCI Express Base 4.0 chapter 7, where no other is named.
//!
//! **Choices.** The function is a root complex integrated endpoint (§7.5.3.2), as all on the root
//! bus are. Device control is storage: payload and request sizes are the host's, since they must
//! agree with the ports above the device. Power states are storage: the device stays in D0, and
//! NoSoftReset promises no more than that. Capabilities lie where the device has them, since
//! drivers may know the offset; the extended list is packed from 0x100 on, where it must begin. The
//! prefetchable bit is not shown: a guest maps the BAR uncached, which is right for each.
//!
//! **Left out.** The legacy pin, I/O BARs, the expansion ROM, bridges.

mod bars;
mod list;
mod seen;
mod unsupported;

use pci::bars::{BARS, BarKind, COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY, FIRST_BAR};
use pci::config::{ConfigSpace, Identity};
use pci::msi::{MsiLayout, MsiRegisters};
use pci::msix::MsixPlace;

use bars::bar_kinds;
pub use list::Broken;
use list::{Listed, STANDARD_END, half, word};
use seen::treatment;
pub use seen::{Row, SEEN, Space, Treatment};
pub use unsupported::{BarReason, Fault, Refusal, Unsupported};

/// Header registers beside those that `pci` names.
const CACHE_LINE_SIZE: u16 = 0x0c;
const HEADER_TYPE: usize = 0x0e;
const EXPANSION_ROM: usize = 0x30;
const INTERRUPT_PIN: usize = 0x3d;
/// Header type bit 7: the device has several functions.
const MULTI_FUNCTION: u8 = 1 << 7;

/// Express capability: device/port type of a root complex integrated endpoint, in the capabilities
/// register (§7.5.3.2).
const ROOT_COMPLEX_ENDPOINT: u16 = 9;
/// Device capabilities that are shown (§7.5.3.3): payload size, extended tags, role-based error
/// reporting.
const DEVICE_CAPABILITIES_SHOWN: u32 = 0x8027;
/// Device capabilities bit 28: the function can be reset by itself.
const FUNCTION_RESET: u32 = 1 << 28;
/// Device control bits that are storage (§7.5.3.4): error reporting, relaxed ordering, payload
/// size, extended tags, no snoop, request size.
const DEVICE_CONTROL_STORED: u16 = 0x79ff;
/// Device control bit 15: reset the function now. Reads zero.
const INITIATE_RESET: u16 = 1 << 15;
const DEVICE_CONTROL: u16 = 8;
const DEVICE_STATUS: u16 = 10;
/// Device status bit 5 (§7.5.3.5).
const TRANSACTIONS_PENDING: u32 = 1 << 5;

/// Power management control and status, in its capability (§7.5.2.2).
const POWER_CONTROL: u16 = 4;
const POWER_STATE: u8 = 3;
/// Bit 3: nothing is lost on the way from D3hot to D0.
const NO_SOFT_RESET: u8 = 1 << 3;

/// Inputs of [`GuestConfig::new`].
#[derive(Clone, Copy, Debug)]
pub struct Device<'a> {
    /// The device's configuration space as read: 256 or 4,096 bytes.
    pub image: &'a [u8],
    /// Bytes of each BAR, 0 where there is none, as the host has sized them.
    pub bar_sizes: [u64; BARS],
    /// The host can reset the function.
    pub can_reset: bool,
}

/// Origin of bits that a space of our own cannot know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dynamic {
    /// Device status of the device's Express capability, at this offset of its configuration space.
    DeviceStatus(u16),
    /// Pending vectors of the function's [`Msi`](pci::msi::Msi).
    MsiPending,
}

/// Bits that a guest's read takes from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadThrough {
    /// Offset of the first byte.
    pub at: u16,
    /// Bits of the word there; the others are the space's own.
    pub mask: u32,
    /// Origin. Its bit 0 is bit 0 of the byte at `at`.
    pub from: Dynamic,
}

/// Command register bits that are for the function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// Memory BARs are decoded.
    pub memory: bool,
    /// The device may do DMA and send messages.
    pub bus_master: bool,
}

/// Message control of MSI-X.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsixControl {
    /// MSI-X is on.
    pub is_enabled: bool,
    /// All vectors are masked.
    pub is_masked: bool,
}

/// Effects of a write: each register that has a new value, and a reset that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// The command register.
    pub command: Option<Command>,
    /// The MSI capability.
    pub msi: Option<MsiRegisters>,
    /// Message control of MSI-X.
    pub msix: Option<MsixControl>,
    /// Initiate Function Level Reset: reset the device, then call [`GuestConfig::reset`].
    pub function_reset: bool,
}

/// The registers that [`Effects`] compares.
#[derive(Clone, Copy, PartialEq, Eq)]
struct EffectRegisters {
    command: Command,
    msi: Option<MsiRegisters>,
    msix: MsixControl,
}

/// Configuration space of one function. See the module's head.
#[derive(Clone)]
pub struct GuestConfig {
    space: ConfigSpace,
    /// The space without a guest's writes.
    fresh: ConfigSpace,
    kinds: [BarKind; BARS],
    unsupported: Vec<Unsupported>,
    read_through: Vec<ReadThrough>,
    msi: Option<MsiLayout>,
    msix: Option<MsixPlace>,
    /// Offset of the Express capability.
    express: Option<u16>,
    /// Offset of the power management capability.
    power: Option<u16>,
    can_reset: bool,
}

impl GuestConfig {
    /// Makes the space of `device`.
    ///
    /// # Errors
    /// The device cannot be assigned at all. Parts that are merely missing are in
    /// [`unsupported`](Self::unsupported).
    pub fn new(device: &Device<'_>) -> Result<Self, Refusal> {
        let image = device.image;
        if ![STANDARD_END, usize::from(pci::config::CONFIG_SIZE)].contains(&image.len()) {
            return Err(Refusal::Length(image.len()));
        }
        if half(image, 0) == 0xffff {
            return Err(Refusal::Absent);
        }
        let header_type = image[HEADER_TYPE] & !MULTI_FUNCTION;
        if header_type != 0 {
            return Err(Refusal::HeaderType(header_type));
        }
        let mut unsupported = Vec::new();
        let kinds = bar_kinds(image, &device.bar_sizes, &mut unsupported);
        let mut space = ConfigSpace::new(&identity(image), kinds);
        let scratch = usize::from(CACHE_LINE_SIZE);
        // Cache line size and latency timer.
        space.set_bytes(CACHE_LINE_SIZE, &image[scratch..scratch + 2]);
        space.make_writable(CACHE_LINE_SIZE, &[0xff; 2]);
        if word(image, EXPANSION_ROM) != 0 {
            unsupported.push(Unsupported::ExpansionRom);
        }
        let mut guest = Self {
            fresh: space.clone(),
            space,
            kinds,
            unsupported,
            read_through: Vec::new(),
            msi: None,
            msix: None,
            express: None,
            power: None,
            can_reset: device.can_reset,
        };
        for list in [Space::Standard, Space::Extended] {
            guest.add_list(image, list);
        }
        guest.fresh = guest.space.clone();
        let has_messages = guest.msi.is_some() || guest.msix.is_some();
        if image[INTERRUPT_PIN] != 0 && !has_messages {
            return Err(Refusal::PinOnly(guest.unsupported));
        }
        Ok(guest)
    }

    fn add_list(&mut self, image: &[u8], space: Space) {
        let (listed, broken) = list::walk(image, space);
        for listed in listed {
            let (id, at) = (listed.id, listed.at as u16);
            let what = treatment(space, id);
            if let Treatment::Hidden(reason) = what {
                let hidden = Unsupported::Hidden {
                    space,
                    id,
                    at,
                    reason,
                };
                self.unsupported.push(hidden);
            } else if let Err(fault) = self.add(image, &listed, what) {
                let malformed = Unsupported::Malformed {
                    space,
                    id,
                    at,
                    fault,
                };
                self.unsupported.push(malformed);
            }
        }
        let broken = broken.map(|broken| Unsupported::List { space, broken });
        self.unsupported.extend(broken);
    }

    fn add(&mut self, image: &[u8], listed: &Listed, what: Treatment) -> Result<(), Fault> {
        match what {
            Treatment::Express => self.add_express(image, listed),
            Treatment::Msi => self.add_msi(image, listed),
            Treatment::Msix => self.add_msix(image, listed),
            Treatment::Power => self.add_power(image, listed),
            Treatment::ReadOnly => self.add_read_only(image, listed),
            Treatment::Serial => self.add_serial(image, listed),
            Treatment::Hidden(_) => Ok(()),
        }
    }

    /// Places a standard capability where the device has it.
    fn place(&mut self, listed: &Listed, body: &[u8]) -> u16 {
        let at = listed.at as u16;
        self.space
            .place_capability(at, listed.id as u8, body)
            .expect("`Listed::end` keeps capabilities apart and in the space");
        at
    }

    fn add_express(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        if self.express.is_some() {
            return Err(Fault::Second);
        }
        let at = listed.at;
        fits(listed, 4)?;
        let flags = half(image, at + 2);
        let version = flags & 0xf;
        let is_integrated = flags >> 4 & 0xf == ROOT_COMPLEX_ENDPOINT;
        // §7.5.3: an integrated endpoint may end before its link registers; version 1 has no second
        // set.
        let len = match (version, is_integrated) {
            (1, true) => 0x0c,
            (1, false) => 0x14,
            (2, true) if listed.end - at < 0x3c => 0x2c,
            (2, _) => 0x3c,
            _ => return Err(Fault::Version(version)),
        };
        fits(listed, len)?;
        let mut body = vec![0; len - 2];
        let flags = version | ROOT_COMPLEX_ENDPOINT << 4;
        body[0..2].copy_from_slice(&flags.to_le_bytes());
        let mut capabilities = word(image, at + 4) & DEVICE_CAPABILITIES_SHOWN;
        if self.can_reset {
            capabilities |= FUNCTION_RESET;
        }
        body[2..6].copy_from_slice(&capabilities.to_le_bytes());
        let control = half(image, at + usize::from(DEVICE_CONTROL)) & DEVICE_CONTROL_STORED;
        body[6..8].copy_from_slice(&control.to_le_bytes());
        let at = self.place(listed, &body);
        let stored = DEVICE_CONTROL_STORED.to_le_bytes();
        self.space.make_writable(at + DEVICE_CONTROL, &stored);
        self.read_through.push(ReadThrough {
            at: at + DEVICE_STATUS,
            mask: TRANSACTIONS_PENDING,
            from: Dynamic::DeviceStatus(at + DEVICE_STATUS),
        });
        self.express = Some(at);
        Ok(())
    }

    fn add_msi(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        if self.msi.is_some() {
            return Err(Fault::Second);
        }
        fits(listed, 4)?;
        let layout = MsiLayout::of_control(half(image, listed.at + 2));
        fits(listed, usize::from(layout.len()))?;
        let at = listed.at as u16;
        self.space
            .place_msi(at, layout)
            .expect("`Listed::end` keeps capabilities apart and in the space");
        if layout.has_masks {
            self.read_through.push(ReadThrough {
                at: at + layout.pending(),
                mask: layout.vector_bits(),
                from: Dynamic::MsiPending,
            });
        }
        self.msi = Some(layout);
        Ok(())
    }

    fn add_msix(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        if self.msix.is_some() {
            return Err(Fault::Second);
        }
        fits(listed, 12)?;
        let (table, pending) = (word(image, listed.at + 4), word(image, listed.at + 8));
        let place = MsixPlace {
            vectors: (half(image, listed.at + 2) & 0x7ff) + 1,
            table_bar: (table & 7) as u8,
            table: table & !7,
            pending_bar: (pending & 7) as u8,
            pending: pending & !7,
        };
        let (table, pending) = (place.table_bytes(), place.pending_bytes());
        let size = |bar: u8| self.space.bars().size(usize::from(bar)).unwrap_or(0);
        let is_inside =
            table.end <= size(place.table_bar) && pending.end <= size(place.pending_bar);
        let is_apart = place.table_bar != place.pending_bar
            || table.end <= pending.start
            || pending.end <= table.start;
        if !is_inside || !is_apart {
            return Err(Fault::Place);
        }
        self.space
            .place_msix(listed.at as u16, &place)
            .expect("`Listed::end` keeps capabilities apart and in the space");
        self.msix = Some(place);
        Ok(())
    }

    fn add_power(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        if self.power.is_some() {
            return Err(Fault::Second);
        }
        fits(listed, 8)?;
        // The version; no D1, no D2, no events. Control: D0, and no state is lost.
        let version = image[listed.at + 2] & 7;
        let at = self.place(listed, &[version, 0, NO_SOFT_RESET, 0, 0, 0]);
        self.space.make_writable(at + POWER_CONTROL, &[POWER_STATE]);
        self.power = Some(at);
        Ok(())
    }

    fn add_read_only(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        fits(listed, 3)?;
        let len = image[listed.at + 2];
        if len < 3 {
            return Err(Fault::Short(len));
        }
        let len = usize::from(len);
        fits(listed, len)?;
        self.place(listed, &image[listed.at + 2..listed.at + len]);
        Ok(())
    }

    fn add_serial(&mut self, image: &[u8], listed: &Listed) -> Result<(), Fault> {
        fits(listed, 12)?;
        if self.space.read(STANDARD_END as u16, 4) != 0 {
            return Err(Fault::Second);
        }
        let body = &image[listed.at + 4..listed.at + 12];
        self.space.add_extended_capability(listed.id, 1, body);
        Ok(())
    }

    /// The space, as the owner sees it.
    pub fn space(&self) -> &ConfigSpace {
        &self.space
    }

    /// Kind of each BAR.
    pub fn bar_kinds(&self) -> [BarKind; BARS] {
        self.kinds
    }

    /// Bytes of each BAR that the guest sees, 0 for the others: the sizes that
    /// [`Areas`](crate::areas::Areas) takes.
    pub fn bar_sizes(&self) -> [u64; BARS] {
        std::array::from_fn(|bar| self.space.bars().size(bar).unwrap_or(0))
    }

    /// Parts of the device that the guest does not see.
    pub fn unsupported(&self) -> &[Unsupported] {
        &self.unsupported
    }

    /// Bits that a read takes from elsewhere.
    pub fn read_through(&self) -> &[ReadThrough] {
        &self.read_through
    }

    /// The MSI capability, where the guest sees one.
    pub fn msi(&self) -> Option<MsiLayout> {
        self.msi
    }

    /// Place of the MSI-X table, where the guest sees one.
    pub fn msix(&self) -> Option<&MsixPlace> {
        self.msix.as_ref()
    }

    /// Handles a guest's read of `len` (1, 2 or 4) bytes at `reg`. `dynamic` returns the bits that
    /// are read through, where the read touches any.
    pub fn read(&self, reg: u16, len: u8, mut dynamic: impl FnMut(Dynamic) -> u32) -> u32 {
        let mut value = self.space.read(reg, len);
        for through in &self.read_through {
            // Bytes of the register that `through` names, against those that are read.
            let shift = 8 * (i32::from(through.at) - i32::from(reg));
            let mask = moved(through.mask, shift) & moved(u32::MAX, 8 * i32::from(len) - 32);
            if mask != 0 {
                value = value & !mask | moved(dynamic(through.from), shift) & mask;
            }
        }
        value
    }

    fn watched(&self) -> EffectRegisters {
        let command = self.space.bars().command();
        let (is_enabled, is_masked) = self.space.msix_control();
        EffectRegisters {
            command: Command {
                memory: command & COMMAND_MEMORY != 0,
                bus_master: command & COMMAND_BUS_MASTER != 0,
            },
            msi: self.space.msi_registers(),
            msix: MsixControl {
                is_enabled,
                is_masked,
            },
        }
    }

    fn effects_since(&self, old: &EffectRegisters) -> Effects {
        let new = self.watched();
        Effects {
            command: (new.command != old.command).then_some(new.command),
            msi: if new.msi == old.msi { None } else { new.msi },
            msix: (new.msix != old.msix).then_some(new.msix),
            function_reset: false,
        }
    }

    /// A guest's write of `len` (1, 2 or 4) bytes at `reg`. Bits that the table does not give it
    /// stay.
    pub fn write(&mut self, reg: u16, len: u8, value: u32) -> Effects {
        let old = self.watched();
        let power = self.power.map(|at| at + POWER_CONTROL);
        let old_power = power.map(|at| self.space.read(at, 1) as u8);
        self.space.write(reg, len, value);
        // A state that the function does not have is not taken (§7.5.2.2): D1 and D2.
        if let (Some(at), Some(old)) = (power, old_power)
            && matches!(self.space.read(at, 1) as u8 & POWER_STATE, 1 | 2)
        {
            self.space.set_bytes(at, &[old]);
        }
        let mut effects = self.effects_since(&old);
        effects.function_reset = self.can_reset
            && self.express.is_some_and(|at| {
                let shift = 8 * (i32::from(reg) - i32::from(at + DEVICE_CONTROL));
                let written = moved(value & moved(u32::MAX, 8 * i32::from(len) - 32), shift);
                written & u32::from(INITIATE_RESET) != 0
            });
        effects
    }

    /// The device was reset: registers are as they were before the guest's first write. BARs, and
    /// whether they are decoded, stay: the bus follows writes alone, and the host's reset keeps
    /// them too.
    pub fn reset(&mut self) -> Effects {
        let old = self.watched();
        let mut space = self.fresh.clone();
        for bar in 0..BARS as u16 {
            let reg = FIRST_BAR + 4 * bar;
            space.write(reg, 4, self.space.read(reg, 4));
        }
        let memory = self.space.bars().command() & COMMAND_MEMORY;
        space.write(COMMAND, 2, u32::from(memory));
        self.space = space;
        self.effects_since(&old)
    }
}

/// Returns `word` shifted to the left, or to the right for a negative `shift`; bits beyond 32 are
/// lost.
fn moved(word: u32, shift: i32) -> u32 {
    let by = shift.unsigned_abs();
    match shift {
        0.. => word.checked_shl(by),
        _ => word.checked_shr(by),
    }
    .unwrap_or(0)
}

fn fits(listed: &Listed, len: usize) -> Result<(), Fault> {
    let end = listed.end;
    if len > end - listed.at {
        return Err(Fault::Cut { len, end });
    }
    Ok(())
}

fn identity(image: &[u8]) -> Identity {
    Identity {
        vendor: half(image, 0x00),
        device: half(image, 0x02),
        class: word(image, 0x08) >> 8,
        revision: image[0x08],
        subsystem_vendor: half(image, 0x2c),
        subsystem: half(image, 0x2e),
    }
}

#[cfg(test)]
mod tests;
