//! `exitless device-worker`: the device model of one disk, in a process that has nothing but the
//! disk's file and the bytes of its requests.
//!
//! Started by `run` (`--disk …,worker=on`) through exec, so nothing of the owner's memory is here.
//! The owner sends its descriptors over the socket that is standard input: the shared area, an
//! eventfd each way, one that is closed when it serves, the image. The rest is given up before the
//! first request is read, in this order: other descriptors, namespaces, capabilities,
//! resource limits, system calls (crate `confine`).
//!
//! One thread takes requests and answers them; four threads make the calls that wait for storage.
//! There is no io_uring: what a ring is asked for goes round the filter of system calls.
//!
//! | file | what it has |
//! |---|---|
//! | `descriptors` | sending and receiving them |
//! | `calls` | the system calls that are allowed |

mod calls;
pub mod descriptors;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use anyhow::{Context, Result};
use confine::Limits;
use guest_mem::SharedFile;
use rustix::event::{PollFd, PollFlags, poll};
use vio::blk::{BlkConfig, BlkWorker, BlockIo, RawDisk, RawDiskOptions, Transfer, UringRefusal};
use worker_area::{FACTS, Worker};

use crate::values::block::serial;
use descriptors::Given;

/// Looks at the rings before it sleeps, of some tens of nanoseconds each.
const LOOKS: u32 = 500;
/// Bytes of address space: the area, stacks and heaps of five threads.
const ADDRESS_SPACE: u64 = 2 << 30;
/// Numbers of descriptors below which new ones would be made; what waits for them polls as many.
const DESCRIPTORS: u64 = 8;

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

/// What a worker says of itself, beside the facts of its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confined {
    /// Error number of leaving the host's namespaces; 0: it has left them.
    pub namespaces: u64,
    /// System calls that it may make; 0: all.
    pub calls: u64,
}

impl Confined {
    /// Reads what a worker says.
    pub fn of(facts: &[u64; FACTS]) -> Self {
        Self {
            namespaces: facts[4],
            calls: facts[5],
        }
    }
}

/// Runs `device-worker` until its owner ends it. Its disk is what `wrap` makes of the image's.
///
/// # Errors
/// It was not started by a machine, or cannot start.
pub fn main(
    args: &DeviceWorkerArgs,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Box<dyn BlockIo>,
) -> Result<u8> {
    confine::die_with_parent(args.owner)?;
    let given = descriptors::receive(io::stdin().as_fd())
        .context("device-worker is started by `exitless run --disk path=FILE,worker=on`")?;
    given.replace_standard().context("standard descriptors")?;
    let keep = given.numbers();
    let kept: Vec<RawFd> = keep.iter().chain(&[0, 1, 2]).copied().collect();
    confine::close_all_but(&kept).context("/proc/self/fd")?;
    let namespaces = match confine::leave_namespaces() {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO) as u64,
    };
    let Given {
        area,
        kick,
        call,
        ready,
        image,
    } = given;
    let len = rustix::fs::fstat(&area).context("the area")?.st_size;
    let mut area = Worker::open(area, u64::try_from(len).context("the area")?)?;
    let begun = begin(args, image, wrap, &area, namespaces);
    let (worker, facts) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            area.failed(&format!("{error:#}"));
            ring(ready.as_fd());
            return Ok(2);
        }
    };
    area.ready(facts);
    ring(ready.as_fd());
    drop(ready);
    // Nobody reads its log, and what a message would ask of the host ends the process.
    let silent = tracing::subscriber::NoSubscriber::new();
    tracing::subscriber::with_default(silent, || {
        serve(worker, &mut area, kick.as_fd(), call.as_fd())
    })
}

/// Opens the disk, and gives up what is not needed from here on.
fn begin(
    args: &DeviceWorkerArgs,
    image: OwnedFd,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Box<dyn BlockIo>,
    area: &Worker<SharedFile>,
    namespaces: u64,
) -> Result<(BlkWorker, [u64; FACTS])> {
    let options = RawDiskOptions {
        read_only: args.read_only,
        o_direct: args.direct,
        transfer: Transfer::Direct,
        depth: area.shape().slots(),
    };
    let why = UringRefusal {
        what: "io_uring in a confined process",
        error: io::Error::from_raw_os_error(libc::EPERM),
    };
    // Rights are a thread's own: before there are others, which begin with this one's.
    confine::drop_privileges().context("capabilities")?;
    let disk = RawDisk::with_threads(File::from(image), options, why)?;
    let config = BlkConfig {
        logical_block: args.block,
        serial: serial(&args.id),
        ..BlkConfig::default()
    };
    let worker = BlkWorker::new(&config, wrap(Box::new(disk)), area)?;
    let disk = worker.facts().words();
    confine::set_limits(Limits {
        address_space: ADDRESS_SPACE,
        // The disk does not grow.
        file_size: worker.facts().capacity,
        descriptors: DESCRIPTORS,
    })
    .context("resource limits")?;
    // The kernel forgets it where a process's rights change.
    confine::die_with_parent(args.owner)?;
    let calls = match args.unconfined {
        true => 0,
        false => {
            let allowed = calls::allowed(worker.facts().capacity);
            confine::allow_only(&allowed)?;
            allowed.len() as u64
        }
    };
    let [capacity, alignment, discard, bits] = disk;
    let facts = [capacity, alignment, discard, bits, namespaces, calls, 0];
    Ok((worker, facts))
}

/// Takes requests and answers them, for ever.
fn serve(
    mut worker: BlkWorker,
    area: &mut Worker<SharedFile>,
    kick: BorrowedFd<'_>,
    call: BorrowedFd<'_>,
) -> Result<u8> {
    // Of the threads that wait for storage: always the same.
    let mut fds = Vec::new();
    worker.wake_fds(&mut fds);
    let mut looks = 0;
    loop {
        let is_busy = worker.step(area)?;
        if area.publish() {
            ring(call);
        }
        if is_busy {
            looks = 0;
            continue;
        }
        if looks < LOOKS {
            looks += 1;
            std::hint::spin_loop();
            continue;
        }
        looks = 0;
        area.arm();
        worker.arm();
        if !area.has_submissions() && !worker.has_ended() {
            descriptors::wait(kick, &fds);
        }
        worker.disarm();
        area.disarm();
    }
}

/// Makes an eventfd readable. Its counter is far from full.
fn ring(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Waits until one of these is readable, and empties `kick`.
fn wait_readable(kick: BorrowedFd<'_>, others: &[BorrowedFd<'_>]) {
    let mut polled = Vec::with_capacity(1 + others.len());
    polled.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
    for other in others {
        polled.push(PollFd::from_borrowed_fd(*other, PollFlags::IN));
    }
    // An interruption is looked into as anything else.
    let _ = poll(&mut polled, None);
    let _ = rustix::io::read(kick, &mut [0; 8]);
}

#[cfg(test)]
mod tests;
