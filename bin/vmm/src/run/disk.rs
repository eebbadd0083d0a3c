//! `--disk`, checked: the file is open and of a usable size.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use disk_image::lock::Locking;
use disk_image::{Backing, ImageDisk, ImageOptions};
use vio::blk::BlkConfig;

use super::worker::{self, WorkerConfig};
use crate::ending::signals;
use crate::values::block::{self, BlockSpec, all_but};
use crate::values::keys::Keys;
use crate::{image_format, image_lock, moved};

/// Format of a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The disk's blocks, as they are.
    Raw,
    /// A qcow2 image.
    Qcow2 {
        /// It may have a backing file.
        backing: bool,
        /// Its metadata are kept in order for a power cut.
        barriers: bool,
    },
}

/// One disk.
#[derive(Debug)]
pub struct DiskConfig {
    /// As given.
    pub path: PathBuf,
    /// Open, for reading and (unless `read_only`) writing; with O_DIRECT if `direct`. Not locked by
    /// the check.
    pub file: File,
    /// Its format.
    pub format: Format,
    /// The file is to be locked.
    pub locking: bool,
    /// The guest may not write.
    pub read_only: bool,
    /// Logical block size: 512 or 4096 bytes.
    pub block: u32,
    /// The file passes the host's page cache by.
    pub direct: bool,
    /// Request queues, 1 to 16.
    pub queues: u16,
    /// Entries of each at most, a power of two.
    pub queue_size: u16,
    /// Serial number, at most 20 bytes of ASCII.
    pub id: String,
    /// Settings of its device model's process, if it has one of its own.
    pub worker: Option<WorkerConfig>,
}

/// The keys of a block device that a disk in a file takes here.
const KEYS: [&str; 11] = [
    "id",
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
];

/// Says which option a value is of.
pub fn of_disk<T>(value: anyhow::Result<T>) -> anyhow::Result<T> {
    value.map_err(|error| anyhow!("--disk: {error}"))
}

impl DiskConfig {
    /// Returns the configuration of its device.
    pub fn device(&self) -> BlkConfig {
        BlkConfig {
            logical_block: self.block,
            queues: self.queues,
            queue_size: self.queue_size,
            serial: block::serial(&self.id),
            ..BlkConfig::default()
        }
    }

    /// Checks one `--disk`, the `index`-th.
    pub fn check(text: &str, index: usize) -> anyhow::Result<Self> {
        let mut keys = Keys::parse("--disk", text)?;
        let name = format!("disk{index}");
        moved::refuse_latency(&keys, "run", &name)?;
        moved::refuse_misbehave(&keys, &name)?;
        // A socket would have made it a disk of another kind.
        keys.refuse(all_but(&KEYS).filter(|key| *key != "socket"), |key| {
            format!(
                "for disks that machines share: exitless serve --block {key}=…, and --disk \
                 socket=… here"
            )
        })?;
        let spec = BlockSpec::take(&mut keys, &KEYS)?;
        let read_only = spec.readonly.unwrap_or(false);
        let direct = spec.direct.unwrap_or(false);
        let locking = spec.locking.unwrap_or(true);
        let format = of_disk(format(&spec))?;
        let block = of_disk(spec.logical_block())?;
        let queues = of_disk(spec.queues())?;
        let queue_size = of_disk(spec.queue_size(256))?;
        let id = spec.id.clone();
        let id = id.unwrap_or_else(|| format!("exitless{index}"));
        if id.len() > 20 || !id.bytes().all(|b| b.is_ascii_graphic()) {
            bail!("--disk: id {id:?} is not 20 printable ASCII characters at most");
        }
        let (worker, on_death) = (keys.take("worker"), keys.take("on-death"));
        let worker = of_disk(worker::check(worker, on_death))?;
        if worker.is_some() && format != Format::Raw {
            bail!("--disk: worker is for raw files: a worker opens no backing file yet");
        }
        // Among what is known, where a key is not.
        keys.take("socket");
        let path = spec.path.as_deref().filter(|path| !path.is_empty());
        if path.is_some() || text.contains('=') {
            keys.finish()?;
        }
        let Some(path) = path.map(PathBuf::from) else {
            bail!("--disk {text:?} names no file and no socket: write path=FILE or socket=PATH");
        };
        let file = open(&path, read_only, direct)?;
        if spec.format.is_none() {
            let refused = image_format::refuse_image(&file);
            refused.with_context(|| format!("disk {}", path.display()))?;
        }
        if format == Format::Raw {
            check_size(&file, &path, block)?;
        }
        Ok(Self {
            path,
            file,
            format,
            locking,
            read_only,
            block,
            direct,
            queues,
            queue_size,
            id,
            worker,
        })
    }

    /// Locks a raw file, and waits for a predecessor if it must. An image is locked when it is
    /// [opened](Self::open_image).
    pub fn lock(self) -> anyhow::Result<Self> {
        if self.format != Format::Raw {
            return Ok(self);
        }
        let locking = Locking {
            is_on: self.locking,
            // Signals are blocked here if the machine is started again.
            give_up: signals::is_end_asked,
        };
        let file = image_lock::raw(self.file, &self.path, self.read_only, &locking)
            .with_context(|| format!("disk {}", self.path.display()))?;
        // No other process resizes it from now on; a predecessor that was waited for may have.
        check_size(&file, &self.path, self.block)?;
        Ok(Self { file, ..self })
    }

    /// Opens and locks the image in the file, with its backing files, for so many requests at a
    /// time; `None` for a raw file. Its error does not name the file. It has threads, so signals
    /// are to be blocked before; one that ends the machine ends a wait for a predecessor as well.
    pub fn open_image(&self, depth: u32) -> anyhow::Result<Option<ImageDisk>> {
        let Format::Qcow2 { backing, barriers } = self.format else {
            return Ok(None);
        };
        let options = ImageOptions {
            read_only: self.read_only,
            depth,
            backing: match backing {
                true => Backing::Follow,
                false => Backing::Refuse,
            },
            locking: Locking {
                is_on: self.locking,
                give_up: signals::is_end_asked,
            },
            barriers,
            ..ImageOptions::default()
        };
        let image = ImageDisk::open(&self.path, options);
        image
            .map(Some)
            .map_err(|error| image_lock::explain(error, &self.path))
    }

    /// Returns device and inode, which show whether two disks are one file.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let meta = self.file.metadata()?;
        if meta.file_type().is_block_device() {
            // Two device nodes may name one disk.
            return Ok((u64::MAX, meta.rdev()));
        }
        Ok((meta.dev(), meta.ino()))
    }
}

/// Returns the format that is given for the file.
fn format(spec: &BlockSpec) -> anyhow::Result<Format> {
    match spec.format()? {
        None | Some(block::Format::Raw) => {
            for (key, value) in [("backing", spec.backing), ("barriers", spec.barriers)] {
                if value.is_some() {
                    bail!("{key} is for images: write format=qcow2");
                }
            }
            Ok(Format::Raw)
        }
        Some(block::Format::Qcow2) => {
            if spec.direct == Some(true) {
                bail!("direct is for raw files");
            }
            Ok(Format::Qcow2 {
                backing: spec.backing.unwrap_or(false),
                barriers: spec.barriers.unwrap_or(true),
            })
        }
    }
}

fn open(path: &Path, read_only: bool, direct: bool) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only);
    // Non-blocking: opening a FIFO must not wait for its other end.
    let direct_flag = if direct { libc::O_DIRECT } else { 0 };
    options.custom_flags(direct_flag | libc::O_NONBLOCK);
    let file = options.open(path).with_context(|| {
        let hint = if read_only {
            ""
        } else {
            " for writing (readonly=on needs less)"
        };
        format!("disk {} cannot be opened{hint}", path.display())
    })?;
    let kind = file
        .metadata()
        .with_context(|| format!("disk {}", path.display()))?
        .file_type();
    if !kind.is_file() && !kind.is_block_device() {
        bail!(
            "disk {} is neither a file nor a block device",
            path.display()
        );
    }
    Ok(file)
}

fn check_size(file: &File, path: &Path, block: u32) -> anyhow::Result<()> {
    use io::{Seek, SeekFrom};
    let mut file = file;
    // Seeking measures block devices too.
    let bytes = file
        .seek(SeekFrom::End(0))
        .with_context(|| format!("disk {} has no size", path.display()))?;
    if bytes == 0 {
        bail!("disk {} is empty", path.display());
    }
    if bytes % u64::from(block) != 0 {
        bail!(
            "disk {}: its size of {bytes} bytes is not a multiple of the block size {block}",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_image_is_not_named_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.raw");
        std::fs::write(&path, [0; 4096]).unwrap();
        let disk = DiskConfig::check(&format!("path={},format=qcow2", path.display()), 0).unwrap();
        let error = disk.open_image(1).err().unwrap();
        // The machine's builder says which disk it is.
        assert_eq!(format!("{error:#}"), "not a qcow2 image");
    }
}
