//! The bus driven as a guest's kernel enumerates it.

use super::*;
use crate::bars::{BarKind, COMMAND_MEMORY};
use crate::config::{ConfigSpace, Identity};
use crate::host_bridge::HostBridge;

const LOW: u64 = layout::PCI_WINDOW;
const HIGH: u64 = 0x70_0000_0000;

fn windows(high: u64) -> BarWindows {
    BarWindows {
        low: LOW..layout::PCI_WINDOW_END,
        high: HIGH..HIGH + high,
    }
}

/// A function with a 32-bit and a 64-bit BAR that remembers the last BAR write.
struct Endpoint {
    kinds: [BarKind; BARS],
    config: Mutex<ConfigSpace>,
    last: Mutex<Option<(u8, u64, Vec<u8>)>>,
    /// Calls of `decodes`: the address of BAR 0, and the function's own command register then.
    told: Mutex<Vec<(Option<u64>, u16)>>,
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
        Self::with(KINDS)
    }

    fn with(kinds: [BarKind; BARS]) -> Arc<Self> {
        let identity = Identity {
            vendor: 0x1af4,
            device: 0x1041,
            class: 0x02_00_00,
            revision: 1,
            subsystem_vendor: 0,
            subsystem: 0,
        };
        Arc::new(Self {
            kinds,
            config: Mutex::new(ConfigSpace::new(&identity, kinds)),
            last: Mutex::new(None),
            told: Mutex::new(Vec::new()),
        })
    }
}

impl FunctionPort for Endpoint {
    fn bar_kinds(&self) -> [BarKind; BARS] {
        self.kinds
    }

    fn config_read(&self, reg: u16, len: u8) -> u32 {
        lock(&self.config).read(reg, len)
    }

    fn config_write(&self, reg: u16, len: u8, value: u32) {
        lock(&self.config).write(reg, len, value);
    }

    fn decodes(&self, bars: &Bars) {
        let command = lock(&self.config).read(4, 2) as u16;
        lock(&self.told).push((bars.decoded(0), command));
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(bar << 4 | offset as u8);
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        *lock(&self.last) = Some((bar, offset, data.to_vec()));
    }
}

/// A bus with one function of these BARs in slot 1, and a window of `high` bytes beyond 4 GiB.
fn bus_with(kinds: [BarKind; BARS], high: u64) -> (Arc<PciBus>, Arc<Endpoint>) {
    let endpoint = Endpoint::with(kinds);
    let bus = PciBus::new(Arc::new(HostBridge::default()));
    let source = bus.reserve().unwrap();
    assert_eq!(source, SourceId::new(0, 1, 0));
    bus.plug(source, endpoint.clone());
    bus.place_bars(&windows(high)).unwrap();
    (Arc::new(bus), endpoint)
}

fn bus() -> (Arc<PciBus>, Arc<Endpoint>) {
    bus_with(KINDS, 0)
}

fn ecam_read(bus: &Arc<PciBus>, slot: u64, reg: u64) -> u32 {
    let mut data = [0xff; 4];
    Ecam(bus.clone()).read(slot << 15 | reg, &mut data);
    u32::from_le_bytes(data)
}

fn ecam_write(bus: &Arc<PciBus>, slot: u64, reg: u64, value: u32) {
    Ecam(bus.clone()).write(slot << 15 | reg, &value.to_le_bytes());
}

fn window(bus: &Arc<PciBus>, base: u64) -> PciWindow {
    PciWindow {
        bus: bus.clone(),
        base,
    }
}

fn window_read(bus: &Arc<PciBus>, address: u64) -> (AccessCause, [u8; 4]) {
    let mut data = [0xff; 4];
    let base = if address < HIGH { LOW } else { HIGH };
    let cause = window(bus, base).read(address - base, &mut data);
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
    assert_eq!(window_read(&bus, first).0, AccessCause::Unclaimed);
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    assert_eq!(
        window_read(&bus, first + 4),
        (AccessCause::Register, [0x04; 4])
    );
    assert_eq!(
        window_read(&bus, second + 8),
        (AccessCause::Register, [0x28; 4])
    );
    assert_eq!(window_read(&bus, second + 0xffe).0, AccessCause::Unclaimed);
}

#[test]
fn a_moved_bar_answers_at_its_new_place_only() {
    let (bus, endpoint) = bus();
    let old = u64::from(ecam_read(&bus, 1, 0x10));
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    ecam_write(&bus, 1, 0x10, u32::MAX);
    assert_eq!(ecam_read(&bus, 1, 0x10), 0xffff_8000);
    ecam_write(&bus, 1, 0x10, 0xd000_0000);
    assert_eq!(window_read(&bus, old).0, AccessCause::Unclaimed);
    window(&bus, LOW).write(0xd000_0010 - LOW, &[7, 8]);
    assert_eq!(*lock(&endpoint.last), Some((0, 0x10, vec![7, 8])));
    ecam_write(&bus, 1, 4, 0);
    assert_eq!(window_read(&bus, 0xd000_0010).0, AccessCause::Unclaimed);
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
fn a_large_64_bit_bar_goes_beyond_4_gib_and_answers_there() {
    const BYTES: u64 = 1 << 30;
    let mut kinds = KINDS;
    kinds[2] = BarKind::Memory64(BYTES);
    let (bus, _) = bus_with(kinds, BYTES);
    assert_eq!(ecam_read(&bus, 1, 0x18), HIGH as u32 | 4);
    assert_eq!(ecam_read(&bus, 1, 0x1c), (HIGH >> 32) as u32);
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    let (cause, data) = window_read(&bus, HIGH + 8);
    assert_eq!((cause, data), (AccessCause::Register, [0x28; 4]));
    assert_eq!(
        window_read(&bus, LOW).0,
        AccessCause::Register,
        "its other BAR"
    );
}

/// Windows of 512 MiB below 4 GiB, and 4 GiB beyond or none. A BAR: its bytes, and whether it has
/// 64 bits.
#[test]
fn bars_go_where_they_fit_and_small_ones_stay_below_4_gib() {
    const MIB: u64 = 1 << 20;
    let (low, high) = (windows(0), windows(4096 * MIB));
    type Case<'a> = (&'a BarWindows, &'a [(u64, bool)], Option<&'a [u64]>);
    let cases: [Case<'_>; 9] = [
        (
            &low,
            &[(0x4000, true), (0x1000, false)],
            Some(&[LOW + 0x4000, LOW]),
        ),
        (
            &high,
            &[(0x4000, true), (0x1000, false)],
            Some(&[LOW + 0x4000, LOW]),
        ),
        (
            &low,
            &[(256 * MIB, true), (0x1000, true)],
            Some(&[LOW, LOW + 256 * MIB]),
        ),
        (
            &high,
            &[(256 * MIB, true), (0x1000, true)],
            Some(&[HIGH, LOW]),
        ),
        // Aligned to their sizes.
        (
            &high,
            &[(64 * MIB, true), (1024 * MIB, true)],
            Some(&[HIGH, HIGH + 1024 * MIB]),
        ),
        (&low, &[(1024 * MIB, true)], None),
        // 32 bits do not reach beyond, and come first where there is room for them.
        (&high, &[(1024 * MIB, false)], None),
        (
            &high,
            &[(4096 * MIB, true), (256 * MIB, true), (256 * MIB, false)],
            Some(&[HIGH, LOW + 256 * MIB, LOW]),
        ),
        (&high, &[(8192 * MIB, true)], None),
    ];
    for (windows, wanted, expected) in cases {
        let bars: Vec<Bar> = wanted
            .iter()
            .enumerate()
            .map(|(slot, (bytes, is_wide))| Bar {
                slot,
                index: 0,
                bytes: *bytes,
                is_wide: *is_wide,
            })
            .collect();
        let placed = windows.place(&bars).ok().map(|mut placed| {
            placed.sort_by_key(|placed| placed.bar.slot);
            placed.iter().map(|placed| placed.at).collect::<Vec<_>>()
        });
        assert_eq!(placed.as_deref(), expected, "{wanted:x?}");
    }
}

#[test]
fn an_unplugged_function_is_gone_and_its_slot_is_taken_again() {
    let (bus, _) = bus();
    let at = u64::from(ecam_read(&bus, 1, 0x10));
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    bus.unplug(SourceId::new(0, 1, 0));
    assert_eq!(ecam_read(&bus, 1, 0), u32::MAX);
    assert_eq!(window_read(&bus, at).0, AccessCause::Unclaimed);
    assert_eq!(bus.reserve().unwrap(), SourceId::new(0, 1, 0));
    assert_eq!(bus.reserve().unwrap(), SourceId::new(0, 2, 0));
}

#[test]
fn a_port_is_told_what_is_decoded_before_its_function_hears_the_write() {
    let (bus, endpoint) = bus();
    let at = u64::from(ecam_read(&bus, 1, 0x10));
    lock(&endpoint.told).clear();
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    ecam_write(&bus, 1, 4, 0);
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    bus.unplug(SourceId::new(0, 1, 0));
    let told = [
        (Some(at), 0),
        (None, COMMAND_MEMORY),
        (Some(at), 0),
        (None, COMMAND_MEMORY),
    ];
    assert_eq!(*lock(&endpoint.told), told);
}

#[test]
fn vcpus_that_move_a_bar_at_once_leave_its_port_told_of_the_place_that_is_decoded() {
    let (bus, endpoint) = bus();
    ecam_write(&bus, 1, 4, u32::from(COMMAND_MEMORY));
    let places: Vec<u64> = (1..=4).map(|mib| LOW + (mib << 20)).collect();
    for _ in 0..200 {
        std::thread::scope(|scope| {
            for at in &places {
                scope.spawn(|| ecam_write(&bus, 1, 0x10, *at as u32));
            }
        });
        let last = lock(&endpoint.told).last().unwrap().0.unwrap();
        for at in &places {
            let is_decoded = window_read(&bus, *at).0 != AccessCause::Unclaimed;
            assert_eq!(is_decoded, *at == last, "{at:#x}, told {last:#x}");
        }
    }
    std::thread::scope(|scope| {
        for at in &places {
            scope.spawn(|| ecam_write(&bus, 1, 0x10, *at as u32));
        }
        bus.unplug(SourceId::new(0, 1, 0));
    });
    assert_eq!(lock(&endpoint.told).last().unwrap().0, None, "unplugged");
}

#[test]
fn the_bus_has_32_slots() {
    let bus = PciBus::new(Arc::new(HostBridge::default()));
    for slot in 1..32 {
        assert_eq!(bus.reserve().unwrap(), SourceId::new(0, slot, 0));
    }
    assert!(matches!(bus.reserve(), Err(PciError::NoSlot)));
}

#[test]
fn bars_that_do_not_fit_are_an_error() {
    let bus = PciBus::new(Arc::new(HostBridge::default()));
    let windows = BarWindows {
        low: LOW..LOW + 0x8000,
        high: HIGH..HIGH,
    };
    bus.plug(bus.reserve().unwrap(), Endpoint::new());
    assert!(matches!(
        bus.place_bars(&windows),
        Err(PciError::NoWindow {
            slot: 1,
            bytes: 0x1000
        })
    ));
}
