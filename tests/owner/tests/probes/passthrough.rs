//! A function in outline that is like an assigned device: its registers in a 64-bit BAR beyond 4
//! GiB, interrupts by MSI-X or by its legacy pin, DMA under leases that the device ends by itself,
//! and removal while one is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;

use guest_mem::{Dma, Iommu, Iova, KeepAlive, LeaseId, NoIommu, Perm, PhysMem, SourceId};
use machine::{
    DataPath, Effects, Function, FunctionContext, FunctionLines, FunctionShape, Op, Progress,
    Target, functions, units,
};
use pci::bars::{BARS, BarKind, COMMAND_BUS_MASTER};
use pci::config::ConfigSpace;
use pci::msix::MsixTable;
use platform::interrupt::Message;

use crate::{ByHand, Pin};

const SOURCE: SourceId = SourceId::new(0, 3, 0);
/// Registers of the device: a doorbell, and an interrupt acknowledgement.
const START: u64 = 0x0;
const ACKNOWLEDGE: u64 = 0x8;
const MSIX_TABLE: u64 = 0x1000;
/// BAR 2, of 1 GiB.
const KINDS: [BarKind; BARS] = [
    BarKind::Absent,
    BarKind::Absent,
    BarKind::Memory64(1 << 30),
    BarKind::Upper,
    BarKind::Absent,
    BarKind::Absent,
];

units! {
    enum Units: () {
        None(NoIommu),
    }
}

functions! {
    enum Functions: () {
        Assigned(Assigned),
    }
}

/// The device: it writes 8 bytes to guest memory when it is started and its hardware, which the
/// test is, is done.
struct Assigned {
    config: ConfigSpace,
    msix: MsixTable,
    wanted: Option<u64>,
    lease: Option<LeaseId>,
    is_done: Arc<AtomicBool>,
    is_over: bool,
}

impl Assigned {
    fn new(is_done: &Arc<AtomicBool>) -> Self {
        let mut config = ConfigSpace::new(&crate::IDENTITY, KINDS);
        config.add_msix(1, (2, MSIX_TABLE as u32), (2, 0x2000));
        config.add_extended_capability(3, 1, &[0; 8]);
        config.set_pin(1);
        Self {
            config,
            msix: MsixTable::new(1),
            wanted: None,
            lease: None,
            is_done: is_done.clone(),
            is_over: false,
        }
    }
}

impl Function<()> for Assigned {
    fn source(&self) -> SourceId {
        SOURCE
    }

    fn shape(&self) -> FunctionShape {
        FunctionShape::new(KINDS)
    }

    fn config_read(&mut self, reg: u16, len: u8) -> u32 {
        self.config.read(reg, len)
    }

    fn config_write(
        &mut self,
        reg: u16,
        len: u8,
        value: u32,
        _: &KeepAlive,
        out: &mut Effects<()>,
    ) {
        self.config.write(reg, len, value);
        let (is_on, is_masked) = self.config.msix_control();
        self.msix.set_control(is_on, is_masked, &mut out.messages);
        let is_master = self.config.bars().command() & COMMAND_BUS_MASTER != 0;
        self.msix.set_bus_master(is_master, &mut out.messages);
        out.set_pin(self.config.pin_level());
    }

    fn bar_read(&mut self, _: u8, offset: u64, data: &mut [u8]) {
        self.msix.read(offset.saturating_sub(MSIX_TABLE), data);
    }

    fn bar_write(
        &mut self,
        bar: u8,
        offset: u64,
        data: &[u8],
        _: &KeepAlive,
        out: &mut Effects<()>,
    ) {
        assert_eq!(bar, 2);
        match offset {
            START => self.wanted = Some(u64::from_le_bytes(data.try_into().unwrap())),
            ACKNOWLEDGE => out.set_pin(self.config.set_interrupt(false)),
            _ => self
                .msix
                .write(offset - MSIX_TABLE, data, &mut out.messages),
        }
    }

    fn is_drained(&self) -> bool {
        self.lease.is_none()
    }

    fn end(&mut self) {
        self.is_over = true;
    }
}

impl DataPath<()> for Assigned {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, ()>) -> Progress {
        let (mut dma, effects) = cx.split();
        if let (Some(at), None, false) = (self.wanted.take(), self.lease, self.is_over) {
            let lease = dma.lease(Iova::new(at), 8, Perm::Write).unwrap();
            self.lease = Some(lease.id);
        }
        if self.is_done.swap(false, Ordering::Relaxed)
            && let Some(lease) = self.lease.take()
        {
            dma.release(lease);
            self.msix.raise(0, &mut effects.messages);
            effects.set_pin(self.config.set_interrupt(true));
        }
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, ()>) -> bool {
        self.wanted.is_some() || self.is_done.load(Ordering::Relaxed)
    }
}

#[test]
fn interrupts_come_by_pin_or_msix_and_removal_waits_for_the_end_of_dma() {
    let mut machine = ByHand::<Units, Functions>::new();
    let unit = machine.owner.add_unit(Units::None(NoIommu::new(16)));
    let (is_done, pin) = (Arc::<AtomicBool>::default(), Pin::default());
    let function_lines = FunctionLines {
        doorbells: None,
        pin: Some(Box::new(pin.clone())),
    };
    let assigned = Functions::Assigned(Assigned::new(&is_done));
    let number = machine.owner.add(unit, assigned, function_lines);
    let target = Target::Function(number);
    machine.config_write(number, 4, 2, 6);
    machine.write(target, 2, START, 0x5000);
    machine.poll();
    assert!(!*pin.0.lock().unwrap());
    is_done.store(true, Ordering::Relaxed);
    machine.poll();
    assert!(*pin.0.lock().unwrap(), "MSI-X is off");
    machine.write(target, 2, ACKNOWLEDGE, 0);
    assert!(!*pin.0.lock().unwrap());

    let message = Message {
        address: 0xfee0_1000,
        data: 0x41,
    };
    machine.write(target, 2, MSIX_TABLE, message.address);
    machine.write(target, 2, MSIX_TABLE + 8, u64::from(message.data));
    machine.config_write(number, 0x42, 2, 0x8000);
    machine.write(target, 2, START, 0x5000);
    machine.poll();
    let (told, gone) = channel();
    machine.owner.remove(number, told);
    (0..10).for_each(|_| machine.poll());
    assert!(gone.try_recv().is_err(), "its DMA is under way");
    is_done.store(true, Ordering::Relaxed);
    machine.poll();
    assert_eq!(gone.try_recv(), Ok(SOURCE));
    assert_eq!(machine.sent.take(), [(SOURCE, message)]);
    let id = Op::ConfigRead { reg: 0, len: 4 };
    assert_eq!(
        machine.access(target, id),
        Some(u64::MAX),
        "the slot is empty"
    );
}
