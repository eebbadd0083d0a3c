//! Handles of an owner for other threads: each access is a message and an answer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guest_mem::{PhysMem, SourceId};
use pci::bars::{BARS, BarKind, Bars};
use pci::port::FunctionPort;
use platform::bus::{AccessCause, BusDevice};
use platform::doorbell::PlaceDoorbells;
use platform::interrupt::{InterruptSink, Message};
use platform::memory::PlaceMemory;
use sidecore::{Handle, Reply};

use crate::function::{FunctionShape, ResolveFunction};
use crate::owner::Owner;
use crate::request::{Op, Request, Target};
use crate::unit::ResolveUnit;

/// Sends an access as a request and returns its answer; `None`: the owner has ended.
fn call<O>(owner: &Handle<Request<O>>, target: Target, op: Op) -> Option<u64> {
    let access = |reply: Reply<u64>| Request::Access { target, op, reply };
    owner.call(access).ok()
}

/// Returns the value of up to eight bytes, little-endian.
fn value(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let len = data.len().min(8);
    bytes[..len].copy_from_slice(&data[..len]);
    u64::from_le_bytes(bytes)
}

fn fill(data: &mut [u8], value: u64) {
    for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
        *to = from;
    }
}

/// Handle through which vCPUs reach a function.
pub struct OwnedFunction<O> {
    owner: Handle<Request<O>>,
    number: usize,
    shape: FunctionShape,
    doorbells: Option<Arc<dyn PlaceDoorbells>>,
    memory: Option<Arc<dyn PlaceMemory>>,
    /// Address at which each BAR's memory is mapped. Locked inside the lock of the BARs.
    shown: Mutex<[Option<u64>; BARS]>,
}

impl<O> OwnedFunction<O> {
    /// Creates a handle to function number `number`, of this shape, of the owner behind `owner`.
    pub fn new(owner: Handle<Request<O>>, number: usize, shape: FunctionShape) -> Self {
        Self {
            owner,
            number,
            shape,
            doorbells: None,
            memory: None,
            shown: Mutex::default(),
        }
    }

    /// Adds watched doorbells, which follow its BAR. They are placed on the vCPU's thread, since
    /// the owner, which reads them, may be serving others.
    #[must_use]
    pub fn with_doorbells(mut self, doorbells: Arc<dyn PlaceDoorbells>) -> Self {
        self.doorbells = Some(doorbells);
        self
    }

    /// Adds memory that the hypervisor maps where the function's BARs are, placed likewise.
    #[must_use]
    pub fn with_memory(mut self, memory: Arc<dyn PlaceMemory>) -> Self {
        self.memory = Some(memory);
        self
    }

    fn call(&self, op: Op) -> Option<u64> {
        call(&self.owner, Target::Function(self.number), op)
    }

    /// Calls `place` with the memory, the number of each BAR, the address at which it is mapped,
    /// and the address at which `bars` decodes it.
    fn place_memory(
        &self,
        bars: &Bars,
        place: impl Fn(&dyn PlaceMemory, u8, &mut Option<u64>, Option<u64>),
    ) {
        let Some(memory) = &self.memory else {
            return;
        };
        for (bar, shown) in (0..).zip(&mut *self.shown()) {
            place(&**memory, bar, shown, bars.decoded(usize::from(bar)));
        }
    }

    fn shown(&self) -> MutexGuard<'_, [Option<u64>; BARS]> {
        // Poison is ignored: the value is valid after each change.
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<O: 'static> FunctionPort for OwnedFunction<O> {
    fn bar_kinds(&self) -> [BarKind; BARS] {
        self.shape.bars
    }

    fn config_read(&self, reg: u16, len: u8) -> u32 {
        // An owner that has ended (the machine is stopping) reads as a removed function.
        self.call(Op::ConfigRead { reg, len })
            .map_or(u32::MAX, |value| value as u32)
    }

    fn config_write(&self, reg: u16, len: u8, value: u32) {
        self.call(Op::ConfigWrite { reg, len, value });
    }

    fn decodes(&self, bars: &Bars) {
        if let (Some(doorbells), Some((bar, range))) = (&self.doorbells, &self.shape.doorbells) {
            let base = bars.decoded(usize::from(*bar));
            doorbells.place(base.and_then(|base| base.checked_add(range.start)));
        }
        // Unmapped before the function turns decoding off: otherwise an access of another vCPU
        // would find memory that does not answer.
        self.place_memory(bars, |memory, bar, shown, wanted| {
            if shown.is_some() && *shown != wanted {
                memory.place(bar, None);
                *shown = None;
            }
        });
    }

    fn has_decoded(&self, bars: &Bars) {
        // Mapped only after the function has turned decoding on, for the same reason.
        self.place_memory(bars, |memory, bar, shown, wanted| {
            if *shown != wanted {
                memory.place(bar, wanted);
                *shown = wanted;
            }
        });
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        let len = data.len() as u8;
        if let Some(value) = self.call(Op::Read { bar, offset, len }) {
            fill(data, value);
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        self.call(Op::Write {
            bar,
            offset,
            len: data.len() as u8,
            value: value(data),
        });
    }

    fn bar_cause(&self, bar: u8, offset: u64) -> AccessCause {
        match &self.shape.doorbells {
            Some((of, range)) if *of == bar && range.contains(&offset) => {
                match self.shape.is_iommu {
                    true => AccessCause::IommuDoorbell,
                    false => AccessCause::Doorbell,
                }
            }
            _ => AccessCause::Register,
        }
    }
}

/// Handle through which vCPUs reach a unit's register page.
///
/// `RUST_LOG=machine::port=trace` with a page that traps records a driver's script, one access a
/// line: `R` or `W` with its width in bytes, offset and value in hexadecimal.
pub struct UnitRegisters<O> {
    owner: Handle<Request<O>>,
    unit: usize,
}

impl<O> UnitRegisters<O> {
    /// Creates a handle to unit number `unit` of the owner behind `owner`.
    pub fn new(owner: Handle<Request<O>>, unit: usize) -> Self {
        Self { owner, unit }
    }
}

impl<O: 'static> BusDevice for UnitRegisters<O> {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        data.fill(0);
        let len = data.len() as u8;
        let op = Op::Read {
            bar: 0,
            offset,
            len,
        };
        if let Some(value) = call(&self.owner, Target::Unit(self.unit), op) {
            fill(data, value);
            tracing::trace!("R{len} {offset:03x} {value:x}");
        }
        AccessCause::IommuRegister
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        let (len, value) = (data.len() as u8, value(data));
        tracing::trace!("W{len} {offset:03x} {value:x}");
        let op = Op::Write {
            bar: 0,
            offset,
            len,
            value,
        };
        call(&self.owner, Target::Unit(self.unit), op);
        AccessCause::IommuRegister
    }
}

/// Interrupts of chips that no owner polls, through a unit that remaps interrupts.
pub struct Remapped<O> {
    owner: Handle<Request<O>>,
    unit: usize,
}

impl<O> Remapped<O> {
    /// Sends through unit number `unit` of the owner behind `owner`.
    pub fn new(owner: Handle<Request<O>>, unit: usize) -> Arc<Self> {
        Arc::new(Self { owner, unit })
    }
}

impl<U, F, M> InterruptSink for Remapped<Owner<U, F, M>>
where
    U: ResolveUnit + 'static,
    F: ResolveFunction<U::Command> + 'static,
    M: PhysMem + 'static,
{
    fn send(&self, from: SourceId, message: Message) {
        let unit = self.unit;
        let send = move |owner: &mut Owner<U, F, M>| owner.send(unit, from, message);
        // An owner that has ended has no guest that waits for an interrupt.
        let _ = self.owner.send(Request::Inspect(Box::new(send)));
    }
}
