//! The back end of one device.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use disk_image::lock::{Access, Locking};
use disk_image::{Backing, FileUse, ImageDisk, ImageOptions};
use rustix::fs::Access as Permission;
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, NullDisk, RawDisk, RawDiskOptions, Transfer};

use super::config::{BlockConfig, Source};
use super::purpose::Purpose;
use crate::ending::signals;
use crate::values::block::serial;
use crate::{image_format, image_lock, lacks};

/// Requests in flight of one device.
const DEPTH: u32 = 256;

/// Files of images that devices which were opened before use.
#[derive(Default)]
pub struct ImagesInUse(Vec<(String, FileUse)>);

impl ImagesInUse {
    /// Adds those of a device, its image first. Where images are opened in trial no lock tells that
    /// two devices exclude each other.
    ///
    /// # Errors
    /// One of them excludes a device before. Names a file only if it is behind the image.
    fn add(&mut self, id: &str, files: Vec<FileUse>) -> Result<()> {
        for (index, file) in files.iter().enumerate() {
            let excludes = |(_, other): &&(String, FileUse)| {
                other.identity == file.identity
                    && (other.access == Access::Write || file.access == Access::Write)
            };
            if let Some((other, used)) = self.0.iter().find(excludes) {
                let does = match used.access {
                    Access::Write => "writes to it",
                    Access::Read => "reads it and lets nobody write",
                };
                let behind = match index {
                    0 => String::new(),
                    _ => format!("backing file {}: ", file.path.display()),
                };
                bail!(
                    "{behind}in use: this process (device {other}) {does} (an image can be shared \
                     if all who use it have readonly=on)"
                );
            }
        }
        let files = files.into_iter().map(|file| (id.to_owned(), file));
        self.0.extend(files);
        Ok(())
    }
}

/// Opens what the device serves, which `wrap` may wrap. In a check nothing is locked or changed.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn open(
    config: &BlockConfig,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Result<Box<dyn BlockIo>>,
    purpose: Purpose,
    images: &mut ImagesInUse,
) -> Result<Blk> {
    let io: Box<dyn BlockIo> = match &config.source {
        Source::Raw(path) => {
            let disk = raw(config, path, purpose, images);
            Box::new(disk.with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Qcow2(path) => {
            let disk = qcow2(config, path, purpose, images);
            Box::new(disk.with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Ram(bytes) => Box::new(ram(*bytes)?),
        Source::Null(bytes) => Box::new(NullDisk::new(*bytes)),
    };
    let io = wrap(io)?;
    let blk = BlkConfig {
        logical_block: config.block,
        queues: config.queues,
        queue_size: config.queue_size,
        serial: serial(&config.id),
        packed: config.packed,
        limits: config.limits,
    };
    let path = io.path();
    Blk::new(blk, io).with_context(|| match path {
        Some(path) => format!("disk image {}", path.display()),
        None => format!("device {}", config.id),
    })
}

fn raw(
    config: &BlockConfig,
    path: &Path,
    purpose: Purpose,
    images: &mut ImagesInUse,
) -> Result<RawDisk> {
    let is_trial = purpose == Purpose::Check;
    // To close a block device that was open for writing is an event for others.
    let read_only = config.read_only || is_trial;
    let direct = if config.direct { libc::O_DIRECT } else { 0 };
    // Non-blocking: opening a FIFO must not wait for its other end.
    let file = File::options()
        .read(true)
        .write(!read_only)
        .custom_flags(direct | libc::O_NONBLOCK)
        .open(path)
        .context("it cannot be opened")?;
    if is_trial && !config.read_only {
        lacks::may_access(path, Permission::WRITE_OK)
            .context("it cannot be opened for writing (readonly=on needs less)")?;
    }
    if !config.is_format_said {
        image_format::refuse_image(&file)?;
    }
    let locking = locking(config);
    let file = match purpose {
        Purpose::Start => image_lock::raw(file, path, config.read_only, &locking)?,
        Purpose::Check => {
            let access = Access::of_disk(config.read_only);
            image_lock::probe(&file, access, &locking)?;
            let about = file.metadata().context("it cannot be looked at")?;
            let used = FileUse {
                path: path.to_owned(),
                identity: (about.dev(), about.ino()),
                access,
            };
            add_if_locked(config, images, vec![used])?;
            file
        }
    };
    let options = RawDiskOptions {
        read_only,
        o_direct: config.direct,
        transfer: Transfer::Direct,
        depth: DEPTH,
    };
    let disk = RawDisk::from_file(file, options)?;
    lacks::say_how_served(&disk);
    Ok(disk)
}

fn qcow2(
    config: &BlockConfig,
    path: &Path,
    purpose: Purpose,
    images: &mut ImagesInUse,
) -> Result<ImageDisk> {
    let options = ImageOptions {
        read_only: config.read_only,
        depth: DEPTH,
        backing: if config.backing {
            Backing::Follow
        } else {
            Backing::Refuse
        },
        locking: locking(config),
        barriers: config.barriers,
        ..ImageOptions::default()
    };
    let explain = |error| image_lock::explain(error, path);
    match purpose {
        Purpose::Start => ImageDisk::open(path, options).map_err(explain),
        Purpose::Check => {
            let (disk, files) = ImageDisk::open_in_trial(path, options).map_err(explain)?;
            add_if_locked(config, images, files)?;
            Ok(disk)
        }
    }
}

/// Adds a disk's files, if they are locked. Devices without locks exclude no others, and are
/// excluded by none.
fn add_if_locked(
    config: &BlockConfig,
    images: &mut ImagesInUse,
    files: Vec<FileUse>,
) -> Result<()> {
    match config.locking {
        true => images.add(&config.id, files),
        false => Ok(()),
    }
}

/// Returns the rules for locks. A wait for a lock ends with the signals that end the daemon.
fn locking(config: &BlockConfig) -> Locking {
    Locking {
        is_on: config.locking,
        give_up: signals::is_end_asked,
    }
}

fn ram(bytes: u64) -> Result<MemDisk> {
    let len = usize::try_from(bytes).context("more memory than can be addressed")?;
    // Zeroed memory comes from the kernel as it is touched; what can never be there is refused
    // here.
    if Vec::<u8>::new().try_reserve_exact(len).is_err() {
        bail!(
            "a disk of {} MiB in memory: the host does not grant this process so much (ulimit -v, \
             vm.overcommit_memory)",
            bytes >> 20
        );
    }
    Ok(MemDisk::new(vec![0; len], DEPTH, false))
}
