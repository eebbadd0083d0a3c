//! An uplink between a switch and a port of the host that a test plays.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use guest_mem::{Gpa, GuestRam, Intent, KeepAlive, PhysMem, VolatileSlice};
use net_ports::{Fabric, SwitchPort, Uplink};
use net_switch::{PortConfig, SwitchConfig};
use seeded::Random;
use vio::net::{
    BURST, FrameData, FrameReceiver, NetHeader, NetPort, Offloads, PortCapabilities, RxFrame,
    TxFrame,
};

/// Frames on their way to the switch, and those that came.
#[derive(Default)]
struct Wire {
    to_switch: VecDeque<Vec<u8>>,
    from_switch: Vec<(NetHeader, Vec<u8>)>,
    room: usize,
    started: Option<Offloads>,
}

#[derive(Clone)]
struct Host {
    wire: Arc<Mutex<Wire>>,
    send: Offloads,
}

impl NetPort for Host {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            send: self.send,
            receive: Offloads::ALL,
            ..PortCapabilities::PLAIN
        }
    }

    fn start(&mut self, receiver: Offloads) {
        self.wire.lock().unwrap().started = Some(receiver);
    }

    fn reset(&mut self) {}

    fn send_room(&mut self, _pair: u16) -> usize {
        self.wire.lock().unwrap().room.min(BURST)
    }

    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut wire = self.wire.lock().unwrap();
        for frame in frames {
            let mut bytes = vec![0; frame.len as usize];
            assert_eq!(frame.read(0, &mut bytes), bytes.len());
            wire.from_switch.push((frame.header, bytes));
            wire.room -= 1;
        }
        0
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        !self.wire.lock().unwrap().to_switch.is_empty()
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        loop {
            let room = to.room();
            let mut wire = self.wire.lock().unwrap();
            let count = room.min(wire.to_switch.len());
            if count == 0 {
                return;
            }
            let frames: Vec<Vec<u8>> = wire.to_switch.drain(..count).collect();
            drop(wire);
            let offered: Vec<_> = frames
                .iter()
                .map(|bytes| RxFrame {
                    header: NetHeader::PLAIN,
                    data: FrameData::Bytes(bytes),
                })
                .collect();
            assert_eq!(to.deliver(&offered), count);
        }
    }
}

/// A guest on the switch.
struct Guest {
    port: SwitchPort,
    ram: GuestRam,
    keep: KeepAlive,
    got: Vec<Vec<u8>>,
    room: usize,
}

struct Buffers<'g>(&'g mut Vec<Vec<u8>>, &'g mut usize);

impl FrameReceiver for Buffers<'_> {
    fn room(&mut self) -> usize {
        (*self.1).min(BURST)
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let count = frames.len().min(*self.1);
        for frame in &frames[..count] {
            let mut bytes = vec![0; frame.data.len()];
            frame.data.read(0, &mut bytes);
            self.0.push(bytes);
        }
        *self.1 -= count;
        count
    }
}

impl Guest {
    fn new(fabric: &Fabric) -> Self {
        let mut port = fabric.port(PortConfig::default(), 1_500).unwrap();
        port.start(Offloads::NONE);
        let ram = GuestRam::in_heap(&[(Gpa::new(0), 1 << 20)]).unwrap();
        Self {
            port,
            keep: ram.keep_alive(),
            ram,
            got: Vec::new(),
            room: 0,
        }
    }

    fn send(&mut self, header: NetHeader, frame: &[u8]) {
        self.ram.write(Gpa::new(0), frame).unwrap();
        let hva = self
            .ram
            .host(Gpa::new(0), frame.len() as u64, Intent::Read)
            .unwrap();
        let slice = VolatileSlice::new(&self.keep, hva, frame.len() as u32).unwrap();
        let frame = TxFrame {
            header,
            len: frame.len() as u32,
            data: &[slice],
        };
        assert_eq!(self.port.send(0, &[frame], &self.keep), 0);
    }

    fn receive(&mut self, room: usize) -> Vec<Vec<u8>> {
        self.room = room;
        self.port
            .receive(0, &mut Buffers(&mut self.got, &mut self.room));
        std::mem::take(&mut self.got)
    }
}

fn rig(send: Offloads) -> (Arc<Mutex<Wire>>, Uplink<Host>, Guest) {
    let fabric = Fabric::new(SwitchConfig::default()).unwrap();
    let wire = Arc::new(Mutex::new(Wire {
        room: 1_000_000,
        ..Wire::default()
    }));
    let host = Host {
        wire: Arc::clone(&wire),
        send,
    };
    let port = fabric.port(PortConfig::default(), 1_500).unwrap();
    let uplink = Uplink::new(host, port).unwrap();
    (wire, uplink, Guest::new(&fabric))
}

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FAR: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn frame(to: [u8; 6], from: [u8; 6], len: usize, fill: u8) -> Vec<u8> {
    let mut frame = [to, from].concat();
    frame.extend([0x12, 0x34]);
    frame.resize(len.max(14), fill);
    frame
}

#[test]
fn frames_of_any_length_go_both_ways_in_order() {
    let (wire, mut uplink, mut guest) = rig(Offloads::NONE);
    // The switch has each of them.
    guest.send(NetHeader::PLAIN, &frame(FAR, GUEST, 60, 0));
    wire.lock()
        .unwrap()
        .to_switch
        .push_back(frame(GUEST, FAR, 60, 0));
    uplink.visit(64);
    guest.receive(BURST);
    wire.lock().unwrap().from_switch.clear();
    let mut random = Random::new(1);
    let (mut to_guest, mut to_host) = (Vec::new(), Vec::new());
    let mut got = Vec::new();
    for round in 0..2_000u32 {
        let len = [14, 60, 256, 257, 1_514][random.below(5) as usize];
        let fill = round as u8;
        if random.below(2) == 0 {
            let one = frame(GUEST, FAR, len, fill);
            wire.lock().unwrap().to_switch.push_back(one.clone());
            to_guest.push(one);
        } else {
            let one = frame(FAR, GUEST, len, fill);
            guest.send(NetHeader::PLAIN, &one);
            // Its memory is used again at once.
            uplink.visit(64);
            guest.port.collect(0);
            to_host.push(one);
        }
        if random.below(8) == 0 {
            while uplink.has_work() {
                uplink.visit(64);
                got.extend(guest.receive(BURST));
            }
        }
    }
    while uplink.has_work() || guest.port.has_frames(0) {
        uplink.visit(64);
        got.extend(guest.receive(BURST));
    }
    assert!(got == to_guest);
    let sent: Vec<_> = wire
        .lock()
        .unwrap()
        .from_switch
        .iter()
        .map(|sent| sent.1.clone())
        .collect();
    assert!(sent == to_host);
    uplink.visit(64);
    assert!(
        !uplink.has_kept() && uplink.counters().dropped == 0,
        "{uplink:?}"
    );
}

/// Places are bounded; frames that do not fit stay in the host's port, and a guest that takes
/// nothing does not keep them.
#[test]
fn a_guest_that_takes_nothing_does_not_hold_the_uplink_up() {
    let (wire, mut uplink, mut guest) = rig(Offloads::NONE);
    guest.send(NetHeader::PLAIN, &frame(FAR, GUEST, 60, 0));
    uplink.visit(64);
    wire.lock()
        .unwrap()
        .to_switch
        .extend((0..200).map(|n| frame(GUEST, FAR, 1_000, n as u8)));
    uplink.visit(1_000);
    let left = wire.lock().unwrap().to_switch.len();
    assert_eq!((left, uplink.has_work()), (200 - 64, false));
    assert!(uplink.has_kept());
    // They are copied for the guest after 50 µs, and the places are free.
    let start = std::time::Instant::now();
    while !wire.lock().unwrap().to_switch.is_empty() {
        assert!(start.elapsed().as_secs() < 10);
        uplink.visit(1_000);
    }
    uplink.cancel();
    uplink.visit(1_000);
    assert!(!uplink.has_kept());
    let mut got = Vec::new();
    while guest.port.has_frames(0) {
        got.extend(guest.receive(BURST));
    }
    assert!(
        got == (0..200)
            .map(|n| frame(GUEST, FAR, 1_000, n as u8))
            .collect::<Vec<_>>()
    );
}

#[test]
fn frames_that_the_host_does_not_take_wait_in_the_switch() {
    let (wire, mut uplink, mut guest) = rig(Offloads::NONE);
    wire.lock().unwrap().room = 3;
    for n in 0..10 {
        guest.send(NetHeader::PLAIN, &frame(FAR, GUEST, 100, n));
    }
    uplink.visit(64);
    let taken = wire.lock().unwrap().from_switch.len();
    assert_eq!((taken, uplink.has_work()), (3, false));
    wire.lock().unwrap().room = 100;
    assert!(uplink.has_work());
    // No more than it may.
    uplink.visit(2);
    assert_eq!(wire.lock().unwrap().from_switch.len(), 5);
    uplink.visit(64);
    assert_eq!(wire.lock().unwrap().from_switch.len(), 10);
}

/// Returns an IPv4 UDP frame of fixed length, whose checksum is left to the receiver.
fn unsummed() -> (NetHeader, Vec<u8>) {
    let mut bytes = frame(FAR, GUEST, 14, 0);
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes.extend([
        0x45,
        0,
        0,
        28 + 18,
        0,
        0,
        0,
        0,
        64,
        17,
        0,
        0,
        10,
        0,
        0,
        1,
        10,
        0,
        0,
        2,
    ]);
    bytes.extend([0, 7, 0, 7, 0, 8 + 18, 0, 0]);
    bytes.extend([5; 18]);
    let header = NetHeader {
        flags: NetHeader::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..NetHeader::PLAIN
    };
    (header, bytes)
}

#[test]
fn a_host_without_offloads_is_given_whole_frames_and_another_what_it_takes_on() {
    for send in [Offloads::NONE, Offloads::ALL] {
        let (wire, mut uplink, mut guest) = rig(send);
        assert_eq!(wire.lock().unwrap().started, Some(Offloads::ALL));
        let (header, bytes) = unsummed();
        guest.send(header, &bytes);
        uplink.visit(64);
        let wire = wire.lock().unwrap();
        let (got, sent) = &wire.from_switch[0];
        let is_whole = send == Offloads::NONE;
        assert_eq!(got.is_plain(), is_whole);
        assert_eq!(sent[40..42] != [0, 0], is_whole);
    }
}
