//! System calls of a container, made by a thread of its own, in the order of submission.
//!
//! A call of type 1 waits for the container's mutex and for the process's `mmap` lock, and may take
//! hundreds of milliseconds (a detach of 65,535 mappings: half a second), for which the owner
//! cannot wait. The kernel serializes the calls of one container anyway, so one thread for each is
//! enough. Its order keeps the rest simple: an unmapping of an IOVA and its next mapping are two
//! calls, and the second is submitted without waiting for the first.
//!
//! Bound: the shadow has no more than [`MOST`] calls under way.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use dma_map::iova::{Access, IovaRange};
use rustix::event::{EventfdFlags, eventfd};

use crate::pin::Pinned;

/// Most calls that may be under way.
pub const MOST: usize = 256;

/// Name of a call, ascending in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Request to a container.
pub enum Call {
    /// Map a range to this memory.
    Map {
        /// IOVAs.
        range: IovaRange,
        /// Memory, as long as the range.
        memory: Pinned,
        /// Access that the device gets.
        access: Access,
    },
    /// Unmap whole mappings, of `pages` pages in total: there may be gaps between them, in which
    /// nothing is mapped.
    Unmap {
        /// From the first mapping to the last.
        range: IovaRange,
        /// Pages of the mappings.
        pages: u64,
    },
    /// Reset the device, which takes a tenth of a second and more.
    Reset,
    /// Close the container, which ends its mappings; later calls are refused.
    Close,
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map { range, access, .. } => write!(f, "map {range} {access:?}"),
            Self::Unmap { range, pages } => write!(f, "unmap {range} {pages}"),
            Self::Reset => f.write_str("reset"),
            Self::Close => f.write_str("close"),
        }
    }
}

/// Reason why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The limit on mappings or on locked memory is reached: with fewer mappings the call may
    /// succeed.
    pub is_full: bool,
    /// Message for the user.
    pub text: String,
}

/// A call that has returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Name of the call.
    pub id: CallId,
    /// Its result.
    pub result: Result<(), Refusal>,
    /// Its duration in ns.
    pub ns: u64,
}

/// Executor of calls, which makes them in the order of submission.
pub trait Caller: Send {
    /// Submits a call. Does not wait.
    fn submit(&mut self, id: CallId, call: Call);

    /// Takes the result of the next finished call, in the order of submission.
    fn take(&mut self) -> Option<Done>;

    /// Returns a descriptor that is readable when a call has returned, until it is
    /// [cleared](Self::quiet).
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }

    /// Returns whether [`take`](Self::take) would return one.
    fn has_done(&mut self) -> bool;

    /// Clears the descriptor. To be followed by [`has_done`](Self::has_done).
    fn quiet(&mut self) {}
}

/// A container as the thread has it.
pub trait Table: Send + 'static {
    /// Maps.
    ///
    /// # Errors
    /// Nothing is mapped then.
    fn map(&mut self, range: IovaRange, memory: Pinned, access: Access) -> Result<(), Refusal>;

    /// Unmaps whole mappings, of `pages` pages in total. On `Ok` no device reaches them.
    ///
    /// # Errors
    /// The set of remaining mappings is unknown then.
    fn unmap(&mut self, range: IovaRange, pages: u64) -> Result<(), Refusal>;

    /// Resets the device.
    ///
    /// # Errors
    /// The state of the device is unchanged.
    fn reset(&mut self) -> Result<(), Refusal>;

    /// Ends all mappings, by force if necessary, and releases the container. On `Ok` no device
    /// reaches any of them.
    ///
    /// # Errors
    /// The device may reach the mapped memory for as long as this process exists.
    fn close(&mut self) -> Result<(), Refusal>;
}

/// The thread of one container.
pub struct CallThread {
    calls: Option<Sender<(CallId, Call)>>,
    done: Receiver<Done>,
    /// Result taken from the channel by [`has_done`](Caller::has_done).
    next: Option<Done>,
    woken: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl CallThread {
    /// Starts the thread, over this container; `name` is shown in lists of threads.
    ///
    /// # Errors
    /// The host has no more threads or descriptors.
    pub fn start(name: &str, table: impl Table) -> io::Result<Self> {
        let (calls, asked) = channel();
        let (tell, done) = channel();
        let woken = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let wake = woken.clone();
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(move || serve(table, &asked, &tell, &wake))?;
        Ok(Self {
            calls: Some(calls),
            done,
            next: None,
            woken,
            thread: Some(thread),
        })
    }
}

fn serve(
    mut table: impl Table,
    asked: &Receiver<(CallId, Call)>,
    tell: &Sender<Done>,
    wake: &OwnedFd,
) {
    for (id, call) in asked {
        let began = Instant::now();
        let result = match call {
            Call::Map {
                range,
                memory,
                access,
            } => table.map(range, memory, access),
            Call::Unmap { range, pages } => table.unmap(range, pages),
            Call::Reset => table.reset(),
            Call::Close => table.close(),
        };
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if tell.send(Done { id, result, ns }).is_err() {
            return;
        }
        // A full counter is readable, too.
        let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
    }
    // The shadow is gone, so there is no receiver for an error.
    let _ = table.close();
}

impl Caller for CallThread {
    fn submit(&mut self, id: CallId, call: Call) {
        // The thread ends with its sender.
        if let Some(calls) = &self.calls {
            let _ = calls.send((id, call));
        }
    }

    fn take(&mut self) -> Option<Done> {
        self.next.take().or_else(|| self.done.try_recv().ok())
    }

    fn has_done(&mut self) -> bool {
        if self.next.is_none() {
            self.next = self.done.try_recv().ok();
        }
        self.next.is_some()
    }

    fn quiet(&mut self) {
        // With nothing to read it is clear as well.
        let _ = rustix::io::read(&*self.woken, &mut [0; 8]);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.woken.as_raw_fd())
    }
}

impl Drop for CallThread {
    /// Waits for the calls asked for, after which the container is closed.
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}
