//! The network device driven as a guest would, against the responder and a scripted back end.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{DirectMap, Gpa, Iova, Perm, PhysMem, SourceId, View};
use net_offload::Checksum;
use proptest::prelude::*;

mod absent;
mod control;
mod headers;
mod kept;
mod model;
mod remote_control;

use super::*;
use crate::fake_driver::{AnyDriver, CountIrq};
use crate::ring::RETRY_NS;
use crate::{PollBudget, QueueDevice, Service};

const GUEST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x10];
const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const GUEST_IP: [u8; 4] = [10, 0, 0, 2];
const PEER_IP: [u8; 4] = [10, 0, 0, 1];
const BUFFERS: u64 = 0x10_0000;
const SENT: u64 = 0x8_0000;

/// A back end whose frames the test supplies and collects.
#[derive(Clone, Default)]
struct Wire(Arc<Mutex<Ends>>);

#[derive(Default)]
struct Ends {
    /// Frames that are sent come back.
    is_looped: bool,
    to_guest: VecDeque<Vec<u8>>,
    from_guest: Vec<Vec<u8>>,
    /// Headers beside those.
    sent_headers: Vec<NetHeader>,
    /// Header of all frames to the guest.
    header: NetHeader,
    /// Queues of all frames, as they moved.
    order: Vec<u16>,
    can: Option<PortCapabilities>,
    /// Room that it says it has; as much as there can be if absent.
    room: Option<usize>,
    is_down: bool,
    /// Number of pairs that was passed to it last.
    pairs: u16,
    receiver: Offloads,
}

impl Wire {
    fn ends(&self) -> std::sync::MutexGuard<'_, Ends> {
        self.0.lock().unwrap()
    }
}

impl NetPort for Wire {
    fn capabilities(&self) -> PortCapabilities {
        self.ends().can.unwrap_or(PortCapabilities::PLAIN)
    }

    fn send_room(&mut self, _pair: u16) -> usize {
        self.ends().room.unwrap_or(BURST)
    }

    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        for frame in frames {
            let mut bytes = vec![0; frame.len as usize];
            assert_eq!(frame.read(0, &mut bytes), bytes.len());
            if self.ends().is_looped {
                self.ends().to_guest.push_back(bytes.clone());
            }
            self.ends().from_guest.push(bytes);
            self.ends().sent_headers.push(frame.header);
            self.ends().order.push(TX);
        }
        0
    }

    fn has_frames(&mut self, pair: u16) -> bool {
        pair == 0 && !self.ends().to_guest.is_empty()
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        loop {
            let frames: Vec<Vec<u8>> = {
                let ends = self.ends();
                ends.to_guest.iter().take(to.room()).cloned().collect()
            };
            let header = self.ends().header;
            let offered: Vec<RxFrame<'_>> = frames
                .iter()
                .map(|frame| RxFrame {
                    header,
                    data: FrameData::Bytes(frame),
                })
                .collect();
            let over = to.deliver(&offered);
            self.ends().to_guest.drain(..over);
            self.ends().order.extend((0..over).map(|_| RX));
            if over == 0 {
                return;
            }
        }
    }

    fn is_up(&self) -> bool {
        !self.ends().is_down
    }

    fn set_pairs(&mut self, pairs: u16) {
        self.ends().pairs = pairs;
    }

    fn set_receiver(&mut self, receiver: Offloads) {
        self.ends().receiver = receiver;
    }

    fn start(&mut self, receiver: Offloads) {
        self.ends().receiver = receiver;
    }

    fn wake_fds(&self, _pair: u16, _waits: Waits, fds: &mut Vec<RawFd>) {
        fds.push(0);
    }

    fn reset(&mut self) {
        self.ends().to_guest.clear();
    }
}

/// Runs a test over split and packed rings: it is given the features that the driver accepts.
fn both(test: impl Fn(u64)) {
    test(!feature::RING_PACKED);
    test(!0);
}

struct Guest {
    mem: ArrayMem,
    rx: AnyDriver<ArrayMem>,
    tx: AnyDriver<ArrayMem>,
    /// Addresses of the receive buffers, by the ids that the ring returns.
    buffers: HashMap<u16, u64>,
    net: Net,
    irq: CountIrq,
    /// A doorbell was asked for when buffers were given.
    is_rung: bool,
}

impl Guest {
    fn new(io: Box<dyn NetPort>, mask: u64) -> Self {
        let mem = ArrayMem::new(4 << 20);
        let mut net = Net::new(GUEST_MAC, 256, io).unwrap().with_packed();
        let features = net.features() & mask;
        let queue = |base, index| AnyDriver::new(mem.clone(), Gpa::new(base), index, 16, features);
        let (rx, tx) = (queue(0x1_0000, RX), queue(0x2_0000, TX));
        net.activate(features, &[rx.config(), tx.config()], mem.keep_alive())
            .unwrap();
        Self {
            mem,
            rx,
            tx,
            buffers: HashMap::new(),
            net,
            irq: CountIrq::default(),
            is_rung: false,
        }
    }

    /// The same device, reset and started on other rings.
    fn restarted(mut self, mask: u64) -> Self {
        self.net.reset();
        let mut fresh = Self::new(Box::new(Wire::default()), mask);
        let queues = [fresh.rx.config(), fresh.tx.config()];
        let features = self.net.features() & mask;
        let activated = self.net.activate(features, &queues, fresh.mem.keep_alive());
        activated.expect("a start");
        fresh.net = self.net;
        fresh
    }

    fn dma(&self) -> FlatDma {
        FlatDma::new(self.mem.clone())
    }

    fn send(&mut self, frame: &[u8]) {
        self.mem.write(Gpa::new(SENT), &[0xee; HEADER_LEN]).unwrap();
        let at = Gpa::new(SENT + HEADER_LEN as u64);
        self.mem.write(at, frame).unwrap();
        // Cut inside the header.
        let len = (HEADER_LEN + frame.len()) as u32;
        self.tx.add(&[(SENT, 5), (SENT + 5, len - 5)], &[]);
    }

    /// Gives the device `count` receive buffers of `len` bytes, 4 KiB apart.
    fn give(&mut self, count: u64, len: u32) {
        for _ in 0..count {
            let at = BUFFERS + self.buffers.len() as u64 * 4096;
            let id = self.rx.stage(&[], &[(at, len)]);
            assert_eq!(self.buffers.insert(id, at), None, "the tests return none");
        }
        self.is_rung |= self.rx.publish();
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem.read(Gpa::new(at), &mut bytes).unwrap();
        bytes
    }

    /// The lengths in the receive ring's next used elements.
    fn received(&mut self) -> Vec<u32> {
        let used = std::iter::from_fn(|| self.rx.used());
        used.map(|(_, len)| len).collect()
    }

    fn poll(&mut self) {
        let mut dma = self.dma();
        while self.net.poll(&mut dma, &mut self.irq, 0) == Activity::Busy {}
    }

    /// The frame in the next used buffer, and its header's `num_buffers`.
    fn frame(&mut self) -> Option<(Vec<u8>, u16)> {
        let (id, len) = self.rx.used()?;
        let at = self.buffers[&id];
        let header = self.get(at, HEADER_LEN);
        let frame = self.get(at + HEADER_LEN as u64, len as usize - HEADER_LEN);
        Some((frame, u16::from_le_bytes([header[10], header[11]])))
    }
}

fn ethernet(to: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &GUEST_MAC, &kind.to_be_bytes(), payload].concat()
}

fn arp_request() -> Vec<u8> {
    let body = [
        &[0u8, 1, 8, 0, 6, 4, 0, 1][..],
        &GUEST_MAC,
        &GUEST_IP,
        &[0; 6],
        &PEER_IP,
    ];
    ethernet([0xff; 6], 0x806, &body.concat())
}

fn ip(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let total = (20 + payload.len()) as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, protocol, 0, 0];
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    packet.extend(GUEST_IP);
    packet.extend(PEER_IP);
    let sum = Checksum::new().bytes(&packet).finish();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(payload);
    ethernet(PEER_MAC, 0x800, &packet)
}

fn ping(data: &[u8]) -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0xab, 0xcd, 0, 7];
    message.extend(data);
    let sum = Checksum::new().bytes(&message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ip(1, &message)
}

fn udp(data: &[u8], with_sum: bool) -> Vec<u8> {
    let len = (8 + data.len()) as u16;
    let mut datagram = [4000u16, 7, len, 0].map(u16::to_be_bytes).concat();
    datagram.extend(data);
    if with_sum {
        let sum = Checksum::new()
            .bytes(&GUEST_IP)
            .bytes(&PEER_IP)
            .word(17)
            .word(len);
        let sum = sum.bytes(&datagram).finish();
        datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    }
    ip(17, &datagram)
}

fn responder() -> Responder {
    Responder::new(PEER_MAC, Ipv4Addr::from(PEER_IP))
}

fn answer(frame: &[u8]) -> Option<Vec<u8>> {
    let mut peer = responder();
    peer.take(frame);
    peer.next_reply().map(<[u8]>::to_vec)
}

#[test]
fn arp_ping_and_udp_come_back_through_the_rings() {
    both(|mask| {
        let mut guest = Guest::new(Box::new(responder()), mask);
        guest.give(8, 2048);
        guest.send(&arp_request());
        guest.poll();
        let (arp, buffers) = guest.frame().expect("an answer");
        assert_eq!(buffers, 1);
        assert_eq!(arp[..6], GUEST_MAC);
        assert_eq!(arp[20..22], [0, 2]);
        assert_eq!(arp[22..28], PEER_MAC);
        assert_eq!(arp[28..32], PEER_IP);
        assert_eq!(arp[32..42], [&GUEST_MAC[..], &GUEST_IP].concat());

        guest.send(&ping(b"exitless!"));
        guest.poll();
        let (pong, _) = guest.frame().expect("an answer");
        assert_eq!(Checksum::new().bytes(&pong[14..34]).finish(), 0);
        assert_eq!(pong[34..36], [0, 0]);
        assert_eq!(Checksum::new().bytes(&pong[34..]).finish(), 0);
        assert_eq!(pong[38..], [&[0xab, 0xcd, 0, 7][..], b"exitless!"].concat());

        for with_sum in [true, false] {
            guest.send(&udp(b"odd", with_sum));
            guest.poll();
            let (echo, _) = guest.frame().expect("an answer");
            assert_eq!(echo[26..34], [PEER_IP, GUEST_IP].concat());
            assert_eq!(echo[34..40], [0, 7, 0x0f, 0xa0, 0, 11]);
            let sum = Checksum::new().bytes(&echo[26..34]).word(17).word(11);
            assert_eq!(sum.bytes(&echo[34..]).finish(), 0);
            assert_eq!(&echo[42..], b"odd");
        }
        assert_eq!(std::iter::from_fn(|| guest.tx.used()).count(), 4);
        assert_eq!(guest.net.stats().errors, 0);
    });
}

#[test]
fn the_responder_drops_what_is_wrong() {
    assert!(answer(&ping(b"x")).is_some());
    let spoil = |at: usize| {
        let mut frame = ping(b"x");
        frame[at] ^= 1;
        answer(&frame)
    };
    for (what, at) in [
        ("mac", 0),
        ("type", 12),
        ("ip sum", 15),
        ("icmp sum", 40),
        ("dst", 33),
    ] {
        assert_eq!(spoil(at), None, "{what}");
    }
    let mut frame = udp(b"y", true);
    frame[42] ^= 1;
    assert_eq!(answer(&frame), None, "udp sum");
}

proptest! {
    #[test]
    fn the_responder_survives_any_frame(
        seed in 0usize..3,
        cut in 0usize..80,
        changes in prop::collection::vec((0usize..80, any::<u8>()), 0..8),
    ) {
        let mut frame = [arp_request(), ping(b"abcdefgh"), udp(b"abcdefgh", true)][seed].clone();
        for (at, value) in changes {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        frame.truncate(frame.len().saturating_sub(cut));
        if let Some(reply) = answer(&frame) {
            prop_assert!(reply.len() <= frame.len().max(42));
        }
    }
}

#[test]
fn answers_nobody_takes_stay_bounded() {
    let mut peer = responder();
    for _ in 0..MAX_REPLIES + 100 {
        peer.take(&ping(b"flood"));
    }
    assert_eq!(peer.dropped(), 100);
}

#[test]
fn a_long_frame_takes_several_small_buffers() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        let frame: Vec<u8> = (0..1000u32).map(|at| at as u8).collect();
        wire.ends().to_guest.push_back(frame.clone());
        guest.give(4, 256);
        guest.poll();
        // 1012 bytes in buffers of 256: 256, 256, 256, 244.
        let lens = guest.received();
        assert_eq!(lens, [256, 256, 256, 244]);
        let mut got = Vec::new();
        for (at, len) in (0..).zip(lens) {
            got.extend(guest.get(BUFFERS + at * 4096, len as usize));
        }
        assert_eq!(got[10..HEADER_LEN], [4, 0]);
        assert_eq!(got[HEADER_LEN..], frame);
        assert_eq!(guest.net.stats().publishes, 1);
    });
}

#[test]
fn too_few_buffers_hold_the_frame_until_there_are_more() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        wire.ends().to_guest.push_back(vec![9; 700]);
        wire.ends().to_guest.push_back(vec![8; 100]);
        guest.poll();
        let mut dma = guest.dma();
        assert!(!guest.net.has_work(&mut dma), "no buffer at all");
        assert!(
            guest.net.wake_fds().is_empty(),
            "nothing to wake for without a buffer"
        );
        guest.give(2, 256);
        assert!(guest.net.has_work(&mut dma));
        guest.poll();
        assert_eq!(guest.rx.used(), None);
        assert!(
            !guest.net.has_work(&mut dma),
            "two are too few, and it knows"
        );
        assert!(guest.net.wake_fds().is_empty());
        guest.give(3, 256);
        assert!(guest.net.has_work(&mut dma));
        guest.poll();
        let lens = guest.received();
        assert_eq!(lens, [256, 256, 200, 112]);
        assert_eq!(guest.net.wake_fds(), [0]);
    });
}

#[test]
fn a_frame_that_waits_for_buffers_asks_for_the_doorbell_of_the_next_one() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        wire.ends().to_guest.push_back(vec![9; 700]);
        guest.give(2, 256);
        guest.poll();
        let mut dma = guest.dma();
        guest.net.arm(&mut dma);
        assert!(!guest.net.has_work(&mut dma), "two are too few");
        // Asleep: nothing but a doorbell wakes it.
        guest.is_rung = false;
        guest.give(1, 256);
        assert!(guest.is_rung);
        guest.poll();
        assert_eq!(guest.received(), [256, 256, 200]);
    });
}

#[test]
fn a_frame_that_fits_into_no_full_ring_is_dropped() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        wire.ends().to_guest.push_back(vec![1; 700]);
        wire.ends().to_guest.push_back(vec![2; 100]);
        guest.give(16, 32);
        guest.poll();
        assert_eq!(guest.received(), [32, 32, 32, 16]);
        assert_eq!(guest.net.stats().errors, 1);
    });
}

#[test]
fn buffers_given_while_the_owner_falls_asleep_put_the_descriptors_back() {
    both(|mask| {
        let mut guest = Guest::new(Box::new(Wire::default()), mask);
        let mut dma = guest.dma();
        guest.poll();
        guest.net.arm(&mut dma);
        let asked = guest.net.wake_fds();
        assert!(asked.is_empty());
        // The driver looks at avail_event before the device has armed: it rings no doorbell.
        guest.give(4, 2048);
        assert!(
            guest.net.has_work(&mut dma),
            "sleeping on `asked` would miss every frame"
        );
        guest.poll();
        guest.net.arm(&mut dma);
        assert!(!guest.net.has_work(&mut dma));
        assert_eq!(guest.net.wake_fds(), [0]);
    });
}

#[test]
fn without_merging_a_frame_that_does_not_fit_is_dropped_and_the_buffer_kept() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask & !net_feature::MRG_RXBUF);
        wire.ends().to_guest.push_back(vec![1; 1000]);
        wire.ends().to_guest.push_back(vec![2; 100]);
        guest.give(2, 512);
        guest.poll();
        assert_eq!(guest.frame(), Some((vec![2; 100], 1)));
        assert_eq!(guest.rx.used(), None);
        assert_eq!(guest.net.stats().errors, 1);
    });
}

#[test]
fn transmit_refuses_odd_sizes_and_returns_the_buffers() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        for len in [13, 14, PLAIN_FRAME, PLAIN_FRAME + 1, 60_000] {
            guest.send(&vec![7; len]);
        }
        guest.poll();
        let lens: Vec<usize> = wire.ends().from_guest.iter().map(Vec::len).collect();
        assert_eq!(lens, [14, PLAIN_FRAME]);
        assert_eq!(std::iter::from_fn(|| guest.tx.used()).count(), 5);
        assert_eq!(guest.net.stats().errors, 3);
        // A header cut short cannot come from a driver that works.
        guest.tx.add(&[(SENT, 11)], &[]);
        guest.poll();
        assert!(guest.net.needs_reset());
        assert_eq!(guest.irq.config, 1);
    });
}

#[test]
fn sent_frames_are_published_though_receiving_fails_in_the_same_visit() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        guest.send(&[1; 64]);
        guest.send(&[2; 64]);
        wire.ends().to_guest.push_back(vec![3; 99]);
        guest.rx.add(&[], &[(BUFFERS, 4)]);
        guest.poll();
        assert!(guest.net.needs_reset());
        assert_eq!(wire.ends().from_guest.len(), 2);
        assert_eq!(std::iter::from_fn(|| guest.tx.used()).count(), 2);
        guest.send(&[4; 64]);
        guest.poll();
        assert_eq!(wire.ends().from_guest.len(), 2);
        assert_eq!(guest.tx.used(), None);
    });
}

#[test]
fn a_wait_at_any_access_changes_nothing_of_the_outcome() {
    both(|mask| {
        let run = |wait: &dyn Fn(FlatDma) -> PendingDma<FlatDma>| {
            let wire = Wire::default();
            let mut guest = Guest::new(Box::new(wire.clone()), mask);
            let mut dma = wait(guest.dma());
            wire.ends().to_guest.push_back((0..=255).collect());
            wire.ends().to_guest.push_back(vec![3; 99]);
            guest.give(4, 200);
            guest.send(&[1; 64]);
            guest.send(&[2; 64]);
            let mut used = Vec::new();
            for _ in 0..300 {
                let _ = guest.net.poll(&mut dma, &mut guest.irq, 0);
                used.extend(std::iter::from_fn(|| guest.rx.used()));
                assert_ne!(used.len(), 1, "half of the first frame");
                for ticket in dma.take_tickets() {
                    guest.net.ticket_done(ticket);
                }
            }
            let sent = std::iter::from_fn(|| guest.tx.used()).count();
            let frames = std::mem::take(&mut wire.ends().from_guest);
            let first = guest.get(BUFFERS, 200);
            ((used, sent, frames, first), dma.accesses())
        };
        let (want, accesses) = run(&PendingDma::never);
        assert_eq!((want.0.len(), want.1), (3, 2));
        for k in 0..accesses {
            assert_eq!(run(&|dma| PendingDma::kth(dma, k)).0, want, "access {k}");
        }
        assert_eq!(run(&PendingDma::every).0, want);
    });
}

#[test]
fn a_receive_buffer_that_faults_comes_back_empty() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        let mut dma = guest.dma();
        guest.give(2, 2048);
        dma.iommu.deny(Iova::new(BUFFERS), 4096, Perm::Write);
        wire.ends().to_guest.push_back(vec![1; 60]);
        wire.ends().to_guest.push_back(vec![2; 60]);
        while guest.net.poll(&mut dma, &mut guest.irq, 0) == Activity::Busy {}
        assert_eq!(guest.rx.used(), Some((0, 0)));
        assert_eq!(guest.frame(), Some((vec![2; 60], 1)));
        assert!(!guest.net.needs_reset());
        assert_eq!(dma.iommu.faults().len(), 1);
    });
}

#[test]
fn a_ring_whose_fault_was_repaired_goes_on_without_a_doorbell() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        let mut dma = guest.dma();
        guest.poll();
        guest.net.arm(&mut dma);
        let tx = guest.tx.config();
        for table in [tx.desc, tx.avail] {
            dma.iommu.deny(table.align_down(4096), 4096, Perm::Read);
        }
        let frame = [1; 60];
        guest
            .tx
            .stage(&[(SENT, (HEADER_LEN + frame.len()) as u32)], &[]);
        assert!(guest.tx.publish(), "a doorbell");
        guest.net.kick(TX);
        for _ in 0..3 {
            let _ = guest.net.poll(&mut dma, &mut guest.irq, 0);
        }
        guest.net.arm(&mut dma);
        assert!(!guest.net.has_work(&mut dma), "it sleeps");
        assert_eq!(guest.net.stats().ring_faults, 1);
        assert_eq!(guest.net.opens_at_ns(), Some(RETRY_NS));
        dma.iommu.allow_all();
        guest
            .tx
            .stage(&[(SENT, (HEADER_LEN + frame.len()) as u32)], &[]);
        assert!(!guest.tx.publish(), "no doorbell");
        let _ = guest.net.poll(&mut dma, &mut guest.irq, RETRY_NS - 1);
        assert_eq!(wire.ends().from_guest.len(), 0, "too early");
        while guest.net.poll(&mut dma, &mut guest.irq, RETRY_NS) == Activity::Busy {}
        assert_eq!(wire.ends().from_guest.len(), 2);
        assert_eq!(guest.net.opens_at_ns(), None);
    });
}

#[test]
fn a_stopped_device_touches_nothing_and_goes_on_later() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        guest.give(1, 2048);
        guest.net.set_service(Service::Stopped);
        wire.ends().to_guest.push_back(vec![1; 60]);
        guest.send(&[1; 60]);
        guest.poll();
        assert_eq!((guest.rx.used(), guest.tx.used()), (None, None));
        guest.net.set_service(Service::Full);
        guest.poll();
        assert!(guest.rx.used().is_some() && guest.tx.used().is_some());
        guest.net.reset();
        guest.poll();
        assert!(guest.net.wake_fds().is_empty());
    });
}

#[test]
fn the_transmit_queue_is_served_first_unless_a_visit_ended_before_the_other_had_its_turn() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        for _ in 0..2 {
            let mut dma = guest.dma();
            for (adds, budget, order) in [
                (true, 10_000, &[TX, RX][..]),
                (true, 10_000, &[TX, RX]),
                (true, 1, &[TX]),
                (false, 1, &[RX]),
                (true, 1, &[TX]),
                (false, 10_000, &[RX]),
                (true, 10_000, &[TX, RX]),
            ] {
                if adds {
                    // The former ones have come back.
                    guest.buffers.clear();
                    guest.give(1, 2048);
                    guest.send(&arp_request());
                    wire.ends().to_guest.push_back(vec![0; 60]);
                }
                let mut visit = PollBudget::new(0, budget);
                let _ = guest.net.visit(&mut dma, &mut guest.irq, &mut visit);
                assert_eq!(std::mem::take(&mut wire.ends().order), order);
                let back = (guest.received().len(), guest.tx.used().is_some());
                let moved = (order.contains(&RX).into(), order.contains(&TX));
                assert_eq!(back, moved);
            }
            guest = guest.restarted(mask);
        }
    });
}

#[test]
fn frames_that_a_port_returns_are_received_by_the_visit_that_sent_them() {
    both(|mask| {
        let wire = Wire::default();
        wire.ends().is_looped = true;
        let mut guest = Guest::new(Box::new(wire), mask);
        for _ in 0..3 {
            guest.buffers.clear();
            guest.give(1, 2048);
            guest.send(&arp_request());
            let mut dma = guest.dma();
            let _ = guest.net.poll(&mut dma, &mut guest.irq, 0);
            assert_eq!(guest.frame().map(|(frame, _)| frame), Some(arp_request()));
            assert!(guest.tx.used().is_some());
        }
    });
}

#[test]
fn a_visit_ends_when_others_wait_and_asks_every_few_frames() {
    both(|mask| {
        let wire = Wire::default();
        for waits in [false, true] {
            let mut guest = Guest::new(Box::new(wire.clone()), mask);
            // One descriptor each: as many as the ring has.
            let frame = [&[0; HEADER_LEN][..], &arp_request()].concat();
            guest.mem.write(Gpa::new(SENT), &frame).unwrap();
            for _ in 0..16 {
                guest.tx.add(&[(SENT, frame.len() as u32)], &[]);
            }
            let asked = std::cell::Cell::new(0);
            let others = || {
                asked.set(asked.get() + 1);
                waits
            };
            let (mut dma, mut visit) = (guest.dma(), PollBudget::new(0, 1_000_000));
            let net = &mut guest.net;
            let _ = net.visit_beside(&mut dma, &mut guest.irq, &mut visit, Some(&others));
            let sent = std::mem::take(&mut wire.ends().from_guest).len();
            match waits {
                true => assert!(
                    (4..12).contains(&sent) && asked.get() == 1,
                    "{sent}, {asked:?}"
                ),
                false => assert!(sent == 16 && asked.get() >= 2, "{sent}, {asked:?}"),
            }
            let used = std::iter::from_fn(|| guest.tx.used()).count();
            assert_eq!(used, sent, "what was taken is shown");
        }
    });
}

/// A row's used elements are stored at once, those of longer chains at the end of a burst.
#[test]
fn frames_in_rows_do_not_overtake_those_in_longer_chains() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        // Of the first short burst the first chain has two descriptors; the second burst is a row.
        let id = guest
            .rx
            .stage(&[], &[(BUFFERS, 100), (BUFFERS + 100, 1948)]);
        guest.buffers.insert(id, BUFFERS);
        guest.give(12, 2048);
        let frames = (0..13).map(|n| [&[0; 6][..], &[n; 54]].concat());
        let frames = Vec::from_iter(frames);
        wire.ends().to_guest.extend(frames.iter().cloned());
        let (mut dma, mut visit) = (guest.dma(), PollBudget::new(0, 1_000_000));
        let (net, irq) = (&mut guest.net, &mut guest.irq);
        let _ = net.visit_beside(&mut dma, irq, &mut visit, Some(&|| false));
        let got = std::iter::from_fn(|| guest.frame()).map(|(frame, _)| frame);
        assert_eq!(Vec::from_iter(got), frames);
    });
}
