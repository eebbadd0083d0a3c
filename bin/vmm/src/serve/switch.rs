//! Switches between network devices: the keys of `--switch` and `[[switch]]`, the settings of a
//! device's port, and a switch with its ports as one poller.
//!
//! The devices of a switch are a [`Group`]: they are on one core, which copies frames from where
//! the sender's guest has them to the receiver's, and they move together. A frame wakes the ports
//! that it is for, without a descriptor.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail};
use net_ports::{Fabric, FabricCounters, SwitchPort, TapOptions, TapPort, Uplink};
use net_switch::{
    DropReason, FloodLimits, MAX_PORTS, Mac, PortConfig, PortCounters, PortId, Rate, Vid, VidSet,
    VlanMode,
};
use serde::Deserialize;
use sidecore::{ChildWakers, Group};
use vhost_export::{Export, ExportStats};
use vio::Device;
use vio::net::{NetClass, NetPort};

use super::fields::id;
use super::uplink::{Member, UplinkPoller};
use crate::ports::open_tap;
use crate::values::keys::Keys;
use crate::values::size::{self, in_range};

/// Payload of a frame that is not to be segmented.
const MTU: u16 = 1500;

/// One switch.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// Its name.
    pub id: String,
    /// Settings of its learning.
    pub settings: net_switch::SwitchConfig,
    /// An interface of the host on a port of it.
    pub uplink: Option<UplinkConfig>,
}

/// The host's port of a switch.
#[derive(Clone, Debug)]
pub struct UplinkConfig {
    /// The TAP interface, which is there.
    pub tap: String,
    /// The port.
    pub port: PortConfig,
}

/// One switch as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SwitchSpec {
    id: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    ageing: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    move_hold: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    addresses: Option<u64>,
    tap: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    vlan: Option<u64>,
    trunk: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    flood_group: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    flood_unknown: Option<u64>,
}

impl SwitchSpec {
    /// Reads the value of `--switch`; `option` is named in messages.
    ///
    /// # Errors
    /// Names the option and the key.
    pub fn parse(option: &str, text: &str) -> Result<Self> {
        let mut keys = Keys::parse(option, text)?;
        let spec = Self {
            id: keys.take("id").map(str::to_owned),
            ageing: keys.take_optional_number("ageing")?,
            move_hold: keys.take_optional_number("move-hold")?,
            addresses: keys.take_optional_number("addresses")?,
            tap: keys.take("tap").map(str::to_owned),
            vlan: keys.take_optional_number("vlan")?,
            trunk: keys.take("trunk").map(str::to_owned),
            flood_group: keys.take_optional_number("flood-group")?,
            flood_unknown: keys.take_optional_number("flood-unknown")?,
        };
        keys.finish()?;
        Ok(spec)
    }

    /// Checks it.
    ///
    /// # Errors
    /// Names the key.
    pub fn check(&self) -> Result<SwitchConfig> {
        let default = net_switch::SwitchConfig::default();
        let addresses = default.addresses_per_port as u64;
        let seconds = default.ageing_ns / 1_000_000_000;
        let hold_ms = default.move_hold_ns / 1_000_000;
        // 802.1Q table 8-6 has 10 to 1,000,000 seconds.
        let ageing = in_range("ageing", self.ageing, seconds, 1..=1_000_000)?;
        let port = PortKeys {
            vlan: self.vlan,
            trunk: self.trunk.as_deref(),
            flood_group: self.flood_group,
            flood_unknown: self.flood_unknown,
            ..PortKeys::default()
        };
        let uplink = match &self.tap {
            None if !port.are_absent() => {
                bail!("vlan, trunk, flood-group and flood-unknown are those of tap=NAME");
            }
            None => None,
            Some(tap) => Some(UplinkConfig {
                tap: tap.clone(),
                port: port.check()?,
            }),
        };
        Ok(SwitchConfig {
            id: id(self.id.as_ref())?,
            uplink,
            settings: net_switch::SwitchConfig {
                ageing_ns: ageing * 1_000_000_000,
                move_hold_ns: in_range("move-hold", self.move_hold, hold_ms, 0..=60_000)?
                    * 1_000_000,
                addresses_per_port: in_range("addresses", self.addresses, addresses, 0..=65_536)?
                    as usize,
            },
        })
    }
}

/// Settings of a device's port, from the device's keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct PortKeys<'a> {
    /// Its VLAN, or of a trunk that of frames without a tag.
    pub vlan: Option<u64>,
    /// VLANs whose frames have tags.
    pub trunk: Option<&'a str>,
    /// It reaches only ports that are not.
    pub isolated: Option<bool>,
    /// Addresses that it sends from.
    pub mac: Option<&'a str>,
    /// Frames a second to groups.
    pub flood_group: Option<u64>,
    /// And to addresses that are not known.
    pub flood_unknown: Option<u64>,
}

impl PortKeys<'_> {
    /// Returns whether none is there.
    pub fn are_absent(&self) -> bool {
        let Self {
            vlan,
            trunk,
            isolated,
            mac,
            flood_group,
            flood_unknown,
        } = self;
        vlan.is_none()
            && trunk.is_none()
            && isolated.is_none()
            && mac.is_none()
            && flood_group.is_none()
            && flood_unknown.is_none()
    }

    /// Checks them.
    ///
    /// # Errors
    /// Names the key.
    pub fn check(&self) -> Result<PortConfig> {
        let own = self.vlan.map(|vlan| vid("vlan", vlan)).transpose()?;
        let vlan = match self.trunk {
            None => VlanMode::Access(own.unwrap_or(Vid::DEFAULT)),
            Some(list) => VlanMode::Trunk {
                native: own,
                tagged: vids(list)?,
            },
        };
        let rate = |key, limit: Option<u64>| -> Result<Rate> {
            let most = in_range(key, limit, 1_000, 0..=u32::MAX.into())? as u32;
            Ok(Rate::new(most, most))
        };
        Ok(PortConfig {
            vlan,
            bound: self.mac.map_or(Ok(Vec::new()), macs)?,
            is_isolated: self.isolated.unwrap_or(false),
            flood: FloodLimits {
                group: rate("flood-group", self.flood_group)?,
                unknown: rate("flood-unknown", self.flood_unknown)?,
            },
        })
    }
}

fn vid(key: &str, number: u64) -> Result<Vid> {
    let vid = u16::try_from(number).ok().and_then(Vid::new);
    vid.with_context(|| format!("{key} is 1 to 4094, not {number}"))
}

/// Parses `10`, `20-29` and `all`, with `+` between.
fn vids(list: &str) -> Result<VidSet> {
    if list == "all" {
        return Ok(VidSet::all());
    }
    let mut set = VidSet::none();
    for part in list.split('+') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            let number = text.parse().ok();
            number.with_context(|| format!("trunk is VLANs such as 10+20-29, or all, not {list:?}"))
        };
        let (first, last) = (vid("trunk", number(first)?)?, vid("trunk", number(last)?)?);
        if first > last {
            bail!("trunk: {part} begins behind its end");
        }
        let within = (first.get()..=last.get()).filter_map(Vid::new);
        within.for_each(|vid| set.insert(vid));
    }
    Ok(set)
}

/// Parses addresses with `+` between.
fn macs(list: &str) -> Result<Vec<Mac>> {
    /// Far more than a guest has, and few enough to be compared.
    const MOST: usize = 64;
    let mut bound = Vec::new();
    for text in list.split('+') {
        let bytes: Option<Vec<u8>> = text
            .split(':')
            .map(|part| {
                u8::from_str_radix(part, 16)
                    .ok()
                    .filter(|_| part.len() == 2)
            })
            .collect();
        let mac = bytes
            .and_then(|bytes| <[u8; 6]>::try_from(bytes).ok())
            .map(Mac);
        let mac = mac.filter(|mac| mac.is_station());
        let mac = mac.with_context(|| {
            format!(
                "mac is the address of an interface, such as 52:54:00:12:34:56, with + between \
                 several, not {text:?}"
            )
        })?;
        if !bound.contains(&mac) {
            bound.push(mac);
        }
    }
    if bound.len() > MOST {
        bail!("mac has {MOST} addresses at most, not {}", bound.len());
    }
    Ok(bound)
}

/// Checks what the ports of all switches have to have in common. `ports`: the switch, the device
/// and its port.
///
/// # Errors
/// Names the switch.
pub fn check_ports<'a>(
    switches: &[SwitchConfig],
    ports: impl Iterator<Item = (&'a str, &'a str, &'a PortConfig)>,
) -> Result<()> {
    let mut ids = HashSet::new();
    if let Some(twice) = switches.iter().find(|switch| !ids.insert(&*switch.id)) {
        bail!("two switches have the id {:?}", twice.id);
    }
    let mut counts: BTreeMap<&str, usize> =
        switches.iter().map(|switch| (&*switch.id, 0)).collect();
    let mut bound = HashSet::new();
    for (switch, device, port) in ports {
        let count = counts.entry(switch).or_default();
        *count += 1;
        let has_uplink = |config: &&SwitchConfig| config.id == switch && config.uplink.is_some();
        let most = MAX_PORTS - usize::from(switches.iter().any(|config| has_uplink(&config)));
        if *count > most {
            bail!("switch {switch} has more than {most} devices");
        }
        if let Some(mac) = port.bound.iter().find(|mac| !bound.insert((switch, **mac))) {
            let text: Vec<String> = mac.0.iter().map(|byte| format!("{byte:02x}")).collect();
            let text = text.join(":");
            bail!("device {device}: mac {text} is another device's of switch {switch}");
        }
    }
    match counts.iter().find(|(_, count)| **count == 0) {
        Some((switch, _)) => {
            bail!("switch {switch} has no device: give it some (--net …,switch={switch})")
        }
        None => Ok(()),
    }
}

/// A switch whose devices are being made.
struct Opening {
    id: String,
    fabric: Fabric,
    wakers: ChildWakers,
    ports: Vec<PortId>,
    /// The first port's, if it is the host's.
    uplink: Option<UplinkPoller>,
}

impl Opening {
    fn port(&mut self, config: &PortConfig, mtu: u16) -> Result<SwitchPort> {
        let waker = self.wakers.waker(self.ports.len());
        let wake = Box::new(move || waker.wake());
        let port = self.fabric.port_with(config.clone(), mtu, wake);
        let port = port.with_context(|| format!("switch {}", self.id))?;
        self.ports.push(port.id());
        Ok(port)
    }
}

/// All switches, while devices are made.
#[derive(Default)]
pub struct Switches(Vec<Opening>);

impl Switches {
    /// Creates one for each name, with a port for each time that it comes.
    ///
    /// # Errors
    /// No memory, or an uplink's interface is not there.
    pub fn new(configs: &[SwitchConfig], names: &[&str]) -> Result<Self> {
        let mut switches = Vec::new();
        let mut seen = HashSet::new();
        for name in names.iter().filter(|name| seen.insert(**name)) {
            let config = configs.iter().find(|config| config.id == **name);
            let settings = config.map(|config| config.settings).unwrap_or_default();
            let count = names.iter().filter(|other| other == &name).count();
            let mut open = Opening {
                id: (*name).to_owned(),
                fabric: Fabric::new(settings).with_context(|| format!("switch {name}"))?,
                wakers: ChildWakers::new(count + 1),
                ports: Vec::new(),
                uplink: None,
            };
            if let Some(uplink) = config.and_then(|config| config.uplink.as_ref()) {
                let made = open_uplink(&mut open, uplink);
                open.uplink = Some(made.with_context(|| format!("switch {name}"))?);
            }
            switches.push(open);
        }
        Ok(Self(switches))
    }

    /// Returns the next port of a switch.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn port(&mut self, switch: &str, config: &PortConfig) -> Result<SwitchPort> {
        let found = self.0.iter_mut().find(|open| open.id == switch);
        let open = found.with_context(|| format!("there is no switch {switch}"))?;
        open.port(config, MTU)
    }

    /// Returns the switches as they are served, over the devices that have their ports, in the
    /// order in which these were made.
    pub fn with_devices(
        self,
        mut devices: BTreeMap<String, Vec<Export<NetClass>>>,
    ) -> Vec<Switched> {
        let each = self.0.into_iter().map(|open| {
            let exports = devices.remove(&open.id).unwrap_or_default().into_iter();
            let devices = exports.map(|export| Member::Device(Box::new(export)));
            let uplink = open.uplink.into_iter();
            let uplink = uplink.map(|uplink| Member::Uplink(Box::new(uplink)));
            let members = uplink.chain(devices).collect();
            Switched {
                // No device is called so.
                group: Group::with_wakers(format!("switch {}", open.id), members, open.wakers),
                id: open.id,
                fabric: open.fabric,
                ports: open.ports,
            }
        });
        each.collect()
    }
}

/// Opens the host's port of a switch, its first one.
fn open_uplink(open: &mut Opening, config: &UplinkConfig) -> Result<UplinkPoller> {
    let queues = open_tap(&TapOptions {
        name: &config.tap,
        pairs: 1,
        mtu: None,
        is_made: false,
    })?;
    let tap = TapPort::new(queues);
    let port = open.port(&config.port, tap.capabilities().mtu)?;
    // No device is called so.
    let name = format!("uplink {}", config.tap);
    let uplink = Uplink::new(tap, port).with_context(|| name.clone())?;
    Ok(UplinkPoller::new(name, uplink))
}

/// A switch and its devices.
pub struct Switched {
    id: String,
    /// The devices and the uplink, as a core polls them.
    pub group: Group<Member>,
    fabric: Fabric,
    /// Of the devices, in their order.
    ports: Vec<PortId>,
}

impl std::fmt::Debug for Switched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switched")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// Counters of a switch for one port.
#[derive(Clone, Copy, Debug, Default)]
pub struct PortStats {
    decided: PortCounters,
    moved: FabricCounters,
    learned: usize,
}

/// Counters of a switch, by the names of its ports.
#[derive(Clone, Debug, Default)]
pub struct SwitchStats(Vec<(String, PortStats)>);

impl Switched {
    /// Returns its name, which is no device's.
    pub fn key(&self) -> String {
        format!("switch {}", self.id)
    }

    /// Returns its own name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the counters of the switch.
    pub fn stats(&self) -> SwitchStats {
        let ports = self.group.children().zip(&self.ports);
        let each = ports.map(|(export, port)| {
            let (decided, moved) = self.fabric.counters(*port);
            let learned = self.fabric.learned(*port).0;
            (
                export.id().to_owned(),
                PortStats {
                    decided,
                    moved,
                    learned,
                },
            )
        });
        SwitchStats(each.collect())
    }

    /// Returns the counters of a device.
    pub fn device_stats(&self) -> impl Iterator<Item = (&str, ExportStats)> {
        self.group
            .children()
            .map(|member| (member.id(), member.stats()))
    }

    /// Ends it, disconnects its front ends, and returns its devices.
    pub fn into_devices(self) -> Vec<Device<NetClass>> {
        let exports = self.group.into_children();
        exports
            .into_iter()
            .filter_map(Member::into_device)
            .collect()
    }
}

/// Reasons for which frames were dropped, as they are written.
const REASONS: [(&str, DropReason); 7] = [
    ("short", DropReason::Short),
    ("address", DropReason::Address),
    ("vlan", DropReason::Vlan),
    ("spoofed", DropReason::Spoofed),
    ("group_limit", DropReason::GroupLimit),
    ("unknown_limit", DropReason::UnknownLimit),
    ("no_port", DropReason::NoPort),
];

impl PortStats {
    fn numbers(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let Self {
            decided,
            moved,
            learned,
        } = *self;
        let dropped = REASONS.map(|(name, reason)| (name, decided.dropped(reason)));
        let others = [
            ("forwarded", decided.forwarded),
            ("flooded", decided.flooded),
            ("overflowed", moved.overflowed),
            ("copied", moved.copied),
            ("wrong_headers", moved.wrong_headers),
            ("learned", learned as u64),
        ];
        others.into_iter().chain(dropped)
    }
}

impl SwitchStats {
    /// Sums over all ports, and each port.
    pub fn to_json(&self) -> serde_json::Value {
        let object = |numbers: &BTreeMap<&str, u64>| {
            let (dropped, others): (Vec<_>, Vec<_>) = numbers
                .iter()
                .partition(|(name, _)| REASONS.iter().any(|(reason, _)| reason == *name));
            let mut object: serde_json::Map<String, serde_json::Value> = others
                .into_iter()
                .map(|(name, number)| ((*name).to_owned(), (*number).into()))
                .collect();
            let dropped: serde_json::Map<String, serde_json::Value> = dropped
                .into_iter()
                .map(|(name, number)| ((*name).to_owned(), (*number).into()))
                .collect();
            object.insert("dropped".to_owned(), dropped.into());
            object
        };
        let mut sums = BTreeMap::new();
        let mut ports = serde_json::Map::new();
        for (id, port) in &self.0 {
            let numbers: BTreeMap<&str, u64> = port.numbers().collect();
            for (name, number) in &numbers {
                *sums.entry(*name).or_insert(0) += number;
            }
            ports.insert(id.clone(), object(&numbers).into());
        }
        let mut all = object(&sums);
        all.insert("ports".to_owned(), ports.into());
        all.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> PortKeys<'static> {
        PortKeys::default()
    }

    #[test]
    fn a_trunk_has_vlans_and_ranges_and_one_without_tags_if_it_is_said() {
        let port = PortKeys {
            vlan: Some(7),
            trunk: Some("10+20-22"),
            ..keys()
        };
        let vid = |vid| Vid::new(vid).unwrap();
        let tagged = [10, 20, 21, 22].map(vid).into_iter().collect();
        let vlan = VlanMode::Trunk {
            native: Some(vid(7)),
            tagged,
        };
        assert_eq!(port.check().unwrap().vlan, vlan);
        let all = PortKeys {
            trunk: Some("all"),
            ..keys()
        }
        .check()
        .unwrap();
        assert!(all.vlan.is_member(vid(4094)) && all.vlan.is_tagged(vid(4094)));
        for wrong in ["", "0", "4095", "20-10", "a", "1-2-3", "10,11", "-5", "5-"] {
            let port = PortKeys {
                trunk: Some(wrong),
                ..keys()
            };
            assert!(port.check().is_err(), "{wrong}");
        }
        for wrong in [0, 4095, 70_000, u64::MAX] {
            let port = PortKeys {
                vlan: Some(wrong),
                ..keys()
            };
            let error = port.check().unwrap_err().to_string();
            assert!(error.contains("vlan is 1 to 4094"), "{error}");
        }
    }

    #[test]
    fn addresses_are_those_of_interfaces() {
        let port = PortKeys {
            mac: Some("52:54:00:00:00:01+52:54:00:00:00:0a"),
            ..keys()
        };
        let bound = port.check().unwrap().bound;
        assert_eq!(
            bound,
            [
                Mac([0x52, 0x54, 0, 0, 0, 1]),
                Mac([0x52, 0x54, 0, 0, 0, 10])
            ]
        );
        for wrong in [
            "",
            "52:54:00:00:00",
            "53:54:00:00:00:01",
            "00:00:00:00:00:00",
            "52:54:00:00:00:1",
            "52:54:00:00:00:01+",
        ] {
            assert!(
                PortKeys {
                    mac: Some(wrong),
                    ..keys()
                }
                .check()
                .is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_flood_limit_of_nothing_lets_nothing_through_and_none_is_a_thousand() {
        let port = PortKeys {
            flood_group: Some(0),
            ..keys()
        }
        .check()
        .unwrap();
        assert_eq!(port.flood.group, Rate::new(0, 0));
        assert_eq!(port.flood.unknown, FloodLimits::default().unknown);
        assert!(
            PortKeys {
                flood_unknown: Some(1 << 32),
                ..keys()
            }
            .check()
            .is_err()
        );
    }

    #[test]
    fn a_switch_without_devices_is_refused_and_an_address_is_one_devices() {
        let spec = SwitchSpec::parse("--switch", "id=s,ageing=60").unwrap();
        let switch = spec.check().unwrap();
        assert_eq!(switch.settings.ageing_ns, 60_000_000_000);
        let error = check_ports(std::slice::from_ref(&switch), [].into_iter()).unwrap_err();
        assert!(
            error.to_string().contains("switch s has no device"),
            "{error}"
        );
        let port = PortKeys {
            mac: Some("52:54:00:00:00:01"),
            ..keys()
        }
        .check()
        .unwrap();
        let twice = [("s", "a", &port), ("s", "b", &port)];
        let error = check_ports(&[], twice.into_iter()).unwrap_err().to_string();
        assert!(
            error.contains("device b: mac 52:54:00:00:00:01 is another device's"),
            "{error}"
        );
        // Of another switch it may be.
        check_ports(&[], [("s", "a", &port), ("t", "b", &port)].into_iter()).unwrap();
        let two = [switch.clone(), switch];
        assert!(check_ports(&two, [].into_iter()).is_err());
        for wrong in [
            "ageing=60",
            "id=s,ageing=0",
            "id=s,addresses=65537",
            "id=s,colour=red",
        ] {
            let spec = SwitchSpec::parse("--switch", wrong).and_then(|spec| spec.check());
            assert!(spec.is_err(), "{wrong}");
        }
    }
}
