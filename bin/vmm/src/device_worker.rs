//! `exitless device-worker`: the device model of one disk, in a process that has nothing but the
//! disk's file and the bytes of its requests. Its command line; the rest is in the crate
//! `disk-worker`.

use anyhow::{Context, Result};
use disk_worker::{LOOKS, Options, ServeError};
use vio::blk::BlockIo;

use crate::values::block::serial;

const EXAMPLES: &str = "\
Examples:
  It is started by a machine with such a disk:
    exitless run --kernel vmlinuz --initrd initrd.img --disk path=disk.raw,worker=on

Exit status:
  0  Its owner has gone.
  2  It could not start; its owner says why.";

/// Arguments of `device-worker`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct DeviceWorkerArgs {
    /// Process that started it, with which it ends.
    #[arg(long, value_name = "PID")]
    pub owner: u32,
    /// Refuse writes.
    #[arg(long)]
    pub read_only: bool,
    /// The image was opened past the page cache.
    #[arg(long)]
    pub direct: bool,
    /// Bytes of a logical block.
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    pub block: u32,
    /// Serial number, at most 20 characters.
    #[arg(long, value_name = "TEXT", default_value = "exitless", value_parser = parse_id)]
    pub id: String,
    /// Go without a filter of system calls.
    #[arg(long)]
    pub unconfined: bool,
}

fn parse_id(text: &str) -> Result<String, String> {
    match text.len() <= 20 && text.is_ascii() {
        true => Ok(text.to_owned()),
        false => Err("it has 20 ASCII characters at most".into()),
    }
}

impl From<&DeviceWorkerArgs> for Options {
    fn from(args: &DeviceWorkerArgs) -> Self {
        Self {
            owner: args.owner,
            read_only: args.read_only,
            direct: args.direct,
            block: args.block,
            serial: serial(&args.id),
            is_unconfined: args.unconfined,
            looks: LOOKS,
        }
    }
}

/// Runs `device-worker` until its owner ends it. Requests are carried out by what `wrap` makes of
/// the disk.
///
/// # Errors
/// It was not started by a machine, or cannot start.
pub fn main(
    args: &DeviceWorkerArgs,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Box<dyn BlockIo>,
) -> Result<u8> {
    let Err(error) = disk_worker::serve(&args.into(), wrap);
    match error {
        ServeError::Reported => Ok(2),
        error @ ServeError::NoOwner(_) => Err(error)
            .context("device-worker is started by `exitless run --disk path=FILE,worker=on`"),
        error => Err(error.into()),
    }
}
