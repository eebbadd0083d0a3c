//! `--net`, checked: a TAP interface is open, the socket of another process is not.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use net_ports::{Existing, TapOptions, TapQueues};
use vhost_import::{Class, NetIdentity};

use super::disks::Disk;
use super::remote::{RemoteConfig, Server};
use super::remote_disk::socket_path;
use super::restart;
use crate::ports::{CaptureConfig, open_tap};
use crate::values::keys::Keys;
use crate::values::net::NetSpec;
use crate::values::size;

/// Back end of a network interface.
#[derive(Debug)]
pub enum NetBackend {
    /// The built-in responder at this address.
    Responder(Ipv4Addr),
    /// A TAP interface of the host, open.
    Tap {
        /// Interface name.
        name: String,
        /// Its queues.
        queues: TapQueues,
    },
    /// The switch of this name, which the machine's interfaces that name it share.
    Switch {
        /// Its name.
        name: String,
        /// Largest packet.
        mtu: u16,
    },
    /// A TAP interface of the host, open, whose frames the host's kernel moves (vhost-net).
    Vhost {
        /// Interface name.
        name: String,
        /// Its queue.
        queues: TapQueues,
        /// Its name in the log.
        id: String,
    },
    /// Another process, over vhost-user.
    Socket {
        /// Its socket.
        socket: PathBuf,
        /// Largest packet, if it is offered to the guest.
        mtu: Option<u16>,
        /// Its name in the log.
        id: String,
    },
}

/// One network interface.
#[derive(Debug)]
pub struct NetConfig {
    /// Its back end.
    pub backend: NetBackend,
    /// The guest's station address: unicast.
    pub mac: [u8; 6],
    /// Queue pairs.
    pub pairs: u16,
    /// Entries of each queue.
    pub queue_size: u16,
    /// Where its frames are written.
    pub capture: Option<CaptureConfig>,
}

/// Entries of a queue, unless another number is given.
const QUEUE: u16 = 256;
/// Queue pairs of a device that another process serves, at most.
const SOCKET_PAIRS: u16 = 16;
/// Keys that network devices of `serve` have too.
const KEYS: [&str; 9] = [
    "id",
    "socket",
    "tap",
    "mtu",
    "pairs",
    "queue-size",
    "pcap",
    "pcap-max",
    "pcap-replace",
];

impl NetConfig {
    /// Checks one `--net`, the `index`-th.
    pub fn check(text: &str, index: usize) -> anyhow::Result<Self> {
        let mut keys = Keys::parse("--net", text)?;
        let mac = match keys.take("mac") {
            Some(text) => mac(text)?,
            // Locally administered.
            None => [0x52, 0x54, 0, 0x65, 0x78, index as u8 + 1],
        };
        let mut given = Given {
            responder: keys.take_word("responder")?,
            switch: keys.take("switch"),
            ip: keys.take("ip"),
            is_made: keys.take_optional_switch("create")?,
            is_vhost: keys.take_optional_switch("vhost")?,
            spec: NetSpec::default(),
        };
        given.spec = NetSpec::take(&mut keys, &KEYS)?;
        keys.finish()?;
        let named = given.named().with_context(|| format!("--net {text:?}"))?;
        let (spec, option) = (&given.spec, "--net");
        Ok(Self {
            mac,
            pairs: spec.pairs().context(option)?,
            queue_size: size::queue_size(spec.queue_size, QUEUE).context(option)?,
            capture: given.capture()?,
            backend: given.backend(named, index)?,
        })
    }

    /// Returns the option that says so, if another process serves it, or the host's kernel.
    pub fn remote(&self) -> Option<String> {
        match &self.backend {
            NetBackend::Socket { socket, .. } => Some(format!("--net socket={}", socket.display())),
            NetBackend::Vhost { name, .. } => Some(format!("--net tap={name},vhost=on")),
            NetBackend::Responder(_) | NetBackend::Tap { .. } | NetBackend::Switch { .. } => None,
        }
    }

    /// Returns the device that another process serves, or the host's kernel, or itself if neither
    /// does.
    ///
    /// # Errors
    /// It is served here.
    pub fn into_remote(self, has_iommu: bool) -> Result<RemoteConfig, Box<Self>> {
        let mac = self.mac;
        let (server, id) = match self.backend {
            NetBackend::Socket { socket, mtu, id } => {
                let class = Class::Net(NetIdentity { mac, mtu });
                (Server::Socket { socket, class }, id)
            }
            NetBackend::Vhost { name, queues, id } => {
                let mtu = Some(queues.mtu());
                let server = Server::Kernel {
                    name,
                    tap: queues,
                    identity: NetIdentity { mac, mtu },
                };
                (server, id)
            }
            backend => return Err(Box::new(Self { backend, ..self })),
        };
        Ok(RemoteConfig {
            server,
            queues: 2 * self.pairs,
            queue_size: self.queue_size,
            id,
            has_iommu,
        })
    }
}

/// Kind of back end that a `--net` names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Named {
    Responder,
    Tap,
    Vhost,
    Switch,
    Socket,
}

/// A `--net` as it is written.
struct Given<'t> {
    responder: bool,
    switch: Option<&'t str>,
    ip: Option<&'t str>,
    is_made: Option<bool>,
    is_vhost: Option<bool>,
    spec: NetSpec,
}

impl Given<'_> {
    /// Returns the kind that it names: one, and keys for that alone.
    fn named(&self) -> anyhow::Result<Named> {
        let spec = &self.spec;
        let named = [
            (self.responder, Named::Responder),
            (spec.tap.is_some(), Named::Tap),
            (self.switch.is_some(), Named::Switch),
            (spec.socket.is_some(), Named::Socket),
        ];
        let mut named = named.into_iter().filter(|(is_given, _)| *is_given);
        let (Some((_, named)), None) = (named.next(), named.next()) else {
            bail!("say one of responder, tap=NAME, switch=NAME and socket=PATH");
        };
        let named = match (named, self.is_vhost) {
            (Named::Tap, Some(true)) => Named::Vhost,
            (named, _) => named,
        };
        let tap = &[Named::Tap, Named::Vhost];
        let keys: [(&str, bool, &[Named], &str); 7] = [
            ("ip", self.ip.is_some(), &[Named::Responder], "responder"),
            ("create", self.is_made.is_some(), tap, "tap=NAME"),
            ("vhost", self.is_vhost.is_some(), tap, "tap=NAME"),
            (
                "pairs",
                spec.pairs.is_some_and(|pairs| pairs != 1),
                &[Named::Tap, Named::Socket],
                "tap=NAME without vhost=on, and socket=PATH",
            ),
            (
                "id",
                spec.id.is_some(),
                &[Named::Socket, Named::Vhost],
                "socket=PATH, and tap=NAME with vhost=on",
            ),
            (
                "mtu",
                spec.mtu.is_some(),
                &[Named::Tap, Named::Vhost, Named::Switch, Named::Socket],
                "tap=NAME, switch=NAME and socket=PATH",
            ),
            (
                "pcap",
                spec.pcap.is_some(),
                &[Named::Responder, Named::Tap, Named::Switch],
                "what this process serves: the server of a socket sees the frames",
            ),
        ];
        for (key, is_given, of, whose) in keys {
            if is_given && !of.contains(&named) {
                bail!("{key} is for {whose}");
            }
        }
        Ok(named)
    }

    /// Returns its capture, whose file can be made.
    fn capture(&self) -> anyhow::Result<Option<CaptureConfig>> {
        let mut capture = self.spec.capture().context("--net")?;
        if let Some(capture) = &mut capture {
            if restart::count() > 0 {
                // Of this machine, before its guest's reset.
                capture.existing = Existing::Continued;
            }
            capture.check().context("--net")?;
        }
        Ok(capture)
    }

    fn backend(&self, named: Named, index: usize) -> anyhow::Result<NetBackend> {
        let spec = &self.spec;
        let mtu = spec.mtu().context("--net")?;
        Ok(match named {
            Named::Responder => {
                let text = self.ip.unwrap_or("10.0.2.2");
                let ip = text.parse();
                let ip = ip.with_context(|| format!("--net: {text:?} is no IPv4 address"))?;
                NetBackend::Responder(ip)
            }
            Named::Tap | Named::Vhost => {
                let name = spec.tap.clone().unwrap_or_default();
                let queues = open_tap(&TapOptions {
                    name: &name,
                    pairs: spec.pairs().context("--net")?,
                    mtu,
                    is_made: self.is_made.unwrap_or(false),
                })?;
                match named {
                    Named::Vhost => NetBackend::Vhost {
                        name,
                        queues,
                        id: self.id(index)?,
                    },
                    _ => NetBackend::Tap { name, queues },
                }
            }
            Named::Switch => match self.switch.unwrap_or_default() {
                "" => bail!("--net: switch is empty"),
                name => NetBackend::Switch {
                    name: name.to_owned(),
                    mtu: mtu.unwrap_or(1500),
                },
            },
            Named::Socket => {
                let socket = spec.socket.as_deref().unwrap_or(Path::new(""));
                if spec.pairs().context("--net")? > SOCKET_PAIRS {
                    bail!("--net: pairs is 1 to {SOCKET_PAIRS} with socket=PATH");
                }
                NetBackend::Socket {
                    socket: socket_path("--net", socket)?,
                    mtu,
                    id: self.id(index)?,
                }
            }
        })
    }

    /// Returns the name of the device in the log.
    fn id(&self, index: usize) -> anyhow::Result<String> {
        match self.spec.id.as_deref() {
            Some("") => bail!("--net: id is empty"),
            Some(id) => Ok(id.to_owned()),
            None => Ok(format!("net{index}")),
        }
    }
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
            "responder,mtu=1500",
            "responder,pairs=2",
            "responder,pcap-max=1M",
            "responder,pcap=a,pcap-max=1K",
            "responder,pcap=",
            "switch=",
            "switch=a,tap=b",
            "switch=a,pairs=2",
            "switch=a,mtu=9",
            "socket=a,pcap=b",
            "socket=a,pairs=0",
            "socket=a,pairs=17",
            "socket=a,vhost=on",
            "responder,vhost=on",
            "switch=a,vhost=on",
            "vhost=on",
            "tap=t0,vhost=on,ip=1.2.3.4",
            "tap=t0,vhost=on,pairs=2",
            "tap=t0,vhost=on,pcap=a",
            "tap=t0,vhost=on,queue-size=3",
            "tap=t0,vhost=maybe",
            "tap=t0,id=a",
            "tap=t0,pairs=0",
            "tap=t0,pairs=65",
            "tap=t0,mtu=67",
        ] {
            assert!(NetConfig::check(text, 0).is_err(), "{text}");
        }
    }
}
