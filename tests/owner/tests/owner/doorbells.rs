//! Doorbells of functions on a bus, watched by a hypervisor that takes its time over each change.

use std::convert::Infallible;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use guest_mem::SourceId;
use machine::port::OwnedFunction;
use machine::{FunctionLines, FunctionShape, ResolveFunction};
use pci::bars::{BARS, COMMAND, COMMAND_MEMORY, FIRST_BAR};
use pci::bus::{BarWindows, Ecam, PciBus, PciWindow};
use pci::host_bridge::HostBridge;
use pci::port::FunctionPort;
use platform::bus::{AccessCause, BusDevice};
use platform::doorbell::{Doorbells, PlaceDoorbells};
use platform::layout;
use platform::memory::PlaceMemory;
use sidecore::SidecoreBuilder;
use virtio_pci::VirtioFunction;
use virtio_pci::function::{NOTIFY, NOTIFY_STRIDE};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::support::*;

/// Eventfds, rung by hand as a hypervisor would.
pub struct Bells {
    fds: Vec<EventFd>,
    rung: u64,
}

impl Bells {
    pub fn new(fds: Vec<EventFd>) -> Self {
        Self { fds, rung: 0 }
    }
}

impl Doorbells for Bells {
    fn fds(&self, add: &mut dyn FnMut(RawFd)) {
        self.fds.iter().map(AsRawFd::as_raw_fd).for_each(add);
    }

    fn drain(&mut self, ring: &mut dyn FnMut(u16)) {
        for (fd, queue) in self.fds.iter().zip(0..) {
            if let Ok(count) = fd.read() {
                self.rung += count;
                ring(queue);
            }
        }
    }

    fn rung(&self) -> u64 {
        self.rung
    }
}

/// A bus with one function in slot 1, as a guest's kernel reaches it.
struct TestBus {
    bus: Arc<PciBus>,
    function: SourceId,
}

impl TestBus {
    fn new(port: impl FunctionPort + 'static) -> Self {
        let windows = BarWindows {
            low: layout::PCI_WINDOW..layout::PCI_WINDOW_END,
            high: 0..0,
        };
        let bus = Arc::new(PciBus::new(Arc::new(HostBridge::default())));
        let function = bus.reserve().unwrap();
        bus.plug(function, Arc::new(port));
        bus.place_bars(&windows).unwrap();
        Self { bus, function }
    }

    fn config_at(&self, reg: u16) -> u64 {
        u64::from(self.function.devfn()) << 12 | u64::from(reg)
    }

    fn set_command(&self, command: u16) {
        Ecam(self.bus.clone()).write(self.config_at(COMMAND), &command.to_le_bytes());
    }

    fn set_bar(&self, base: u64) {
        let bytes = u32::try_from(base).unwrap().to_le_bytes();
        Ecam(self.bus.clone()).write(self.config_at(FIRST_BAR), &bytes);
    }

    fn bar(&self) -> u64 {
        let mut bytes = [0; 4];
        Ecam(self.bus.clone()).read(self.config_at(FIRST_BAR), &mut bytes);
        u64::from(u32::from_le_bytes(bytes) & !0xf)
    }

    /// A store that exits: what it was.
    fn exit(&self, at: u64) -> AccessCause {
        let base = layout::PCI_WINDOW;
        let bus = self.bus.clone();
        PciWindow { bus, base }.write(at - base, &0_u16.to_le_bytes())
    }
}

fn shape(function: &Functions) -> FunctionShape {
    ResolveFunction::<Infallible>::get(function).shape()
}

/// A hypervisor that reports the beginning of each change, and ends it when the test says so, or
/// after [`PATIENCE`].
struct Slow {
    at: Mutex<Option<u64>>,
    begun: Sender<Option<u64>>,
    may_end: Mutex<Receiver<()>>,
}

impl PlaceDoorbells for Slow {
    fn place(&self, first: Option<u64>) {
        let mut at = self.at.lock().unwrap();
        if *at != first {
            self.begun.send(first).unwrap();
            let _ = self.may_end.lock().unwrap().recv_timeout(PATIENCE);
            *at = first;
        }
    }
}

#[test]
fn a_bar_that_moves_holds_up_no_other_device_of_the_core() {
    let (mut owner, parts) = machine(Mode::Trap, NO_LIMIT, mem_disk());
    let other = SourceId::new(0, 2, 0);
    let function = Functions::Disk(VirtioFunction::new(other, mem_disk()));
    let shape = shape(&function);
    let (begun, is_begun) = channel();
    let (end, may_end) = channel();
    let slow = Slow {
        at: Mutex::new(None),
        begun,
        may_end: Mutex::new(may_end),
    };
    let number = owner.add(0, function, FunctionLines::default());
    let core = SidecoreBuilder::new("doorbells")
        .spawn(vec![owner])
        .unwrap();
    let port = OwnedFunction::new(core.handle(0), number, shape).with_doorbells(Arc::new(slow));
    let board = TestBus::new(port);
    let mut guest = Guest::new(core.handle(0), parts);
    guest.boot();
    guest.start_driver();
    thread::scope(|scope| {
        // Dropped when anything here fails: then nothing is slow any more.
        let (end, board) = (end, &board);
        for (round, command) in [(1, COMMAND_MEMORY), (2, 0), (3, COMMAND_MEMORY)] {
            let vcpu = scope.spawn(move || board.set_command(command));
            let place = is_begun.recv_timeout(PATIENCE).unwrap();
            assert_eq!(place.is_some(), command == COMMAND_MEMORY);
            guest.verified_io(round);
            assert!(!vcpu.is_finished(), "its doorbells are not there yet");
            end.send(()).unwrap();
            vcpu.join().unwrap();
        }
    });
    core.stop();
}

/// A hypervisor's table of one function's doorbells.
struct DoorbellTable {
    fds: Vec<EventFd>,
    at: Mutex<Option<u64>>,
}

impl PlaceDoorbells for DoorbellTable {
    fn place(&self, first: Option<u64>) {
        *self.at.lock().unwrap() = first;
    }
}

impl DoorbellTable {
    /// A store, which rings here or exits.
    fn store(&self, board: &TestBus, at: u64) -> Option<AccessCause> {
        let first = *self.at.lock().unwrap();
        let queue = first
            .and_then(|first| at.checked_sub(first))
            .map(|inside| (inside / NOTIFY_STRIDE) as usize);
        match queue.and_then(|queue| self.fds.get(queue)) {
            Some(fd) => {
                fd.write(1).unwrap();
                None
            }
            None => Some(board.exit(at)),
        }
    }
}

#[test]
fn a_doorbell_rings_where_its_bar_is_decoded_and_nowhere_else() {
    let (_, parts) = machine(Mode::Trap, NO_LIMIT, mem_disk());
    let function = VirtioFunction::new(DISK, mem_disk());
    let fds: Vec<_> = (0..function.queues())
        .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
        .collect();
    let watched = Arc::new(DoorbellTable {
        fds: fds.iter().map(|fd| fd.try_clone().unwrap()).collect(),
        at: Mutex::new(None),
    });
    let function = Functions::Disk(function);
    let shape = shape(&function);
    let function_lines = FunctionLines {
        doorbells: Some(Box::new(Bells::new(fds))),
        pin: None,
    };
    let unit = Units::Vtd(vtd_port::VtdPort::trap(vtd::Unit::new(
        vtd::Config::default(),
    )));
    let owner = owner_of(
        ("doorbells".into(), &parts.ram, &parts.messages),
        unit,
        function,
        function_lines,
    );
    let core = SidecoreBuilder::new("doorbells")
        .spawn(vec![owner])
        .unwrap();
    let port = OwnedFunction::new(core.handle(0), 0, shape).with_doorbells(watched.clone());
    let board = TestBus::new(port);
    let mut guest = Guest::new(core.handle(0), parts);
    let here = board.bar() + NOTIFY;
    let there = here + (1 << 20);
    let mut heard = 0;
    // Where it is to ring, if anywhere.
    let mut check = |what: &str, place: Option<u64>| {
        for at in [here, there] {
            let exit = watched.store(&board, at);
            if place == Some(at) {
                heard += 1;
                assert_eq!(exit, None, "{what}: it exits");
            } else {
                assert_eq!(exit, Some(AccessCause::Unclaimed), "{what}: {at:#x}");
            }
        }
        assert_eq!(guest.counts().doorbells, heard, "{what}");
    };
    check("before the guest decodes anything", None);
    board.set_command(COMMAND_MEMORY);
    check("decoding on", Some(here));
    board.set_command(0);
    check("decoding off", None);
    board.set_bar(there - NOTIFY);
    check("moved while off", None);
    board.set_command(COMMAND_MEMORY);
    check("on again elsewhere", Some(there));
    board.set_bar(here - NOTIFY);
    check("moved while on", Some(here));
    board.bus.unplug(board.function);
    check("unplugged", None);
    core.stop();
}

/// Memory of a BAR, which reads the function's command register at each change.
struct ShownMemory {
    function: Arc<dyn FunctionPort>,
    shown: Mutex<[Option<u64>; BARS]>,
    changes: Mutex<Vec<(u8, Option<u64>, bool)>>,
}

impl PlaceMemory for ShownMemory {
    fn place(&self, bar: u8, at: Option<u64>) {
        let old = std::mem::replace(&mut self.shown.lock().unwrap()[usize::from(bar)], at);
        if old == at {
            return;
        }
        let command = self.function.config_read(COMMAND, 2);
        let is_on = command & u32::from(COMMAND_MEMORY) != 0;
        self.changes.lock().unwrap().push((bar, at, is_on));
    }
}

#[test]
fn memory_of_a_bar_is_there_only_while_the_function_decodes_it() {
    let (_, parts) = machine(Mode::Trap, NO_LIMIT, mem_disk());
    let function = Functions::Disk(VirtioFunction::new(DISK, mem_disk()));
    let shape = shape(&function);
    let unit = Units::Vtd(vtd_port::VtdPort::trap(vtd::Unit::new(
        vtd::Config::default(),
    )));
    let owner = owner_of(
        ("memory".into(), &parts.ram, &parts.messages),
        unit,
        function,
        FunctionLines::default(),
    );
    let core = SidecoreBuilder::new("memory").spawn(vec![owner]).unwrap();
    let memory = Arc::new(ShownMemory {
        function: Arc::new(OwnedFunction::new(core.handle(0), 0, shape.clone())),
        shown: Mutex::default(),
        changes: Mutex::default(),
    });
    let port = OwnedFunction::new(core.handle(0), 0, shape).with_memory(memory.clone());
    let board = TestBus::new(port);
    let (here, there) = (board.bar(), board.bar() + (1 << 20));
    let check = |what: &str, expected: &[(u8, Option<u64>, bool)]| {
        let changes = std::mem::take(&mut *memory.changes.lock().unwrap());
        assert_eq!(changes, expected, "{what}");
    };
    check("before the guest decodes anything", &[]);
    board.set_command(COMMAND_MEMORY);
    check("decoding on", &[(0, Some(here), true)]);
    board.set_command(COMMAND_MEMORY);
    check("on, as it is", &[]);
    board.set_command(0);
    check("decoding off", &[(0, None, true)]);
    board.set_bar(there);
    check("moved while off", &[]);
    board.set_command(COMMAND_MEMORY);
    check("on again elsewhere", &[(0, Some(there), true)]);
    board.set_bar(here);
    check("moved while on", &[(0, None, true), (0, Some(here), true)]);
    board.bus.unplug(board.function);
    check("unplugged", &[(0, None, true)]);
    core.stop();
}
