//! A network device as an export: what it takes beyond a block device is nothing.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::sync::Arc;

use crate::common::front::{copy, event};
use crate::common::{PATIENCE, until};
use fake_driver::{AnyDriver, Rings};
use guest_mem::{ForeignRam, ForeignRegion, Gpa, KeepAlive, PhysMem};
use sidecore::{IdlePolicy, Sidecore, SidecoreBuilder};
use vhost_blk::memory::Memory;
use vhost_export::{Export, ExportConfig, ExportMessage};
use vhost_user::frontend::{Connection, Ring};
use vhost_user::wire::{MemRegion, ProtocolFeatures};
use vio::feature;
use vio::net::{
    FrameData, FrameReceiver, HEADER_LEN, Net, NetClass, NetHeader, NetPort, RX, RxFrame, TX,
    TxFrame, Waits, net_feature,
};

const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x10];
const MEMORY: u64 = 1 << 20;
/// Where the front end has the guest's memory mapped.
const USER: u64 = 0x7f00_0000_0000;
const SENT: u64 = 0x4_0000;
const RECEIVED: u64 = 0x5_0000;

/// One end of a pair of sockets is the network.
struct Wire {
    socket: UnixDatagram,
    /// Read and not delivered.
    next: Option<Vec<u8>>,
}

impl NetPort for Wire {
    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let sent = frames.iter().filter(|frame| {
            let mut bytes = vec![0; frame.len as usize];
            frame.read(0, &mut bytes);
            self.socket.send(&bytes).is_ok()
        });
        frames.len() - sent.count()
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        self.look();
        self.next.is_some()
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        while to.room() != 0 {
            self.look();
            let Some(next) = &self.next else { return };
            let frame = RxFrame {
                header: NetHeader::PLAIN,
                data: FrameData::Bytes(next),
            };
            if to.deliver(&[frame]) == 0 {
                return;
            }
            self.next = None;
        }
    }

    fn wake_fds(&self, _pair: u16, _waits: Waits, fds: &mut Vec<RawFd>) {
        fds.push(self.socket.as_raw_fd());
    }

    fn reset(&mut self) {}
}

impl Wire {
    fn look(&mut self) {
        let mut buf = [0; 2048];
        if self.next.is_none() {
            let read = self.socket.recv(&mut buf).ok();
            self.next = read.map(|len| buf[..len].to_vec());
        }
    }
}

/// A server, the other end of its wire, and a guest with two rings.
struct Scene {
    core: Sidecore<Export<NetClass>>,
    wire: UnixDatagram,
    connection: Connection,
    ram: ForeignRam,
    features: u64,
    rings: Vec<AnyDriver<ForeignRam>>,
    /// By ring: kick and call.
    events: Vec<(OwnedFd, OwnedFd)>,
    _dir: tempfile::TempDir,
}

impl Scene {
    fn new(ring_features: u64) -> Self {
        Self::with_idle(ring_features, IdlePolicy::Sleep)
    }

    fn with_idle(ring_features: u64, idle: IdlePolicy) -> Self {
        let dir = tempfile::tempdir().expect("a step of the session");
        let path = dir.path().join("net");
        let (ours, wire) = UnixDatagram::pair().expect("a step of the session");
        ours.set_nonblocking(true).expect("a step of the session");
        wire.set_read_timeout(Some(PATIENCE))
            .expect("a step of the session");
        let wire_end = Wire {
            socket: ours,
            next: None,
        };
        let net = Net::new(MAC, 256, Box::new(wire_end)).expect("a step of the session");
        let listener = UnixListener::bind(&path).expect("a step of the session");
        let config = ExportConfig::new("net");
        let export =
            Export::new(config, net.with_packed(), listener).expect("a step of the session");
        let core = SidecoreBuilder::new("test").idle(idle);
        let core = core.spawn(vec![export]).expect("a step of the session");

        let mut connection = Connection::open_within(PATIENCE, &path, None, PATIENCE)
            .expect("a step of the session");
        let everything = ProtocolFeatures(u64::MAX);
        let offered = connection
            .negotiate(Some(everything))
            .expect("a step of the session")
            .features;
        let rings = feature::RING_PACKED | feature::EVENT_IDX;
        let features = offered & !rings | ring_features;
        assert_eq!(features & !offered, 0, "it is not offered");
        connection
            .set_features(features)
            .expect("a step of the session");
        let memory = Memory::create(MEMORY as usize).expect("a step of the session");
        let region = MemRegion {
            guest_addr: 0,
            size: MEMORY,
            user_addr: USER,
            mmap_offset: 0,
        };
        connection
            .share_memory(&[region], memory.file())
            .expect("a step of the session");
        let own = ForeignRegion {
            gpa: Gpa::new(0),
            len: MEMORY,
            file: Arc::new(copy(memory.file())),
            offset: 0,
        };
        let ram = ForeignRam::empty()
            .with_regions(&[own])
            .expect("a step of the session");
        Self {
            core,
            wire,
            connection,
            ram,
            features,
            rings: Vec::new(),
            events: Vec::new(),
            _dir: dir,
        }
    }

    /// Starts fresh rings.
    fn start(&mut self) {
        self.rings.clear();
        self.events.clear();
        for index in [RX, TX] {
            let base = Gpa::new(0x1_0000 + 0x1_0000 * u64::from(index));
            let driver = AnyDriver::new(self.ram.clone(), base, index, 64, self.features);
            let config: Rings = driver.config();
            let (kick, call) = (event(), event());
            let ring = Ring {
                index: index as u8,
                size: config.size,
                // A packed ring begins with wrap counters of 1.
                base: match driver {
                    AnyDriver::Split(_) => 0,
                    AnyDriver::Packed(_) => 1 << 15 | 1 << 31,
                },
                desc: USER + config.desc.raw(),
                avail: USER + config.avail.raw(),
                used: USER + config.used.raw(),
                kick: kick.as_fd(),
                call: call.as_fd(),
                err: None,
            };
            self.connection
                .start_rings(&[ring])
                .expect("a step of the session");
            self.rings.push(driver);
            self.events.push((kick, call));
        }
    }

    fn stop(&mut self) -> [u32; 2] {
        [RX, TX].map(|index| {
            self.connection
                .ring_base(index.into())
                .expect("a step of the session")
        })
    }

    /// Makes a chain available, and rings the doorbell if it is asked for.
    fn offer(&mut self, ring: u16, readable: &[(u64, u32)], writable: &[(u64, u32)]) {
        let driver = &mut self.rings[usize::from(ring)];
        driver.stage(readable, writable);
        if driver.publish() {
            let (kick, _) = &self.events[usize::from(ring)];
            rustix::io::write(kick, &1_u64.to_ne_bytes()).expect("a step of the session");
        }
    }

    /// Waits for a chain to come back: its written bytes.
    fn returned(&mut self, ring: u16) -> u32 {
        let mut len = None;
        until("a chain comes back", || {
            len = self.rings[usize::from(ring)].used();
            len.is_some()
        });
        len.expect("a step of the session").1
    }

    /// The guest sends a frame, and it arrives.
    fn transmit(&mut self, frame: &[u8]) {
        self.ram
            .write(Gpa::new(SENT), &[0; HEADER_LEN])
            .expect("a step of the session");
        let at = Gpa::new(SENT + HEADER_LEN as u64);
        self.ram.write(at, frame).expect("a step of the session");
        self.offer(TX, &[(SENT, (HEADER_LEN + frame.len()) as u32)], &[]);
        let mut got = [0; 2048];
        let len = self.wire.recv(&mut got).expect("a frame arrives");
        assert_eq!(&got[..len], frame);
        assert_eq!(self.returned(TX), 0);
    }

    /// The next frame in the guest's buffer.
    fn receive(&mut self) -> Vec<u8> {
        let len = self.returned(RX);
        let mut bytes = vec![0; len as usize - HEADER_LEN];
        let at = Gpa::new(RECEIVED + HEADER_LEN as u64);
        self.ram
            .read(at, &mut bytes)
            .expect("a step of the session");
        bytes
    }

    fn give_buffer(&mut self) {
        self.offer(RX, &[], &[(RECEIVED, 2048)]);
    }
}

fn both(test: impl Fn(Scene)) {
    let split = feature::EVENT_IDX;
    for features in [split, split | feature::RING_PACKED] {
        test(Scene::new(features));
    }
}

#[test]
fn frames_go_both_ways_and_wake_the_core() {
    both(|mut scene| {
        scene.start();
        scene.transmit(&[0x5a; 60]);
        // Without a buffer a frame waits, and does not keep the core awake.
        scene.wire.send(&[1; 60]).unwrap();
        scene.give_buffer();
        assert_eq!(scene.receive(), [1; 60]);
        // With one, it is the frame that wakes the core.
        scene.give_buffer();
        scene.wire.send(&[2; 1500]).unwrap();
        assert_eq!(scene.receive(), [2; 1500]);
        // The call of each ring.
        for (_, call) in &scene.events {
            let mut count = [0; 8];
            until("a call", || rustix::io::read(call, &mut count).is_ok());
        }
        let stats = scene.core.handle(0).call(ExportMessage::Stats).unwrap();
        let device = stats.device;
        assert_eq!((device.requests, device.errors), (3, 0));
        assert_eq!((device.read_bytes, device.written_bytes), (1560, 60));
    });
}

/// User-mode Linux acknowledges what its driver would, and cannot read a configuration space that
/// is not offered: it takes nothing for the link's state, and what it happens to find for an
/// address.
#[test]
fn features_that_need_the_configuration_space_are_not_offered() {
    let scene = Scene::new(0);
    let unread = net_feature::MAC | net_feature::STATUS;
    let by_address = net_feature::CTRL_RX | net_feature::CTRL_RX_EXTRA | net_feature::CTRL_MAC_ADDR;
    assert_eq!(
        scene.features & (unread | by_address),
        0,
        "what cannot be read is offered"
    );
    let rest = net_feature::CTRL_VQ | net_feature::MRG_RXBUF | net_feature::GUEST_ANNOUNCE;
    assert_eq!(scene.features & rest, rest);
}

/// While a core polls it waits for no descriptor, and a frame of the network changes no ring.
#[test]
fn a_polling_core_sees_frames_of_the_network_though_the_rings_are_quiet() {
    let split = feature::EVENT_IDX;
    for features in [split, split | feature::RING_PACKED] {
        let mut scene = Scene::with_idle(features, IdlePolicy::Poll);
        scene.start();
        for round in 0..10 {
            scene.give_buffer();
            let watch = scene.core.watch();
            let idle = || watch.stats().core.sweeps_idle;
            let before = idle();
            until("the core is idle", || idle() > before + 1000);
            scene.wire.send(&[round; 60]).unwrap();
            assert_eq!(scene.receive(), [round; 60]);
        }
    }
}

#[test]
fn rings_stop_where_they_stand_and_start_afresh() {
    both(|mut scene| {
        for round in 0..3 {
            scene.start();
            scene.give_buffer();
            scene.transmit(&[round; 80]);
            scene.wire.send(&[round; 90]).unwrap();
            assert_eq!(scene.receive(), [round; 90]);
            // A buffer that no frame came for is not taken.
            scene.give_buffer();
            let bases = scene.stop();
            let position = match scene.features & feature::RING_PACKED {
                0 => 1,
                _ => 1 | 1 << 15 | 1 << 16 | 1 << 31,
            };
            assert_eq!(bases, [position; 2]);
        }
    });
}

#[test]
fn a_driver_that_breaks_the_protocol_needs_a_reset_and_gets_one() {
    both(|mut scene| {
        scene.start();
        // No room for the header.
        scene.offer(TX, &[(SENT, 5)], &[]);
        let handle = scene.core.handle(0);
        let violations = || handle.call(ExportMessage::Stats).unwrap().device.violations;
        until("it is noticed", || violations() == 1);
        scene.stop();
        scene.start();
        scene.transmit(&[7; 60]);
    });
}
