//! The two calls of a container, made by a thread of its own, in the order in which they are asked
//! for.
//!
//! A call of type 1 waits for the container's mutex and for the process's `mmap` lock, and may take
//! hundreds of milliseconds (a detach of 65,535 mappings: half a second), which the owner has not.
//! Calls of one container take turns in the kernel anyway, so one thread for each is enough, and
//! its order is what makes the rest simple: an unmapping of an IOVA and its next mapping are two
//! calls, of which the second is not waited for.
//!
//! Bound: the shadow asks for no more than [`MOST`] at a time.

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

/// Calls that may be under way.
pub const MOST: usize = 256;

/// Names a call, in the order in which they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// What is asked of a container.
pub enum Call {
    /// A range goes to this memory.
    Map {
        /// IOVAs.
        range: IovaRange,
        /// Memory, as long as the range.
        memory: Pinned,
        /// What the device may do.
        access: Access,
    },
    /// Whole mappings go, `pages` of them all in all: with gaps between them, in which nothing is
    /// mapped.
    Unmap {
        /// From the first mapping to the last.
        range: IovaRange,
        /// Pages of the mappings.
        pages: u64,
    },
    /// The device is reset, which takes a tenth of a second and more.
    Reset,
    /// The container is closed, which ends what is mapped, and what comes after this is refused.
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

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// There are as many mappings as may be, or as much locked memory: with less it might go.
    pub is_full: bool,
    /// For the user.
    pub text: String,
}

/// A call that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Which.
    pub id: CallId,
    /// What came of it.
    pub result: Result<(), Refusal>,
    /// How long it took, ns.
    pub ns: u64,
}

/// Whoever makes calls, in order.
pub trait Caller: Send {
    /// Asks for a call. Does not wait.
    fn submit(&mut self, id: CallId, call: Call);

    /// The next call that is over: in the order in which they were asked for.
    fn take(&mut self) -> Option<Done>;

    /// Readable when a call is over, until it is [quieted](Self::quiet).
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }

    /// Whether [`take`](Self::take) would give one.
    fn has_done(&mut self) -> bool;

    /// Empties the descriptor. To be followed by [`has_done`](Self::has_done).
    fn quiet(&mut self) {}
}

/// A container as the thread has it.
pub trait Table: Send + 'static {
    /// Maps.
    ///
    /// # Errors
    /// Nothing is mapped then.
    fn map(&mut self, range: IovaRange, memory: Pinned, access: Access) -> Result<(), Refusal>;

    /// Unmaps whole mappings, of so many pages. On `Ok` no device reaches them.
    ///
    /// # Errors
    /// What is mapped then is not known.
    fn unmap(&mut self, range: IovaRange, pages: u64) -> Result<(), Refusal>;

    /// Resets the device.
    ///
    /// # Errors
    /// It is in the state that it was in.
    fn reset(&mut self) -> Result<(), Refusal>;

    /// Ends what is mapped, however it has to, and lets go of the container. On `Ok` no device
    /// reaches any of it.
    ///
    /// # Errors
    /// The device may reach what was mapped for as long as this process exists.
    fn close(&mut self) -> Result<(), Refusal>;
}

/// The thread of one container.
pub struct CallThread {
    calls: Option<Sender<(CallId, Call)>>,
    done: Receiver<Done>,
    /// Taken from the channel to be looked at.
    next: Option<Done>,
    woken: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl CallThread {
    /// Starts it, over this container; `name` is for who looks at threads.
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
        // Full is as good as one more.
        let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
    }
    // Whoever asked is gone, and with it whatever could say so.
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
        // Nothing to read is quiet as well.
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
