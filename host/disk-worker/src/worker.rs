//! The process: what it gives up, in which order, and the loop that takes requests and answers
//! them.
//!
//! The owner sends its descriptors over the socket that is standard input: the shared area, an
//! eventfd each way, one that is closed when it serves, the image. The rest is given up before the
//! first request is read, in this order: other descriptors, namespaces, capabilities, resource
//! limits, system calls (crate `confine`).

use std::convert::Infallible;
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use confine::Limits;
use guest_mem::SharedFile;
use vio::blk::request::ID_LEN;
use vio::blk::{BlkConfig, BlkWorker, BlockIo, RawDisk, RawDiskOptions, Transfer, UringRefusal};
use worker_area::{FACTS, OpenError, OwnerError, Worker};

use crate::descriptors::{self, Given};
use crate::{HostError, calls};

/// Number of empty polls in a row before a worker sleeps, of some tens of nanoseconds each.
pub const LOOKS: u32 = 500;
/// Bytes of address space: the area, stacks and heaps of five threads.
const ADDRESS_SPACE: u64 = 2 << 30;
/// Numbers of descriptors below which new ones would be made; what waits for them polls as many.
const DESCRIPTORS: u64 = 8;

/// Settings of a worker: those of its program's command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Process that started it, with which it ends.
    pub owner: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The image was opened past the page cache.
    pub direct: bool,
    /// Bytes of a logical block, 512 or 4096.
    pub block: u32,
    /// Serial number, zero-padded.
    pub serial: [u8; ID_LEN],
    /// It goes without a filter of system calls.
    pub is_unconfined: bool,
    /// Number of empty polls in a row before it sleeps: [`LOOKS`] for disks of guests; 0: it sleeps
    /// after the first.
    pub looks: u32,
}

/// Reason why a worker does not serve, or serves no longer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It was not started by an owner.
    #[error(transparent)]
    NoOwner(io::Error),
    /// It does not end with its owner: that has gone, or the kernel refuses.
    #[error(transparent)]
    Parent(io::Error),
    /// The host refuses what it needs before it can say so to its owner.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The memory that it was sent is no area.
    #[error(transparent)]
    Area(#[from] OpenError),
    /// It cannot begin, and has said why to its owner.
    #[error("its owner has the reason")]
    Told,
    /// The owner has broken the protocol.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// Facts that a worker gives about itself, beside those of its disk. Not to be trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confined {
    /// Error number of leaving the host's namespaces; 0: it has left them.
    pub namespaces: u64,
    /// System calls that it may make; 0: all.
    pub calls: u64,
}

impl Confined {
    /// Reads what a worker says.
    pub(crate) fn of(facts: &[u64; FACTS]) -> Self {
        Self {
            namespaces: facts[4],
            calls: facts[5],
        }
    }
}

/// Serves the disk that the owner sends over standard input, until that ends this process. To be
/// called while there is one thread.
///
/// `wrap` is given the disk, and returns what requests are carried out by: a back end at least as
/// deep. It is called once, without capabilities and namespaces, before the limits are set and
/// system calls filtered.
///
/// # Errors
/// The process serves nothing, and is to end.
pub fn serve(
    options: &Options,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Box<dyn BlockIo>,
) -> Result<Infallible, ServeError> {
    confine::die_with_parent(options.owner).map_err(ServeError::Parent)?;
    let given = descriptors::receive(io::stdin().as_fd()).map_err(ServeError::NoOwner)?;
    let replaced = given.replace_standard();
    replaced.map_err(HostError::of("standard descriptors"))?;
    let keep = given.numbers();
    let kept: Vec<RawFd> = keep.iter().chain(&[0, 1, 2]).copied().collect();
    confine::close_all_but(&kept).map_err(HostError::of("/proc/self/fd"))?;
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
    let len = rustix::fs::fstat(&area).map_err(HostError::of("the area"))?;
    let len = u64::try_from(len.st_size).map_err(|_| io::Error::other("it has no length"));
    let mut area = Worker::open(area, len.map_err(HostError::of("the area"))?)?;
    let begun = begin(options, wrap, image, &area, namespaces);
    let (worker, facts) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            area.failed(&in_full(&*error));
            ring(ready.as_fd());
            return Err(ServeError::Told);
        }
    };
    area.ready(facts);
    ring(ready.as_fd());
    drop(ready);
    // Its log has no reader, and what a message would ask of the host ends the process.
    let silent = tracing::subscriber::NoSubscriber::new();
    tracing::subscriber::with_default(silent, || {
        run(worker, &mut area, kick.as_fd(), call.as_fd(), options.looks)
    })
}

/// Returns the text of an error with those of its sources.
fn in_full(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Opens the disk, and gives up what is not needed from here on.
fn begin(
    options: &Options,
    wrap: impl FnOnce(Box<dyn BlockIo>) -> Box<dyn BlockIo>,
    image: OwnedFd,
    area: &Worker<SharedFile>,
    namespaces: u64,
) -> Result<(BlkWorker, [u64; FACTS]), Box<dyn Error>> {
    let of_disk = RawDiskOptions {
        read_only: options.read_only,
        o_direct: options.direct,
        transfer: Transfer::Direct,
        depth: area.shape().slots(),
    };
    let why = UringRefusal {
        what: "io_uring in a confined process",
        error: io::Error::from_raw_os_error(libc::EPERM),
    };
    // Rights are a thread's own: before there are others, which begin with this one's.
    confine::drop_privileges().map_err(HostError::of("capabilities"))?;
    let disk = RawDisk::with_threads(File::from(image), of_disk, why)?;
    let config = BlkConfig {
        logical_block: options.block,
        serial: options.serial,
        ..BlkConfig::default()
    };
    let worker = BlkWorker::new(&config, wrap(Box::new(disk)), area)?;
    let disk = worker.facts().words();
    let limits = Limits {
        address_space: ADDRESS_SPACE,
        // The disk does not grow.
        file_size: worker.facts().capacity,
        descriptors: DESCRIPTORS,
    };
    confine::set_limits(limits).map_err(HostError::of("resource limits"))?;
    // The kernel forgets it where a process's rights change.
    confine::die_with_parent(options.owner)?;
    let calls = match options.is_unconfined {
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

/// Takes requests and answers them, for ever; sleeps after `most_looks` empty polls in a row.
fn run(
    mut worker: BlkWorker,
    area: &mut Worker<SharedFile>,
    kick: BorrowedFd<'_>,
    call: BorrowedFd<'_>,
    most_looks: u32,
) -> Result<Infallible, ServeError> {
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
        if looks < most_looks {
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
