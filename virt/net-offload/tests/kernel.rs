//! The kernel as the oracle: the same frame written into a TAP and bridged to a second one with
//! another set of offloads, in a network namespace of this thread. NET_FRAMES (20,000) frames;
//! skipped where it cannot be set up, with the reason printed.

mod packets;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use net_offload::{GsoType, HEADER_LEN, NetHeader, Offloads};
use packets::delivered::delivered;
use packets::{Expected, Packet, all_sets, naive_sum};
use seeded::Random;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
/// IFF_TAP, IFF_NO_PI, IFF_VNET_HDR.
const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;

fn asked(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

struct Tap(File);

impl Tap {
    fn open(name: &str) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")?;
        let mut request = [0u8; 40];
        request[..name.len()].copy_from_slice(name.as_bytes());
        request[16..18].copy_from_slice(&FLAGS.to_ne_bytes());
        let size: libc::c_int = 12;
        // SAFETY: `request` is a `struct ifreq` of 40 bytes, which lives through the call.
        asked(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) })?;
        // SAFETY: the argument is an int, which lives through the call.
        asked(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ, &raw const size) })?;
        Ok(Self(file))
    }

    fn set_offloads(&self, set: Offloads) -> io::Result<()> {
        let flags = libc::c_ulong::from(set.tun_flags());
        // SAFETY: the argument is a number.
        asked(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETOFFLOAD, flags) })
    }

    fn send(&mut self, header: &NetHeader, frame: &[u8]) -> io::Result<()> {
        let mut bytes = header.to_bytes(0).to_vec();
        bytes.extend(frame);
        let sent = self.0.write(&bytes)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    /// All frames that are there.
    fn receive(&mut self) -> io::Result<Vec<(NetHeader, Vec<u8>)>> {
        let mut buffer = vec![0; 70_000];
        let mut frames = Vec::new();
        loop {
            match self.0.read(&mut buffer) {
                Ok(len) => {
                    let (header, frame) = buffer[..len].split_at(HEADER_LEN);
                    let header = header.try_into().expect("12 bytes");
                    frames.push((NetHeader::from_bytes(header), frame.to_vec()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
    }
}

fn ip(line: &str) -> io::Result<()> {
    let status = Command::new("ip").args(line.split(' ')).output()?;
    if !status.status.success() {
        let text = String::from_utf8_lossy(&status.stderr).into_owned();
        return Err(io::Error::other(format!("ip {line}: {text}")));
    }
    Ok(())
}

/// Two interfaces on a bridge in a namespace of their own.
fn bridged() -> io::Result<[Tap; 2]> {
    // SAFETY: changes the namespace of this thread alone.
    asked(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    let taps = [Tap::open("from")?, Tap::open("to")?];
    ip("link add name bridge type bridge forward_delay 0 stp_state 0 mcast_snooping 0")?;
    for name in ["from", "to"] {
        ip(&format!(
            "link set {name} mtu 65521 txqueuelen 8192 master bridge"
        ))?;
        // Quiet: no packets of the interface's own.
        ip(&format!("link set {name} addrgenmode none"))?;
        ip(&format!("link set {name} up"))?;
    }
    ip("link set bridge addrgenmode none")?;
    ip("link set bridge up")?;
    Ok(taps)
}

/// Completes a partial checksum, so that partial and complete results can be compared.
fn completed(one: &Expected, packet: &Packet) -> Vec<u8> {
    let mut bytes = one.bytes.clone();
    let at = packet.checksum_at();
    if one.needs_checksum {
        let sum = !naive_sum(&bytes[packet.l4()..]);
        bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    // The same number, and some of the kernel's paths write it so.
    if bytes[at..at + 2] == [0, 0] {
        bytes[at..at + 2].copy_from_slice(&[0xff; 2]);
    }
    bytes
}

fn compare(packet: &Packet, got: &[(NetHeader, Vec<u8>)], ours: &[Vec<Expected>]) -> bool {
    let theirs = got.iter().map(|(header, bytes)| Expected {
        gso_type: header.gso_type,
        needs_checksum: header.flags & NetHeader::NEEDS_CSUM != 0,
        bytes: bytes.clone(),
    });
    let theirs = Vec::from_iter(theirs);
    // A VLAN device has fewer offloads than the interface below, so Linux may do more for tagged
    // frames.
    let may_do_more = !packet.tags.is_empty();
    ours.iter().any(|ours| {
        theirs.len() == ours.len()
            && theirs.iter().zip(ours).all(|(theirs, ours)| {
                theirs.gso_type == ours.gso_type
                    && (may_do_more || theirs.needs_checksum == ours.needs_checksum)
                    && completed(theirs, packet) == completed(ours, packet)
            })
    })
}

#[test]
fn the_kernel_makes_the_same_frames() {
    let [mut from, mut to] = match bridged() {
        Ok(taps) => taps,
        Err(error) => {
            println!("skipped: no bridge of two TAPs in a namespace: {error}");
            return;
        }
    };
    let given = std::env::var("NET_FRAMES").ok();
    let frames: u64 = given.map_or(20_000, |text| text.parse().expect("NET_FRAMES is a number"));
    let given = std::env::var("NET_SEED").ok();
    let seed = given.map_or(3, |text| text.parse().expect("NET_SEED is a number"));
    let mut random = Random::new(seed);
    let both = Offloads::USO4.with(Offloads::USO6);
    let has_uso = to.set_offloads(Offloads::ALL).is_ok();
    if !has_uso {
        println!("skipped: UDP segmentation, which this kernel has not (6.2 has)");
    }
    let sets = all_sets();
    let apt = |set: &Offloads| {
        let uso = [Offloads::USO4, Offloads::USO6].map(|one| set.contains(one));
        uso == [false; 2] || has_uso && set.contains(both)
    };
    let receivers = Vec::from_iter(sets.iter().copied().filter(apt));
    let _ = to.receive();
    // The receiver's set is an ioctl: changed once in so many frames.
    let each = frames.div_ceil(receivers.len() as u64);
    let (mut sent, mut segments) = (0u64, 0u64);
    for &receiver in &receivers {
        to.set_offloads(receiver).expect("the kernel has these");
        for _ in 0..each {
            let packet = Packet::random(&mut random);
            let sender = sets[random.below(sets.len() as u64) as usize];
            let is_uso = packet.is_udp && sender.contains(packet.needs());
            // Linux drops a frame that is a single segment only because of its TCP options.
            let is_one = packet.payload.len() <= usize::from(packet.size);
            let options = packet.tcp_options.len();
            let looks_large = packet.payload.len() + options > usize::from(packet.size);
            if is_uso && !has_uso || is_one && looks_large && !packet.is_udp {
                continue;
            }
            let (header, frame) = packet.sent(sender);
            let wanted = [receiver, Offloads::CSUM, Offloads::NONE];
            let ours = delivered(&header, &frame[..], sender, &wanted).expect("a right header");
            // Another permitted form of a tagged frame.
            let ours = if packet.tags.is_empty() {
                &ours[..1]
            } else {
                &ours[..]
            };
            let result = from.send(&header, &frame);
            result.unwrap_or_else(|error| panic!("{error}: {header:?} {packet:?}"));
            let got = to.receive().expect("readable");
            let is_ours =
                |(_, frame): &(NetHeader, Vec<u8>)| frame.starts_with(&[2, 0, 0, 0, 0, 2]);
            let got = Vec::from_iter(got.into_iter().filter(is_ours));
            assert!(
                compare(&packet, &got, ours),
                "to {receiver:?}: {header:?} {packet:?}\nkernel {got:x?}\nours {ours:x?}"
            );
            sent += 1;
            segments += got.len() as u64;
        }
    }
    println!("{sent} frames, which the kernel delivered as {segments}");
    assert!(sent > frames / 2 && segments > sent);
    assert_wrong_headers_are_refused_by_both(&mut from);
}

/// Asserts that the check refuses all headers that the kernel refuses with EINVAL.
fn assert_wrong_headers_are_refused_by_both(from: &mut Tap) {
    let mut random = Random::new(9);
    let mut refused = 0;
    for _ in 0..5_000 {
        let packet = Packet::random(&mut random);
        let (header, frame) = packet.sent(Offloads::ALL);
        let mut bytes = header.to_bytes(0);
        bytes[2 + random.below(8) as usize] = random.bits() as u8;
        bytes[1] = if random.chance(0.3) {
            random.below(8) as u8
        } else {
            bytes[1]
        };
        let header = NetHeader::from_bytes(&bytes);
        // The length of the headers is a hint for us; Linux may take it for more.
        let header = NetHeader {
            hdr_len: packet.headers() as u16,
            ..header
        };
        let Err(error) = from.send(&header, &frame) else {
            continue;
        };
        assert_eq!(
            error.raw_os_error(),
            Some(libc::EINVAL),
            "{header:?} {packet:?}"
        );
        refused += 1;
        let ours = delivered(&header, &frame[..], Offloads::ALL, &[Offloads::NONE]);
        let is_small =
            header.gso_type != GsoType::NONE && !ours.as_ref().is_ok_and(|ours| ours[0].len() > 1);
        assert!(ours.is_err() || is_small, "{header:?} {packet:?}");
    }
    assert!(refused > 100, "{refused}");
}
