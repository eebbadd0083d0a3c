//! A network device of two queue pairs, served by `vhost-export`: frames of a pair come back by it
//! once the driver uses it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use fake_driver::{FakeDriver, Rings};
use guest_mem::{Gpa, GuestRam, KeepAlive, PhysMem};
use rustix::event::{EventfdFlags, eventfd};
use sidecore::{IdlePolicy, SidecoreBuilder};
use vhost_export::{Export, ExportConfig};
use vhost_import::{Class, Import, ImportConfig, NetIdentity};
use vio::net::{
    FrameData, FrameReceiver, Net, NetHeader, NetPort, PortCapabilities, RxFrame, TxFrame,
};
use vio::{QueueConfig, RemoteDevice};

const RAM: u64 = 4 << 20;
const RINGS: u64 = 0x1_0000;
const FRAMES: u64 = 0x10_0000;
const SIZE: u16 = 16;
const PAIRS: u16 = 2;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const HEADER: usize = 12;
const LEN: usize = 100;
const PATIENCE: Duration = Duration::from_secs(20);

/// Port that returns a pair's frames by the same pair.
#[derive(Default)]
struct Echo([VecDeque<Vec<u8>>; PAIRS as usize]);

impl NetPort for Echo {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            pairs: PAIRS,
            ..PortCapabilities::PLAIN
        }
    }

    fn send(&mut self, pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        for frame in frames {
            let mut bytes = vec![0; frame.len as usize];
            frame.read(0, &mut bytes);
            self.0[usize::from(pair)].push_back(bytes);
        }
        0
    }

    fn reset(&mut self) {
        self.0.iter_mut().for_each(VecDeque::clear);
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        !self.0[usize::from(pair)].is_empty()
    }

    fn receive(&mut self, pair: u16, to: &mut dyn FrameReceiver) {
        let frames = &mut self.0[usize::from(pair)];
        while let Some(frame) = frames.front()
            && to.room() != 0
        {
            let offered = RxFrame {
                header: NetHeader::default(),
                data: FrameData::Bytes(frame),
            };
            if to.deliver(&[offered]) == 0 {
                return;
            }
            frames.pop_front();
        }
    }
}

struct Guest {
    import: Import,
    ram: GuestRam,
    rings: Vec<FakeDriver<GuestRam>>,
    kick: Vec<OwnedFd>,
}

impl Guest {
    fn new(socket: &std::path::Path) -> Self {
        let ram = GuestRam::new(&[(Gpa::new(0), RAM)]).unwrap();
        let config = ImportConfig {
            class: Class::Net(NetIdentity {
                mac: MAC,
                mtu: Some(1500),
            }),
            queues: 2 * PAIRS,
            ..ImportConfig::new("test", socket)
        };
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let fds = |count: u16| -> Vec<OwnedFd> {
            (0..count).map(|_| eventfd(0, flags).unwrap()).collect()
        };
        let all = config.class.device_queues(config.queues);
        let kick = fds(all);
        let clones = kick.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let mut import = Import::connect(config, ram.clone(), clones, fds(all)).unwrap();
        let rings: Vec<FakeDriver<GuestRam>> = (0..2 * PAIRS)
            .map(|index| {
                let base = Gpa::new(RINGS + 0x1000 * u64::from(index));
                FakeDriver::new(ram.clone(), base, index, SIZE)
            })
            .collect();
        let queues: Vec<_> = rings
            .iter()
            .map(|ring| {
                let Rings {
                    index,
                    size,
                    desc,
                    avail,
                    used,
                } = ring.config();
                QueueConfig {
                    index,
                    size,
                    desc,
                    avail,
                    used,
                }
            })
            .collect();
        import.start(import.features(), &queues).unwrap();
        Self {
            import,
            ram,
            rings,
            kick,
        }
    }

    fn place(queue: u16) -> u64 {
        FRAMES + 0x1000 * u64::from(queue)
    }

    fn kick(&self, queue: u16) {
        let kick = &self.kick[usize::from(queue)];
        rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Sends a frame of this byte by a pair, with a buffer for one.
    fn send(&mut self, pair: u16, byte: u8) {
        let (receive, transmit) = (2 * pair, 2 * pair + 1);
        let buffer = (Self::place(receive), (HEADER + LEN) as u32);
        self.rings[usize::from(receive)].add(&[], &[buffer]);
        self.kick(receive);
        let mut frame = vec![0; HEADER];
        frame.extend([byte; LEN]);
        let at = Self::place(transmit);
        self.ram.write(Gpa::new(at), &frame).unwrap();
        self.rings[usize::from(transmit)].add(&[(at, frame.len() as u32)], &[]);
        self.kick(transmit);
    }

    /// Waits for a frame of this byte by a pair.
    fn expect(&mut self, pair: u16, byte: u8) {
        let ring = &mut self.rings[usize::from(2 * pair)];
        let deadline = Instant::now() + PATIENCE;
        let (_, len) = loop {
            if let Some(used) = ring.used() {
                break used;
            }
            assert!(Instant::now() < deadline, "no frame by pair {pair}");
            std::thread::yield_now();
        };
        assert_eq!(len as usize, HEADER + LEN);
        let mut frame = [0; LEN];
        let at = Gpa::new(Self::place(2 * pair) + HEADER as u64);
        self.ram.read(at, &mut frame).unwrap();
        assert_eq!(frame, [byte; LEN]);
        assert!(self.rings[usize::from(2 * pair + 1)].used().is_some());
    }
}

#[test]
fn a_pair_is_served_once_the_driver_uses_it() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let net = Net::new(MAC, 256, Box::new(Echo::default())).unwrap();
    let net = net.with_pairs(PAIRS).unwrap();
    let export = Export::new(ExportConfig::new("test"), net, listener).unwrap();
    let core = SidecoreBuilder::new("daemon")
        .idle(IdlePolicy::Sleep)
        .spawn(vec![export])
        .unwrap();
    let mut guest = Guest::new(&socket);
    guest.send(1, 0x11);
    guest.send(0, 0x22);
    guest.expect(0, 0x22);
    assert_eq!(guest.rings[3].used(), None, "its pair is not used");
    guest.import.set_pairs(PAIRS);
    guest.expect(1, 0x11);
    for byte in 0..50 {
        let pair = u16::from(byte % 2);
        guest.send(pair, byte);
        guest.expect(pair, byte);
    }
    guest.import.set_pairs(1);
    guest.send(0, 0x33);
    guest.expect(0, 0x33);
    assert!(!guest.import.needs_reset());
    drop(guest);
    drop(core.stop());
}
