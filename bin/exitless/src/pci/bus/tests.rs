//! The bus driven as a guest's kernel enumerates it.

use super::super::bars::{BarKind, COMMAND_MEMORY};
use super::super::config::{ConfigSpace, Identity};
use super::super::host_bridge::HostBridge;
use super::*;

/// A function with a 32-bit and a 64-bit BAR that remembers the last BAR write.
struct Endpoint {
    config: Mutex<ConfigSpace>,
    last: Mutex<Option<(u8, u64, Vec<u8>)>>,
}

const KINDS: [BarKind; BARS] = [
    BarKind::Memory32(0x8000),
    BarKind::Absent,
    BarKind::Memory64(0x1000),
    BarKind::Upper,
    BarKind::Absent,
    BarKind::Absent,
];

impl Endpoint {
    fn new() -> Arc<Self> {
        let identity = Identity {
            vendor: 0x1af4,
            device: 0x1041,
            class: 0x02_00_00,
            revision: 1,
            subsystem_vendor: 0,
            subsystem: 0,
        };
        Arc::new(Self {
            config: Mutex::new(ConfigSpace::new(&identity, KINDS)),
            last: Mutex::new(None),
        })
    }
}

impl FunctionPort for Endpoint {
    fn bar_kinds(&self) -> [BarKind; BARS] {
        KINDS
    }

    fn config_read(&self, reg: u16, len: u8) -> u32 {
        lock(&self.config).read(reg, len)
    }

    fn config_write(&self, reg: u16, len: u8, value: u32) {
        lock(&self.config).write(reg, len, value);
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(bar << 4 | offset as u8);
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        *lock(&self.last) = Some((bar, offset, data.to_vec()));
    }
}

fn bus() -> (Arc<PciBus>, Arc<Endpoint>) {
    let endpoint = Endpoint::new();
    let mut bus = PciBus::new(Arc::new(HostBridge::new()));
    assert_eq!(bus.add(endpoint.clone()).unwrap(), 1);
    bus.place_bars().unwrap();
    (Arc::new(bus), endpoint)
}

fn ecam_read(bus: &Arc<PciBus>, slot: u64, reg: u64) -> u32 {
    let mut data = [0xff; 4];
    Ecam(bus.clone()).read(slot << 15 | reg, &mut data);
    u32::from_le_bytes(data)
}

fn ecam_write(bus: &Arc<PciBus>, slot: u64, reg: u64, value: u32) {
    Ecam(bus.clone()).write(slot << 15 | reg, &value.to_le_bytes());
}

fn window_read(bus: &Arc<PciBus>, address: u64) -> (ExitCause, [u8; 4]) {
    let mut data = [0xff; 4];
    let cause = PciWindow(bus.clone()).read(address - layout::PCI_WINDOW, &mut data);
    (cause, data)
}

#[test]
fn both_mechanisms_see_the_same_functions_and_nothing_elsewhere() {
    let (bus, _) = bus();
    let ports = ConfigPorts::new(bus.clone());
    for (slot, id) in [
        (0, 0x0008_1b36),
        (1, 0x1041_1af4),
        (2, u32::MAX),
        (31, u32::MAX),
    ] {
        assert_eq!(ecam_read(&bus, slot, 0), id);
        ports.write(0, &(1 << 31 | (slot as u32) << 11).to_le_bytes());
        let mut data = [0xff; 4];
        ports.read(4, &mut data);
        assert_eq!(u32::from_le_bytes(data), id);
    }
    let mut data = [0xff; 4];
    Ecam(bus).read(1 << 15 | 1 << 12, &mut data);
    assert_eq!(data, [0xff; 4], "there is no function 1");
}

#[test]
fn mechanism_1_addresses_bytes_and_needs_its_enable_bit() {
    let (bus, _) = bus();
    let ports = ConfigPorts::new(bus);
    ports.write(0, &(1u32 << 31 | 1 << 11).to_le_bytes());
    let mut data = [0xff; 2];
    ports.read(6, &mut data);
    assert_eq!(u16::from_le_bytes(data), 0x1041);
    ports.write(0, &(1u32 << 11).to_le_bytes());
    let mut data = [0xff; 2];
    ports.read(6, &mut data);
    assert_eq!(data, [0xff; 2]);
    let mut data = [0; 4];
    ports.read(0, &mut data);
    assert_eq!(u32::from_le_bytes(data), 1 << 11);
}

#[test]
fn placed_bars_are_aligned_disjoint_and_silent_until_decoding_is_on() {
    let (bus, _) = bus();
    let first = u64::from(ecam_read(&bus, 1, 0x10));
    let second = u64::from(ecam_read(&bus, 1, 0x18) & !0xf);
    assert_eq!(first % 0x8000, 0);
    assert!(second >= first + 0x8000 && second % 0x1000 == 0);
    assert_eq!(window_read(&bus, first).0, ExitCause::Unclaimed);
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    assert_eq!(
        window_read(&bus, first + 4),
        (ExitCause::OtherDevice, [0x04; 4])
    );
    assert_eq!(
        window_read(&bus, second + 8),
        (ExitCause::OtherDevice, [0x28; 4])
    );
    assert_eq!(window_read(&bus, second + 0xffe).0, ExitCause::Unclaimed);
}

#[test]
fn a_moved_bar_answers_at_its_new_place_only() {
    let (bus, endpoint) = bus();
    let old = u64::from(ecam_read(&bus, 1, 0x10));
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    ecam_write(&bus, 1, 0x10, u32::MAX);
    assert_eq!(ecam_read(&bus, 1, 0x10), 0xffff_8000);
    ecam_write(&bus, 1, 0x10, 0xd000_0000);
    assert_eq!(window_read(&bus, old).0, ExitCause::Unclaimed);
    PciWindow(bus.clone()).write(0xd000_0010 - layout::PCI_WINDOW, &[7, 8]);
    assert_eq!(*lock(&endpoint.last), Some((0, 0x10, vec![7, 8])));
    ecam_write(&bus, 1, 4, 0);
    assert_eq!(window_read(&bus, 0xd000_0010).0, ExitCause::Unclaimed);
}

#[test]
fn odd_configuration_accesses_read_ones_and_write_nothing() {
    let (bus, _) = bus();
    let ecam = Ecam(bus.clone());
    let mut data = [0xff; 8];
    ecam.read(1 << 15, &mut data);
    assert_eq!(data, [0xff; 8]);
    let mut data = [0xff; 4];
    ecam.read(1 << 15 | 0xffe, &mut data);
    assert_eq!(data, [0xff; 4]);
    ecam.write(1 << 15 | 0xffe, &[0; 4]);
    ecam.write(31 << 15, &[0; 4]);
    let ports = ConfigPorts::new(bus);
    ports.write(0, &u32::MAX.to_le_bytes());
    ports.read(7, &mut data);
    ports.write(7, &[0; 4]);
    assert_eq!(data, [0xff; 4]);
}

#[test]
fn the_bus_has_32_slots() {
    let mut bus = PciBus::new(Arc::new(HostBridge::new()));
    for slot in 1..32 {
        assert_eq!(bus.add(Endpoint::new()).unwrap(), slot);
    }
    assert!(matches!(bus.add(Endpoint::new()), Err(PciError::NoSlot)));
}
