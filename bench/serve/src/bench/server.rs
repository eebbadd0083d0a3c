//! The servers that are measured, and their command lines.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use vhost_client::server::{Files, is_installed};

pub use vhost_client::server::Server;

use super::Settings;

/// A server that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Ours, with its usual idle policy.
    Ours,
    /// Ours, with another idle policy.
    OursIdle(String),
    /// Another build of ours, with this command line.
    Beside(String),
    /// qemu-storage-daemon, all exports on one iothread.
    Qsd(Aio),
    /// SPDK's vhost target, which polls; files by its aio back end.
    Spdk,
}

/// Means by which qemu-storage-daemon reads and writes files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// io_uring, on the iothread.
    Uring,
    /// A pool of threads, which is its default.
    Threads,
}

impl Peer {
    /// Whether it is installed: why not, if not.
    pub fn missing(&self, settings: &Settings) -> Option<String> {
        let program = match self {
            Self::Ours | Self::OursIdle(_) => settings.ours.split_whitespace().next()?,
            Self::Beside(command) => command.split_whitespace().next()?,
            Self::Qsd(_) => &settings.qsd,
            Self::Spdk => {
                let Some(vhost) = settings.spdk_vhost() else {
                    return Some("no build of SPDK is given".to_owned());
                };
                return (!vhost.is_file()).then(|| format!("{} is missing", vhost.display()));
            }
        };
        (!is_installed(program)).then(|| format!("{program} is missing"))
    }

    /// A word for tables and keys.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ours | Self::OursIdle(_) => "ours",
            Self::Beside(_) => "old",
            Self::Qsd(Aio::Uring) => "qsd",
            Self::Qsd(Aio::Threads) => "qsdthr",
            Self::Spdk => "spdk",
        }
    }

    /// Whether it is a build of ours.
    pub const fn is_ours(&self) -> bool {
        !matches!(self, Self::Qsd(_) | Self::Spdk)
    }
}

/// Backing of a disk; sizes in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing is read or written.
    Null,
    /// Memory of the server; the peer, which has no such disk, gets a file in tmpfs.
    Ram(u32),
    /// A file in /dev/shm.
    Tmpfs(u32),
    /// A file in the directory for files, through the page cache.
    Buffered(u32),
    /// The same with O_DIRECT.
    Direct(u32),
}

impl Kind {
    /// qemu-storage-daemon in each way that may be its best for such a disk.
    pub const fn qsds(self) -> &'static [Peer] {
        match self {
            Self::Null => &[Peer::Qsd(Aio::Uring)],
            _ => &[Peer::Qsd(Aio::Uring), Peer::Qsd(Aio::Threads)],
        }
    }

    /// Returns the MiB that are written before the disk is measured.
    pub const fn mib(self) -> u32 {
        match self {
            Self::Null => 0,
            Self::Ram(mib) | Self::Tmpfs(mib) | Self::Buffered(mib) | Self::Direct(mib) => mib,
        }
    }
}

/// One disk.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its backing.
    pub kind: Kind,
    /// Its weight, where the server knows weights.
    pub weight: u32,
}

impl Disk {
    /// So many equal disks.
    pub fn many(kind: Kind, count: usize) -> Vec<Self> {
        vec![Self { kind, weight: 1 }; count]
    }
}

/// Starts a server on its CPU and waits until its last socket takes connections.
///
/// # Errors
/// It is not installed, ended at once, or took too long.
pub fn start(settings: &Settings, peer: &Peer, disks: &[Disk]) -> Result<Server> {
    if disks.is_empty() {
        bail!("a server without disks");
    }
    let mut files = Files::new()?;
    let sockets = files.sockets(disks.len());
    let directory = files.directory().to_owned();
    let mut image = |kind: Kind| {
        let directory = match kind {
            Kind::Buffered(_) | Kind::Direct(_) => settings.files.as_path(),
            Kind::Null | Kind::Ram(_) | Kind::Tmpfs(_) => Path::new("/dev/shm"),
        };
        fs::create_dir_all(directory)?;
        let path = files.other(directory);
        // Real pages: holes would all be read from the same page of zeroes. And on the disk, not on
        // their way to it.
        let mut file = File::create(&path)?;
        file.write_all(&vec![0x5a; (kind.mib() as usize) << 20])?;
        file.sync_all().map(|()| path)
    };
    let offered: Vec<_> = disks.iter().zip(&sockets).collect();
    let idle = &settings.idle;
    let command = match peer {
        Peer::Ours => ours(settings, &settings.ours, idle, &offered, &mut image)?,
        Peer::OursIdle(idle) => ours(settings, &settings.ours, idle, &offered, &mut image)?,
        Peer::Beside(line) => ours(settings, line, idle, &offered, &mut image)?,
        Peer::Spdk => spdk(settings, disks, &directory, &mut image)?,
        Peer::Qsd(aio) => qsd(&settings.qsd, *aio, disks, &sockets, &mut image)?,
    };
    Ok(Server::start(command, settings.server_cpu, files, sockets)?)
}

fn ours(
    settings: &Settings,
    line: &str,
    idle: &str,
    offered: &[(&Disk, &PathBuf)],
    image: &mut impl FnMut(Kind) -> io::Result<PathBuf>,
) -> Result<Command> {
    let mut words = line.split_whitespace();
    let program = words.next().context("our server's command line is empty")?;
    let mut command = Command::new(program);
    for word in words {
        if word != "{blocks}" {
            let cpu = settings.server_cpu.to_string();
            command.arg(word.replace("{cpu}", &cpu).replace("{idle}", idle));
            continue;
        }
        for (at, (disk, socket)) in offered.iter().enumerate() {
            let path = match disk.kind {
                Kind::Null => "null:1G".to_owned(),
                Kind::Ram(mib) => format!("ram:{mib}M"),
                Kind::Tmpfs(_) | Kind::Buffered(_) => image(disk.kind)?.display().to_string(),
                Kind::Direct(_) => format!("{},direct=on", image(disk.kind)?.display()),
            };
            let socket = socket.display();
            let weight = match disk.weight {
                1 => String::new(),
                weight => format!(",weight={weight}"),
            };
            command
                .arg("--block")
                .arg(format!("id=d{at},path={path},socket={socket}{weight}"));
        }
    }
    Ok(command)
}

fn qsd(
    program: &str,
    aio: Aio,
    disks: &[Disk],
    sockets: &[PathBuf],
    image: &mut impl FnMut(Kind) -> io::Result<PathBuf>,
) -> Result<Command> {
    let aio = match aio {
        Aio::Uring => "io_uring",
        Aio::Threads => "threads",
    };
    let mut command = Command::new(program);
    command.args(["--object", "iothread,id=t0"]);
    for (at, (disk, socket)) in disks.iter().zip(sockets).enumerate() {
        let node = match disk.kind {
            Kind::Null => format!("driver=null-co,node-name=n{at},size=1073741824,read-zeroes=off"),
            kind => {
                let path = image(kind)?;
                let direct = if matches!(kind, Kind::Direct(_)) {
                    "on"
                } else {
                    "off"
                };
                let path = path.display();
                format!(
                    "driver=file,node-name=n{at},filename={path},aio={aio},cache.direct={direct},discard=unmap"
                )
            }
        };
        let socket = socket.display();
        command.args(["--blockdev", &node]).arg("--export").arg(format!(
            "type=vhost-user-blk,id=e{at},node-name=n{at},addr.type=unix,addr.path={socket},writable=on,num-queues=1,iothread=t0"
        ));
    }
    Ok(command)
}

/// Megabytes of memory that DPDK is given: enough for a malloc disk of 256 MiB, without huge pages.
const DPDK_MIB: u32 = 1024;

/// Sockets are named as ours are. Its malloc and aio back ends stand for RAM disks and files;
/// O_DIRECT it takes by itself.
fn spdk(
    settings: &Settings,
    disks: &[Disk],
    sockets: &Path,
    image: &mut impl FnMut(Kind) -> io::Result<PathBuf>,
) -> Result<Command> {
    let (mut back_ends, mut controllers) = (Vec::new(), Vec::new());
    for (at, disk) in disks.iter().enumerate() {
        let name = format!("b{at}");
        let blocks = |mib: u32| u64::from(mib) * 2048;
        back_ends.push(match disk.kind {
            Kind::Null => json!({"method": "bdev_null_create", "params":
                {"name": name, "num_blocks": blocks(1024), "block_size": 512}}),
            Kind::Ram(mib) => json!({"method": "bdev_malloc_create", "params":
                {"name": name, "num_blocks": blocks(mib), "block_size": 512}}),
            Kind::Buffered(_) => bail!("SPDK opens files with O_DIRECT only"),
            Kind::Tmpfs(_) | Kind::Direct(_) => json!({"method": "bdev_aio_create", "params":
                {"name": name, "filename": image(disk.kind)?, "block_size": 512}}),
        });
        controllers.push(json!({"method": "vhost_create_blk_controller", "params":
            {"ctrlr": format!("{at}.s"), "dev_name": name}}));
    }
    let config = json!({"subsystems": [
        {"subsystem": "bdev", "config": back_ends},
        {"subsystem": "vhost_blk", "config": controllers}]});
    let path = sockets.join("spdk.json");
    fs::write(&path, config.to_string())?;
    let vhost = settings.spdk_vhost().context("no build of SPDK is given")?;
    let mut command = Command::new(vhost);
    let mask = 1_u64 << settings.server_cpu;
    command
        .args(["--no-huge", "--no-rpc-server", "-u"])
        .args(["-s", &DPDK_MIB.to_string(), "-m", &format!("{mask:#x}")])
        .arg("-S")
        .arg(sockets)
        .arg("-c")
        .arg(path);
    Ok(command)
}
