//! The keys of a network device, as they are written after `--net`, and in a file.
//!
//! One grammar for every command, as `block` is for disks: each accepts a part of the keys, and the
//! values that a key may have are given here.

use std::path::PathBuf;

use anyhow::{Result, bail};
use net_ports::Existing;
use serde::Deserialize;
use vio::net::MAX_PAIRS;

use super::keys::Keys;
use super::size::{self, in_range};
use crate::ports::CaptureConfig;

/// Bytes of a capture file, unless another number is given.
const CAPTURE: u64 = 64 << 20;

/// One device as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NetSpec {
    pub id: Option<String>,
    pub socket: Option<PathBuf>,
    pub mode: Option<String>,
    pub group: Option<String>,
    pub tap: Option<String>,
    #[serde(default)]
    pub sink: bool,
    #[serde(default)]
    pub source: bool,
    #[serde(default)]
    pub r#loop: bool,
    pub switch: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub vlan: Option<u64>,
    pub trunk: Option<String>,
    pub isolated: Option<bool>,
    pub mac: Option<String>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub flood_group: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub flood_unknown: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub frame: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub mtu: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub pairs: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub queue_size: Option<u64>,
    pub packed: Option<bool>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub weight: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub fps: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub fps_burst: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub bps: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub bps_burst: Option<u64>,
    pub pcap: Option<PathBuf>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub pcap_max: Option<u64>,
    #[serde(default)]
    pub pcap_replace: bool,
}

impl NetSpec {
    /// Takes those of `accepted` out of `keys`; what is left is the command's own, or unknown.
    ///
    /// # Errors
    /// Names the option and the key whose value is no switch, or no number.
    pub fn take(keys: &mut Keys<'_>, accepted: &[&str]) -> Result<Self> {
        let mut keys = keys.part(accepted);
        Ok(Self {
            id: keys.text("id"),
            socket: keys.text("socket").map(PathBuf::from),
            mode: keys.text("mode"),
            group: keys.text("group"),
            tap: keys.text("tap"),
            sink: keys.word("sink")?,
            source: keys.word("source")?,
            r#loop: keys.word("loop")?,
            switch: keys.text("switch"),
            vlan: keys.number("vlan")?,
            trunk: keys.text("trunk"),
            isolated: keys.switch("isolated")?,
            mac: keys.text("mac"),
            flood_group: keys.number("flood-group")?,
            flood_unknown: keys.number("flood-unknown")?,
            frame: keys.number("frame")?,
            mtu: keys.number("mtu")?,
            pairs: keys.number("pairs")?,
            queue_size: keys.number("queue-size")?,
            packed: keys.switch("packed")?,
            weight: keys.number("weight")?,
            fps: keys.number("fps")?,
            fps_burst: keys.number("fps-burst")?,
            bps: keys.number("bps")?,
            bps_burst: keys.number("bps-burst")?,
            pcap: keys.text("pcap").map(PathBuf::from),
            pcap_max: keys.number("pcap-max")?,
            pcap_replace: keys.switch("pcap-replace")?.unwrap_or(false),
        })
    }

    /// Returns the number of queue pairs: 1 unless another is given.
    ///
    /// # Errors
    /// None, or more than a device has.
    pub fn pairs(&self) -> Result<u16> {
        Ok(in_range("pairs", self.pairs, 1, 1..=MAX_PAIRS.into())? as u16)
    }

    /// Returns the largest packet, if it is given: what Linux takes, an IPv4 host's least to what
    /// fits the field.
    ///
    /// # Errors
    /// Any other number.
    pub fn mtu(&self) -> Result<Option<u16>> {
        let check = |mtu| in_range("mtu", Some(mtu), mtu, 68..=65_535);
        Ok(self.mtu.map(check).transpose()?.map(|mtu| mtu as u16))
    }

    /// Returns the file that the frames are written to.
    ///
    /// # Errors
    /// Its bound is too small or too large, or there is no file for it.
    pub fn capture(&self) -> Result<Option<CaptureConfig>> {
        let Some(path) = &self.pcap else {
            if self.pcap_max.is_some() || self.pcap_replace {
                bail!("pcap-max and pcap-replace are for pcap=FILE");
            }
            return Ok(None);
        };
        if path.as_os_str().is_empty() {
            bail!("pcap is empty");
        }
        Ok(Some(CaptureConfig {
            path: path.clone(),
            limit: in_range("pcap-max", self.pcap_max, CAPTURE, 4096..=1 << 40)?,
            existing: match self.pcap_replace {
                true => Existing::Replaced,
                false => Existing::Refused,
            },
        }))
    }
}
