//! Bus 0: slots, configuration accesses by ECAM and CF8/CFC, and decoding of BAR addresses.
//!
//! A function takes a slot with [`PciBus::reserve`], which names its requester, and is plugged in
//! with [`PciBus::plug`], while the machine is built or later; [`PciBus::place_bars`] gives each
//! BAR an address before the first vCPU runs, and a guest may move them. The bus follows every
//! write to a BAR or command register with a [`Bars`] of its own per function, so decoding never
//! asks a function's owner.
//!
//! Three [`BusDevice`]s serve vCPU threads: [`Ecam`], [`ConfigPorts`] and [`PciWindow`]. The bus's
//! locks are never held while a function is called, but for the lock of that function's BARs.
//! Bound: 32 slots, one function each, six BARs.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use guest_mem::SourceId;
use platform::bus::{AccessCause, BusDevice};
use platform::layout;

use crate::bars::{BARS, Bars, FIRST_BAR};
use crate::config::CONFIG_SIZE;
use crate::port::FunctionPort;

/// Slots of a bus.
pub const SLOTS: usize = 32;

/// Guest-physical addresses in which BARs are placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarWindows {
    /// Below 4 GiB.
    pub low: Range<u64>,
    /// Beyond: where large 64-bit BARs go, and others that find no room below. Empty: there is
    /// none.
    pub high: Range<u64>,
}

/// 64-bit BARs of so many bytes go beyond 4 GiB if they can; smaller ones stay below, wherever the
/// large ones are.
const LARGE: u64 = 64 << 20;

/// A BAR that needs an address.
#[derive(Clone, Copy)]
struct Bar {
    slot: usize,
    index: usize,
    bytes: u64,
    is_wide: bool,
}

/// A BAR and its address.
struct Placed {
    bar: Bar,
    at: u64,
}

/// Takes `bytes`, a power of two, from the beginning of `room`, naturally aligned.
fn take(room: &mut Range<u64>, bytes: u64) -> Option<u64> {
    let at = room.start.checked_next_multiple_of(bytes)?;
    let end = at.checked_add(bytes).filter(|end| *end <= room.end)?;
    room.start = end;
    Some(at)
}

impl BarWindows {
    /// Addresses for `bars`: those of 32 bits first, which have no choice.
    fn place(&self, bars: &[Bar]) -> Result<Vec<Placed>, PciError> {
        let Self { mut low, mut high } = self.clone();
        let narrow = bars.iter().filter(|bar| !bar.is_wide);
        let wide = bars.iter().filter(|bar| bar.is_wide);
        let mut placed = Vec::new();
        for bar in narrow.chain(wide).copied() {
            let Bar { slot, bytes, .. } = bar;
            let at = match (bar.is_wide, bytes >= LARGE) {
                (false, _) => take(&mut low, bytes),
                (true, false) => take(&mut low, bytes).or_else(|| take(&mut high, bytes)),
                (true, true) => take(&mut high, bytes).or_else(|| take(&mut low, bytes)),
            };
            let at = at.ok_or(PciError::NoWindow { slot, bytes })?;
            placed.push(Placed { bar, at });
        }
        Ok(placed)
    }
}

/// A function in its slot.
struct Plugged {
    port: Arc<dyn FunctionPort>,
    /// Follows the function's BARs; serialises configuration writes to them. `None`: unplugged.
    bars: Mutex<Option<Bars>>,
}

enum Slot {
    Free,
    /// Reserved for a function that will be plugged in.
    Reserved,
    Taken(Arc<Plugged>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decoded {
    first: u64,
    len: u64,
    slot: u8,
    bar: u8,
}

/// Error of the configuration, found while functions are added or placed.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// More functions than slots.
    #[error("all {SLOTS} PCI slots are taken")]
    NoSlot,
    /// The BARs do not fit the window.
    #[error("the PCI memory windows have no room for {bytes:#x} bytes of slot {slot}")]
    NoWindow {
        /// The function's slot.
        slot: usize,
        /// Bytes of the BAR.
        bytes: u64,
    },
}

/// The bus. See the module's head.
pub struct PciBus {
    slots: RwLock<[Slot; SLOTS]>,
    /// Ranges that are decoded now. Written on configuration writes, read on BAR accesses.
    decoded: RwLock<Vec<Decoded>>,
}

impl PciBus {
    /// A bus with `bridge` in slot 0.
    pub fn new(bridge: Arc<dyn FunctionPort>) -> Self {
        let bus = Self {
            slots: RwLock::new([const { Slot::Free }; SLOTS]),
            decoded: RwLock::new(Vec::new()),
        };
        bus.plug(SourceId::new(0, 0, 0), bridge);
        bus
    }

    /// Takes the first free slot; the requester id of the function that will be in it.
    ///
    /// # Errors
    /// All are taken.
    pub fn reserve(&self) -> Result<SourceId, PciError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let free = slots
            .iter_mut()
            .zip(0..)
            .find(|(slot, _)| matches!(slot, Slot::Free));
        let (slot, number) = free.ok_or(PciError::NoSlot)?;
        *slot = Slot::Reserved;
        Ok(SourceId::new(0, number, 0))
    }

    /// Puts the function behind `port` into the slot that `source` names, and removes the former
    /// function.
    pub fn plug(&self, source: SourceId, port: Arc<dyn FunctionPort>) {
        let bars = Mutex::new(Some(Bars::new(port.bar_kinds())));
        self.replace(source, Slot::Taken(Arc::new(Plugged { port, bars })));
    }

    /// Takes the function out of the slot that `source` names: it reads as ones and decodes nothing
    /// from the return of this call on, but for accesses that are under way. The slot is free
    /// again.
    pub fn unplug(&self, source: SourceId) {
        let slot = source.devfn() >> 3;
        if let Some(plugged) = self.plugged(usize::from(slot)) {
            // A configuration write under way finds no BARs from here on, so ranges that are
            // removed stay removed.
            let mut bars = lock(&plugged.bars);
            *bars = None;
            self.redecode(slot, &plugged, &Bars::default());
        }
        self.replace(source, Slot::Free);
    }

    fn replace(&self, source: SourceId, new: Slot) {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots[usize::from(source.devfn() >> 3)] = new;
    }

    fn plugged(&self, slot: usize) -> Option<Arc<Plugged>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        match slots.get(slot)? {
            Slot::Taken(plugged) => Some(plugged.clone()),
            Slot::Free | Slot::Reserved => None,
        }
    }

    /// Gives every BAR an address in one of `windows`, naturally aligned, by writing it as firmware
    /// would. Decoding stays off. The functions' owners must already serve accesses.
    ///
    /// # Errors
    /// A BAR finds no room: 64-bit ones in either window, others below 4 GiB. No BAR has been
    /// written.
    pub fn place_bars(&self, windows: &BarWindows) -> Result<(), PciError> {
        for Placed { bar, at } in windows.place(&self.bars())? {
            let reg = FIRST_BAR + 4 * bar.index as u16;
            self.config_write(bar.slot, reg, 4, at as u32);
            if bar.is_wide {
                self.config_write(bar.slot, reg + 4, 4, (at >> 32) as u32);
            }
        }
        Ok(())
    }

    /// All BARs, by slots.
    fn bars(&self) -> Vec<Bar> {
        let mut all = Vec::new();
        for slot in 0..SLOTS {
            let Some(plugged) = self.plugged(slot) else {
                continue;
            };
            let bars = lock(&plugged.bars);
            let Some(bars) = &*bars else {
                continue;
            };
            all.extend((0..BARS).filter_map(|index| {
                Some(Bar {
                    slot,
                    index,
                    bytes: bars.size(index)?,
                    is_wide: bars.is_wide(index),
                })
            }));
        }
        all
    }

    /// A read of configuration space; all ones where no function is.
    fn config_read(&self, slot: usize, reg: u16, len: u8) -> u32 {
        match self.plugged(slot) {
            Some(plugged) => plugged.port.config_read(reg, len),
            None => u32::MAX,
        }
    }

    fn config_write(&self, number: usize, reg: u16, len: u8, value: u32) {
        let Some(plugged) = self.plugged(number) else {
            return;
        };
        // A BAR that the guest turns off must not be reached after the function has received the
        // write: decode first. The lock is held until then, so that the writes of two vCPUs to one
        // function's BARs have the same order here and in the function.
        let mut bars = lock(&plugged.bars);
        if let Some(bars) = &mut *bars
            && bars.write(reg, len, value)
        {
            self.redecode(number as u8, &plugged, bars);
            plugged.port.config_write(reg, len, value);
            plugged.port.has_decoded(bars);
            return;
        }
        drop(bars);
        plugged.port.config_write(reg, len, value);
    }

    /// Decodes the BARs of `plugged` in `slot` as `bars` has it; whose lock is held.
    fn redecode(&self, slot: u8, plugged: &Plugged, bars: &Bars) {
        self.note_decoded(slot, bars);
        plugged.port.decodes(bars);
    }

    fn note_decoded(&self, slot: u8, bars: &Bars) {
        let mut decoded = self.decoded.write().unwrap_or_else(PoisonError::into_inner);
        decoded.retain(|range| range.slot != slot);
        for bar in 0..BARS {
            if let (Some(first), Some(len)) = (bars.decoded(bar), bars.size(bar)) {
                decoded.push(Decoded {
                    first,
                    len,
                    slot,
                    bar: bar as u8,
                });
            }
        }
    }

    /// The function and place behind a memory access, if one BAR holds all of it.
    fn decode(&self, address: u64, len: usize) -> Option<(Arc<Plugged>, u8, u64)> {
        let decoded = self.decoded.read().unwrap_or_else(PoisonError::into_inner);
        let range = *decoded.iter().find(|range| {
            address
                .checked_sub(range.first)
                .is_some_and(|offset| offset < range.len && len as u64 <= range.len - offset)
        })?;
        drop(decoded);
        let plugged = self.plugged(usize::from(range.slot))?;
        Some((plugged, range.bar, address - range.first))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded values are plain registers: no panic leaves them unusable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn to_u32(data: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    bytes[..data.len()].copy_from_slice(data);
    u32::from_le_bytes(bytes)
}

/// Enhanced configuration access of bus 0: address bits 19:15 device, 14:12 function, 11:0
/// register.
pub struct Ecam(pub Arc<PciBus>);

impl Ecam {
    /// Slot and register, where the access addresses function 0 and is legal.
    fn decode(offset: u64, len: usize) -> Option<(usize, u16)> {
        let reg = (offset & 0xfff) as u16;
        let is_function_0 = offset >> 12 & 7 == 0;
        (is_function_0
            && matches!(len, 1 | 2 | 4)
            && usize::from(reg) + len <= usize::from(CONFIG_SIZE))
        .then_some(((offset >> 15) as usize, reg))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        if let Some((slot, reg)) = Self::decode(offset, data.len()) {
            let value = self.0.config_read(slot, reg, data.len() as u8);
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        AccessCause::PciConfig
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        if let Some((slot, reg)) = Self::decode(offset, data.len()) {
            self.0
                .config_write(slot, reg, data.len() as u8, to_u32(data));
        }
        AccessCause::PciConfig
    }
}

/// Configuration mechanism #1: ports CF8 (address) and CFC to CFF (data), offset 0 being CF8.
pub struct ConfigPorts {
    bus: Arc<PciBus>,
    /// Enable 31, bus 23:16, device 15:11, function 10:8, register 7:2.
    address: Mutex<u32>,
}

impl ConfigPorts {
    /// First of the eight ports.
    pub const BASE: u16 = layout::PCI_CONFIG_ADDRESS;
    /// Number of ports.
    pub const LEN: u16 = 8;

    /// Ports onto `bus`.
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self {
            bus,
            address: Mutex::new(0),
        }
    }

    /// Slot and register for `len` bytes at data port CFC + `byte`.
    fn decode(&self, byte: u64, len: usize) -> Option<(usize, u16)> {
        let address = *lock(&self.address);
        let enabled = address >> 31 == 1;
        let bus_and_function = address & 0x00ff_0700;
        let fits = matches!(len, 1 | 2 | 4) && byte as usize + len <= 4;
        (enabled && bus_and_function == 0 && fits).then_some((
            (address >> 11 & 0x1f) as usize,
            (address & 0xfc) as u16 + byte as u16,
        ))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&lock(&self.address).to_le_bytes());
        } else if let Some(byte) = offset.checked_sub(4)
            && let Some((slot, reg)) = self.decode(byte, data.len())
        {
            let value = self.bus.config_read(slot, reg, data.len() as u8);
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        AccessCause::PciConfig
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        if offset == 0 && data.len() == 4 {
            *lock(&self.address) = to_u32(data);
        } else if let Some(byte) = offset.checked_sub(4)
            && let Some((slot, reg)) = self.decode(byte, data.len())
        {
            self.bus
                .config_write(slot, reg, data.len() as u8, to_u32(data));
        }
        AccessCause::PciConfig
    }
}

/// One of the PCI memory windows, with the BARs that the guest has put there.
pub struct PciWindow {
    /// The bus.
    pub bus: Arc<PciBus>,
    /// Start of the window.
    pub base: u64,
}

impl BusDevice for PciWindow {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        match self.bus.decode(self.base + offset, data.len()) {
            Some((plugged, bar, offset)) => {
                plugged.port.bar_read(bar, offset, data);
                plugged.port.bar_cause(bar, offset)
            }
            None => AccessCause::Unclaimed,
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        match self.bus.decode(self.base + offset, data.len()) {
            Some((plugged, bar, offset)) => {
                plugged.port.bar_write(bar, offset, data);
                plugged.port.bar_cause(bar, offset)
            }
            None => AccessCause::Unclaimed,
        }
    }
}

#[cfg(test)]
mod tests;
