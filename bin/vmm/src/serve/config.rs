//! The request, checked. Flags and file come down to the same structures, and are checked by the
//! same code.
//!
//! Nothing here starts anything or opens an image.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use net_switch::PortConfig;
use serde::Deserialize;
use sidecore::IdlePolicy;
use vio::RateLimits;

use super::access::Access;
use super::args::ServeArgs;
use super::fields::{id_and_socket, rate};
use super::net::{Behind, NetConfig};
use super::switch::{self, SwitchConfig, SwitchSpec};
use crate::values::block::{self, BlockSpec, Format};
use crate::values::keys::Keys;
use crate::values::net::NetSpec;
use crate::values::size::in_range;
use crate::values::{counted, file, size};
use crate::{host_memory, moved, ports};

/// Most devices: each takes a socket, a connection and descriptors for its guest's memory.
const MAX_DEVICES: usize = 4096;
/// Most cores.
const MAX_CORES: usize = 64;
/// A checked request.
#[derive(Debug)]
pub struct Config {
    /// The cores.
    pub cores: Cores,
    /// Disks; all devices together are at least one, with different names and sockets.
    pub blocks: Vec<BlockConfig>,
    /// Network devices.
    pub nets: Vec<NetConfig>,
    /// Switches that are not as they are without a word.
    pub switches: Vec<SwitchConfig>,
    /// Where counters are written.
    pub stats: Option<PathBuf>,
}

/// The cores that serve.
#[derive(Debug)]
pub struct Cores {
    /// Greatest number of cores, at least 1.
    pub count: usize,
    /// Host CPUs: none, or one for each.
    pub cpus: Vec<usize>,
    /// Policy of an idle core.
    pub idle: IdlePolicy,
    /// Longest time that calls may wait under load, in nanoseconds.
    pub call_delay_ns: u64,
}

/// Place of a device's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or block device of raw blocks.
    Raw(PathBuf),
    /// A qcow2 image.
    Qcow2(PathBuf),
    /// Memory, this many bytes.
    Ram(u64),
    /// Nowhere; this many bytes.
    Null(u64),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw(path) | Self::Qcow2(path) => write!(f, "{}", path.display()),
            Self::Ram(_) => f.write_str("ram"),
            Self::Null(_) => f.write_str("null"),
        }
    }
}

/// One device.
#[derive(Clone, Debug)]
pub struct BlockConfig {
    /// Its name.
    pub id: String,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// Processes that may connect.
    pub access: Access,
    /// Its blocks.
    pub source: Source,
    /// The format of the file was given, and not left out.
    pub is_format_said: bool,
    /// The guest may not write.
    pub read_only: bool,
    /// Past the page cache.
    pub direct: bool,
    /// A qcow2 image may have a backing file.
    pub backing: bool,
    /// Files are locked.
    pub locking: bool,
    /// A qcow2 image's metadata are kept in order for a power cut.
    pub barriers: bool,
    /// Logical block, 512 or 4096 bytes.
    pub block: u32,
    /// Queues.
    pub queues: u16,
    /// Entries of a queue at most.
    pub queue_size: u16,
    /// Packed rings are offered.
    pub packed: bool,
    /// Its share of a core.
    pub weight: u32,
    /// Its limits.
    pub limits: RateLimits,
}

/// The file as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    cores: CoresSpec,
    #[serde(default)]
    block: Vec<BlockSpec>,
    #[serde(default)]
    net: Vec<NetSpec>,
    #[serde(default)]
    switch: Vec<SwitchSpec>,
    stats: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CoresSpec {
    cpus: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    count: Option<u64>,
    idle: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    coalesce_us: Option<u64>,
}

/// Reads the value of `--block`; `option` is named in messages.
fn parse(option: &str, text: &str) -> Result<BlockSpec> {
    let mut keys = Keys::parse(option, text)?;
    moved::refuse_latency(&keys, "serve", "diskN")?;
    let spec = BlockSpec::take(&mut keys, &block::ALL)?;
    keys.finish()?;
    Ok(spec)
}

fn check(spec: &BlockSpec) -> Result<BlockConfig> {
    let (id, socket) = id_and_socket(spec.id.as_ref(), spec.socket.as_ref())?;
    let path = spec
        .path
        .as_deref()
        .context("it has no path (a file, ram:SIZE or null:SIZE)")?;
    let format = spec.format()?;
    let source = source(path, format)?;
    let is_file = matches!(source, Source::Raw(_) | Source::Qcow2(_));
    if spec.direct == Some(true) && !matches!(source, Source::Raw(_)) {
        bail!("direct is for raw files");
    }
    if spec.backing.is_some() && !matches!(source, Source::Qcow2(_)) {
        bail!("backing is for qcow2 images: write format=qcow2");
    }
    if spec.barriers.is_some() && !matches!(source, Source::Qcow2(_)) {
        bail!(
            "barriers is for qcow2 images: write format=qcow2 (what else there is has no tables to \
             keep in order)"
        );
    }
    if spec.readonly == Some(true) && !is_file {
        bail!("readonly is for files");
    }
    if spec.locking.is_some() && !is_file {
        bail!("locking is for files");
    }
    Ok(BlockConfig {
        id,
        socket,
        access: Access::parse(spec.mode.as_deref(), spec.group.as_deref())?,
        source,
        is_format_said: format.is_some(),
        read_only: spec.readonly.unwrap_or(false),
        direct: spec.direct.unwrap_or(false),
        backing: spec.backing.unwrap_or(false),
        locking: spec.locking.unwrap_or(true),
        barriers: spec.barriers.unwrap_or(true),
        block: spec.logical_block()?,
        queues: spec.queues()?,
        queue_size: spec.queue_size(1024)?,
        packed: spec.packed.unwrap_or(true),
        weight: in_range("weight", spec.weight, 1, 1..=1000)? as u32,
        limits: RateLimits {
            operations: rate("iops", spec.iops, spec.iops_burst)?,
            bytes: rate("bps", spec.bps, spec.bps_burst)?,
        },
    })
}

impl Config {
    /// Reads and checks everything that can be checked without opening images.
    ///
    /// # Errors
    /// Names the file, the device and the field.
    pub fn load(args: &ServeArgs) -> Result<Self> {
        let file = match &args.config {
            Some(path) => file::toml(path)?,
            None => File::default(),
        };
        let mut blocks = Vec::new();
        for (number, spec) in file.block.iter().enumerate() {
            let name = spec
                .id
                .clone()
                .unwrap_or_else(|| format!("number {number}"));
            let path = args.config.as_deref().unwrap_or(Path::new(""));
            blocks.push(check(spec).with_context(|| format!("{}: block {name}", path.display()))?);
        }
        for text in &args.block {
            let option = format!("--block {text}");
            let spec = parse(&option, text)?;
            blocks.push(check(&spec).context(option)?);
        }
        let mut nets = Vec::new();
        for (number, spec) in file.net.iter().enumerate() {
            let path = args.config.as_deref().unwrap_or(Path::new(""));
            let checked = NetConfig::check(spec);
            nets.push(checked.with_context(|| format!("{}: net number {number}", path.display()))?);
        }
        for text in &args.net {
            let option = format!("--net {text}");
            nets.push(NetConfig::parse(&option, text)?);
        }
        let mut switches = Vec::new();
        for (number, spec) in file.switch.iter().enumerate() {
            let path = args.config.as_deref().unwrap_or(Path::new(""));
            let checked = spec.check();
            let checked =
                checked.with_context(|| format!("{}: switch number {number}", path.display()))?;
            switches.push(checked);
        }
        for text in &args.switch {
            let option = format!("--switch {text}");
            switches.push(SwitchSpec::parse(&option, text)?.check().context(option)?);
        }
        let config = Self {
            cores: cores(args, &file.cores)?,
            blocks,
            nets,
            switches,
            stats: args.stats.clone().or(file.stats),
        };
        check_all(&config)?;
        Ok(config)
    }
}

impl Config {
    /// Returns the number of devices and of cores, as text.
    pub fn extent(&self) -> String {
        let devices = counted(self.blocks.len() + self.nets.len(), "device");
        format!("{devices} on {}", counted(self.cores.count, "core"))
    }

    /// Returns switch, name and port of every device that is on one.
    pub fn switched(&self) -> impl Iterator<Item = (&str, &str, &PortConfig)> {
        self.nets.iter().filter_map(|net| match &net.behind {
            Behind::Switch(switch, port) => Some((&**switch, &*net.id, port)),
            _ => None,
        })
    }

    /// Returns name, socket and access of every device, disks first.
    pub fn sockets(&self) -> impl Iterator<Item = (&str, &Path, Access)> {
        let blocks = self.blocks.iter();
        let blocks = blocks.map(|block| (&*block.id, &*block.socket, block.access));
        let nets = self.nets.iter();
        blocks.chain(nets.map(|net| (&*net.id, &*net.socket, net.access)))
    }
}

fn source(path: &str, format: Option<Format>) -> Result<Source> {
    let size = |text: &str| -> Result<u64> {
        let bytes = size::bytes(text)?;
        if bytes == 0 || !bytes.is_multiple_of(4096) {
            bail!("{path}: the size is a multiple of 4096 bytes, not {bytes}");
        }
        Ok(bytes)
    };
    let made = match path.split_once(':') {
        Some(("ram", text)) => Some(Source::Ram(size(text)?)),
        Some(("null", text)) => Some(Source::Null(size(text)?)),
        _ => None,
    };
    match (made, format) {
        (Some(_), Some(_)) => bail!("{path} has no format, not even raw"),
        (Some(made), None) => Ok(made),
        (None, _) if path.is_empty() => bail!("path is empty"),
        (None, None | Some(Format::Raw)) => Ok(Source::Raw(path.into())),
        (None, Some(Format::Qcow2)) => Ok(Source::Qcow2(path.into())),
    }
}

fn check_all(config: &Config) -> Result<()> {
    let blocks = &config.blocks;
    let devices = blocks.len() + config.nets.len();
    if devices == 0 {
        bail!(
            "there is no device to serve: give --block or --net, or a --config file with [[block]] \
             or [[net]]"
        );
    }
    if devices > MAX_DEVICES {
        bail!("{devices} devices, where {MAX_DEVICES} can be served");
    }
    let in_memory = blocks.iter().map(|block| match block.source {
        Source::Ram(bytes) => bytes,
        _ => 0,
    });
    let in_memory = in_memory.fold(0, u64::saturating_add);
    if in_memory > 0 {
        let host = host_memory::bytes()?;
        if in_memory > host {
            bail!(
                "disks of {} MiB in memory (path=ram:…) are more than this host has ({} MiB): make \
                 them smaller, or use files",
                in_memory >> 20,
                host >> 20
            );
        }
    }
    let captures = config.nets.iter();
    ports::check_captures(captures.filter_map(|net| net.capture.as_ref()))?;
    let (mut ids, mut sockets) = (HashSet::new(), HashSet::new());
    for (id, socket, _) in config.sockets() {
        if !ids.insert(id) {
            bail!("two devices have the id {id:?}");
        }
        if !sockets.insert(socket) {
            bail!("two devices have the socket {}", socket.display());
        }
    }
    switch::check_ports(&config.switches, config.switched())
}

fn cores(args: &ServeArgs, spec: &CoresSpec) -> Result<Cores> {
    let cpus = match args.cpu.as_ref().or(spec.cpus.as_ref()) {
        Some(list) => size::cpu_list(list).context("the list of CPUs")?,
        None => Vec::new(),
    };
    let count = spec
        .count
        .map(|count| usize::try_from(count).unwrap_or(usize::MAX));
    let count = args.cores.or(count).unwrap_or(cpus.len().max(1));
    if !(1..=MAX_CORES).contains(&count) {
        bail!("1 to {MAX_CORES} cores, not {count}");
    }
    let mut listed = HashSet::new();
    if let Some(cpu) = cpus.iter().find(|&&cpu| !listed.insert(cpu)) {
        bail!("CPU {cpu} is listed twice: two cores that poll there would take turns");
    }
    if !cpus.is_empty() && cpus.len() != count {
        bail!(
            "{}, but {} to pin to",
            counted(count, "core"),
            counted(cpus.len(), "CPU")
        );
    }
    let idle = args
        .idle
        .as_deref()
        .or(spec.idle.as_deref())
        .unwrap_or("adaptive");
    let delay_us = args.coalesce.or(spec.coalesce_us).unwrap_or(20);
    if delay_us > 10_000 {
        bail!("calls may wait 0 to 10000 microseconds, not {delay_us}");
    }
    Ok(Cores {
        count,
        cpus,
        idle: idle_policy(idle)?,
        call_delay_ns: delay_us * 1000,
    })
}

/// Parses `poll`, `sleep`, `spin:US`, `adaptive`, `adaptive:PRICE`.
fn idle_policy(text: &str) -> Result<IdlePolicy> {
    let (name, value) = match text.split_once(':') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    match (name, value) {
        ("poll", None) => Ok(IdlePolicy::Poll),
        ("sleep", None) => Ok(IdlePolicy::Sleep),
        ("spin", Some(value)) => {
            let us: u64 = value
                .parse()
                .with_context(|| format!("idle: {value:?} is no number of microseconds"))?;
            if us > 1_000_000 {
                bail!("idle: spin is 0 to 1000000 microseconds, not {us}");
            }
            Ok(IdlePolicy::Spin(us * 1000))
        }
        ("adaptive", None) => Ok(IdlePolicy::tiered()),
        ("adaptive", Some(value)) => {
            let price: f64 = value
                .parse()
                .with_context(|| format!("idle: {value:?} is no price"))?;
            if !(0.01..=100.0).contains(&price) {
                bail!("idle: the price of latency is 0.01 to 100, not {price}");
            }
            Ok(IdlePolicy::priced(price))
        }
        _ => bail!(
            "idle is poll, sleep, spin:MICROSECONDS, adaptive or adaptive:PRICE, not {text:?}"
        ),
    }
}
