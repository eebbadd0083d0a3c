//! Commands of a network device's control queue. Each is answered or breaks the protocol, what it
//! sets stays bounded, and frames are filtered without a panic.
//!
//! The input: features of the driver (8 bytes), number of pairs (1), then commands: length (2),
//! where they are cut into two buffers (1), their bytes.

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, Iova, KeepAlive, PhysMem};
use vio::net::{
    FrameData, FrameReceiver, MAC_ENTRIES, Net, NetHeader, NetPort, Offloads, PortCapabilities,
    RxFrame, TxFrame, control_class, net_feature,
};
use vio::{Activity, Interrupt, QueueConfig, QueueDevice, Service, feature};

use crate::{Input, Script};

/// Most commands of one input.
const COMMANDS: usize = 64;
/// Most bytes of one command.
const MOST: usize = 2048;
const ENTRIES: u16 = 8;
/// Rings of queue `n` begin at `n + 1` times this.
const QUEUE: u64 = 0x4000;
const DATA: u64 = 0x10_0000;
const ANSWER: u64 = 0x11_0000;
const BUFFER: u64 = 0x12_0000;

/// Offers one frame after each command.
struct Offers(Vec<u8>);

impl NetPort for Offers {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            receive: Offloads::ALL,
            ..PortCapabilities::PLAIN
        }
    }

    fn set_pairs(&mut self, pairs: u16) {
        assert!((1..=4).contains(&pairs), "{pairs} pairs");
    }

    fn set_receiver(&mut self, receiver: Offloads) {
        assert_eq!(receiver, receiver.consistent());
    }

    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        frames.len()
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        true
    }

    fn receive(&mut self, _pair: u16, to: &mut dyn FrameReceiver) {
        if to.room() != 0 {
            let data = FrameData::Bytes(&self.0);
            let header = NetHeader::PLAIN;
            to.deliver(&[RxFrame { header, data }]);
        }
    }

    fn reset(&mut self) {}
}

struct NoInterrupts;

impl Interrupt for NoInterrupts {
    fn queue(&mut self, _queue: u16) {}

    fn config(&mut self) {}
}

fn place(index: u16) -> u64 {
    QUEUE * (u64::from(index) + 1)
}

fn config(index: u16) -> QueueConfig {
    QueueConfig {
        index,
        size: ENTRIES,
        desc: Iova::new(place(index)),
        avail: Iova::new(place(index) + 0x1000),
        used: Iova::new(place(index) + 0x2000),
    }
}

fn put_desc(mem: &ArrayMem, index: u16, nth: u16, buffer: (u64, usize), flags: u16) {
    let at = place(index) + 16 * u64::from(nth);
    mem.put_u64(Gpa::new(at), buffer.0);
    mem.put_u32(Gpa::new(at + 8), buffer.1 as u32);
    mem.put_u16(Gpa::new(at + 12), flags);
    mem.put_u16(Gpa::new(at + 14), nth + 1);
}

/// The body.
///
/// # Panics
/// If the device breaks one of its promises.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (wanted, pairs) = (input.u64(), u16::from(input.u8()) % 4 + 1);
    let mem = ArrayMem::new(2 << 20);
    let mut frame = vec![0x02, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x81, 0, 0, 7];
    frame.resize(60, 0);
    let net = Net::new([2, 0, 0, 0, 0, 1], ENTRIES, Box::new(Offers(frame)));
    let net = net.and_then(|net| net.with_pairs(pairs));
    let mut net = net.expect("a good configuration");
    let must = feature::VERSION_1 | net_feature::CTRL_VQ;
    let features = net.features() & (wanted | must) & !feature::EVENT_IDX;
    let control = match features & net_feature::MQ {
        0 => 2,
        _ => 2 * pairs,
    };
    let queues: Vec<QueueConfig> = (0..=control).map(config).collect();
    net.activate(features, &queues, mem.keep_alive())
        .expect("a good start");
    let mut dma = FlatDma::new(mem.clone());
    for nth in 1..=COMMANDS as u16 {
        if input.is_empty() {
            break;
        }
        let len = usize::from(input.u16()) % MOST;
        let cut = usize::from(input.u8());
        let bytes = input.bytes(len);
        mem.put(Gpa::new(DATA), bytes);
        let cut = if bytes.is_empty() {
            0
        } else {
            cut % bytes.len()
        };
        let (mut desc, mut at) = (0, DATA);
        for part in [cut, bytes.len() - cut]
            .into_iter()
            .filter(|&part| part != 0)
        {
            put_desc(&mem, control, desc, (at, part), 1);
            desc += 1;
            at += part as u64;
        }
        put_desc(&mem, control, desc, (ANSWER, 1), 2);
        mem.put(Gpa::new(ANSWER), &[0xee]);
        // Head 0 each time, and one receive buffer, unless a frame that was not wanted has left the
        // last one.
        put_desc(&mem, 0, 0, (BUFFER, 2048), 2);
        mem.put_u16(Gpa::new(place(control) + 0x1002), nth);
        let received = mem.get_u16(Gpa::new(place(0) + 0x2002));
        mem.put_u16(Gpa::new(place(0) + 0x1002), received + 1);
        // Frames that are dropped leave buffers, and so work for ever.
        for _ in 0..4 {
            if net.poll(&mut dma, &mut NoInterrupts, 0) == Activity::Idle {
                break;
            }
        }
        if net.needs_reset() {
            assert!(bytes.len() < 2, "a whole command broke the protocol");
            return;
        }
        assert_eq!(mem.get_u16(Gpa::new(place(control) + 0x2002)), nth);
        let answer = mem.get::<1>(Gpa::new(ANSWER))[0];
        assert!(answer <= 1, "answer {answer:#x}");
    }
    check(&mut net, pairs);
}

fn check(net: &mut Net, pairs: u16) {
    net.set_service(Service::Stopped);
    let saved = net.save().expect("nothing is in flight").class;
    let lists = [&saved.filter.unicast, &saved.filter.multicast];
    assert!(lists.iter().all(|list| list.entries.len() <= MAC_ENTRIES));
    assert!((1..=pairs).contains(&saved.pairs));
    assert_eq!(saved.mac[0] & 1, 0);
    net.reset();
}

/// Valid traffic.
pub fn seeds() -> Vec<Vec<u8>> {
    let table = [
        &[1, 0, 0, 0, 2, 0, 0, 0, 0, 9][..],
        &[1, 0, 0, 0, 1, 0, 0x5e, 0, 0, 1],
    ];
    let commands: [(u8, u8, Vec<u8>); 6] = [
        (control_class::RX, 0, vec![0]),
        (control_class::MAC, 0, table.concat()),
        (control_class::MAC, 1, vec![2, 0, 0, 0, 0, 7]),
        (control_class::VLAN, 0, vec![7, 0]),
        (control_class::MQ, 0, vec![2, 0]),
        (
            control_class::GUEST_OFFLOADS,
            0,
            vec![2, 0, 0, 0, 0, 0, 0, 0],
        ),
    ];
    let mut all = Script::new();
    all.bytes(&u64::MAX.to_le_bytes()).u8(3);
    let mut seeds = Vec::new();
    for (class, command, data) in commands {
        let bytes = [&[class, command][..], &data].concat();
        let mut one = Script::new();
        one.bytes(&u64::MAX.to_le_bytes()).u8(3);
        for script in [&mut all, &mut one] {
            script.u16(bytes.len() as u16).u8(1).bytes(&bytes);
        }
        seeds.push(one);
    }
    seeds.push(all);
    seeds.into_iter().map(|mut script| script.end()).collect()
}
