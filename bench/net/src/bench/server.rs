//! The servers that are measured, and their command lines.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use vhost_client::server::{Files, is_installed};

pub use vhost_client::server::Server;

use super::Settings;

/// A server that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// `exitless serve`.
    Ours,
    /// DPDK's vhost library, driven by its testpmd.
    Dpdk,
}

impl Peer {
    /// Both, ours first.
    pub const ALL: [Self; 2] = [Self::Ours, Self::Dpdk];

    /// A word for tables and keys.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Dpdk => "dpdk",
        }
    }

    /// Whether it is installed: why not, if not.
    pub fn missing(self, settings: &Settings) -> Option<String> {
        let program = match self {
            Self::Ours => settings.ours.split_whitespace().next()?,
            Self::Dpdk => &settings.testpmd,
        };
        (!is_installed(program)).then(|| format!("{program} is missing"))
    }
}

/// Device behind the ports of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behind {
    /// Discards what is sent.
    Sink,
    /// Makes frames of so many bytes.
    Source(u32),
    /// Returns frames to the port they came from.
    Loop,
    /// Two ports: frames from one go to the other. With us a switch, with DPDK `io` forwarding,
    /// which looks at nothing.
    Between,
    /// An interface of the host, which is there already.
    Tap(String),
}

/// Devices of one server.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Behind all ports.
    pub behind: Behind,
    /// Ports, one socket each.
    pub ports: usize,
    /// Queue pairs of each.
    pub pairs: u16,
    /// A disk of this path besides, at the last socket; ours only.
    pub disk: Option<String>,
}

impl Offer {
    /// So many ports of one pair.
    pub const fn new(behind: Behind, ports: usize) -> Self {
        Self {
            behind,
            ports,
            pairs: 1,
            disk: None,
        }
    }
}

/// Starts a server on its CPU and waits until its last socket takes connections.
///
/// # Errors
/// It is not installed, ended at once, or took too long.
pub fn start(settings: &Settings, peer: Peer, offer: &Offer) -> Result<Server> {
    if let Some(missing) = peer.missing(settings) {
        bail!("{missing}");
    }
    let files = Files::new()?;
    let sockets = files.sockets(offer.ports + usize::from(offer.disk.is_some()));
    let command = match peer {
        Peer::Ours => ours(settings, offer, &sockets)?,
        Peer::Dpdk => testpmd(settings, offer, &sockets, files.name())?,
    };
    Ok(Server::start(command, settings.server_cpu, files, sockets)?)
}

fn ours(settings: &Settings, offer: &Offer, sockets: &[PathBuf]) -> Result<Command> {
    let mut words = settings.ours.split_whitespace();
    let program = words.next().context("our server's command line is empty")?;
    let mut command = Command::new(program);
    for word in words {
        if word != "{devices}" {
            let cpu = settings.server_cpu.to_string();
            command.arg(
                word.replace("{cpu}", &cpu)
                    .replace("{idle}", &settings.idle),
            );
            continue;
        }
        let behind = match &offer.behind {
            Behind::Sink => "sink".to_owned(),
            Behind::Source(len) => settings.source.replace("{len}", &len.to_string()),
            Behind::Loop => "loop".to_owned(),
            Behind::Between => "switch=s0".to_owned(),
            Behind::Tap(name) => format!("tap={name}"),
        };
        for (at, socket) in sockets[..offer.ports].iter().enumerate() {
            let (socket, pairs) = (socket.display(), offer.pairs);
            let net = format!("id=n{at},socket={socket},{behind},pairs={pairs}");
            command.arg("--net").arg(net);
        }
        if let (Some(path), Some(socket)) = (&offer.disk, sockets.last()) {
            let disk = format!("id=d,path={path},socket={}", socket.display());
            command.arg("--block").arg(disk);
        }
    }
    Ok(command)
}

/// DPDK without huge pages, its own thread and the forwarding one on the server's CPU. It makes its
/// sockets in order.
fn testpmd(settings: &Settings, offer: &Offer, sockets: &[PathBuf], name: &str) -> Result<Command> {
    let (mode, more): (_, &[&str]) = match &offer.behind {
        Behind::Sink => ("rxonly", &[]),
        Behind::Source(_) => ("txonly", &[]),
        // Each port is its own partner.
        Behind::Loop => ("io", &["--port-topology=loop"]),
        Behind::Between => ("io", &[]),
        Behind::Tap(_) => bail!("not measured with DPDK: its TAP driver is another way there"),
    };
    if offer.disk.is_some() {
        bail!("testpmd serves no disks");
    }
    let len = match offer.behind {
        Behind::Source(len) => len,
        _ => 64,
    };
    let (cpu, pairs) = (settings.server_cpu, offer.pairs);
    let mut command = Command::new(&settings.testpmd);
    command
        .arg(format!("--lcores=0@{cpu},1@{cpu}"))
        .args(["--no-pci", "--no-huge", "-m", "512"])
        .arg(format!("--file-prefix={name}"));
    for (at, socket) in sockets.iter().enumerate() {
        let socket = socket.display();
        command.arg(format!(
            "--vdev=net_vhost{at},iface={socket},queues={pairs}"
        ));
    }
    command
        .args(["--", "--burst=32", "--nb-cores=1", "--txd=256", "--rxd=256"])
        .args(["--no-flush-rx", "--total-num-mbufs=16384"])
        .arg(format!("--txpkts={len}"))
        .arg(format!("--rxq={pairs}"))
        .arg(format!("--txq={pairs}"))
        .arg(format!("--forward-mode={mode}"))
        .args(more);
    Ok(command)
}
