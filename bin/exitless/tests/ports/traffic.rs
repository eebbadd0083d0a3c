//! The kernel's own TCP and UDP between two namespaces, over two TAP interfaces whose devices'
//! drivers are joined.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use seeded::Random;

use crate::namespace::{self, Other, ip, tap, up};
use crate::served::{OFFLOADS, Served, frames, join};

const HERE: &str = "10.9.0.1";
const THERE: &str = "10.9.0.2";

/// Two interfaces with their devices, `a` here and `b` there, joined for as long as `test` runs.
/// The counters of both.
fn joined(idle: &str, options: &str, test: impl FnOnce(&Served, &Other)) -> serde_json::Value {
    tap("a", " vnet_hdr");
    tap("b", " vnet_hdr");
    let nets = ["a", "b"].map(|id| format!("{id},tap={id}{}", options.replace("ID", id)));
    let served = Served::start(idle, &nets.each_ref().map(String::as_str));
    let other = Other::new();
    other.take("b");
    other.run(|| {
        assert!(ip(&format!("addr add {THERE}/24 dev b")));
        up("b");
    });
    assert!(ip(&format!("addr add {HERE}/24 dev a")));
    up("a");
    let mut ends = ["a", "b"].map(|id| served.client(id, 1));
    assert!(ends.iter().all(|end| end.features() & OFFLOADS == OFFLOADS));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        // Also if the test panics.
        struct Over<'o>(&'o AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let over = Over(&is_over);
        scope.spawn(|| join(&mut ends, &is_over));
        test(&served, &other);
        drop(over);
    });
    drop(ends);
    served.end().1
}

const MIB: usize = 1 << 20;
/// Bytes of the stream.
const STREAM: usize = 32 * MIB;
/// Frames that a MiB may take, acknowledgements included. Segments of the network would be 724.
const FRAMES_PER_MIB: f64 = 40.0;

fn content() -> Vec<u8> {
    let mut random = Random::new(37);
    let mut bytes = vec![0; MIB];
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&random.bits().to_le_bytes());
    }
    bytes
}

#[test]
fn tcp_over_tap_goes_in_large_segments() {
    namespace::in_one(|| {
        let stats = joined(
            "adaptive",
            ",pcap=FOLDER/ID.pcap,pcap-max=256M",
            |served, other| {
                let listener = other.run(|| TcpListener::bind((THERE, 9)).expect("an address"));
                let there = other.begin(move || {
                    let (mut stream, _) = listener.accept().expect("a connection");
                    let content = content();
                    let mut got = vec![0; MIB];
                    for nth in 0..STREAM / MIB {
                        stream.read_exact(&mut got).expect("bytes");
                        assert!(got == content, "MiB {nth}");
                    }
                    stream.write_all(b"all").expect("a connection");
                });
                let mut stream = TcpStream::connect((THERE, 9)).expect("an answer");
                let content = content();
                for _ in 0..STREAM / MIB {
                    stream.write_all(&content).expect("a connection");
                }
                let mut all = [0; 3];
                stream.read_exact(&mut all).expect("an answer");
                there.recv().expect("what was sent");
                let captures = ["a.pcap", "b.pcap"].map(|name| served.path(name));
                // As a core that sleeps leaves them.
                let is_whole = |path: &std::path::Path| {
                    let frames = frames(path);
                    frames.iter().map(Vec::len).sum::<usize>() >= STREAM
                };
                spawned::program::until("captures of all", || {
                    captures.iter().all(|path| is_whole(path))
                });
                for path in &captures {
                    let frames = frames(path);
                    let tcp = frames
                        .iter()
                        .filter(|frame| frame[12..14] == [8, 0] && frame[23] == 6);
                    let count = tcp.clone().count();
                    let large = tcp.filter(|frame| frame.len() > 1_514).count();
                    let per_mib = count as f64 / (STREAM / MIB) as f64;
                    println!(
                        "{}: {per_mib:.1} frames a MiB, {large} of {count} larger than a segment",
                        path.display()
                    );
                    assert!(per_mib <= FRAMES_PER_MIB && large > 0, "{per_mib}");
                }
            },
        );
        for id in ["a", "b"] {
            assert_eq!(stats[id]["errors"], 0, "{stats}");
        }
    });
}

/// One datagram there and back, again and again, with pauses in which the core goes to sleep: each
/// frame has to wake it, that of the interface and that of the driver. None is sent twice, so one
/// lost wake-up is the end.
#[test]
fn no_wake_up_of_a_sleeping_core_is_lost() {
    namespace::in_one(|| {
        for idle in ["sleep", "adaptive"] {
            let stats = joined(idle, "", |_, other| {
                let echo = UdpSocket::bind((HERE, 0)).expect("an address");
                echo.connect((THERE, 7)).expect("a route");
                let limit = Some(Duration::from_secs(3));
                echo.set_read_timeout(limit).expect("a socket");
                let socket = other.run(|| UdpSocket::bind((THERE, 7)).expect("an address"));
                let answers = other.begin(move || {
                    socket.set_read_timeout(limit).expect("a socket");
                    let mut bytes = [0; 1_400];
                    while let Ok((len, from)) = socket.recv_from(&mut bytes) {
                        if len == 1 {
                            break;
                        }
                        socket.send_to(&bytes[..len], from).expect("a route");
                    }
                });
                let mut random = Random::new(11);
                let mut bytes = [0; 1_400];
                for nth in 0..ROUNDS {
                    let len = 8 + random.below(1_300) as usize;
                    bytes[..8].copy_from_slice(&nth.to_le_bytes());
                    echo.send(&bytes[..len]).expect("a route");
                    let mut got = [0; 1_400];
                    let got_len = echo.recv(&mut got);
                    let got_len = got_len.unwrap_or_else(|error| panic!("{idle}: {nth}: {error}"));
                    assert!(got[..got_len] == bytes[..len], "{idle}: {nth}");
                    if random.chance(0.5) {
                        thread::sleep(Duration::from_micros(random.below(400)));
                    }
                }
                echo.send(&[0]).expect("a route");
                answers.recv().expect("no panic there");
            });
            println!("{idle}: {stats}");
            assert!(ip("link delete dev a"));
        }
    });
}

/// Datagrams there and back.
const ROUNDS: u64 = 2_000;
