//! The back end of one device.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use disk_image::{Backing, ImageDisk, ImageOptions};
use vio::blk::{Blk, BlkConfig, BlockIo, MemDisk, NullDisk, Transfer, UringFile, UringOptions};

use super::config::{BlockConfig, Source};

/// Requests in flight of one device.
const DEPTH: u32 = 256;
/// How long a predecessor may take to let go of an image, and how often that is looked at.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// Opens what the device serves.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn open(config: &BlockConfig) -> Result<Blk> {
    let io: Box<dyn BlockIo> = match &config.source {
        Source::Raw(path) => {
            Box::new(raw(config, path).with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Qcow2(path) => {
            Box::new(qcow2(config, path).with_context(|| format!("disk image {}", path.display()))?)
        }
        Source::Ram(bytes) => Box::new(ram(*bytes)?),
        Source::Null(bytes) => Box::new(NullDisk::new(*bytes)),
    };
    let mut serial = [0; 20];
    serial[..config.id.len()].copy_from_slice(config.id.as_bytes());
    let blk = BlkConfig {
        logical_block: config.block,
        queues: config.queues,
        queue_size: config.queue_size,
        serial,
        packed: config.packed,
        limits: config.limits,
        ..BlkConfig::default()
    };
    Ok(Blk::new(blk, io)?)
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
    lock(&file, config.read_only)?;
    let options = UringOptions {
        read_only: config.read_only,
        o_direct: config.direct,
        transfer: Transfer::Direct,
        depth: DEPTH,
    };
    Ok(UringFile::from_file(file, options)?)
}

/// One writer, or any number of readers: a second daemon, or a second device of this one, is refused.
///
/// A predecessor that was killed lets go only when the kernel has finished what it had in flight: the lock belongs to the
/// open file, which each operation of its io_uring holds. So whoever has the lock knows that no write of the predecessor
/// is still to come, which could otherwise overtake the guest's next one; and waiting for it a while is part of taking over.
fn lock(file: &File, is_shared: bool) -> Result<()> {
    use std::os::fd::AsRawFd;
    let how = if is_shared {
        libc::LOCK_SH
    } else {
        libc::LOCK_EX
    };
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        // SAFETY: plain system call on a descriptor that is open.
        if unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error).context("it cannot be locked");
        }
        if Instant::now() >= deadline {
            bail!("it is in use (an image can be shared if all who use it have readonly=on)");
        }
        std::thread::sleep(LOCK_RETRY);
    }
}

fn qcow2(config: &BlockConfig, path: &Path) -> Result<ImageDisk> {
    let options = ImageOptions {
        read_only: config.read_only,
        depth: DEPTH,
        backing: if config.backing {
            Backing::Follow
        } else {
            Backing::Refuse
        },
        barriers: config.barriers,
        ..ImageOptions::default()
    };
    Ok(ImageDisk::open(path, options)?)
}

fn ram(bytes: u64) -> Result<MemDisk> {
    let len = usize::try_from(bytes).context("more memory than can be addressed")?;
    // Zeroed memory comes from the kernel as it is touched; what can never be there is refused here.
    Vec::<u8>::new()
        .try_reserve_exact(len)
        .context("there is not that much memory")?;
    Ok(MemDisk::new(vec![0; len], DEPTH, false))
}
