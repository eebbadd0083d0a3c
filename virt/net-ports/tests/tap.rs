//! An interface of the host, in a network namespace of the test's thread; skipped where there can
//! be none, with the reason printed.

use std::process::Command;
use std::time::{Duration, Instant};

use guest_mem::{Gpa, GuestRam, Intent, KeepAlive, PhysMem, VolatileSlice};
use net_ports::{TapError, TapOptions, TapPort, TapQueues};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vio::net::{
    BURST, FrameReceiver, GsoType, NetHeader, NetPort, Offloads, RxFrame, TxFrame, Waits,
};

#[derive(Default)]
struct Receiver {
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
            frame.data.read(0, &mut bytes);
            self.got.push((frame.header, bytes));
        }
        self.room -= taken;
        taken
    }
}

fn ip(line: &str) -> bool {
    let output = Command::new("ip").args(line.split(' ')).output();
    let is_done = output.as_ref().is_ok_and(|output| output.status.success());
    if !is_done {
        println!("ip {line}: {output:?}");
    }
    is_done
}

/// A namespace with a bridge to which `taps` are to be added; false where there can be none.
fn has_namespace() -> bool {
    // SAFETY: changes the namespace of this thread alone.
    let is_own = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
    let is_there = is_own
        && ip("link add name bridge type bridge forward_delay 0 stp_state 0 mcast_snooping 0")
        && ip("link set bridge addrgenmode none")
        && ip("link set bridge up");
    if !is_there {
        println!("skipped: no network namespace with a bridge");
    }
    is_there
}

fn options(name: &str, pairs: u16) -> TapOptions<'_> {
    TapOptions {
        name,
        pairs,
        mtu: None,
        is_made: true,
    }
}

fn open(options: &TapOptions<'_>) -> Result<TapPort, TapError> {
    TapQueues::open(options).map(TapPort::new)
}

fn bridged(name: &str, pairs: u16) -> Result<TapPort, TapError> {
    let port = open(&options(name, pairs))?;
    assert!(ip(&format!("link set {name} master bridge")));
    assert!(ip(&format!("link set {name} addrgenmode none")));
    assert!(ip(&format!("link set {name} up")));
    Ok(port)
}

struct Memory {
    ram: GuestRam,
    keep: KeepAlive,
}

impl Memory {
    fn new() -> Self {
        let ram = GuestRam::in_heap(&[(Gpa::new(0), 1 << 17)]).expect("memory");
        Self {
            keep: ram.keep_alive(),
            ram,
        }
    }

    /// Sends a frame in so many pieces; how many were dropped.
    fn send(&self, port: &mut TapPort, header: NetHeader, frame: &[u8], pieces: usize) -> usize {
        self.ram.write(Gpa::new(0), frame).expect("RAM");
        let piece = frame.len().div_ceil(pieces);
        let slices = Vec::from_iter((0..frame.len()).step_by(piece).map(|at| {
            let len = piece.min(frame.len() - at) as u64;
            let hva = self
                .ram
                .host(Gpa::new(at as u64), len, Intent::Read)
                .expect("RAM");
            VolatileSlice::new(&self.keep, hva, len as u32).expect("kept")
        }));
        let frame = TxFrame {
            header,
            len: frame.len() as u32,
            data: &slices,
        };
        port.send(0, &[frame], &self.keep)
    }
}

/// Frames of this test that come within a second, until there are `count`.
fn receive(port: &mut TapPort, count: usize) -> Vec<(NetHeader, Vec<u8>)> {
    let mut receiver = Receiver::default();
    let end = Instant::now() + Duration::from_secs(1);
    while receiver.got.len() < count && Instant::now() < end {
        if port.has_frames(0) {
            receiver.room = BURST;
            port.receive(0, &mut receiver);
            receiver
                .got
                .retain(|(_, frame)| frame.starts_with(&[2, 0, 0, 0, 0, 2]));
        }
    }
    receiver.got
}

fn plain(n: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x12, 0x34];
    frame.extend(n.to_be_bytes());
    frame.resize(60 + n as usize % 1_400, n as u8);
    frame
}

/// TCP over IPv4 of `payload` bytes, with its checksum and its segments left undone.
fn tcp(payload: usize) -> (NetHeader, Vec<u8>) {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([
        0, 9, 0, 9, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 1, 0x12, 0x34, 0, 0,
    ]);
    // A bridge checks the checksum of IP.
    let words = frame[14..34].chunks(2);
    let sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame.resize(54 + payload, 7);
    let header = NetHeader {
        flags: NetHeader::NEEDS_CSUM,
        gso_type: GsoType::TCPV4,
        gso_size: 1_400,
        hdr_len: 54,
        csum_start: 34,
        csum_offset: 16,
    };
    (header, frame)
}

#[test]
fn frames_and_headers_go_through_as_they_are() {
    if !has_namespace() {
        return;
    }
    let memory = Memory::new();
    let mut one = bridged("one", 1).expect("an interface");
    let mut two = bridged("two", 1).expect("an interface");
    one.start(Offloads::NONE);
    two.start(Offloads::ALL);
    assert!(!two.has_frames(0));
    // Singly, and in bursts, in their order.
    let mut n = 0;
    for burst in [1, 1, 2, 7, 32, 100, 300, 1, 33] {
        let frames = Vec::from_iter((n..n + burst).map(plain));
        for (nth, frame) in frames.iter().enumerate() {
            let dropped = memory.send(&mut one, NetHeader::default(), frame, 1 + nth % 40);
            assert_eq!(dropped, 0);
        }
        let got = receive(&mut two, burst as usize);
        let got = Vec::from_iter(got.into_iter().map(|(_, frame)| frame));
        assert!(got == frames, "{burst}: {} frames", got.len());
        n += burst;
    }
    // One frame of 40,000 bytes where the driver takes it, or 29 of it.
    let (header, frame) = tcp(40_000);
    assert_eq!(memory.send(&mut one, header, &frame, 10), 0);
    let got = receive(&mut two, 1);
    assert_eq!(
        (got[0].0.gso_type, got[0].0.gso_size, &got[0].1),
        (GsoType::TCPV4, 1_400, &frame)
    );
    two.set_receiver(Offloads::NONE);
    assert_eq!(memory.send(&mut one, header, &frame, 10), 0);
    let got = receive(&mut two, 29);
    assert!(
        got.len() == 29
            && got
                .iter()
                .all(|(header, _)| *header == NetHeader::default())
    );
    // DATA_VALID is only for receivers with GUEST_CSUM (§5.1.6.4.1). Not every kernel passes it on;
    // other receivers never see it.
    for (receiver, may) in [(Offloads::CSUM, NetHeader::DATA_VALID), (Offloads::NONE, 0)] {
        two.set_receiver(receiver);
        let valid = NetHeader {
            flags: NetHeader::DATA_VALID,
            ..NetHeader::PLAIN
        };
        assert_eq!(memory.send(&mut one, valid, &plain(4), 1), 0);
        assert_eq!(receive(&mut two, 1)[0].0.flags & !may, 0, "{receiver:?}");
    }
    // Wrong headers are counted, and the frames behind them are sent.
    let wrong = NetHeader {
        csum_start: 60_000,
        ..header
    };
    assert_eq!(memory.send(&mut one, wrong, &frame, 1), 1);
    let wrong = NetHeader {
        gso_size: 0,
        ..header
    };
    assert_eq!(memory.send(&mut one, wrong, &frame, 1), 1);
    assert_eq!(one.counters().wrong_headers, 2);
    assert_eq!(memory.send(&mut one, NetHeader::default(), &plain(5), 1), 0);
    assert_eq!(receive(&mut two, 1).len(), 1);
}

#[test]
fn a_sleeping_device_is_woken_and_a_reset_leaves_no_stale_frame() {
    if !has_namespace() {
        return;
    }
    let memory = Memory::new();
    let mut one = bridged("one", 1).expect("an interface");
    let mut two = bridged("two", 1).expect("an interface");
    one.start(Offloads::NONE);
    two.start(Offloads::NONE);
    for n in 0..50 {
        two.arm();
        let mut fds = Vec::new();
        two.wake_fds(
            0,
            Waits {
                receive: true,
                send: false,
            },
            &mut fds,
        );
        assert!(fds.len() == 1 && !two.has_frames(0));
        let sent = memory.send(&mut one, NetHeader::default(), &plain(n), 1);
        assert_eq!(sent, 0);
        // SAFETY: the port keeps the descriptor open.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fds[0]) };
        let mut polled = [PollFd::new(&fd, PollFlags::IN)];
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        assert_eq!(
            poll(&mut polled, Some(&second)),
            Ok(1),
            "woken by frame {n}"
        );
        two.disarm();
        assert_eq!(receive(&mut two, 1), [(NetHeader::default(), plain(n))]);
        if n % 10 == 9 {
            for stale in 0..40 {
                memory.send(&mut one, NetHeader::default(), &plain(stale), 1);
            }
            two.reset();
            assert!(!two.has_frames(0));
            two.start(Offloads::NONE);
            assert!(!two.has_frames(0));
        }
    }
    // On another thread, with another io_uring.
    two.rebind();
    let mut two = std::thread::scope(|scope| {
        let moved = scope.spawn(|| {
            assert!(!two.has_frames(0));
            memory.send(&mut one, NetHeader::default(), &plain(1), 1);
            assert_eq!(receive(&mut two, 1).len(), 1);
            two.rebind();
            two
        });
        moved.join().expect("no panic")
    });
    memory.send(&mut one, NetHeader::default(), &plain(2), 1);
    assert_eq!(receive(&mut two, 1).len(), 1);
}

#[test]
fn a_deleted_interface_takes_the_link_down() {
    if !has_namespace() {
        return;
    }
    let memory = Memory::new();
    let mut one = bridged("one", 1).expect("an interface");
    one.start(Offloads::ALL);
    assert!(!one.has_frames(0) && one.is_up());
    assert!(ip("link delete one"));
    let end = Instant::now() + Duration::from_secs(1);
    while one.is_up() && Instant::now() < end {
        assert!(!one.has_frames(0));
    }
    assert!(!one.is_up());
    assert_eq!(memory.send(&mut one, NetHeader::default(), &plain(1), 1), 1);
    one.arm();
    one.set_pairs(1);
    one.set_receiver(Offloads::NONE);
    one.reset();
    one.start(Offloads::NONE);
    assert!(!one.has_frames(0) && !one.is_up());
    // A send detects it, too.
    let mut two = bridged("two", 1).expect("an interface");
    two.start(Offloads::NONE);
    assert!(ip("link delete two"));
    assert_eq!(memory.send(&mut two, NetHeader::default(), &plain(1), 1), 1);
    assert!(!two.is_up());
}

#[test]
fn an_interface_has_the_queues_it_was_made_with() {
    if !has_namespace() {
        return;
    }
    assert!(ip("tuntap add dev single mode tap vnet_hdr"));
    assert!(ip("tuntap add dev many mode tap vnet_hdr multi_queue"));
    let capabilities = |options: &TapOptions<'_>| open(options).map(|port| port.capabilities());
    let pairs = |name, pairs| {
        capabilities(&options(name, pairs))
            .expect("an interface")
            .pairs
    };
    assert!(matches!(
        open(&options("single", 2)),
        Err(TapError::OneQueue)
    ));
    assert_eq!((pairs("single", 1), pairs("many", 1)), (1, 1));
    let mut many = open(&options("many", 4)).expect("four");
    assert_eq!(many.capabilities().pairs, 4);
    many.start(Offloads::ALL);
    for pairs in [4, 1, 3, 4, 2] {
        many.set_pairs(pairs);
        assert!(
            (0..4).all(|pair| !many.has_frames(pair)) && many.is_up(),
            "{pairs}"
        );
    }
}

#[test]
fn an_interface_that_is_down_refuses_frames_and_blocks_nothing() {
    if !has_namespace() {
        return;
    }
    let memory = Memory::new();
    let mut down = open(&options("down", 1)).expect("an interface");
    down.start(Offloads::NONE);
    assert!(!down.has_frames(0));
    assert_eq!(
        memory.send(&mut down, NetHeader::default(), &plain(1), 1),
        1
    );
    assert_eq!(down.counters().refused, 1);
    down.arm();
    assert!(!down.has_frames(0) && down.is_up());
    down.reset();
}

#[test]
fn open_error_names_the_unavailable_property() {
    if !has_namespace() {
        return;
    }
    let mtu = |name, mtu| {
        open(&TapOptions {
            mtu: Some(mtu),
            ..options(name, 1)
        })
    };
    // One that is made has the MTU that is asked for; another one is never changed.
    assert_eq!(mtu("made", 9_000).expect("made").capabilities().mtu, 9_000);
    assert!(ip("tuntap add dev there mode tap vnet_hdr"));
    assert!(matches!(
        mtu("there", 1_501),
        Err(TapError::Mtu {
            asked: 1_501,
            has: 1_500
        })
    ));
    assert_eq!(mtu("there", 1_400).expect("less").capabilities().mtu, 1_400);
    assert!(ip("link set there mtu 9000"));
    assert_eq!(
        open(&options("there", 1))
            .expect("its own")
            .capabilities()
            .mtu,
        9_000
    );
    let taken = open(&options("there", 1)).expect("free");
    assert!(matches!(open(&options("there", 1)), Err(TapError::Busy)));
    drop(taken);
    let missing = TapOptions {
        is_made: false,
        ..options("none", 1)
    };
    assert!(matches!(open(&missing), Err(TapError::Missing)));
    assert!(ip("link add veil type veth"));
    for (name, pairs) in [("lo", 1), ("lo", 2), ("veil", 1), ("veil", 4)] {
        assert!(
            matches!(open(&options(name, pairs)), Err(TapError::Kind)),
            "{name}"
        );
    }
    for name in ["", "a name", "name-that-is-too-long", "a/b", "%\n"] {
        assert!(
            matches!(open(&options(name, 1)), Err(TapError::Name(_))),
            "{name}"
        );
    }
}
