//! Frames of 64,000 bytes into a TAP interface: through our server, and by bare writes of the same
//! frames from the same CPU.
//!
//! Both are counted by the interface (`rx_packets`): the frames that the kernel took. The frames
//! are TCP segments to be segmented, to an address of no interface here, so that the kernel drops
//! each behind its driver.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use net_offload::{Checksum, GsoType, HEADER_LEN, NetHeader, Offloads};
use net_ports::{TapOptions, TapQueues};
use report::{Measured, object};
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use vhost_net::client::feature as net;
use vhost_net::drive::{Content, Load, PortSpec};
use vhost_net::{Options, host};

use super::Bench;
use super::server::{Behind, Offer, Peer};

/// Bytes of a frame.
const FRAME: usize = 64_000;
/// Bytes before TCP's payload: Ethernet, IPv4, TCP.
const HEADERS: u16 = 14 + 20 + 20;
/// Frames that are written in turn, each from a buffer of its own: as many as the client's ring
/// has.
const BUFFERS: usize = 256;
/// Bytes of payload in a segment.
const SEGMENT: u16 = 1448;

/// Returns the header of a frame whose checksum and segmentation the driver leaves to the device.
fn header() -> [u8; HEADER_LEN] {
    let header = NetHeader {
        flags: NetHeader::NEEDS_CSUM,
        gso_type: GsoType::TCPV4,
        hdr_len: HEADERS,
        gso_size: SEGMENT,
        csum_start: 14 + 20,
        csum_offset: 16,
    };
    header.to_bytes(0)
}

/// A TCP segment from 198.18.0.1 to 198.18.0.2 (RFC 2544), its checksum left to be completed.
fn frame() -> Vec<u8> {
    let mut frame = vec![0x5a; FRAME];
    frame[..14].copy_from_slice(b"\x02\0\0\0\x37\x02\x02\0\0\0\x37\x01\x08\0");
    let length = (FRAME - 14) as u16;
    let mut ip = [
        0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2,
    ];
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    let sum = Checksum::new().bytes(&ip).finish();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame[14..34].copy_from_slice(&ip);
    let mut tcp = [0; 20];
    tcp[..4].copy_from_slice(&[0x10, 0, 0x10, 1]);
    tcp[12..14].copy_from_slice(&[0x50, 0x10]);
    // Of the pseudo header, as NEEDS_CSUM has it.
    let mut pseudo = [0; 12];
    pseudo[..8].copy_from_slice(&ip[12..]);
    pseudo[9] = 6;
    pseudo[10..].copy_from_slice(&(length - 20).to_be_bytes());
    let partial = Checksum::new().bytes(&pseudo).partial();
    tcp[16..18].copy_from_slice(&partial.to_be_bytes());
    frame[34..54].copy_from_slice(&tcp);
    frame
}

/// An interface for as long as this lives.
struct Interface(String);

impl Interface {
    fn make(name: &str) -> Result<Self> {
        let name = format!("{name}{}", std::process::id() % 100_000);
        ip(&["tuntap", "add", "dev", &name, "mode", "tap", "vnet_hdr"])?;
        let interface = Self(name);
        // Neither the host's IPv6 nor its addresses: no frames of its own.
        let quiet = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", interface.0);
        let _ = fs::write(quiet, "1");
        ip(&["link", "set", &interface.0, "up"])?;
        Ok(interface)
    }

    /// Frames that the kernel took from writers, and bytes.
    fn received(&self) -> Result<(u64, u64)> {
        let read = |what: &str| -> Result<u64> {
            let path = format!("/sys/class/net/{}/statistics/{what}", self.0);
            Ok(fs::read_to_string(path)?.trim().parse()?)
        };
        Ok((read("rx_packets")?, read("rx_bytes")?))
    }

    /// Opens it as a server does, with offloads.
    fn open(&self) -> Result<TapQueues> {
        let queues = TapQueues::open(&TapOptions {
            name: &self.0,
            pairs: 1,
            mtu: None,
            is_made: false,
        })?;
        let tcp = Offloads::CSUM.with(Offloads::TSO4).with(Offloads::TSO6);
        queues.set_offloads(tcp)?;
        Ok(queues)
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        // Without this it goes with its last descriptor, or stays: then it disturbs no other
        // interface.
        let _ = ip(&["link", "delete", &self.0]);
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let output = Command::new("ip")
        .args(words)
        .output()
        .context("the program `ip`")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(output.status.success(), "ip {}: {said}", words.join(" "));
    Ok(())
}

/// The section.
pub fn tap(bench: &mut Bench) -> Result<()> {
    bench.record.section(
        "Frames of 64,000 bytes into a TAP interface: through our server, and by bare writes out \
         of as many buffers; frames per second by its count",
    );
    match measure(bench) {
        Ok((ours, bare, ratio)) => {
            bench.record.measured("tap_tso_vs_bare_write", ratio);
            for (name, rate) in [("ours", ours), ("bare", bare)] {
                let key = format!("tap_tso_{name}");
                bench.record.number(&key, object::round(rate.median, 1));
                let gigabits = rate.median * FRAME as f64 * 8.0 / 1e9;
                println!("{key:34} {:.0} frames/s, {gigabits:.1} Gb/s", rate.median);
            }
            println!(
                "{:34} ours / bare {:.3} ({:.3} to {:.3})",
                "", ratio.median, ratio.min, ratio.max
            );
        }
        Err(error) => println!("tap_tso_vs_bare_write: not measured: {error:#}"),
    }
    Ok(())
}

fn measure(bench: &mut Bench) -> Result<(Measured, Measured, Measured)> {
    let (served, bare) = (Interface::make("exs")?, Interface::make("exb")?);
    let queues = bare.open()?;
    let mut file = queues.queue();
    let written = vec![[&header()[..], &frame()].concat(); BUFFERS];
    let options = Options::new().require(net::CSUM | net::HOST_TSO4);
    let specs = |_, sockets: &[PathBuf]| {
        vec![PortSpec {
            content: Content::Fixed {
                header: header(),
                frame: frame(),
            },
            ..PortSpec::to_sink(&sockets[0], options.clone(), Load::Flood, FRAME as u32)
        }]
    };
    let offer = Offer::new(Behind::Tap(served.0.clone()), 1);
    let mut contender = bench.contend(Peer::Ours, &offer, &specs)?;
    let mut rounds = Vec::new();
    let window = bench.settings.window;
    for _ in 0..bench.settings.rounds {
        let (before, start) = (served.received()?, Instant::now());
        contender.server.resume()?;
        contender.driver.measure(window / 4, window, None)?;
        let after = served.received()?;
        let ours = (after.0 - before.0) as f64 / start.elapsed().as_secs_f64();
        contender.server.pause()?;
        let whole = (after.1 - before.1) / (after.0 - before.0).max(1);
        ensure!(
            whole >= FRAME as u64 - 14,
            "frames of {whole} bytes came out of it"
        );
        // On the server's CPU, which stands still.
        let cpus = sched_getaffinity(None)?;
        host::pin(bench.settings.server_cpu)?;
        let (before, start) = (bare.received()?, Instant::now());
        let mut frames = written.iter().cycle();
        while start.elapsed() < window + window / 4 {
            for frame in frames.by_ref().take(32) {
                file.write_all(frame)?;
            }
        }
        let bare_rate = (bare.received()?.0 - before.0) as f64 / start.elapsed().as_secs_f64();
        sched_setaffinity(None, &cpus)?;
        rounds.push((ours, bare_rate));
    }
    let of = |part: &dyn Fn(&(f64, f64)) -> f64| Measured::of(rounds.iter().map(part));
    let figures = (
        of(&|round| round.0),
        of(&|round| round.1),
        of(&|round| round.0 / round.1),
    );
    let (Some(ours), Some(bare), Some(ratio)) = figures else {
        anyhow::bail!("no rounds");
    };
    Ok((ours, bare, ratio))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_says_where_the_checksum_goes_and_how_long_segments_are() {
        assert_eq!(header(), [1, 1, 54, 0, 0xa8, 0x05, 34, 0, 16, 0, 0, 0]);
    }

    #[test]
    fn the_frames_own_header_sums_to_nothing() {
        let frame = frame();
        assert_eq!(Checksum::new().bytes(&frame[14..34]).finish(), 0);
        assert_eq!(frame.len(), FRAME);
    }
}
