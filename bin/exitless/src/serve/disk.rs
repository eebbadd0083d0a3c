//! The back end of one device.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use disk_image::lock::Locking;
use disk_image::{Backing, ImageDisk, ImageOptions};
use rustix::fs::{Access, access};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, NullDisk, Transfer, UringFile, UringOptions};

use vio_faults::PanicDisk;

use super::config::{BlockConfig, Source};
use crate::ending::signals;
use crate::{image_format, image_lock};

/// Requests in flight of one device.
const DEPTH: u32 = 256;

/// Opens what the device serves; `panics`, for tests: as soon as anything is asked of it.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn open(config: &BlockConfig, panics: bool) -> Result<Blk> {
    let mut io: Box<dyn BlockIo> = match &config.source {
        Source::Raw(path) => {
            Box::new(raw(config, path).with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Qcow2(path) => {
            Box::new(qcow2(config, path).with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Ram(bytes) => Box::new(ram(*bytes)?),
        Source::Null(bytes) => Box::new(NullDisk::new(*bytes)),
    };
    if panics {
        io = Box::new(PanicDisk::new(io));
    }
    let mut serial = [0; 20];
    serial[..config.id.len()].copy_from_slice(config.id.as_bytes());
    let blk = BlkConfig {
        logical_block: config.block,
        queues: config.queues,
        queue_size: config.queue_size,
        serial,
        packed: config.packed,
        limits: config.limits,
    };
    let path = io.path();
    Blk::new(blk, io).with_context(|| match path {
        Some(path) => format!("disk image {}", path.display()),
        None => format!("device {}", config.id),
    })
}

/// Whether the device could be opened, as far as can be seen without locking its image or changing anything.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn check(config: &BlockConfig) -> Result<()> {
    let trial = BlockConfig {
        read_only: true,
        locking: false,
        ..config.clone()
    };
    open(&trial, false)?;
    if let Source::Qcow2(path) = &config.source {
        ImageDisk::check(path, image_options(config))
            .map_err(|error| image_lock::explain(error, path))
            .with_context(|| format!("disk image {}", path.display()))?;
    }
    if let Source::Raw(path) | Source::Qcow2(path) = &config.source
        && !config.read_only
    {
        access(path, Access::WRITE_OK).with_context(|| {
            let path = path.display();
            format!("disk image {path} cannot be written (readonly=on needs less)")
        })?;
    }
    Ok(())
}

fn raw(config: &BlockConfig, path: &Path) -> Result<UringFile> {
    let direct = if config.direct { libc::O_DIRECT } else { 0 };
    // Non-blocking: opening a FIFO must not wait for its other end.
    let file = File::options()
        .read(true)
        .write(!config.read_only)
        .custom_flags(direct | libc::O_NONBLOCK)
        .open(path)
        .context("it cannot be opened")?;
    if !config.is_format_said {
        image_format::refuse_image(&file)?;
    }
    let file = image_lock::raw(file, path, config.read_only, &locking(config))?;
    let options = UringOptions {
        read_only: config.read_only,
        o_direct: config.direct,
        transfer: Transfer::Direct,
        depth: DEPTH,
    };
    Ok(UringFile::from_file(file, options)?)
}

fn qcow2(config: &BlockConfig, path: &Path) -> Result<ImageDisk> {
    ImageDisk::open(path, image_options(config)).map_err(|error| image_lock::explain(error, path))
}

fn image_options(config: &BlockConfig) -> ImageOptions {
    ImageOptions {
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
    }
}

/// A wait for a lock ends with the signals that end the daemon.
fn locking(config: &BlockConfig) -> Locking {
    Locking {
        is_on: config.locking,
        give_up: signals::is_end_asked,
    }
}

fn ram(bytes: u64) -> Result<MemDisk> {
    let len = usize::try_from(bytes).context("more memory than can be addressed")?;
    // Zeroed memory comes from the kernel as it is touched; what can never be there is refused here.
    Vec::<u8>::new()
        .try_reserve_exact(len)
        .context("there is not that much memory")?;
    Ok(MemDisk::new(vec![0; len], DEPTH, false))
}
