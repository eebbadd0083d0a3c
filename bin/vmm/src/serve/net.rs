//! Network devices: the keys of `--net` and of `[[net]]`, checked, and the device with what is
//! behind it.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use net_ports::{Loop, Sink, Source, TapOptions, TapPort};
use net_switch::PortConfig;
use vio::RateLimits;
use vio::net::{Net, PLAIN_FRAME};

use super::access::Access;
use super::fields::{self, id_and_socket, rate};
use super::purpose::Purpose;
use super::switch::{PortKeys, Switches};
use crate::ports::{CaptureConfig, open_tap, port};
use crate::values::keys::Keys;
use crate::values::net::NetSpec;
use crate::values::size::{self, in_range};

/// Shortest frame of `source`, without its check sequence: what Ethernet pads to.
const SHORTEST: u64 = 60;

/// Back end of a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behind {
    /// A TAP interface of the host.
    Tap(String),
    /// None: every frame is taken and dropped.
    Sink,
    /// Frames of this length, as many as there are buffers for.
    Source(usize),
    /// Every frame comes back.
    Loop,
    /// A port of the switch of that name.
    Switch(String, PortConfig),
}

impl fmt::Display for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tap(name) => write!(f, "TAP {name}"),
            Self::Sink => f.write_str("sink"),
            Self::Source(_) => f.write_str("source"),
            Self::Loop => f.write_str("loop"),
            Self::Switch(name, _) => write!(f, "switch {name}"),
        }
    }
}

/// One network device.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Its name.
    pub id: String,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// Processes that may connect.
    pub access: Access,
    /// Its back end.
    pub behind: Behind,
    /// Largest packet; that of the TAP interface if it is not given.
    pub mtu: Option<u16>,
    /// Queue pairs.
    pub pairs: u16,
    /// Entries of a queue at most.
    pub queue_size: u16,
    /// Packed rings are offered.
    pub packed: bool,
    /// Its share of a core.
    pub weight: u32,
    /// Its limits, of frames and bytes.
    pub limits: RateLimits,
    /// Where its frames are written.
    pub capture: Option<CaptureConfig>,
}

/// The keys of `--net`: all that there are.
const KEYS: [&str; 28] = [
    "switch",
    "vlan",
    "trunk",
    "isolated",
    "mac",
    "flood-group",
    "flood-unknown",
    "id",
    "socket",
    "mode",
    "group",
    "tap",
    "sink",
    "source",
    "frame",
    "loop",
    "mtu",
    "pairs",
    "queue-size",
    "packed",
    "weight",
    "fps",
    "fps-burst",
    "bps",
    "bps-burst",
    "pcap",
    "pcap-max",
    "pcap-replace",
];

impl NetConfig {
    /// Reads the value of `--net`, and checks it; `option` is named in messages.
    ///
    /// # Errors
    /// Names the option and the key.
    pub fn parse(option: &str, text: &str) -> Result<Self> {
        let mut keys = Keys::parse(option, text)?;
        let spec = NetSpec::take(&mut keys, &KEYS)?;
        keys.finish()?;
        Self::check(&spec).with_context(|| option.to_owned())
    }

    /// Checks what is written.
    ///
    /// # Errors
    /// Names the key.
    pub fn check(spec: &NetSpec) -> Result<Self> {
        let (id, socket) = id_and_socket(spec.id.as_ref(), spec.socket.as_ref())?;
        let frame = in_range("frame", spec.frame, SHORTEST, SHORTEST..=PLAIN_FRAME as u64)?;
        if spec.frame.is_some() && !spec.source {
            bail!("frame is for source");
        }
        let port = PortKeys {
            vlan: spec.vlan,
            trunk: spec.trunk.as_deref(),
            isolated: spec.isolated,
            mac: spec.mac.as_deref(),
            flood_group: spec.flood_group,
            flood_unknown: spec.flood_unknown,
        };
        let switch = match &spec.switch {
            None if !port.are_absent() => {
                bail!(
                    "vlan, trunk, isolated, mac, flood-group and flood-unknown are for switch=NAME"
                );
            }
            None => None,
            Some(name) => Some(Behind::Switch(
                fields::id(Some(name)).context("switch")?,
                port.check()?,
            )),
        };
        let named = [
            switch,
            spec.tap.clone().map(Behind::Tap),
            spec.sink.then_some(Behind::Sink),
            spec.source.then_some(Behind::Source(frame as usize)),
            spec.r#loop.then_some(Behind::Loop),
        ];
        let mut named = named.into_iter().flatten();
        let (Some(behind), None) = (named.next(), named.next()) else {
            bail!("say one of tap=NAME, switch=NAME, sink, source and loop");
        };
        let pairs = spec.pairs()?;
        if pairs > 1 && matches!(behind, Behind::Loop | Behind::Switch(..)) {
            bail!("{behind} has one pair of queues");
        }
        let mtu = spec.mtu()?;
        if mtu.is_some() && !matches!(behind, Behind::Tap(_)) {
            bail!("mtu is for tap=NAME");
        }
        Ok(Self {
            id,
            socket,
            access: Access::parse(spec.mode.as_deref(), spec.group.as_deref())?,
            behind,
            mtu,
            pairs,
            queue_size: size::queue_size(spec.queue_size, 1024)?,
            packed: spec.packed.unwrap_or(true),
            weight: in_range("weight", spec.weight, 1, 1..=1000)? as u32,
            limits: RateLimits {
                operations: rate("fps", spec.fps, spec.fps_burst)?,
                bytes: rate("bps", spec.bps, spec.bps_burst)?,
            },
            capture: spec.capture()?,
        })
    }
}

/// Makes the device. A TAP interface has to be there; a check opens it too, without an effect on
/// it.
///
/// # Errors
/// Names what the host lacks.
pub fn open(config: &NetConfig, purpose: Purpose, switches: &mut Switches) -> Result<Net> {
    let capture = config.capture.as_ref();
    let is_check = purpose == Purpose::Check;
    let port = match &config.behind {
        Behind::Tap(name) => {
            let tap = open_tap(&TapOptions {
                name,
                pairs: config.pairs,
                mtu: config.mtu,
                is_made: false,
            });
            port(TapPort::new(tap?), capture, is_check)
        }
        Behind::Sink => port(Sink::default(), capture, is_check),
        Behind::Source(len) => {
            let source = Source::new(*len).context("no such frame")?;
            port(source, capture, is_check)
        }
        Behind::Loop => port(Loop::default(), capture, is_check),
        Behind::Switch(name, of) => port(switches.port(name, of)?, capture, is_check),
    };
    // Front ends have addresses of their own, and none asks for this one.
    let mac = [0x52, 0x54, 0, 0x65, 0x78, 1];
    let net = Net::new(mac, config.queue_size, port?)?
        .with_pairs(config.pairs)?
        .with_in_order()
        .with_limits(config.limits);
    Ok(match config.packed {
        true => net.with_packed(),
        false => net,
    })
}
