//! The worker process: its confinement, and the loop that takes requests and completes them.
//!
//! The owner sends descriptors over the socket that is standard input: the shared area, an eventfd
//! for each direction, an eventfd for the report of the start, and the image. Before the first
//! request is read, the process gives up, in this order: other descriptors, namespaces,
//! capabilities, resource limits, system calls (crate `confine`).

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

/// Number of consecutive empty polls before a worker sleeps. A poll takes some tens of nanoseconds.
pub const LOOKS: u32 = 500;
/// Limit of the address space, in bytes: the shared area, and the stacks and heaps of five threads.
const ADDRESS_SPACE: u64 = 2 << 30;
/// Limit of descriptor numbers, which is also the most that one poll(2) waits for.
const DESCRIPTORS: u64 = 8;

/// Settings of a worker: those of its program's command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Process id of the owner; the worker is killed when it ends.
    pub owner: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The image was opened with `O_DIRECT`.
    pub direct: bool,
    /// Size of a logical block, in bytes: 512 or 4096.
    pub block: u32,
    /// Serial number, zero-padded.
    pub serial: [u8; ID_LEN],
    /// The worker runs without a filter of system calls.
    pub is_unconfined: bool,
    /// Number of consecutive empty polls before the worker sleeps: [`LOOKS`] for disks of guests.
    /// With 0 it sleeps after the first.
    pub looks: u32,
}

/// Reason why a worker cannot start, or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Standard input brings no descriptors of an owner.
    #[error(transparent)]
    NoOwner(io::Error),
    /// The parent-death signal cannot be set, or the owner has ended.
    #[error(transparent)]
    Parent(io::Error),
    /// The host refuses a resource that is needed before the worker can report to its owner.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The memory received is no valid shared area.
    #[error(transparent)]
    Area(#[from] OpenError),
    /// The start failed, and the owner has received the reason.
    #[error("its owner has the reason")]
    Reported,
    /// The owner has broken the protocol of the shared area.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// Confinement of a worker as it reports it, in the words behind those of its disk. Not to be
/// trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confined {
    /// Error number of leaving the host's namespaces; 0 if it has left them.
    pub namespaces: u64,
    /// Number of system calls that the filter allows; 0 if there is no filter.
    pub calls: u64,
}

impl Confined {
    /// Extracts these values from the words that a worker reports.
    pub(crate) fn of(facts: &[u64; FACTS]) -> Self {
        Self {
            namespaces: facts[4],
            calls: facts[5],
        }
    }
}

/// Serves the disk that the owner sends over standard input, until the owner ends this process. To
/// be called while the process has one thread.
///
/// `wrap` receives the disk and returns the back end that carries out requests, whose queue is at
/// least as deep. It is called once: after capabilities and namespaces are dropped, before resource
/// limits and the filter of system calls are set.
///
/// # Errors
/// No requests are served any more, and the process is to end.
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
            signal_eventfd(ready.as_fd());
            return Err(ServeError::Reported);
        }
    };
    area.ready(facts);
    signal_eventfd(ready.as_fd());
    drop(ready);
    // The log has no reader, and a system call that logging makes would kill the process.
    let silent = tracing::subscriber::NoSubscriber::new();
    tracing::subscriber::with_default(silent, || {
        run(worker, &mut area, kick.as_fd(), call.as_fd(), options.looks)
    })
}

/// Returns the text of an error followed by those of its sources.
fn in_full(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Opens the disk, and gives up the rights that are not needed any more.
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
    // Capabilities belong to a thread, and a new thread inherits its creator's: they are dropped
    // before the I/O threads start.
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
        // The disk's file does not grow.
        file_size: worker.facts().capacity,
        descriptors: DESCRIPTORS,
    };
    confine::set_limits(limits).map_err(HostError::of("resource limits"))?;
    // The kernel clears the parent-death signal when a process's credentials change.
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

/// Takes requests and completes them, for ever. Sleeps after `most_looks` consecutive empty polls.
fn run(
    mut worker: BlkWorker,
    area: &mut Worker<SharedFile>,
    kick: BorrowedFd<'_>,
    call: BorrowedFd<'_>,
    most_looks: u32,
) -> Result<Infallible, ServeError> {
    // Descriptors of the threads that wait for storage; the set does not change.
    let mut fds = Vec::new();
    worker.wake_fds(&mut fds);
    let mut looks = 0;
    loop {
        let is_busy = worker.step(area)?;
        if area.publish() {
            signal_eventfd(call);
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

/// Signals an eventfd. Its counter never comes near its limit.
fn signal_eventfd(fd: BorrowedFd<'_>) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}
