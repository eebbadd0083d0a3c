//! Decisions of a test about one file.

use std::collections::VecDeque;
use std::fs::File;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time after which [`Gate::wait_until_held`] takes the test for broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read that the page cache did not answer.
    Read,
    /// A write.
    Write,
    /// fsync, fdatasync.
    Sync,
    /// fallocate: space reserved, a range punched or zeroed.
    Allocate,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Sync, Self::Allocate];
}

/// An operation that has arrived: runs when called, with the error it is to answer, if any.
pub(crate) type Operation = Box<dyn FnOnce(Option<i32>) + Send>;

#[derive(Default)]
struct State {
    holds: [bool; 4],
    is_open_for_ever: bool,
    held: VecDeque<(Kind, Operation)>,
    arrived: [u64; 4],
    failures: [VecDeque<i32>; 4],
    refused: [Option<i32>; 4],
}

/// The test's handle on one file; clones are the same gate. Open at first.
#[derive(Clone)]
pub struct Gate(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    contents: File,
}

impl Gate {
    pub(crate) fn new(contents: File) -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            contents,
        }))
    }

    /// Holds operations of these kinds that arrive from now on, beside those held already.
    pub fn hold(&self, kinds: &[Kind]) {
        let mut state = self.state();
        for &kind in kinds {
            state.holds[kind as usize] = true;
        }
    }

    /// Waits until at least `count` operations are held.
    ///
    /// # Panics
    /// After a minute.
    pub fn wait_until_held(&self, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state();
        while state.held.len() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{} operations are held where {count} were expected",
                state.held.len()
            );
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.expect("nobody panics holding the gate").0;
        }
    }

    /// Operations held now.
    pub fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Holds nothing any more: what was held runs now, in the order of its arrival.
    pub fn release(&self) {
        let mut state = self.state();
        state.holds = [false; 4];
        let held = mem::take(&mut state.held);
        drop(state);
        for (kind, operation) in held {
            self.run(kind, operation);
        }
    }

    /// Runs the `count` operations that have been held longest, and goes on holding others.
    pub fn let_through(&self, count: usize) {
        for _ in 0..count {
            let Some((kind, operation)) = self.state().held.pop_front() else {
                return;
            };
            self.run(kind, operation);
        }
    }

    /// The next operation of this kind to run answers `errno` and does nothing; called again, the
    /// one after it.
    pub fn fail_next(&self, kind: Kind, errno: i32) {
        self.state().failures[kind as usize].push_back(errno);
    }

    /// Every operation of this kind that runs from now on answers `errno` and does nothing, as on a
    /// file system without it.
    pub fn refuse(&self, kind: Kind, errno: i32) {
        self.state().refused[kind as usize] = Some(errno);
    }

    /// Cancels all failures that have not happened yet.
    pub fn fail_no_more(&self) {
        let mut state = self.state();
        state.failures = Default::default();
        state.refused = Default::default();
    }

    /// Operations of this kind that have arrived, held ones included.
    pub fn count(&self, kind: Kind) -> u64 {
        self.state().arrived[kind as usize]
    }

    /// The file's bytes as the storage has them, past the file system and its caches.
    pub fn contents(&self) -> &File {
        &self.0.contents
    }

    /// An operation arrives.
    pub(crate) fn admit(&self, kind: Kind, operation: Operation) {
        let mut state = self.state();
        state.arrived[kind as usize] += 1;
        if state.holds[kind as usize] && !state.is_open_for_ever {
            state.held.push_back((kind, operation));
            self.0.changed.notify_all();
            return;
        }
        drop(state);
        self.run(kind, operation);
    }

    pub(crate) fn open_for_ever(&self) {
        self.state().is_open_for_ever = true;
        self.release();
    }

    fn run(&self, kind: Kind, operation: Operation) {
        let mut state = self.state();
        let failure = state.failures[kind as usize].pop_front();
        let failure = failure.or(state.refused[kind as usize]);
        drop(state);
        operation(failure);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No operation runs under the lock; a waiting test may panic under it, and changes nothing
        // then.
        self.0
            .state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("held", &self.held())
            .finish_non_exhaustive()
    }
}
