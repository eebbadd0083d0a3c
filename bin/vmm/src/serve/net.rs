//! Network devices: the keys of `--net` and of `[[net]]`, checked, and the device with what is behind it.

use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use net_switch::PortConfig;
use serde::Deserialize;
use vio::RateLimits;
use vio::net::{Loop, MAX_PAIRS, Net, NetPort, PLAIN_FRAME, Sink, Source, Tap};

use super::access::Access;
use super::fields::{self, id_and_socket, rate};
use super::purpose::Purpose;
use super::switch::{PortKeys, Switches};
use crate::run::open_tap;
use crate::values::block::in_range;
use crate::values::keys::Keys;
use crate::values::size;

/// Shortest frame of `source`, without its check sequence: what Ethernet pads to.
const SHORTEST: u64 = 60;

/// What is behind a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behind {
    /// A TAP interface of the host.
    Tap(String),
    /// Nothing: every frame is taken and forgotten.
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
    /// Who may.
    pub access: Access,
    /// What is behind it.
    pub behind: Behind,
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
}

/// One network device as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NetSpec {
    id: Option<String>,
    socket: Option<PathBuf>,
    mode: Option<String>,
    group: Option<String>,
    tap: Option<String>,
    #[serde(default)]
    sink: bool,
    #[serde(default)]
    source: bool,
    #[serde(default)]
    r#loop: bool,
    switch: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    vlan: Option<u64>,
    trunk: Option<String>,
    isolated: Option<bool>,
    mac: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    flood_group: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    flood_unknown: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    frame: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pairs: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    queue_size: Option<u64>,
    packed: Option<bool>,
    #[serde(default, deserialize_with = "size::in_file")]
    weight: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    fps: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    fps_burst: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    bps: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    bps_burst: Option<u64>,
}

impl NetSpec {
    /// Reads the value of `--net`; `option` is named in messages.
    ///
    /// # Errors
    /// Names the option and the key.
    pub fn parse(option: &str, text: &str) -> Result<Self> {
        let mut keys = Keys::parse(option, text)?;
        let mut word = |key: &str| match keys.take(key) {
            None => Ok(false),
            Some("") => Ok(true),
            Some(value) => bail!("{option}: {key} takes no value ({value:?})"),
        };
        let mut spec = Self {
            sink: word("sink")?,
            source: word("source")?,
            r#loop: word("loop")?,
            ..Self::default()
        };
        spec.id = keys.take("id").map(str::to_owned);
        spec.socket = keys.take("socket").map(PathBuf::from);
        spec.mode = keys.take("mode").map(str::to_owned);
        spec.group = keys.take("group").map(str::to_owned);
        spec.tap = keys.take("tap").map(str::to_owned);
        spec.switch = keys.take("switch").map(str::to_owned);
        spec.trunk = keys.take("trunk").map(str::to_owned);
        spec.mac = keys.take("mac").map(str::to_owned);
        spec.isolated = keys.take_optional_switch("isolated")?;
        spec.packed = keys.take_optional_switch("packed")?;
        let mut number = |key: &str| keys.take_optional_number(key);
        spec.frame = number("frame")?;
        spec.vlan = number("vlan")?;
        spec.flood_group = number("flood-group")?;
        spec.flood_unknown = number("flood-unknown")?;
        spec.pairs = number("pairs")?;
        spec.queue_size = number("queue-size")?;
        spec.weight = number("weight")?;
        spec.fps = number("fps")?;
        spec.fps_burst = number("fps-burst")?;
        spec.bps = number("bps")?;
        spec.bps_burst = number("bps-burst")?;
        keys.finish()?;
        Ok(spec)
    }

    /// Checks it.
    ///
    /// # Errors
    /// Names the key.
    pub fn check(&self) -> Result<NetConfig> {
        let (id, socket) = id_and_socket(self.id.as_ref(), self.socket.as_ref())?;
        let frame = in_range("frame", self.frame, SHORTEST, SHORTEST..=PLAIN_FRAME as u64)?;
        if self.frame.is_some() && !self.source {
            bail!("frame is for source");
        }
        let port = PortKeys {
            vlan: self.vlan,
            trunk: self.trunk.as_deref(),
            isolated: self.isolated,
            mac: self.mac.as_deref(),
            flood_group: self.flood_group,
            flood_unknown: self.flood_unknown,
        };
        let switch = match &self.switch {
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
            self.tap.clone().map(Behind::Tap),
            self.sink.then_some(Behind::Sink),
            self.source.then_some(Behind::Source(frame as usize)),
            self.r#loop.then_some(Behind::Loop),
        ];
        let mut named = named.into_iter().flatten();
        let (Some(behind), None) = (named.next(), named.next()) else {
            bail!("say one of tap=NAME, switch=NAME, sink, source and loop");
        };
        let pairs = in_range("pairs", self.pairs, 1, 1..=MAX_PAIRS.into())? as u16;
        if pairs > 1 && behind != Behind::Sink && !matches!(behind, Behind::Source(_)) {
            bail!("{behind} has one pair of queues");
        }
        let queue_size = in_range("queue-size", self.queue_size, 1024, 2..=1024)? as u16;
        if !queue_size.is_power_of_two() {
            bail!("queue-size is a power of two, not {queue_size}");
        }
        Ok(NetConfig {
            id,
            socket,
            access: Access::parse(self.mode.as_deref(), self.group.as_deref())?,
            behind,
            pairs,
            queue_size,
            packed: self.packed.unwrap_or(true),
            weight: in_range("weight", self.weight, 1, 1..=1000)? as u32,
            limits: RateLimits {
                operations: rate("fps", self.fps, self.fps_burst)?,
                bytes: rate("bps", self.bps, self.bps_burst)?,
            },
        })
    }
}

/// Makes the device. A TAP interface has to be there; a check opens it too, which nobody notices.
///
/// # Errors
/// Names what the host lacks.
pub fn open(config: &NetConfig, _purpose: Purpose, switches: &mut Switches) -> Result<Net> {
    let port: Box<dyn NetPort> = match &config.behind {
        Behind::Tap(name) => {
            let file = open_tap(name, false)?;
            Box::new(Tap::from_fd(file.into()).with_context(|| format!("TAP {name}"))?)
        }
        Behind::Sink => Box::new(Sink::default()),
        Behind::Source(len) => Box::new(Source::new(*len).context("no such frame")?),
        Behind::Loop => Box::new(Loop::default()),
        Behind::Switch(name, port) => Box::new(switches.port(name, port)?),
    };
    // Front ends have addresses of their own, and none asks for this one.
    let mac = [0x52, 0x54, 0, 0x65, 0x78, 1];
    let net = Net::new(mac, config.queue_size, port)?
        .with_pairs(config.pairs)?
        .with_in_order()
        .with_limits(config.limits);
    Ok(match config.packed {
        true => net.with_packed(),
        false => net,
    })
}
