//! Changes of a host to the interface under a device, and frames of a guest to the host.

use spawned::program::until;
use vhost_net::frames::Packet;

use crate::namespace::{self, ip, received, tap, up};
use crate::served::{Served, receive, send};

/// A frame of an experimental protocol (IEEE 802), which the kernel counts and drops.
fn plain(n: u8) -> Packet {
    let mut frame = vec![
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5,
    ];
    frame.resize(60, n);
    ([0; 12], frame)
}

/// TCP over IPv4 whose header claims, by `gso_type`, that it is TCP over IPv4 to be segmented, or
/// something else.
fn segmented(gso_type: u8) -> Packet {
    let mut frame = vec![
        0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0,
    ];
    frame.extend(4_040u16.to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([
        0, 9, 0, 9, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 1, 1, 0, 0, 0, 0,
    ]);
    frame.resize(54 + 4_000, 7);
    // NEEDS_CSUM; 54 bytes of headers, segments of 1,400; the checksum at 34 + 16.
    ([1, gso_type, 54, 0, 0x78, 5, 34, 0, 16, 0, 0, 0], frame)
}

#[test]
fn a_wrong_header_costs_its_frame_alone() {
    namespace::in_one(|| {
        tap("t", " vnet_hdr");
        up("t");
        let served = Served::start("adaptive", &["a,tap=t"]);
        let mut client = served.client("a", 1);
        let before = received("t");
        send(&mut client, &segmented(1));
        send(&mut client, &plain(1));
        until("two frames that are right", || received("t") == before + 2);
        // Of the device: outside the frame. Of the kernel, by EINVAL: the type against the
        // protocol, in 4 bytes of payload too.
        let mut outside = segmented(1);
        outside.0[6..8].copy_from_slice(&60_000u16.to_le_bytes());
        let mut short = segmented(1);
        short.1.truncate(38);
        short.0[6] = 34;
        short.0[8] = 0;
        send(&mut client, &outside);
        send(&mut client, &short);
        send(&mut client, &plain(2));
        until("the frame behind them", || received("t") == before + 3);
        assert!(!client.is_hung_up());
        drop(client);
        let (said, devices) = served.end();
        assert_eq!(devices["a"]["errors"], 2, "{devices} {said}");
    });
}

#[test]
fn an_interface_that_is_deleted_costs_its_device_alone() {
    namespace::in_one(|| {
        tap("gone", " vnet_hdr");
        tap("stays", " vnet_hdr");
        up("gone");
        up("stays");
        let served = Served::start("adaptive", &["a,tap=gone", "b,tap=stays", "c,loop"]);
        let [mut gone, mut stays, mut looped] = ["a", "b", "c"].map(|id| served.client(id, 1));
        send(&mut gone, &plain(0));
        assert!(ip("link delete gone"));
        served.program.wait_for("TAP gone is gone");
        // Its frames are taken, and dropped; those of the others go on.
        let before = received("stays");
        for n in 0..100 {
            send(&mut gone, &plain(n));
            send(&mut stays, &plain(n));
            send(&mut looped, &plain(n));
            let back = receive(&mut looped, 0);
            assert_eq!(back[0].1, plain(n).1);
        }
        until("all frames of the neighbour", || {
            received("stays") == before + 100
        });
        let is_hung_up = [&gone, &stays, &looped].map(|client| client.is_hung_up());
        assert_eq!(is_hung_up, [false; 3]);
        drop([gone, stays, looped]);
        let (said, devices) = served.end();
        assert_eq!(said.matches("is gone").count(), 1, "{said}");
        assert!(devices["a"]["errors"].as_u64() >= Some(100), "{devices}");
        assert_eq!(devices["b"]["errors"], 0, "{devices}");
    });
}

#[test]
fn an_interface_has_the_queues_and_the_mtu_that_are_asked_for() {
    namespace::in_one(|| {
        tap("many", " vnet_hdr multi_queue");
        tap("one", " vnet_hdr");
        up("many");
        assert!(ip("link set many mtu 9000"));
        let served = Served::start("sleep", &["a,tap=many,pairs=2"]);
        let mut client = served.client("a", 2);
        let before = received("many");
        for pair in [0, 1, 0, 1] {
            let mut long = plain(pair);
            long.1.resize(9_014, 3);
            assert!(client.send_frame(pair.into(), &long).expect("a right ring"));
        }
        until("frames by both pairs", || received("many") == before + 4);
        drop(client);
        served.end();
        for (net, says) in [
            ("tap=one,pairs=2", "it has one queue"),
            ("tap=one,pairs=2", "multi_queue"),
            (
                "tap=one,mtu=1501",
                "its MTU is 1500, less than 1501; ip link set one mtu 1501",
            ),
            ("tap=none", "there is no such interface"),
            ("tap=lo", "no TAP interface"),
        ] {
            let said = crate::captures::refused(&format!("id=a,socket=a.sock,{net}"));
            assert!(said.contains(says), "{net}: {said}");
        }
    });
}
