//! An ext4 file system with a journal on storage of the lab. It can be filled up by a file that
//! takes all free space.

use anyhow::{Context, Result};
use lab::Lab;

use super::host::Host;
use super::storage::{Storage, shell};
use super::tools::{text, tool};

/// Size of a file system, bytes.
pub const BYTES: usize = 12 << 20;
/// A new file system, to be copied.
const TEMPLATE: &str = "/root/ext4.template";
/// Mount point.
const PLACE: &str = "/mnt/storage";

/// A mounted file system.
pub struct FileSystem<'a> {
    lab: &'a Lab,
}

impl<'a> FileSystem<'a> {
    /// Creates a file system on `storage`, which has [`BYTES`]; none natively.
    ///
    /// # Errors
    /// This machine has no `mke2fs`; the lab refuses.
    pub fn make(host: &'a Host, storage: &Storage<'_>) -> Result<Option<Self>> {
        let Host::Lab(lab) = host else {
            return Ok(None);
        };
        if lab.exec("test", ["-f", TEMPLATE])?.status != 0 {
            let dir = tempfile::tempdir().context("making a directory for a file system")?;
            let image = dir.path().join("ext4");
            let size = format!("{}k", BYTES >> 10);
            // Blocks that fit sectors of either size; no blocks reserved for root.
            tool(
                "mke2fs",
                &[
                    "-q",
                    "-t",
                    "ext4",
                    "-b",
                    "4096",
                    "-m",
                    "0",
                    text(&image)?,
                    &size,
                ],
            )?;
            lab.push(&image, TEMPLATE)?;
        }
        let device = storage.path();
        let script = format!(
            "dd if={TEMPLATE} of={device} bs=64k && mkdir -p {PLACE} && mount -t ext4 {device} \
             {PLACE}"
        );
        shell(lab, &script)?;
        Ok(Some(Self { lab }))
    }

    /// Returns the path of a file on it.
    pub fn path(&self, name: &str) -> String {
        format!("{PLACE}/{name}")
    }

    /// Writes a file.
    pub fn put(&self, name: &str, data: &[u8]) -> Result<()> {
        Ok(self.lab.push_bytes(data, &self.path(name), 0o644)?)
    }

    /// Creates a file of `bytes` zeroes that takes no space yet.
    pub fn put_hole(&self, name: &str, bytes: usize) -> Result<()> {
        let path = self.path(name);
        shell(self.lab, &format!("truncate -s {bytes} {path}")).map(drop)
    }

    /// Reads a file.
    pub fn get(&self, name: &str) -> Result<Vec<u8>> {
        Ok(self.lab.pull_bytes(&self.path(name))?)
    }

    /// Takes all free space, until [`make_room`](Self::make_room).
    pub fn fill_up(&self) -> Result<()> {
        // It ends when there is no more space.
        let filler = self.path("filler");
        shell(
            self.lab,
            &format!("! dd if=/dev/zero of={filler} bs=4k 2>/dev/null"),
        )
        .map(drop)
    }

    /// Frees the space.
    pub fn make_room(&self) -> Result<()> {
        shell(self.lab, &format!("rm -f {}", self.path("filler"))).map(drop)
    }

    /// Unmounts it. The kernel may hold the files of a process that has ended for a moment longer.
    pub fn unmount(self) -> Result<()> {
        // 20 s, in steps of a tenth.
        let script = format!(
            "n=0; until umount {PLACE}; do n=$((n+1)); [ $n -le 200 ] || exit 1; sleep 0.1; done"
        );
        shell(self.lab, &script).map(drop)
    }
}
