//! Frames in are frames out, by any division into buffers and with any features: against a naive
//! model.

use super::*;

const RING: u16 = 64;
/// Address of the first frame that is sent; they are 128 KiB apart.
const FRAMES: u64 = 0x10_0000;

/// A device whose port segments and takes segments to be made, and its driver's rings.
struct Scene {
    mem: ArrayMem,
    rx: AnyDriver<ArrayMem>,
    tx: AnyDriver<ArrayMem>,
    net: Net,
    wire: Wire,
    irq: CountIrq,
    /// Memory is reached without asking for each buffer.
    is_direct: bool,
}

impl Scene {
    fn new(mask: u64, is_direct: bool) -> Self {
        Self::over(ArrayMem::new(16 << 20), mask, is_direct)
    }

    fn over(mem: ArrayMem, mask: u64, is_direct: bool) -> Self {
        let wire = Wire::default();
        wire.ends().can = Some(PortCapabilities {
            send: Offloads::ALL,
            receive: Offloads::ALL,
            ..PortCapabilities::PLAIN
        });
        let net = Net::new(GUEST_MAC, 256, Box::new(wire.clone())).unwrap();
        let mut net = net.with_packed().with_in_order();
        let features = net.features() & mask;
        let queue =
            |base, index| AnyDriver::new(mem.clone(), Gpa::new(base), index, RING, features);
        let (rx, tx) = (queue(0x1_0000, RX), queue(0x2_0000, TX));
        let queues = [rx.config(), tx.config()];
        net.activate(features, &queues, mem.keep_alive()).unwrap();
        Self {
            mem,
            rx,
            tx,
            net,
            wire,
            irq: CountIrq::default(),
            is_direct,
        }
    }

    fn poll(&mut self) {
        if self.is_direct {
            let (mut map, source) = (DirectMap::new(), SourceId::new(0, 1, 0));
            let mut view = View::new(&mut map, &self.mem, source);
            while self.net.poll(&mut view, &mut self.irq, 0) == Activity::Busy {}
        } else {
            let mut dma = FlatDma::new(self.mem.clone());
            while self.net.poll(&mut dma, &mut self.irq, 0) == Activity::Busy {}
        }
        assert!(!self.net.needs_reset());
    }

    /// Reads what buffers hold in a row.
    fn bytes(&self, buffers: &[(u64, u32)]) -> Vec<u8> {
        let mut all = Vec::new();
        for &(at, len) in buffers {
            let mut part = vec![0; len as usize];
            self.mem.read(Gpa::new(at), &mut part).unwrap();
            all.extend(part);
        }
        all
    }
}

/// Features that change how frames lie in rings and buffers.
fn features() -> impl Strategy<Value = u64> {
    let bits = [
        feature::RING_PACKED,
        feature::IN_ORDER,
        feature::EVENT_IDX,
        net_feature::MRG_RXBUF,
        net_feature::GUEST_CSUM,
        net_feature::CSUM,
    ];
    let without = prop::sample::subsequence(bits.to_vec(), 0..=bits.len());
    without.prop_map(|bits| bits.into_iter().fold(!0, |mask, bit| mask & !bit))
}

fn frame_len() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 14usize..1519,
        1 => prop::sample::select(vec![0, 13, 14, 60, 64, 243, 244, 245, 1518, 1519]),
        1 => prop::sample::select(vec![65_535, 65_551, 65_553, 65_554]),
    ]
}

fn content(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31) ^ salt)
        .collect()
}

/// Cuts `len` bytes at `at` into pieces at these marks, none empty.
fn cut(at: u64, len: u32, marks: &[u32]) -> Vec<(u64, u32)> {
    let mut cuts: Vec<u32> = marks.iter().map(|mark| mark % len).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.dedup();
    let pieces = cuts.windows(2);
    pieces
        .map(|pair| (at + u64::from(pair[0]), pair[1] - pair[0]))
        .collect()
}

/// The longest frame that may be sent as it is, or received.
fn is_plain(len: usize) -> bool {
    (14..=PLAIN_FRAME).contains(&len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 400 }))]

    #[test]
    fn sent_frames_arrive_whatever_their_division_into_buffers(
        mask in features(),
        is_direct in any::<bool>(),
        frames in prop::collection::vec(
            (frame_len(), any::<u8>(), prop::collection::vec(any::<u32>(), 0..6), any::<bool>()),
            1..40,
        ),
    ) {
        let mut scene = Scene::new(mask, is_direct);
        let mut expected = Vec::new();
        let mut errors = 0;
        for (nth, (len, salt, marks, is_indirect)) in frames.iter().enumerate() {
            let at = FRAMES + (nth as u64 % 64) * 0x2_0000;
            let bytes = content(*len, *salt);
            scene.mem.put(Gpa::new(at), &[0; HEADER_LEN]);
            scene.mem.put(Gpa::new(at + HEADER_LEN as u64), &bytes);
            let buffers = cut(at, (HEADER_LEN + len) as u32, marks);
            if *is_indirect {
                let table = Gpa::new(0x4_0000 + nth as u64 * 0x100);
                scene.tx.stage_indirect(table, &buffers, &[]);
            } else {
                scene.tx.stage(&buffers, &[]);
            }
            match is_plain(*len) {
                true => expected.push(bytes),
                false => errors += 1,
            }
            if scene.tx.free() < 8 || nth % 7 == 6 {
                scene.tx.publish();
                scene.poll();
                while scene.tx.used().is_some() {}
            }
        }
        scene.tx.publish();
        scene.poll();
        let ends = scene.wire.ends();
        prop_assert_eq!(&ends.from_guest, &expected);
        prop_assert!(ends.sent_headers.iter().all(|header| *header == NetHeader::PLAIN));
        let stats = scene.net.stats();
        prop_assert_eq!((stats.requests, stats.errors), (frames.len() as u64, errors));
        let bytes: usize = expected.iter().map(Vec::len).sum();
        prop_assert_eq!(stats.written_bytes, bytes as u64);
    }

    #[test]
    fn frames_are_received_whatever_the_buffers(
        mask in features(),
        is_direct in any::<bool>(),
        steps in prop::collection::vec(
            prop_oneof![
                (12u32..2000, prop::collection::vec(any::<u32>(), 0..3)).prop_map(|(len, marks)| (Some((len, marks)), 0)),
                frame_len().prop_map(|len| (None, len)),
            ],
            1..50,
        ),
    ) {
        let mut scene = Scene::new(mask, is_direct);
        let is_mergeable = mask & net_feature::MRG_RXBUF != 0;
        // The model: buffers that are free, frames that wait, and what came of them.
        let mut free: VecDeque<Vec<(u64, u32)>> = VecDeque::new();
        let mut waiting: VecDeque<Vec<u8>> = VecDeque::new();
        let mut expected: Vec<(Vec<u8>, usize)> = Vec::new();
        let mut got: Vec<(Vec<u8>, usize)> = Vec::new();
        let mut given: HashMap<u16, Vec<(u64, u32)>> = HashMap::new();
        let size = |buffers: &[(u64, u32)]| buffers.iter().map(|(_, len)| len).sum::<u32>();
        for (nth, (buffer, len)) in steps.iter().enumerate() {
            match buffer {
                Some((room, marks)) => {
                    let at = FRAMES + nth as u64 * 4096;
                    let buffers = cut(at, *room, marks);
                    // The ring is never full of buffers that are too few.
                    if scene.rx.free() < buffers.len() + 8 {
                        continue;
                    }
                    let id = scene.rx.add(&[], &buffers);
                    given.insert(id, buffers.clone());
                    free.push_back(buffers);
                }
                None => {
                    let bytes = content(*len, nth as u8);
                    scene.wire.ends().to_guest.push_back(bytes.clone());
                    waiting.push_back(bytes);
                }
            }
            scene.poll();
            // Naively: one frame after the other, as long as there are buffers at all.
            while let (Some(bytes), false) = (waiting.front(), free.is_empty()) {
                let most = match mask & net_feature::GUEST_CSUM {
                    0 => PLAIN_FRAME,
                    _ => MAX_FRAME as usize,
                };
                if !(14..=most).contains(&bytes.len()) {
                    waiting.pop_front();
                    continue;
                }
                let need = HEADER_LEN + bytes.len();
                let (mut room, mut count) = (0, 0);
                for buffers in &free {
                    if room >= need || (!is_mergeable && count == 1) {
                        break;
                    }
                    room += size(buffers) as usize;
                    count += 1;
                }
                if room < need {
                    if is_mergeable {
                        break;
                    }
                    waiting.pop_front();
                    continue;
                }
                let bytes = waiting.pop_front().unwrap();
                free.drain(..count);
                expected.push((bytes, count));
            }
            // What the driver finds.
            while let Some((id, first)) = scene.rx.used() {
                let mut lens = vec![(id, first)];
                let head = scene.bytes(&given[&id]);
                let count = usize::from(u16::from_le_bytes([head[10], head[11]]));
                while lens.len() < count {
                    lens.push(scene.rx.used().expect("all of a frame's buffers at once"));
                }
                let mut bytes = Vec::new();
                for (id, len) in lens {
                    let buffer = given.remove(&id).unwrap();
                    bytes.extend(&scene.bytes(&buffer)[..len as usize]);
                }
                prop_assert_eq!(&bytes[..10], &[0; 10]);
                got.push((bytes[HEADER_LEN..].to_vec(), count));
            }
            prop_assert_eq!(&got, &expected);
        }
    }
}

/// Two regions that follow each other in the guest and not here, and nothing behind them.
#[test]
fn frames_across_regions_arrive_and_those_outside_are_dropped() {
    const MIB: u64 = 1 << 20;
    let places = [
        2 * MIB - 40,
        4 * MIB - 40,
        MIB,
        3 * MIB,
        5 * MIB,
        2 * MIB + 4096,
    ];
    // The second begins in memory and ends outside, as the fifth does wholly.
    let is_there = [true, false, true, true, false, true];
    for mask in [!0, !feature::RING_PACKED, !net_feature::CSUM] {
        for is_direct in [true, false] {
            let regions = [(Gpa::new(0), 2 * MIB), (Gpa::new(2 * MIB), 2 * MIB)];
            let mut scene = Scene::over(ArrayMem::with_regions(&regions), mask, is_direct);
            // The first chain of all makes the ring's windows; the others come as a row.
            for round in 0..3 {
                let frames: Vec<_> = (0..6).map(|nth| content(64, 10 * round + nth)).collect();
                let good = || {
                    frames
                        .iter()
                        .zip(is_there)
                        .filter(|(_, is_there)| *is_there)
                };
                let expected: Vec<_> = good().map(|(frame, _)| frame.clone()).collect();
                for ((&at, frame), is_there) in places.iter().zip(&frames).zip(is_there) {
                    if is_there {
                        scene.mem.put(Gpa::new(at), &[0; HEADER_LEN]);
                        scene.mem.put(Gpa::new(at + HEADER_LEN as u64), frame);
                    }
                    scene.tx.stage(&[(at, 76)], &[]);
                }
                scene.tx.publish();
                scene.poll();
                let sent = std::mem::take(&mut scene.wire.ends().from_guest);
                assert_eq!(sent, expected);
                while scene.tx.used().is_some() {}

                scene.wire.ends().to_guest.extend(frames.clone());
                let mut given = HashMap::new();
                for &at in &places {
                    given.insert(scene.rx.stage(&[], &[(at, 76)]), at);
                }
                scene.rx.publish();
                scene.poll();
                let mut got = Vec::new();
                while let Some((id, len)) = scene.rx.used() {
                    if len != 0 {
                        let bytes = scene.bytes(&[(given[&id], len)]);
                        assert_eq!(bytes[..10], [0; 10]);
                        got.push(bytes[HEADER_LEN..].to_vec());
                    }
                }
                assert_eq!(got, expected);
            }
            let errors = scene.net.stats().errors;
            assert_eq!(errors, 3 * (2 + 2), "two of each direction in each round");
        }
    }
}
