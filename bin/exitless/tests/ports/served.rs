//! A daemon with network devices, and front ends that move single frames.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use spawned::program::{Program, command};
use tempfile::TempDir;
use vhost_net::client::feature;
use vhost_net::frames::Packet;
use vhost_net::{Client, Options};

/// Features that a driver over an interface of the host negotiates: offloads in both directions.
pub const OFFLOADS: u64 =
    feature::CSUM | feature::GUEST_CSUM | feature::HOST_TSO4 | feature::GUEST_TSO4;

/// A daemon, in a folder of its own.
pub struct Served {
    pub program: Program,
    folder: TempDir,
}

impl Served {
    /// Serves these devices, whose sockets are `ID.sock`, with this idle policy.
    pub fn start(idle: &str, nets: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let stats = path("stats");
        let mut args = vec!["serve".into(), "--idle".into(), idle.to_owned()];
        args.extend(["--stats".to_owned(), stats]);
        for net in nets {
            let id = net.split(',').next().unwrap_or_default();
            let net = net.replace("FOLDER", &path(""));
            args.extend([
                "--net".to_owned(),
                format!("id={net},socket={}", path(&format!("{id}.sock"))),
            ]);
        }
        let args = Vec::from_iter(args.iter().map(String::as_str));
        let program = Program::start(command(env!("CARGO_BIN_EXE_exitless"), &args), true);
        program.wait_for("ready");
        Self { program, folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A front end of a device, whose driver takes and leaves undone what the device offers of
    /// checksums and TCP to be segmented.
    pub fn client(&self, id: &str, pairs: u16) -> Client {
        let options = Options {
            buffer_len: 2_048,
            max_frame: 65_553,
            ..Options::new()
        };
        let mut options = options.pairs(pairs);
        options.features |= OFFLOADS;
        let client = Client::connect(&self.path(&format!("{id}.sock")), &options);
        client.expect("a device")
    }

    /// Ends it; its devices' counters.
    pub fn end(self) -> (String, Value) {
        let Self { program, folder } = self;
        let ended = program.ends_by(Signal::TERM, 0);
        let stats = std::fs::read(folder.path().join("stats")).expect("counters");
        let stats: Value = serde_json::from_slice(&stats).expect("JSON");
        (ended.said, stats["devices"].clone())
    }
}

/// Sends a frame, however long the device takes to have room.
pub fn send(client: &mut Client, packet: &Packet) {
    let end = Instant::now() + Duration::from_secs(5);
    while !client.send_frame(0, packet).expect("a right ring") {
        assert!(Instant::now() < end, "the device takes no frame");
        thread::yield_now();
    }
}

/// The next frame of a pair.
pub fn receive(client: &mut Client, pair: usize) -> Vec<Packet> {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let packets = client.take_frames(pair).expect("a right ring");
        if !packets.is_empty() {
            return packets;
        }
        assert!(Instant::now() < end, "no frame");
        thread::yield_now();
    }
}

/// Two devices joined by their drivers: what one hands over, the other is given to send, with what
/// is left undone in it.
pub fn join(ends: &mut [Client; 2], is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let mut has_moved = false;
        for at in 0..2 {
            let packets = ends[at].take_frames(0).expect("a right ring");
            has_moved |= !packets.is_empty();
            for (mut header, frame) in packets {
                // Of the flags a driver may send only NEEDS_CSUM; the number of buffers is the
                // receiver's.
                header[0] &= 1;
                header[10..].fill(0);
                send(&mut ends[1 - at], &(header, frame));
            }
        }
        if !has_moved {
            thread::yield_now();
        }
    }
}

/// Frames of a capture, all that are whole: it may be under way.
pub fn frames(path: &Path) -> Vec<Vec<u8>> {
    let file = std::fs::File::open(path).expect("it is there");
    let mut reader = pcap_file::pcap::PcapReader::new(file).expect("a capture");
    let mut frames = Vec::new();
    while let Some(Ok(packet)) = reader.next_packet() {
        frames.push(packet.data.into_owned());
    }
    frames
}
