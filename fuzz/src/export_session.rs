//! A front end and the whole of `vhost-export`: a real socket, real memory files and eventfds,
//! rings that are served, and connections that end in the middle of it.
//!
//! The harness plays both sides of a [`Export`]: the front end with its guest (`front_end`), and
//! the sidecore that calls it, on one thread, with a clock that the input moves on. It checks:
//!
//! * nothing panics or waits;
//! * once a front end has gone and the disk has ended what it was doing, nothing of it is left: no
//!   descriptor to wait for, none open, no memory mapped;
//! * the disk is asked only for what it has (see `held_disk`).
//!
//! Left out: bytes that come in pieces with descriptors in the middle of a message, which
//! [`vhost_user_messages`](crate::vhost_user_messages) sends; moves between two cores at the same
//! time.

mod front_end;
mod seeds;
mod translations;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore::{Activity, DetachReason, Nanos, PollContext, Poller, Probe, Wakes};
use vhost_export::{Export, ExportConfig, RingProbe};
use vio::blk::{Blk, BlkClass, BlkConfig, MemDisk, Transfer};

use crate::held_disk::{Control, HeldDisk};
use crate::{Input, fds};
use front_end::FrontEnd;

pub use seeds::seeds;
pub(crate) use seeds::translated_seeds;
pub(crate) use translations::MISSES;

/// The export's own tokens: its socket, and its listener.
const TOKEN_SOCKET: u32 = 1 << 16;
const TOKEN_LISTENER: u32 = TOKEN_SOCKET + 1;
const TOKEN_CHANNEL: u32 = TOKEN_SOCKET + 3;
/// Polls within which a connection ends once its front end has gone and nothing is in flight.
const PATIENCE: usize = 50;
/// Disk size.
const SECTORS: u64 = 64;
/// Time for which requests in flight may hold something up, nanoseconds.
const DRAIN_LIMIT_NS: u64 = 10_000_000;
/// Name of the memory files, as it is found among this process's mappings.
const FILE_NAME: &str = "fuzzed-guest";

/// The body.
///
/// # Panics
/// If anything of a front end is left, and if the export panics.
pub fn run(data: &[u8]) {
    play(data, |input| {
        let mut world = World::new(input);
        while !input.is_empty() {
            world.step(input);
        }
        world
    });
}

/// The same with a device behind the front end's IOMMU: every other step is about that.
///
/// # Panics
/// As [`run`], and if more is asked for than may be at a time.
pub(crate) fn run_translated(data: &[u8]) {
    play(data, |input| {
        let mut world = World::new(input);
        world.front_end.translate();
        while !input.is_empty() {
            match input.u8() & 1 {
                0 => world.step(input),
                _ => {
                    world.now_ns += 1000;
                    world.front_end.iotlb(input);
                    world.serve(50_000);
                    world.front_end.receive();
                }
            }
        }
        world
    });
}

fn play(data: &[u8], body: impl FnOnce(&mut Input<'_>) -> World) {
    // The first export of a process keeps a descriptor for the rest of it.
    static FIRST: Once = Once::new();
    FIRST.call_once(|| drop(export(0, &mut Wakes::by_hand())));
    fds::leaves_none(|| {
        body(&mut Input::new(data)).end();
    });
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    assert!(!maps.contains(FILE_NAME), "guest memory is still mapped");
}

struct World {
    choice: u8,
    export: Export<BlkClass>,
    control: Option<Control>,
    address: SocketAddr,
    wakes: Wakes,
    probe: Option<RingProbe>,
    front_end: FrontEnd,
    now_ns: u64,
    is_armed: bool,
    /// Whether it is to move; it is asked until it may.
    is_moving: bool,
}

/// Returns a listener with a name of its own, and its address.
fn listener() -> (UnixListener, SocketAddr) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("exitless-fuzz-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    let listener = UnixListener::bind_addr(&address).expect("the name is free");
    (listener, address)
}

/// A device as the input chose it.
fn device(choice: u8) -> (Blk, Option<Control>) {
    let config = BlkConfig {
        queues: 2,
        queue_size: 64,
        packed: choice & 1 != 0,
        ..Default::default()
    };
    let transfer = match choice >> 1 & 3 {
        0 => None,
        1 => Some(Transfer::Direct),
        2 => Some(Transfer::Bounce),
        _ => Some(Transfer::Nothing),
    };
    let read_only = choice & 8 != 0;
    let made = match transfer {
        None => {
            let disk = MemDisk::new(vec![0x33; SECTORS as usize * 512], 8, read_only);
            (Blk::new(config, Box::new(disk)), None)
        }
        Some(transfer) => {
            let (disk, control) = HeldDisk::new(transfer, read_only, SECTORS, 8, 512);
            (Blk::new(config, Box::new(disk)), Some(control))
        }
    };
    (made.0.expect("the configuration is valid"), made.1)
}

fn export(choice: u8, wakes: &mut Wakes) -> (Export<BlkClass>, Option<Control>, SocketAddr) {
    let (blk, control) = device(choice);
    let (listener, address) = listener();
    let config = ExportConfig {
        drain_limit_ns: DRAIN_LIMIT_NS,
        ..ExportConfig::new("fuzzed")
    };
    let mut export = Export::new(config, blk, listener).expect("a listener");
    export.attached(wakes).expect("nothing is waited for");
    (export, control, address)
}

impl World {
    fn new(input: &mut Input<'_>) -> Self {
        let choice = input.u8();
        let mut wakes = Wakes::by_hand();
        let (export, control, address) = export(choice, &mut wakes);
        let front_end = FrontEnd::new(&address);
        let mut world = Self {
            choice,
            export,
            control,
            address,
            wakes,
            probe: None,
            front_end,
            now_ns: 1,
            is_armed: false,
            is_moving: false,
        };
        world.ready(TOKEN_LISTENER);
        world
    }

    fn step(&mut self, input: &mut Input<'_>) {
        self.now_ns += 1000;
        match input.u8() % 16 {
            0..=4 => {
                self.front_end.send(input);
                self.serve(100_000);
            }
            // Several messages may come at once.
            5 => self.front_end.send(input),
            6 | 7 => {
                self.front_end.guest(input);
                self.serve(50_000);
            }
            8 => {
                let budget = u64::from(input.u8()) * 100;
                self.serve(budget);
            }
            9 => self.sleep(),
            10 => {
                if let Some(control) = &self.control {
                    let (which, how) = (input.u8(), input.u8());
                    control.end_one(which, how);
                }
            }
            11 => {
                if let Some(control) = &self.control {
                    control.behave(input.u8());
                }
            }
            12 => self.now_ns += u64::from(input.u8()) * 1_000_000,
            13 => {
                self.is_moving = true;
                self.move_away();
            }
            14 => {
                // Gone, and another one comes, perhaps before that was seen.
                let is_seen = input.u8() & 1 == 0;
                self.front_end.reconnect(&self.address);
                if is_seen {
                    self.serve(100_000);
                }
                self.ready(TOKEN_LISTENER);
            }
            _ => self.succeed(),
        }
        self.front_end.receive();
    }

    fn turn(
        &mut self,
        budget: u64,
        body: impl FnOnce(&mut Export<BlkClass>, &mut PollContext<'_>),
    ) {
        if self.is_armed {
            self.is_armed = false;
            self.export.disarm();
        }
        let mut turn = PollContext::new(Nanos(self.now_ns), budget, &mut self.wakes);
        body(&mut self.export, &mut turn);
    }

    fn ready(&mut self, token: u32) {
        self.turn(10_000, |export, turn| export.ready(token, turn));
    }

    /// One sweep of the sidecore: descriptors, then the rings.
    fn serve(&mut self, budget: u64) {
        if self.is_moving {
            self.move_away();
        }
        for token in [TOKEN_CHANNEL, TOKEN_SOCKET, 0, 1] {
            self.ready(token);
        }
        let mut activity = Activity::Busy;
        self.turn(budget, |export, turn| activity = export.poll(turn));
        if activity == Activity::Idle {
            self.export.probe(&mut self.probe);
        }
        let _ = self.probe.as_ref().is_some_and(Probe::fires);
        let _ = self.export.deadline();
    }

    fn sleep(&mut self) {
        if !self.is_armed && self.export.arm(&mut self.wakes).is_ok() {
            self.is_armed = true;
            let _ = self.export.has_work();
        }
    }

    /// Moves it to another core, if it can.
    fn move_away(&mut self) {
        if self.is_armed {
            self.is_armed = false;
            self.export.disarm();
        }
        if self.is_moving && self.export.may_detach(DetachReason::Move) {
            self.is_moving = false;
            self.export.detaching(&mut self.wakes);
            self.wakes = Wakes::by_hand();
            self.probe = None;
            self.export
                .attached(&mut self.wakes)
                .expect("nothing is waited for");
        }
    }

    /// The process ends, and another one serves what the front end has kept.
    fn succeed(&mut self) {
        self.probe = None;
        self.is_armed = false;
        self.is_moving = false;
        self.wakes = Wakes::by_hand();
        let (export, control, address) = export(self.choice, &mut self.wakes);
        self.export = export;
        self.control = control;
        self.address = address;
        self.front_end.reconnect(&self.address);
        self.ready(TOKEN_LISTENER);
    }

    /// The front end goes.
    fn end(mut self) {
        self.front_end.disconnect();
        if let Some(control) = &self.control {
            control.behave(0);
        }
        let listening = 1;
        let mut polls = 0;
        while self.wakes.fds().count() != listening || self.has_peer() {
            if let Some(control) = &self.control {
                while control.end_one(0, 0) {}
            }
            self.now_ns += DRAIN_LIMIT_NS;
            self.serve(100_000);
            polls += 1;
            assert!(
                polls < PATIENCE,
                "the connection never ends: {:?}, {:?}",
                self.export,
                self.wakes
            );
        }
    }

    fn has_peer(&self) -> bool {
        format!("{:?}", self.export).contains("is_connected: true")
    }
}
