//! Configuration space of one function: a type 0 header, capability lists, the legacy pin, and the
//! bits that a guest may change.
//!
//! Plain data: the function's owner (a sidecore, or a vCPU exit for the host bridge) reads and
//! writes it. After a write, the owner has to check for its effects.
//!
//! ```text
//! let mut config = ConfigSpace::new(&Identity { … }, kinds);
//! config.add_express_endpoint();
//! let msix = config.add_msix(8, (0, 0x4000), (0, 0x5000));
//! let common = config.add_capability(0x09, &virtio_cap_body);
//! ```
//! Left out: expansion ROM, power management (a caller may place any capability, and give it
//! writable bits).

use crate::bars::{BARS, BarKind, Bars, COMMAND, COMMAND_PIN_OFF, FIRST_BAR};
use crate::msi::{MsiLayout, MsiRegisters};
use crate::msix::MsixPlace;

/// Bytes of configuration space of a PCI Express function.
pub const CONFIG_SIZE: u16 = 4096;
/// Status register bit 4: there is a capability list.
const STATUS_CAPABILITIES: u8 = 1 << 4;
const STATUS: usize = 0x06;
const CAPABILITY_POINTER: usize = 0x34;
/// Capabilities begin behind the header.
const FIRST_CAPABILITY: usize = 0x40;
/// And end with the conventional space.
const CAPABILITY_END: usize = 0x100;
const CAPABILITY_MSI: u8 = 0x05;
const CAPABILITY_MSIX: u8 = 0x11;
const CAPABILITY_EXPRESS: u8 = 0x10;
/// Extended capabilities begin behind the conventional space (PCI Express Base 4.0 §7.6).
const FIRST_EXTENDED: usize = 0x100;
const INTERRUPT_PIN: usize = 0x3d;
/// Status register bit 3: the legacy pin is asserted, or would be if it were not off.
const STATUS_INTERRUPT: u8 = 1 << 3;
/// MSI-X message control bits a guest may change: enable (15) and function mask (14).
const MSIX_CONTROL_WRITABLE: u16 = 0xc000;

/// Error of a capability that does not fit at the requested offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for capability {id:#x} of {len} bytes at {at:#x}")]
pub struct NoRoom {
    /// Capability id.
    pub id: u8,
    /// Offset asked for.
    pub at: u16,
    /// Bytes, id and link included.
    pub len: usize,
}

/// Identification registers.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, sub-class, programming interface: 0xBBSSPP.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
}

/// A function's configuration space. See the module's head.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SIZE as usize],
    /// Bits a guest may change, outside command and BARs.
    writable: [u8; CONFIG_SIZE as usize],
    bars: Bars,
    /// Offset and bytes of each capability.
    capabilities: Vec<(u16, u16)>,
    /// The same of each extended one.
    extended: Vec<(u16, u16)>,
    msi: Option<(u16, MsiLayout)>,
    msix: Option<u16>,
}

impl ConfigSpace {
    /// A space with these identification registers and BARs, and no capability.
    pub fn new(identity: &Identity, kinds: [BarKind; BARS]) -> Self {
        let mut bytes = [0; CONFIG_SIZE as usize];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0x00, &identity.vendor.to_le_bytes());
        put(0x02, &identity.device.to_le_bytes());
        put(0x08, &[identity.revision]);
        put(0x09, &identity.class.to_le_bytes()[..3]);
        put(0x2c, &identity.subsystem_vendor.to_le_bytes());
        put(0x2e, &identity.subsystem.to_le_bytes());
        let mut writable = [0; CONFIG_SIZE as usize];
        // Cache line size and interrupt line: scratch bytes that firmware and systems write.
        writable[0x0c] = 0xff;
        writable[0x3c] = 0xff;
        Self {
            bytes,
            writable,
            bars: Bars::new(kinds),
            capabilities: Vec::new(),
            extended: Vec::new(),
            msi: None,
            msix: None,
        }
    }

    /// BARs and command register.
    pub fn bars(&self) -> &Bars {
        &self.bars
    }

    /// Appends a capability: `id`, link and then `body`, behind the others. Returns its offset.
    /// Panics when the conventional space is full, which is an error of the function's design.
    pub fn add_capability(&mut self, id: u8, body: &[u8]) -> u16 {
        let at = self.capability_room();
        self.place_capability(at, id, body)
            .unwrap_or_else(|error| panic!("{error}"));
        at
    }

    /// Offset behind the last byte of the capabilities there are.
    fn capability_room(&self) -> u16 {
        let ends = self
            .capabilities
            .iter()
            .map(|(at, len)| (at + len).next_multiple_of(4));
        ends.max().unwrap_or(FIRST_CAPABILITY as u16)
    }

    /// Makes a capability at offset `at` the last of the list: `id`, link and then `body`.
    ///
    /// # Errors
    /// `at` is no multiple of 4, or the bytes are not all free bytes of the conventional
    /// space behind the header.
    pub fn place_capability(&mut self, at: u16, id: u8, body: &[u8]) -> Result<(), NoRoom> {
        let (start, len) = (usize::from(at), 2 + body.len());
        let mut taken = self.capabilities.iter();
        let is_free = taken.all(|(other, other_len)| {
            start + len <= usize::from(*other) || usize::from(other + other_len) <= start
        });
        let is_inside = start >= FIRST_CAPABILITY && start + len <= CAPABILITY_END;
        if !is_free || !is_inside || !at.is_multiple_of(4) {
            return Err(NoRoom { id, at, len });
        }
        self.bytes[start] = id;
        self.bytes[start + 2..start + len].copy_from_slice(body);
        let link = match self.capabilities.last() {
            Some((offset, _)) => usize::from(*offset) + 1,
            None => CAPABILITY_POINTER,
        };
        self.bytes[link] = at as u8;
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.capabilities.push((at, len as u16));
        Ok(())
    }

    /// Appends an extended capability: `id`, `version` (0 to 15), link and then `body`. Returns its
    /// offset. Panics when the space is full, as [`add_capability`](Self::add_capability).
    pub fn add_extended_capability(&mut self, id: u16, version: u8, body: &[u8]) -> u16 {
        let at = match self.extended.last() {
            Some((offset, len)) => usize::from(offset + len).next_multiple_of(4),
            None => FIRST_EXTENDED,
        };
        let len = 4 + body.len();
        assert!(
            at + len <= usize::from(CONFIG_SIZE),
            "no room for extended capability {id:#x}"
        );
        // The link of the one before: bits 31:20 of its header.
        if let Some((last, _)) = self.extended.last() {
            let link = usize::from(*last) + 2;
            self.bytes[link] = self.bytes[link] & 0xf | ((at as u16) << 4) as u8;
            self.bytes[link + 1] = (at >> 4) as u8;
        }
        self.bytes[at..at + 2].copy_from_slice(&id.to_le_bytes());
        self.bytes[at + 2] = version & 0xf;
        self.bytes[at + 4..at + len].copy_from_slice(body);
        self.extended.push((at as u16, len as u16));
        at as u16
    }

    /// Gives the function a legacy interrupt pin: 1 (INTA) to 4 (INTD); 0 takes it away.
    pub fn set_pin(&mut self, pin: u8) {
        assert!(pin <= 4, "there is no interrupt pin {pin}");
        self.bytes[INTERRUPT_PIN] = pin;
    }

    /// Sets whether the function's interrupt is pending; returns the level of its pin: not asserted
    /// while the guest has switched the pin off (command bit 10), or MSI or MSI-X on.
    pub fn set_interrupt(&mut self, is_pending: bool) -> bool {
        if is_pending {
            self.bytes[STATUS] |= STATUS_INTERRUPT;
        } else {
            self.bytes[STATUS] &= !STATUS_INTERRUPT;
        }
        self.pin_level()
    }

    /// Returns the level of the legacy pin, to be re-checked after every configuration write.
    pub fn pin_level(&self) -> bool {
        self.bytes[INTERRUPT_PIN] != 0
            && self.bytes[STATUS] & STATUS_INTERRUPT != 0
            && self.bars.command() & COMMAND_PIN_OFF == 0
            && !self.msix_control().0
            && !self.msi_registers().is_some_and(|msi| msi.is_enabled)
    }

    /// Lets a guest change the bits of `mask` at `offset` (for instance a virtio PCI configuration
    /// access capability).
    pub fn make_writable(&mut self, offset: u16, mask: &[u8]) {
        let at = usize::from(offset);
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// PCI Express capability of a root complex integrated endpoint, version 2: the type a function
    /// on a root bus has, so that it needs no port above it and has an IOMMU group of its own.
    pub fn add_express_endpoint(&mut self) -> u16 {
        let mut body = [0u8; 0x3a];
        // Capabilities register: version 2, device/port type 1001b.
        body[0..2].copy_from_slice(&0x0092u16.to_le_bytes());
        // Device capabilities: role-based error reporting (required since 1.1).
        body[2..6].copy_from_slice(&(1u32 << 15).to_le_bytes());
        self.add_capability(CAPABILITY_EXPRESS, &body)
    }

    /// MSI-X capability (§6.8.2): `vectors` 1 to 2048, table and pending bits at BAR index and
    /// offset (multiples of 8).
    pub fn add_msix(
        &mut self,
        vectors: u16,
        (table_bar, table): (u8, u32),
        (pending_bar, pending): (u8, u32),
    ) -> u16 {
        let at = self.capability_room();
        let place = MsixPlace {
            vectors,
            table_bar,
            table,
            pending_bar,
            pending,
        };
        self.place_msix(at, &place)
            .unwrap_or_else(|error| panic!("{error}"));
        at
    }

    /// [`add_msix`](Self::add_msix), at offset `at`.
    ///
    /// # Errors
    /// As [`place_capability`](Self::place_capability).
    pub fn place_msix(&mut self, at: u16, place: &MsixPlace) -> Result<(), NoRoom> {
        let vectors = place.vectors;
        assert!((1..=2048).contains(&vectors), "{vectors} MSI-X vectors");
        assert!(self.msix.is_none(), "a second MSI-X capability");
        let mut body = [0u8; 10];
        body[0..2].copy_from_slice(&(vectors - 1).to_le_bytes());
        body[2..6].copy_from_slice(&(place.table | u32::from(place.table_bar)).to_le_bytes());
        body[6..10].copy_from_slice(&(place.pending | u32::from(place.pending_bar)).to_le_bytes());
        self.place_capability(at, CAPABILITY_MSIX, &body)?;
        self.make_writable(at + 2, &MSIX_CONTROL_WRITABLE.to_le_bytes());
        self.msix = Some(at);
        Ok(())
    }

    /// MSI capability (§6.8.1) at offset `at`.
    ///
    /// # Errors
    /// As [`place_capability`](Self::place_capability).
    pub fn place_msi(&mut self, at: u16, layout: MsiLayout) -> Result<(), NoRoom> {
        assert!(self.msi.is_none(), "a second MSI capability");
        self.place_capability(at, CAPABILITY_MSI, &layout.body())?;
        for (offset, mask) in layout.writable() {
            self.make_writable(at + offset, &mask.to_le_bytes());
        }
        self.msi = Some((at, layout));
        Ok(())
    }

    /// The MSI capability's registers; `None` without it.
    pub fn msi_registers(&self) -> Option<MsiRegisters> {
        let (at, layout) = self.msi?;
        Some(layout.registers(self.bytes(at, layout.len())))
    }

    /// MSI-X enable and function mask, in that order; both false without the capability.
    pub fn msix_control(&self) -> (bool, bool) {
        let Some(at) = self.msix else {
            return (false, false);
        };
        let high = self.bytes[usize::from(at) + 3];
        (high & 0x80 != 0, high & 0x40 != 0)
    }

    /// Raw bytes at `offset`, as the owner sees them (BARs and command excluded).
    pub fn bytes(&self, offset: u16, len: u16) -> &[u8] {
        &self.bytes[usize::from(offset)..usize::from(offset + len)]
    }

    /// Sets raw bytes at `offset`, as the owner (BARs and command excluded); a guest's writable
    /// bits stay its own.
    pub fn set_bytes(&mut self, offset: u16, bytes: &[u8]) {
        let at = usize::from(offset);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn byte(&self, at: u16) -> u8 {
        let bar_end = FIRST_BAR + 4 * BARS as u16;
        if at == COMMAND || at == COMMAND + 1 {
            self.bars.command().to_le_bytes()[usize::from(at - COMMAND)]
        } else if (FIRST_BAR..bar_end).contains(&at) {
            let index = usize::from((at - FIRST_BAR) / 4);
            self.bars.read(index).to_le_bytes()[usize::from(at % 4)]
        } else {
            self.bytes.get(usize::from(at)).copied().unwrap_or(0xff)
        }
    }

    /// A guest's read of `len` (1, 2 or 4) bytes at `reg` (0 to 4095); ones beyond the end.
    pub fn read(&self, reg: u16, len: u8) -> u32 {
        let mut bytes = [0; 4];
        for (to, at) in bytes.iter_mut().zip(reg..).take(usize::from(len)) {
            *to = self.byte(at);
        }
        u32::from_le_bytes(bytes)
    }

    /// A guest's write of `len` (1, 2 or 4) bytes at `reg`; bits it may not change stay. Whether
    /// MSI-X control was written.
    pub fn write(&mut self, reg: u16, len: u8, value: u32) -> bool {
        self.bars.write(reg, len, value);
        let mut is_msix_control = false;
        for (at, byte) in (reg..).zip(value.to_le_bytes()).take(usize::from(len)) {
            let Some(mask) = self
                .writable
                .get(usize::from(at))
                .copied()
                .filter(|m| *m != 0)
            else {
                continue;
            };
            let old = &mut self.bytes[usize::from(at)];
            *old = *old & !mask | byte & mask;
            is_msix_control |= self.msix.is_some_and(|msix| at == msix + 3);
        }
        is_msix_control
    }
}

#[cfg(test)]
mod tests;
