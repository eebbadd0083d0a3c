//! Machines with a second unit, made as programs make them, without a guest.

use std::cell::OnceCell;
use std::sync::{Arc, Mutex};

use guest_mem::{Gpa, GuestRam, PhysMem, SourceId};
use kvm::control::Control;
use kvm::exits::ExitLedger;
use kvm::msi::KvmMsi;
use kvm::routes::KvmRoutes;
use kvm::{Vcpu, Vm};
use machine::port::OwnedFunction;
use machine::{RemappingUnit, Request};
use pci::bus::{Ecam, PciBus};
use pci::host_bridge::HostBridge;
use platform::bus::BusDevice;
use platform::memory::PlaceMemory;
use sidecore::{IdlePolicy, SidecoreBuilder};
use vio::rng::{HOST_LIMITS, HostEntropy, Rng};
use virtio_pci::VirtioFunction;
use vtd::AccessLen;
use vtd::spec::registers::{CAP, CCMD};
use vtd_port::VtdPort;

use super::super::args::IdleArg;
use super::super::config::{IommuMode, Remapping};
use super::super::ejection::ejectable;
use super::super::ledger::owner_counts;
use super::super::pending_functions::{Assigned, PendingFunctions, Plugged};
use super::*;

crate::functions! {
    /// Functions of every machine.
    enum TestFunctions {}
}

const HOST_39: HostIommu = host((1 << 39) - 1);
const HOST_48: HostIommu = host((1 << 48) - 1);

const fn host(last_iova: u64) -> HostIommu {
    HostIommu {
        last_iova,
        large_pages: LargePages::TwoM,
        is_coherent: false,
    }
}

fn options(mode: Option<IommuMode>) -> UnitOptions {
    UnitOptions {
        remapping: mode.map_or(Remapping::None, Remapping::Vtd),
        drain_limit_ns: 5,
        idle: IdleArg::Poll,
    }
}

#[test]
fn the_unit_reaches_no_further_than_the_hosts_and_has_caching_mode() {
    let cases = [
        (u64::MAX, Some(AddressWidth::Bits48)),
        ((1 << 57) - 1, Some(AddressWidth::Bits48)),
        (HOST_48.last_iova, Some(AddressWidth::Bits48)),
        (HOST_48.last_iova - 1, Some(AddressWidth::Bits39)),
        (1 << 39, Some(AddressWidth::Bits39)),
        (HOST_39.last_iova, Some(AddressWidth::Bits39)),
        (HOST_39.last_iova - 1, None),
        (u32::MAX.into(), None),
        (0, None),
    ];
    for (last_iova, width) in cases {
        let config = unit_config(&options(None), &host(last_iova));
        match config {
            Ok(config) => {
                assert_eq!(Some(config.width), width, "{last_iova:#x}");
                assert!(config.caching_mode);
                assert_eq!(config.drain_limit_ns, 5);
            }
            Err(error) => {
                assert_eq!(width, None, "{last_iova:#x}: {error}");
                assert!(error.to_string().contains("at least 39 bits"), "{error}");
            }
        }
    }
}

/// Parts from which devices are built, in a machine without a guest.
struct Pieces {
    vm: Arc<Vm>,
    vcpu: Vcpu,
    ram: GuestRam,
    msi: Arc<KvmMsi>,
    routes: Arc<KvmRoutes>,
    control: Arc<Control>,
    exits: ExitLedger,
    bus: Arc<PciBus>,
}

impl Pieces {
    /// `None`, with the reason printed, where there is no KVM.
    fn new() -> Option<Self> {
        let kvm = match kvm::vm::open_any() {
            Ok(kvm) => kvm,
            Err(error) => {
                println!("skipped: {error}");
                return None;
            }
        };
        let vm = Arc::new(Vm::bare(&kvm).unwrap());
        Some(Self {
            vcpu: Vcpu::new(&vm, 0).unwrap(),
            ram: GuestRam::new(&[(Gpa::new(0), 1 << 20)]).unwrap(),
            msi: Arc::new(KvmMsi::new(vm.clone())),
            routes: Arc::new(KvmRoutes::new(vm.clone())),
            control: Arc::new(Control::new().unwrap()),
            exits: ExitLedger::new(1),
            bus: Arc::new(PciBus::new(Arc::new(HostBridge::default()))),
            vm,
        })
    }

    fn with<T>(&self, body: impl FnOnce(&Parts<'_>) -> T) -> T {
        body(&Parts {
            vm: &self.vm,
            vcpus: &[self.vcpu.as_fd()],
            ram: &self.ram,
            slots: &[],
            msi: &self.msi,
            routes: &self.routes,
            control: &self.control,
            exits: &self.exits,
            bus: &self.bus,
            ring: OnceCell::new(),
        })
    }
}

/// A function as devices of the host will be: any one has a requester and BARs.
fn function(parts: &Parts<'_>) -> VirtioFunction<Rng> {
    let entropy = HostEntropy::open().unwrap();
    let source = parts.bus.reserve().unwrap();
    VirtioFunction::new(source, Rng::new(Box::new(entropy), HOST_LIMITS))
}

#[derive(Default)]
struct Nowhere(Mutex<Vec<(u8, Option<u64>)>>);

impl PlaceMemory for Nowhere {
    fn place(&self, bar: u8, at: Option<u64>) {
        self.0.lock().unwrap().push((bar, at));
    }
}

fn port<F: Functions, M: PhysMem>(owner: &mut Owner<F, M>, unit: usize) -> &mut VtdPort {
    match owner.unit(unit) {
        Some(Units::Vtd(port)) => port,
        _ => panic!("unit {unit} is no VT-d unit"),
    }
}

fn iommu(port: &mut VtdPort) -> &mut vtd::Unit {
    RemappingUnit::<pv_iommu::Request>::iommu(port)
}

#[test]
fn assigned_functions_share_a_second_unit_that_only_they_bring_about() {
    const CACHING_MODE: u64 = 1 << 7;
    // Once for each register mode: two pages, two slots, one reader of the log.
    for mode in [IommuMode::Trap, IommuMode::Shared, IommuMode::Logged] {
        let Some(pieces) = Pieces::new() else {
            return;
        };
        let options = options(Some(mode));
        pieces.with(|parts| {
            let mut owner: Owner<TestFunctions, _> =
                Owner::new("test", parts.ram.clone(), parts.msi.clone());
            let first = match units::iommu(&options, pv_iommu::Hints::default(), parts) {
                Ok(units) => owner.add_unit(units),
                Err(error) => return println!("skipped: {mode:?}: {error:#}"),
            };
            let mut pending = PendingFunctions::new(&mut owner, first);
            let mut sources = Vec::new();
            for _ in 0..2 {
                let function = function(parts);
                sources.push(machine::Function::<pv_iommu::Request>::source(&function));
                let memory = Arc::new(Nowhere::default());
                let make = || assigned_unit(&options, parts, &HOST_39);
                pending.add_assigned(function, memory, make).unwrap();
            }
            let Plugged {
                ports: plugged,
                assigned,
                ..
            } = pending.into_plugged();
            assert!(plugged.iter().all(|plug| plug.memory.is_some()));
            assert!(plugged.iter().all(|plug| plug.doorbells.is_none()));
            let assigned = assigned.expect("two functions");
            assert_eq!((assigned.unit, &assigned.functions), (1, &sources));
            assert!(owner.unit(2).is_none(), "one unit for both");
            let caps = [0, 1].map(|unit| iommu(port(&mut owner, unit)).read(CAP, AccessLen::B8));
            assert_eq!(caps.map(|cap| cap & CACHING_MODE != 0), [false, true]);
            // SAGAW, bits 12:8: the second unit has 39 bits only.
            assert_eq!(caps.map(|cap| cap >> 8 & 0x1f), [0b110, 0b010]);
            assert_eq!(
                units::register_pages(Some(&assigned)),
                0xfed9_0000..0xfed9_2000
            );
            counts_are_of_both_units(&mut owner);
        });
    }
}

#[test]
fn a_unit_that_cannot_be_made_leaves_nothing_behind() {
    let Some(pieces) = Pieces::new() else {
        return;
    };
    pieces.with(|parts| {
        let mut owner: Owner<TestFunctions, _> =
            Owner::new("test", parts.ram.clone(), parts.msi.clone());
        let options = options(Some(IommuMode::Trap));
        let first =
            owner.add_unit(units::iommu(&options, pv_iommu::Hints::default(), parts).unwrap());
        let mut pending = PendingFunctions::new(&mut owner, first);
        let make = || assigned_unit(&options, parts, &host(0));
        let memory = Arc::new(Nowhere::default());
        assert!(pending.add_assigned(function(parts), memory, make).is_err());
        let Plugged {
            ports: plugged,
            assigned,
            ..
        } = pending.into_plugged();
        assert_eq!((plugged.len(), &assigned), (0, &None));
        assert!(owner.unit(1).is_none());
        assert_eq!(units::register_pages(None), 0xfed9_0000..0xfed9_1000);
        assert_eq!(units::dmar_table(None).len(), 64);
    });
}

/// One invalidation of contexts in the first unit, two in the second: the ledger has three.
fn counts_are_of_both_units(owner: &mut Owner<TestFunctions, GuestRam>) {
    struct Silent;
    impl vtd::Sink for Silent {
        fn msi(&mut self, _: u64, _: u32) {}
        fn event(&mut self, _: vtd::Event) {}
    }
    let ram = GuestRam::new(&[(Gpa::new(0), 1 << 12)]).unwrap();
    for unit in [0, 1, 1] {
        let unit = iommu(port(owner, unit));
        // ICC, and a global invalidation.
        unit.write(CCMD, AccessLen::B8, 1 << 63 | 1 << 61);
        unit.step(&ram, 0, &mut Silent);
    }
    assert_eq!(owner_counts(owner).invalidations, 3);
}

#[test]
fn the_table_names_assigned_functions_before_the_unit_of_all_others() {
    let assigned = Assigned {
        unit: 1,
        functions: vec![SourceId::new(0, 5, 0)],
    };
    let table = units::dmar_table(Some(&assigned));
    let bases: Vec<u64> = [56, 80]
        .map(|at| u64::from_le_bytes(table[at..at + 8].try_into().unwrap()))
        .to_vec();
    assert_eq!(bases, [layout::VTD_ASSIGNED, layout::VTD]);
    // INCLUDE_PCI_ALL of each, and device and function of the scope between them.
    assert_eq!((table[52], table[76]), (0, 1));
    assert_eq!(table[64..72], [1, 8, 0, 0, 0, 0, 5, 0]);
}

/// Two assigned functions and one that is not: the guest ejects what it may, once.
#[test]
fn an_ejected_function_is_gone_from_bus_and_owner_and_no_other_is() {
    let Some(pieces) = Pieces::new() else {
        return;
    };
    pieces.with(|parts| {
        let mut owner: Owner<TestFunctions, _> =
            Owner::new("test", parts.ram.clone(), parts.msi.clone());
        let options = options(Some(IommuMode::Trap));
        let first =
            owner.add_unit(units::iommu(&options, pv_iommu::Hints::default(), parts).unwrap());
        let mut pending = PendingFunctions::new(&mut owner, first);
        let doorbells = kvm::doorbells::KvmDoorbells::new(parts.vm.clone(), 1, 4).unwrap();
        let kept = pending.add(function(parts), doorbells);
        let mut assign = || {
            let memory = Arc::new(Nowhere::default());
            let make = || assigned_unit(&options, parts, &HOST_39);
            pending.add_assigned(function(parts), memory, make).unwrap()
        };
        let numbers = [assign(), assign()];
        let plugged = pending.into_plugged().ports;
        let builder = SidecoreBuilder::new("test").idle(IdlePolicy::Poll);
        let core = builder.spawn(vec![owner]).unwrap();
        let handle = core.handle(0);
        let ejectable = ejectable(&plugged, &handle, parts.bus).expect("two functions");
        // Slot 0 is the bridge, slot 1 the function that is not assigned.
        assert_eq!(ejectable.slots, [2, 3]);
        for plug in plugged {
            let port = OwnedFunction::new(handle.clone(), plug.number, plug.shape);
            parts.bus.plug(plug.source, Arc::new(port));
        }
        let present = || {
            [0, 1, 2, 3, 4].map(|slot: u64| {
                let mut id = [0; 4];
                Ecam(parts.bus.clone()).read(slot << 15, &mut id);
                id != [0xff; 4]
            })
        };
        let there = |number| {
            let look = move |owner: &mut Owner<TestFunctions, _>| owner.function(number).is_some();
            handle.call(|reply| Request::ask(reply, look)).unwrap()
        };
        assert_eq!(present(), [true, true, true, true, false]);
        for slot in [0, 1, 4, 31, 32, 0xff] {
            ejectable.sink.eject(slot);
        }
        assert_eq!(present(), [true, true, true, true, false]);
        for _ in 0..2 {
            ejectable.sink.eject(2);
            assert_eq!(present(), [true, true, false, true, false]);
        }
        // The owner removes it as soon as it has stopped, which takes it some polls.
        while there(numbers[0]) {
            std::thread::yield_now();
        }
        assert!(there(numbers[1]) && there(kept));
        ejectable.sink.eject(3);
        assert_eq!(present(), [true, true, false, false, false]);
        while there(numbers[1]) {
            std::thread::yield_now();
        }
        assert!(there(kept));
        core.stop();
    });
}
