//! `--net`, checked: a TAP interface is open, the socket of another process is not.
//!
//! UNSAFETY: one `ioctl` (TUNSETIFF) on a descriptor held here.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use anyhow::{Context, bail};
use net_ports::TapQueues;
use rustix::io::Errno;
use rustix::net::netdevice;
use vhost_import::{Class, NetIdentity};

use super::disks::Disk;
use super::remote::{RemoteConfig, Server};
use super::remote_disk::socket_path;
use crate::values::keys::Keys;
use crate::values::size;

/// What is behind a network interface.
#[derive(Debug)]
pub enum NetBackend {
    /// The built-in responder at this address.
    Responder(Ipv4Addr),
    /// A TAP interface of the host: its name, and its queue, open, non-blocking, with virtio-net headers.
    Tap {
        /// Interface name.
        name: String,
        /// The open queue.
        file: File,
    },
    /// A TAP interface of the host, whose frames the host's kernel moves (vhost-net).
    Vhost {
        /// Interface name.
        name: String,
        /// Its queue.
        tap: TapQueues,
        /// Entries of each of the two queues.
        queue_size: u16,
        /// Its name in the log.
        id: String,
    },
    /// Another process, over vhost-user.
    Socket {
        /// Its socket.
        socket: PathBuf,
        /// Entries of each queue.
        queue_size: u16,
        /// Queue pairs.
        pairs: u16,
        /// Largest packet, if the guest is told.
        mtu: Option<u16>,
        /// Its name in the log.
        id: String,
    },
}

/// One network interface.
#[derive(Debug)]
pub struct NetConfig {
    /// What is behind it.
    pub backend: NetBackend,
    /// The guest's station address: unicast.
    pub mac: [u8; 6],
}

impl NetConfig {
    /// Checks one `--net`, the `index`-th.
    pub fn check(text: &str, index: usize) -> anyhow::Result<Self> {
        let mut keys = Keys::parse("--net", text)?;
        let mac = match keys.take("mac") {
            Some(text) => mac(text)?,
            // Locally administered.
            None => [0x52, 0x54, 0, 0x65, 0x78, index as u8 + 1],
        };
        let responder = match keys.take("responder") {
            Some("") => true,
            Some(value) => bail!("--net: responder takes no value ({value:?})"),
            None => false,
        };
        let tap = keys.take("tap");
        let ip = keys.take("ip");
        let is_made = keys.take_optional_switch("create")?;
        let is_vhost = keys.take_optional_switch("vhost")?;
        if let Some(socket) = keys.take("socket") {
            if responder || tap.is_some() || ip.is_some() || is_made.is_some() || is_vhost.is_some()
            {
                bail!(
                    "--net {text:?}: socket=PATH goes with mac, mtu, pairs, queue-size and id alone"
                );
            }
            let backend = remote(socket, keys, index)?;
            return Ok(Self { backend, mac });
        }
        if let (Some(name), Some(true)) = (tap, is_vhost) {
            if responder || ip.is_some() {
                bail!(
                    "--net {text:?}: vhost=on goes with tap, create, mac, queue-size and id alone"
                );
            }
            let backend = vhost(name, is_made.unwrap_or(false), keys, index)?;
            return Ok(Self { backend, mac });
        }
        keys.finish()?;
        let backend = match (responder, tap) {
            (true, None) if is_vhost.is_some() => bail!("--net: vhost is for tap=NAME"),
            (true, None) if is_made.is_some() => bail!("--net: create is for tap=NAME"),
            (true, None) => {
                let text = ip.unwrap_or("10.0.2.2");
                let ip = text
                    .parse()
                    .with_context(|| format!("--net: {text:?} is no IPv4 address"))?;
                NetBackend::Responder(ip)
            }
            (false, Some(_)) if ip.is_some() => bail!("--net: ip is for responder"),
            (false, Some(name)) => {
                let file = open_tap(name, is_made.unwrap_or(false))?;
                let name = name.to_owned();
                NetBackend::Tap { name, file }
            }
            _ => bail!("--net {text:?}: say responder, tap=NAME or socket=PATH"),
        };
        Ok(Self { backend, mac })
    }

    /// Whether another process serves it, or the host's kernel; then the option that says so.
    pub fn remote(&self) -> Option<String> {
        match &self.backend {
            NetBackend::Socket { socket, .. } => Some(format!("--net socket={}", socket.display())),
            NetBackend::Vhost { name, .. } => Some(format!("--net tap={name},vhost=on")),
            NetBackend::Responder(_) | NetBackend::Tap { .. } => None,
        }
    }

    /// The device that another process serves, or the host's kernel, or itself if none does.
    ///
    /// # Errors
    /// It is served here.
    pub fn into_remote(self, has_iommu: bool) -> Result<RemoteConfig, Self> {
        let Self { backend, mac } = self;
        match backend {
            NetBackend::Socket {
                socket,
                queue_size,
                pairs,
                mtu,
                id,
            } => Ok(RemoteConfig {
                server: Server::Socket {
                    socket,
                    class: Class::Net(NetIdentity { mac, mtu }),
                },
                queues: 2 * pairs,
                queue_size,
                id,
                has_iommu,
            }),
            NetBackend::Vhost {
                name,
                tap,
                queue_size,
                id,
            } => Ok(RemoteConfig {
                server: Server::Kernel {
                    name,
                    identity: NetIdentity {
                        mac,
                        mtu: Some(tap.mtu()),
                    },
                    tap,
                },
                // One pair.
                queues: 2,
                queue_size,
                id,
                has_iommu,
            }),
            backend => Err(Self { backend, mac }),
        }
    }
}

/// What is left of a `--net` whose frames the host's kernel moves.
fn vhost(
    name: &str,
    is_made: bool,
    mut keys: Keys<'_>,
    index: usize,
) -> anyhow::Result<NetBackend> {
    let queue_size = queue_size(&mut keys)?;
    let id = id(&mut keys, index)?;
    keys.finish()?;
    check_tap(name, is_made)?;
    let tap = TapQueues::open(name, 1).with_context(|| format!("TAP {name}"))?;
    Ok(NetBackend::Vhost {
        name: name.to_owned(),
        tap,
        queue_size,
        id,
    })
}

fn queue_size(keys: &mut Keys<'_>) -> anyhow::Result<u16> {
    match number(keys, "queue-size")? {
        Some(size) if !(size.is_power_of_two() && (2..=1024).contains(&size)) => {
            bail!("--net: queue-size is a power of two from 2 to 1024, not {size}")
        }
        size => Ok(size.map_or(256, |size| size as u16)),
    }
}

/// Name of the device in the log.
fn id(keys: &mut Keys<'_>, index: usize) -> anyhow::Result<String> {
    match keys.take("id") {
        Some("") => bail!("--net: id is empty"),
        Some(id) => Ok(id.to_owned()),
        None => Ok(format!("net{index}")),
    }
}

fn number(keys: &mut Keys<'_>, key: &str) -> anyhow::Result<Option<u64>> {
    let value = keys.take(key).map(size::number).transpose();
    value.with_context(|| format!("--net: {key}"))
}

/// What is left of a `--net` that another process serves.
fn remote(socket: &str, mut keys: Keys<'_>, index: usize) -> anyhow::Result<NetBackend> {
    /// What Linux takes: an IPv4 host's least, and what fits the field.
    const MTU: std::ops::RangeInclusive<u64> = 68..=65_535;
    let socket = socket_path("--net", socket)?;
    let mtu = match number(&mut keys, "mtu")? {
        Some(mtu) if !MTU.contains(&mtu) => bail!("--net: mtu is 68 to 65535, not {mtu}"),
        mtu => mtu.map(|mtu| mtu as u16),
    };
    let queue_size = queue_size(&mut keys)?;
    let pairs = match number(&mut keys, "pairs")? {
        Some(pairs) if !(1..=16).contains(&pairs) => bail!("--net: pairs is 1 to 16, not {pairs}"),
        pairs => pairs.map_or(1, |pairs| pairs as u16),
    };
    let id = id(&mut keys, index)?;
    keys.finish()?;
    Ok(NetBackend::Socket {
        socket,
        queue_size,
        pairs,
        mtu,
        id,
    })
}

/// Refuses sockets that serve two devices.
///
/// # Errors
/// Names one.
pub fn check_sockets(nets: &[NetConfig], disks: &[Disk]) -> anyhow::Result<()> {
    let of_disks = disks.iter().filter_map(|disk| match disk {
        Disk::Remote(disk) => Some(&disk.socket),
        Disk::File(_) => None,
    });
    let mut taken: Vec<&PathBuf> = of_disks.collect();
    for net in nets {
        if let NetBackend::Socket { socket, .. } = &net.backend {
            if taken.contains(&socket) {
                let socket = socket.display();
                bail!("--net socket={socket} is given twice: a socket serves one device");
            }
            taken.push(socket);
        }
    }
    Ok(())
}

fn mac(text: &str) -> anyhow::Result<[u8; 6]> {
    let parts: Vec<_> = text.split(':').collect();
    let bytes: Vec<u8> = parts
        .iter()
        .filter(|part| part.len() == 2)
        .filter_map(|part| u8::from_str_radix(part, 16).ok())
        .collect();
    match <[u8; 6]>::try_from(bytes) {
        Ok(mac) if parts.len() == 6 && mac[0] & 1 == 0 && mac != [0; 6] => Ok(mac),
        _ => bail!("--net: {text:?} is no unicast MAC address"),
    }
}

const TUN: &str = "/dev/net/tun";
/// Advice where it cannot be opened.
const NO_TUN: &str =
    "modprobe tun brings it, a container has to be given it; --net responder needs none";

const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;

/// `struct ifreq` with the flags member of its union.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Opens the interface, which has to be there unless `is_made` says that the kernel may make one of that name; that one goes
/// with the process.
pub(crate) fn open_tap(name: &str, is_made: bool) -> anyhow::Result<File> {
    check_tap(name, is_made)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(TUN)
        .with_context(|| format!("TAP {name}: {TUN} cannot be opened ({NO_TUN})"))?;
    let mut request = InterfaceRequest {
        name: [0; 16],
        flags: IFF_TAP | IFF_NO_PI | IFF_VNET_HDR,
        rest: [0; 22],
    };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`, 40 bytes, which `request` is.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) } < 0 {
        let error = io::Error::last_os_error();
        let hint = match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => {
                "no permission (make it for this user: ip tuntap add mode tap user …; create=on takes CAP_NET_ADMIN; --net responder \
                 needs neither)"
            }
            Some(libc::EBUSY) => "another process has it open",
            Some(libc::EINVAL) => "it exists and is no TAP interface",
            _ => "the host refused",
        };
        return Err(anyhow::Error::new(error).context(format!("TAP {name}: {hint}")));
    }
    Ok(file)
}

/// Refuses a name that is none, and an interface that is not there unless it may be made.
fn check_tap(name: &str, is_made: bool) -> anyhow::Result<()> {
    if name.is_empty()
        || name.len() > 15
        || !name.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
    {
        bail!("--net: {name:?} is no interface name (1 to 15 printable characters)");
    }
    if !is_made
        && !is_there(name)
            .with_context(|| format!("TAP {name} cannot be looked for (create=on does not look)"))?
    {
        bail!(
            "TAP {name}: there is no such interface; make it (ip tuntap add {name} mode tap user …), \
             or say create=on for one that goes with the machine"
        );
    }
    Ok(())
}

/// Whether this network namespace has an interface of that name.
fn is_there(name: &str) -> io::Result<bool> {
    // Any socket will do to ask by.
    let socket = UnixDatagram::unbound()?;
    match netdevice::name_to_index(&socket, name) {
        Ok(_) => Ok(true),
        Err(Errno::NODEV) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

const _: () = assert!(size_of::<InterfaceRequest>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_responder_has_an_address_and_each_interface_a_mac_of_its_own() {
        let one = NetConfig::check("responder", 0).unwrap();
        let two = NetConfig::check("responder,ip=192.168.9.1,mac=02:00:00:00:00:09", 1).unwrap();
        assert!(
            matches!(one.backend, NetBackend::Responder(ip) if ip == Ipv4Addr::new(10, 0, 2, 2))
        );
        assert!(
            matches!(two.backend, NetBackend::Responder(ip) if ip == Ipv4Addr::new(192, 168, 9, 1))
        );
        assert_eq!(two.mac, [2, 0, 0, 0, 0, 9]);
        assert_ne!(one.mac, NetConfig::check("responder", 1).unwrap().mac);
    }

    #[test]
    fn a_socket_has_two_queues_a_name_and_an_mtu_if_that_is_said() {
        let remote = |text| {
            let net = NetConfig::check(text, 3).unwrap();
            let Ok(remote) = net.into_remote(true) else {
                panic!("another process serves it");
            };
            remote
        };
        let identity = |remote: &RemoteConfig| match &remote.server {
            Server::Socket {
                class: Class::Net(identity),
                ..
            } => *identity,
            _ => panic!("a socket's network device"),
        };
        let plain = remote("socket=/tmp/n.sock");
        assert_eq!((plain.queues, plain.queue_size), (2, 256));
        assert_eq!(plain.id, "net3");
        assert_eq!(plain.option(), "--net socket=/tmp/n.sock");
        let mac = [0x52, 0x54, 0, 0x65, 0x78, 4];
        assert_eq!(identity(&plain), NetIdentity { mac, mtu: None });
        let full = remote("socket=a,mac=02:00:00:00:00:09,mtu=9000,queue-size=1024,id=blue");
        let mac = [2, 0, 0, 0, 0, 9];
        let mtu = Some(9000);
        assert_eq!(identity(&full), NetIdentity { mac, mtu });
        assert_eq!((full.queue_size, full.id.as_str()), (1024, "blue"));
        assert_eq!(remote("socket=a,pairs=4").queues, 8);
    }

    #[test]
    fn a_socket_serves_one_device() {
        let net = |text| NetConfig::check(text, 0).unwrap();
        assert!(check_sockets(&[net("socket=a"), net("socket=b")], &[]).is_ok());
        let error = check_sockets(&[net("socket=a"), net("responder"), net("socket=a")], &[]);
        assert!(error.unwrap_err().to_string().contains("twice"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "bridge",
            "responder=1",
            "responder,tap=t0",
            "responder,ip=1.2.3",
            "responder,mac=01:00:00:00:00:01",
            "responder,mac=02:00:00:00:00",
            "responder,mac=2:0:0:0:0:1",
            "responder,colour=red",
            "responder,ip=1.2.3.4,ip=1.2.3.4",
            "tap=",
            "tap=name-that-is-too-long",
            "tap=../../x",
            "socket=",
            "socket=a,tap=b",
            "socket=a,responder",
            "socket=a,ip=1.2.3.4",
            "socket=a,mtu=67",
            "socket=a,mtu=65536",
            "socket=a,queue-size=3",
            "socket=a,queue-size=2048",
            "socket=a,id=",
            "socket=a,queues=2",
            "socket=a,pairs=0",
            "socket=a,pairs=17",
            "socket=a,vhost=on",
            "responder,vhost=on",
            "vhost=on",
            "tap=t0,vhost=on,ip=1.2.3.4",
            "tap=t0,vhost=on,queue-size=3",
            "tap=t0,vhost=maybe",
            "responder,mtu=1500",
        ] {
            assert!(NetConfig::check(text, 0).is_err(), "{text}");
        }
    }
}
