//! Bounded queue of bytes for a descriptor whose reader may be slow, stopped or gone.
//!
//! A dedicated thread writes them, with plain blocking writes: other processes may share the
//! descriptor and depend on its flags, so it is not made non-blocking. The thread is never joined;
//! the end of the process ends it, also within a write.
//!
//! A producer either waits for room ([`Sink::wait_for_room`]: a vCPU, as on a serial line with flow
//! control) or has its bytes refused where there is none ([`Sink::offer`]). [`Sink::let_go`] ends
//! all waiting for room, for good: the machine ends.
//!
//! Bound: [`Sink::CAPACITY`], and one addition of each thread that found room at the same time.
//! Locks: one mutex around the queue, not held while writing; nothing else is locked under it.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Default)]
struct State {
    queue: Vec<u8>,
    /// Number of bytes that the thread is writing.
    under_way: usize,
    /// Waiting for room has ended for good ([`Sink::let_go`]).
    is_let_go: bool,
}

impl State {
    fn len(&self) -> usize {
        self.queue.len() + self.under_way
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There are bytes to write.
    filled: Condvar,
    /// There is room, or all has been written, or waiting is over.
    emptied: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Every change leaves the queue consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of the queue. Clones share it.
#[derive(Clone, Default)]
pub struct Sink(Option<Arc<Shared>>);

impl Sink {
    /// Largest number of queued bytes, as many as a pipe holds.
    pub const CAPACITY: usize = 64 << 10;

    /// Creates a sink that discards everything.
    pub fn nowhere() -> Self {
        Self(None)
    }

    /// Creates a sink that writes to `output`, on a thread named `name`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(name: &str, output: impl Write + AsRawFd + Send + 'static) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || write_out(&of_thread, output))?;
        Ok(Self(Some(shared)))
    }

    /// Waits until there is room for a byte or [`let_go`](Self::let_go) was called.
    pub fn wait_for_room(&self) {
        let Some(shared) = &self.0 else { return };
        let state = shared.state();
        let is_full = |state: &mut State| !state.is_let_go && state.len() >= Self::CAPACITY;
        drop(shared.emptied.wait_while(state, is_full));
    }

    /// Adds bytes, after a call of [`wait_for_room`](Self::wait_for_room). Does not wait. After
    /// [`let_go`](Self::let_go) a full queue drops them.
    pub fn add(&self, bytes: &[u8]) {
        let Some(shared) = &self.0 else { return };
        let mut state = shared.state();
        if state.is_let_go && state.len() >= Self::CAPACITY {
            return;
        }
        state.queue.extend_from_slice(bytes);
        shared.filled.notify_one();
    }

    /// Adds all of `bytes` if there is room for them now, or nothing. Returns whether there was
    /// room.
    pub fn offer(&self, bytes: &[u8]) -> bool {
        let Some(shared) = &self.0 else { return true };
        let mut state = shared.state();
        // Bytes that exceed the capacity are accepted when the queue is empty.
        let has_room = state.len() == 0 || state.len() + bytes.len() <= Self::CAPACITY;
        if has_room {
            state.queue.extend_from_slice(bytes);
            shared.filled.notify_one();
        }
        has_room
    }

    /// Ends all waiting for room, for good.
    pub fn let_go(&self) {
        let Some(shared) = &self.0 else { return };
        shared.state().is_let_go = true;
        shared.emptied.notify_all();
    }

    /// Waits until everything added has been written, at most for `limit`. Returns whether it has.
    pub fn flush(&self, limit: Duration) -> bool {
        let Some(shared) = &self.0 else { return true };
        let waited = shared
            .emptied
            .wait_timeout_while(shared.state(), limit, |state| state.len() > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.len() == 0
    }
}

/// Output of an emulated UART: accepts bytes without waiting.
impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.add(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_out(shared: &Shared, mut output: impl Write + AsRawFd) {
    let mut bytes = Vec::new();
    loop {
        let state = shared.state();
        let waited = shared
            .filled
            .wait_while(state, |state| state.queue.is_empty());
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut state.queue, &mut bytes);
        state.under_way = bytes.len();
        drop(state);
        // Bytes that cannot be written (the reader is gone, the disk is full) are lost, as on a
        // serial line without a receiver.
        let _ = write_all(&mut output, &bytes);
        bytes.clear();
        shared.state().under_way = 0;
        shared.emptied.notify_all();
    }
}

/// Does what [`Write::write_all`] does, and also waits where another process that shares the
/// descriptor has made it non-blocking.
fn write_all(output: &mut (impl Write + AsRawFd), mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut entry = libc::pollfd {
                    fd: output.as_raw_fd(),
                    events: libc::POLLOUT,
                    revents: 0,
                };
                // SAFETY: one entry, which outlives the call; -1 waits without limit.
                unsafe { libc::poll(&raw mut entry, 1, -1) };
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
