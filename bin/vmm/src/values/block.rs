//! The keys of a block device, for the options `--disk` and `--block` and for configuration files.
//!
//! All commands share one grammar: each accepts a subset of the keys. The values of a key are the
//! same for all.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::Deserialize;

use super::keys::Keys;
use super::size::{self, in_range};

/// The longest socket path, in bytes: the size of `sun_path` without its terminator.
pub const MAX_SOCKET: usize = 107;

/// All keys.
pub const ALL: [&str; 20] = [
    "id",
    "socket",
    "mode",
    "group",
    "path",
    "format",
    "readonly",
    "direct",
    "backing",
    "locking",
    "barriers",
    "block",
    "queues",
    "queue-size",
    "packed",
    "weight",
    "iops",
    "iops-burst",
    "bps",
    "bps-burst",
];

/// Returns the serial number of a disk with this name of at most 20 bytes, zero-padded.
pub fn serial(id: &str) -> [u8; 20] {
    let mut serial = [0; 20];
    serial[..id.len()].copy_from_slice(id.as_bytes());
    serial
}

/// Returns all keys but these.
pub fn all_but(accepted: &[&str]) -> impl Iterator<Item = &'static str> {
    let accepted = accepted.to_vec();
    ALL.into_iter().filter(move |key| !accepted.contains(key))
}

/// Format of a device's image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Raw,
    Qcow2,
}

/// One device as the user writes it, not yet checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct BlockSpec {
    pub id: Option<String>,
    pub socket: Option<PathBuf>,
    pub mode: Option<String>,
    pub group: Option<String>,
    pub path: Option<String>,
    pub format: Option<String>,
    pub readonly: Option<bool>,
    pub direct: Option<bool>,
    pub backing: Option<bool>,
    pub locking: Option<bool>,
    pub barriers: Option<bool>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub block: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub queues: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub queue_size: Option<u64>,
    pub packed: Option<bool>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub weight: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub iops: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub iops_burst: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub bps: Option<u64>,
    #[serde(default, deserialize_with = "size::in_file")]
    pub bps_burst: Option<u64>,
}

impl BlockSpec {
    /// Takes the keys of `accepted` out of `keys`. The rest is for the command, or unknown.
    ///
    /// # Errors
    /// A value is no switch or no number; the error names the option and the key.
    pub fn take(keys: &mut Keys<'_>, accepted: &[&str]) -> Result<Self> {
        let mut keys = keys.part(accepted);
        Ok(Self {
            id: keys.text("id"),
            socket: keys.text("socket").map(PathBuf::from),
            mode: keys.text("mode"),
            group: keys.text("group"),
            path: keys.text("path"),
            format: keys.text("format"),
            readonly: keys.switch("readonly")?,
            direct: keys.switch("direct")?,
            backing: keys.switch("backing")?,
            locking: keys.switch("locking")?,
            barriers: keys.switch("barriers")?,
            block: keys.number("block")?,
            queues: keys.number("queues")?,
            queue_size: keys.number("queue-size")?,
            packed: keys.switch("packed")?,
            weight: keys.number("weight")?,
            iops: keys.number("iops")?,
            iops_burst: keys.number("iops-burst")?,
            bps: keys.number("bps")?,
            bps_burst: keys.number("bps-burst")?,
        })
    }

    /// Returns the format; `None` if none is given.
    ///
    /// # Errors
    /// The format is unknown.
    pub fn format(&self) -> Result<Option<Format>> {
        match self.format.as_deref() {
            None => Ok(None),
            Some("raw") => Ok(Some(Format::Raw)),
            Some("qcow2") => Ok(Some(Format::Qcow2)),
            Some(other) => bail!("format is raw or qcow2, not {other:?}"),
        }
    }

    /// Returns the size of a logical block in bytes: 512 by default, or 4096.
    ///
    /// # Errors
    /// The value is another number.
    pub fn logical_block(&self) -> Result<u32> {
        let block = in_range("block", self.block, 512, 512..=4096)? as u32;
        if block != 512 && block != 4096 {
            bail!("block is 512 or 4096, not {block}");
        }
        Ok(block)
    }

    /// Returns the number of request queues, 1 to 16: by default 1.
    ///
    /// # Errors
    /// The value is another number.
    pub fn queues(&self) -> Result<u16> {
        Ok(in_range("queues", self.queues, 1, 1..=16)? as u16)
    }

    /// Returns the number of entries of a queue.
    ///
    /// # Errors
    /// The value is no power of two from 2 to 1024.
    pub fn queue_size(&self, default: u16) -> Result<u16> {
        size::queue_size(self.queue_size, default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_taken_where_it_is_accepted_and_left_where_it_is_not() {
        for key in ALL {
            for value in ["1", "on"] {
                let text = format!("{key}={value}");
                let mut keys = Keys::parse("--block", &text).unwrap();
                let others: Vec<_> = ALL.into_iter().filter(|other| *other != key).collect();
                BlockSpec::take(&mut keys, &others).unwrap();
                // One of the two values does not fit the type of the key; an error of that kind
                // shows that the key was taken.
                let spec = BlockSpec::take(&mut keys, &ALL);
                if let Ok(spec) = &spec {
                    assert_ne!(format!("{spec:?}"), format!("{:?}", BlockSpec::default()));
                }
                assert!(spec.is_err() || keys.finish().is_ok(), "{text}");
            }
        }
    }

    #[test]
    fn an_unknown_key_is_left() {
        let mut keys = Keys::parse("--disk", "path=a,colour=red").unwrap();
        let spec = BlockSpec::take(&mut keys, &ALL).unwrap();
        assert_eq!(spec.path.as_deref(), Some("a"));
        let error = keys.finish().unwrap_err().to_string();
        assert!(
            error.starts_with("--disk: unknown key \"colour\" (it takes id, "),
            "{error}"
        );
    }
}
