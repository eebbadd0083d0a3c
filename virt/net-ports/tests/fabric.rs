//! Guests on a switch: the frames that each gets, the return of its buffers, and the effect of a
//! hostile or dead guest on the others.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use guest_mem::{Gpa, GuestRam, Intent, KeepAlive, PhysMem, VolatileSlice};
use net_offload::{Checked, Delivery, HeaderRoom};
use net_ports::{CaptureError, CaptureOptions, Captured, Existing, Fabric, SwitchPort};
use net_switch::{FloodLimits, PortConfig, Rate, SwitchConfig, Vid, VidSet, VlanMode};
use seeded::Random;
use vio::net::{BURST, Collected, FrameReceiver, NetHeader, NetPort, Offloads, RxFrame, TxFrame};

/// A guest: memory, where the next frame goes, and frames it has received.
struct Guest<P> {
    port: P,
    ram: GuestRam,
    keep: KeepAlive,
    next: u64,
    receiver: Receiver,
}

#[derive(Default)]
struct Receiver {
    /// Buffers it has.
    room: usize,
    got: Vec<(NetHeader, Vec<u8>)>,
}

impl FrameReceiver for Receiver {
    fn room(&mut self) -> usize {
        self.room.min(BURST)
    }

    fn deliver(&mut self, frames: &[RxFrame<'_>]) -> usize {
        let taken = frames.len().min(self.room);
        for frame in &frames[..taken] {
            let mut bytes = vec![0; frame.data.len()];
            assert_eq!(frame.data.read(0, &mut bytes), bytes.len());
            self.got.push((frame.header, bytes));
        }
        self.room -= taken;
        taken
    }
}

const SIZE: u64 = 1 << 22;

impl<P: NetPort> Guest<P> {
    fn over(mut port: P, offloads: Offloads) -> Self {
        port.start(offloads);
        let ram = GuestRam::in_heap(&[(Gpa::new(0), SIZE)]).expect("memory");
        Self {
            port,
            keep: ram.keep_alive(),
            ram,
            next: 0,
            receiver: Receiver::default(),
        }
    }

    /// Sends a frame in three pieces; where it lies.
    fn send(&mut self, header: NetHeader, frame: &[u8]) -> u64 {
        if self.next + frame.len() as u64 > SIZE {
            self.next = 0;
        }
        let at = self.next;
        self.next += frame.len() as u64;
        self.ram.write(Gpa::new(at), frame).expect("RAM");
        let cuts = [0, 5, frame.len() / 2, frame.len()];
        let slices = Vec::from_iter(cuts.windows(2).filter(|cut| cut[0] < cut[1]).map(|cut| {
            let len = (cut[1] - cut[0]) as u32;
            let gpa = Gpa::new(at + cut[0] as u64);
            let hva = self
                .ram
                .host(gpa, u64::from(len), Intent::Read)
                .expect("RAM");
            VolatileSlice::new(&self.keep, hva, len).expect("kept")
        }));
        let frame = TxFrame {
            header,
            len: frame.len() as u32,
            data: &slices,
        };
        assert_eq!(self.port.send(0, &[frame], &self.keep), 0);
        at
    }

    fn receive(&mut self, room: usize) -> Vec<(NetHeader, Vec<u8>)> {
        self.receiver.room = room;
        self.port.receive(0, &mut self.receiver);
        std::mem::take(&mut self.receiver.got)
    }
}

fn free() -> PortConfig {
    let rate = Rate::new(u32::MAX, u32::MAX);
    PortConfig {
        flood: FloodLimits {
            group: rate,
            unknown: rate,
        },
        ..PortConfig::default()
    }
}

fn fabric() -> Fabric {
    Fabric::new(SwitchConfig::default()).expect("memory")
}

fn guest(fabric: &Fabric, config: PortConfig, offloads: Offloads) -> Guest<SwitchPort> {
    Guest::over(fabric.port(config, 1_500).expect("room"), offloads)
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

fn plain(to: [u8; 6], from: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = [to, from].concat();
    frame.extend([0x12, 0x34]);
    frame.extend((0..len).map(|at| at as u8));
    frame
}

const DONE: Collected = Collected {
    frames: 1,
    dropped: 0,
};

#[test]
fn a_frame_stays_with_its_sender_until_it_is_taken() {
    let fabric = fabric();
    let [mut one, mut two] = [0; 2].map(|_| guest(&fabric, free(), Offloads::NONE));
    let frame = plain(mac(2), mac(1), 1_000);
    one.send(NetHeader::default(), &frame);
    assert_eq!(one.port.collect(0), Collected::default());
    assert!(two.port.has_frames(0) && !one.port.has_frames(0));
    assert_eq!(two.receive(BURST), [(NetHeader::default(), frame)]);
    assert!(!two.port.has_frames(0));
    assert_eq!(one.port.collect(0), DONE);
    // Nothing was copied in between.
    assert_eq!(two.port.counters().1.copied, 0);
}

#[test]
fn a_sender_that_changes_a_frame_under_way_changes_its_payload_only() {
    let fabric = fabric();
    let bound = |n| PortConfig {
        bound: vec![net_switch::Mac(mac(n))],
        ..free()
    };
    let mut one = guest(&fabric, bound(1), Offloads::NONE);
    let mut two = guest(&fabric, bound(2), Offloads::NONE);
    let frame = plain(mac(2), mac(1), 300);
    let at = one.send(NetHeader::default(), &frame);
    one.ram.write(Gpa::new(at), &[0xee; 314]).expect("RAM");
    let got = &two.receive(1)[0].1;
    assert_eq!(got[..18], frame[..18]);
    assert_eq!(got[18..], [0xee; 296]);
}

/// They are their sender's no more when they have been sent, and come in order with long ones.
#[test]
fn short_frames_are_copied_when_they_are_sent() {
    let trunk = PortConfig {
        vlan: VlanMode::Trunk {
            native: None,
            tagged: VidSet::all(),
        },
        ..free()
    };
    let fabric = fabric();
    let mut one = guest(&fabric, free(), Offloads::NONE);
    let mut two = guest(&fabric, free(), Offloads::NONE);
    let mut tagged = guest(&fabric, trunk, Offloads::NONE);
    let lens = [0, 1, 46, 241, 242, 243, 600];
    let frames = Vec::from_iter((0..70).map(|n| plain([0xff; 6], mac(1), lens[n % lens.len()])));
    for frame in &frames {
        let at = one.send(NetHeader::default(), frame);
        if frame.len() <= 256 {
            one.ram
                .write(Gpa::new(at), &vec![0xee; frame.len()])
                .expect("RAM");
        }
    }
    let mut got = Vec::new();
    while two.port.has_frames(0) {
        got.extend(two.receive(9));
    }
    assert!(got.iter().map(|(_, frame)| frame).eq(&frames));
    let long = frames.iter().filter(|frame| frame.len() > 256).count();
    // Some may have been copied by now.
    let before = one.port.collect(0).frames;
    let mut got = tagged.receive(usize::MAX);
    for (_, frame) in &mut got {
        assert_eq!(frame.drain(12..16).as_slice(), [0x81, 0, 0, 1]);
    }
    assert!(got.iter().map(|(_, frame)| frame).eq(&frames));
    assert_eq!(one.port.has_kept(0), before != long);
    assert_eq!(before + one.port.collect(0).frames, long);
    assert!(!one.port.has_kept(0));
}

/// Their owners have a call in the place of a descriptor.
#[test]
fn the_owner_of_a_port_is_called_for_the_first_frame_of_several() {
    let fabric = fabric();
    let mut one = guest(&fabric, free(), Offloads::NONE);
    let calls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&calls);
    let wake = Box::new(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    });
    let port = fabric.port_with(free(), 1_500, wake).expect("room");
    let mut two = Guest::over(port, Offloads::NONE);
    let count = || calls.load(std::sync::atomic::Ordering::Relaxed);
    for round in 1..=3 {
        for len in [50, 1_000] {
            one.send(NetHeader::default(), &plain(mac(2), mac(1), len));
        }
        assert_eq!((count(), two.receive(BURST).len()), (round, 2));
    }
    let mut fds = Vec::new();
    two.port.wake_fds(
        0,
        vio::net::Waits {
            receive: true,
            send: true,
        },
        &mut fds,
    );
    assert!(fds.is_empty());
}

#[test]
fn a_port_that_takes_nothing_does_not_make_its_neighbours_wait() {
    let fabric = fabric();
    let [mut one, mut dead, mut two] = [0; 3].map(|_| guest(&fabric, free(), Offloads::NONE));
    for (guest, n) in [(&mut dead, 9), (&mut two, 2)] {
        guest.send(NetHeader::default(), &plain([0xff; 6], mac(n), 50));
    }
    assert_eq!(
        (
            one.receive(9).len(),
            dead.receive(1).len(),
            two.receive(9).len()
        ),
        (2, 1, 1)
    );
    let mut got = 0;
    let mut back = 0;
    for n in 0..20_000u32 {
        one.send(NetHeader::default(), &plain(mac(9), mac(1), 1_400));
        one.send(NetHeader::default(), &plain(mac(2), mac(1), 100));
        got += two.receive(BURST).len();
        // Frames queued at the dead port are returned after 50 µs at most.
        if n % 100 == 0 {
            std::thread::sleep(Duration::from_micros(60));
            back += one.port.collect(0).frames;
            assert_eq!(back as u32, n + 1, "frames that one has back");
        }
    }
    assert_eq!(got, 20_000);
    let counters = dead.port.counters().1;
    // 1 MiB of copies, 1,024 frames in all, and the rest is lost.
    assert!(
        counters.copied <= 1_024 && counters.overflowed > 18_000,
        "{counters:?}"
    );
    let got = dead.receive(usize::MAX);
    assert!(got.len() > 500 && got.iter().all(|(_, frame)| frame.len() == 1_414));
}

#[test]
fn a_port_that_resets_or_goes_lets_go_of_all_frames() {
    let fabric = fabric();
    let [mut one, mut two, third] = [0; 3].map(|_| guest(&fabric, free(), Offloads::NONE));
    let to_all = plain([0xff; 6], mac(1), 600);
    for _ in 0..40 {
        one.send(NetHeader::default(), &to_all);
    }
    drop(third);
    two.port.reset();
    assert_eq!(
        one.port.collect(0),
        Collected {
            frames: 40,
            dropped: 0
        }
    );
    // Without a driver there is no receiver.
    one.send(NetHeader::default(), &to_all);
    assert_eq!(
        one.port.collect(0),
        Collected {
            frames: 1,
            dropped: 1
        }
    );
    two.port.start(Offloads::NONE);
    one.send(NetHeader::default(), &to_all);
    one.port.cancel(0);
    assert_eq!(one.port.collect(0), DONE);
    // The memory of one may go now.
    drop(one);
    assert_eq!(two.receive(9), [(NetHeader::default(), to_all)]);
}

/// A TCP or UDP frame with all left undone.
fn large(random: &mut Random, to: u8, from: u8, tci: Option<u16>) -> (NetHeader, Vec<u8>) {
    let is_udp = random.chance(0.3);
    let payload = 1 + random.below(9_000) as usize;
    let mut frame = [mac(to), mac(from)].concat();
    if let Some(tci) = tci {
        frame.extend([0x81, 0]);
        frame.extend(tci.to_be_bytes());
    }
    let l4 = frame.len() + 2 + 20;
    let transport = if is_udp { 8 } else { 20 };
    frame.extend([8, 0, 0x45, 0]);
    frame.extend((20 + (transport + payload) as u16).to_be_bytes());
    frame.extend([
        1,
        2,
        0x40,
        0,
        64,
        if is_udp { 17 } else { 6 },
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
    if is_udp {
        frame.extend([0, 9, 0, 9]);
        frame.extend((8 + payload as u16).to_be_bytes());
        frame.extend([0x12, 0x34]);
    } else {
        frame.extend([
            0, 9, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8, 0x50, 0x99, 1, 1, 0x12, 0x34, 0, 0,
        ]);
    }
    let start = frame.len();
    frame.resize(start + payload, 0);
    random.fill(&mut frame[start..]);
    let has_gso = random.chance(0.7);
    let kind = match (has_gso, is_udp) {
        (false, _) => 0,
        (true, true) => 5,
        (true, false) => 1,
    };
    let header = NetHeader {
        flags: 1,
        gso_type: net_offload::GsoType(kind),
        gso_size: 200 + random.below(2_000) as u16,
        csum_start: l4 as u16,
        csum_offset: if is_udp { 6 } else { 16 },
        ..NetHeader::default()
    };
    (header, frame)
}

/// Returns the frames that a receiver must get for a frame, by `net-offload` over flat bytes.
fn expected(header: &NetHeader, frame: &[u8], to: Offloads) -> Vec<(NetHeader, Vec<u8>)> {
    let mut room = HeaderRoom::new();
    let all = Offloads::ALL;
    let mut checked = Checked::check(header, frame, all, &mut room).expect("a right header");
    match checked.deliver(to) {
        Delivery::Unchanged(one) => vec![(one.header, frame.to_vec())],
        Delivery::Checksum(partial) => {
            let mut bytes = frame.to_vec();
            let sum = partial.complete(frame).to_be_bytes();
            bytes[partial.position()..][..2].copy_from_slice(&sum);
            vec![(NetHeader::default(), bytes)]
        }
        Delivery::Segments(mut segments) => {
            let mut all = Vec::new();
            while let Some(mut segment) = segments.next() {
                segment.complete(frame);
                let bytes = [segment.headers(), &frame[segment.payload()]].concat();
                all.push((segment.header(), bytes));
            }
            all
        }
    }
}

#[test]
fn each_receiver_gets_what_it_takes_with_the_tag_it_has() {
    let vid = Vid::new(5).expect("a VLAN");
    let trunk = VlanMode::Trunk {
        native: None,
        tagged: VidSet::all(),
    };
    let vlans = [VlanMode::Access(vid), trunk];
    let sets = [
        Offloads::NONE,
        Offloads::CSUM,
        Offloads::CSUM.with(Offloads::TSO4),
        Offloads::CSUM.with(Offloads::USO4),
        Offloads::ALL,
    ];
    let mut random = Random::new(5);
    for (from_vlan, to_vlan) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let fabric = fabric();
        let with = |at: usize| PortConfig {
            vlan: vlans[at].clone(),
            ..free()
        };
        let mut sender = guest(&fabric, with(from_vlan), Offloads::ALL);
        let mut receivers = sets.map(|set| guest(&fabric, with(to_vlan), set));
        for n in 0..400 {
            let tci = (from_vlan == 1).then_some(0x6005);
            // To an address that no port has: all get it.
            let (header, frame) = large(&mut random, 77, 1, tci);
            sender.send(header, &frame);
            let mut seen = frame.clone();
            let mut seen_header = header;
            match (from_vlan, to_vlan) {
                (0, 1) => {
                    seen.splice(12..12, [0x81, 0, 0, 5]);
                    seen_header.csum_start += 4;
                }
                (1, 0) => {
                    seen.drain(12..16);
                    seen_header.csum_start -= 4;
                }
                _ => {}
            }
            // Some take it when it is a copy already.
            if n % 8 == 7 {
                std::thread::sleep(Duration::from_micros(60));
                assert_eq!(sender.port.collect(0).dropped, 0);
            }
            for (receiver, set) in receivers.iter_mut().zip(sets) {
                let mut got = Vec::new();
                while receiver.port.has_frames(0) {
                    // Some buffers at a time: segments are gone on with.
                    got.extend(receiver.receive(1 + random.below(5) as usize));
                }
                let expected = expected(&seen_header, &seen, set);
                assert!(
                    got == expected,
                    "{from_vlan} {to_vlan} {set:?} {header:?} {} {}",
                    got.len(),
                    expected.len()
                );
            }
            sender.port.collect(0);
        }
    }
}

#[test]
fn a_wrong_header_costs_its_frame_alone() {
    let fabric = fabric();
    let [mut one, mut two] = [0; 2].map(|_| guest(&fabric, free(), Offloads::NONE));
    let mut random = Random::new(1);
    let (header, frame) = large(&mut random, 2, 1, None);
    let wrong = NetHeader {
        gso_type: net_offload::GsoType(4),
        gso_size: 10,
        ..header
    };
    one.send(wrong, &frame);
    let right = plain(mac(2), mac(1), 600);
    one.send(NetHeader::default(), &right);
    assert_eq!(two.receive(BURST), [(NetHeader::default(), right)]);
    assert_eq!(
        one.port.collect(0),
        Collected {
            frames: 2,
            dropped: 0
        }
    );
    assert_eq!(one.port.counters().1.wrong_headers, 1);
}

#[test]
fn a_capture_has_both_directions_and_ends_at_its_limit() {
    let fabric = fabric();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("port.pcap");
    let port = fabric.port(free(), 1_500).expect("room");
    let options = CaptureOptions {
        path: &path,
        limit: 24 + 3 * (16 + 114),
        existing: Existing::Refused,
    };
    let port = Captured::new(port, &options).expect("a file");
    let mut one = Guest::over(port, Offloads::NONE);
    let mut two = guest(&fabric, free(), Offloads::NONE);
    let sent = plain(mac(2), mac(1), 100);
    let answer = plain(mac(1), mac(2), 100);
    for _ in 0..2 {
        one.send(NetHeader::default(), &sent);
        two.receive(9);
        two.send(NetHeader::default(), &answer);
        assert_eq!(one.receive(9).len(), 1);
    }
    assert_eq!(one.port.missed(), 1);
    // Full is complete, with the port still there.
    let file = std::fs::File::open(&path).expect("it is there");
    assert_eq!(file.metadata().expect("a file").len(), 24 + 3 * (16 + 114));
    let mut reader = pcap_file::pcap::PcapReader::new(file).expect("a capture");
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        frames.push(packet.expect("a frame").data.into_owned());
    }
    assert_eq!(frames, [sent.clone(), answer, sent]);
}

#[test]
fn a_capture_replaces_a_file_only_if_asked_and_is_complete_when_the_core_sleeps() {
    let fabric = fabric();
    let folder = tempfile::tempdir().expect("a folder");
    let (path, target) = (folder.path().join("port.pcap"), folder.path().join("other"));
    std::fs::write(&target, "not to be touched").expect("a file");
    std::os::unix::fs::symlink(&target, &path).expect("a link");
    let capture = |existing| {
        let options = CaptureOptions {
            path: &path,
            limit: 1 << 20,
            existing,
        };
        Captured::new(fabric.port(free(), 1_500).expect("room"), &options)
    };
    assert!(matches!(
        capture(Existing::Refused),
        Err(CaptureError::Exists)
    ));
    let mut one = Guest::over(
        capture(Existing::Replaced).expect("replaced"),
        Offloads::NONE,
    );
    let other = std::fs::read_to_string(&target).expect("it is there");
    assert_eq!(other, "not to be touched");
    let metadata = std::fs::symlink_metadata(&path).expect("it is there");
    assert!(metadata.is_file() && metadata.permissions().mode() & 0o777 == 0o600);
    let mut two = guest(&fabric, free(), Offloads::NONE);
    one.send(NetHeader::default(), &plain(mac(2), mac(1), 100));
    two.receive(9);
    assert!(matches!(
        capture(Existing::Refused),
        Err(CaptureError::Exists)
    ));
    one.port.arm();
    assert_eq!(
        std::fs::read(&path).expect("it is there").len(),
        24 + 16 + 114
    );
    drop(one);
    let mut one = Guest::over(
        capture(Existing::Continued).expect("goes on"),
        Offloads::NONE,
    );
    one.send(NetHeader::default(), &plain(mac(2), mac(1), 100));
    drop(one);
    let file = std::fs::File::open(&path).expect("it is there");
    let mut reader = pcap_file::pcap::PcapReader::new(file).expect("a capture");
    assert!((0..2).all(|_| reader.next_packet().is_some_and(|packet| packet.is_ok())));
    assert!(reader.next_packet().is_none());
    std::fs::write(&path, "no capture, but of 24 bytes at least").expect("a file");
    assert!(matches!(
        capture(Existing::Continued),
        Err(CaptureError::Foreign)
    ));
}
