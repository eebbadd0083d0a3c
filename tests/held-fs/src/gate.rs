//! The test's control of the operations on one file.

use std::collections::VecDeque;
use std::fs::File;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time after which [`Gate::wait_until_held`] fails the test.
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

/// An operation that has arrived. Calling it runs the operation, or makes it fail with the given
/// error number.
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

/// The test's handle of one file; a clone is another handle of the same file. Nothing is held at
/// first.
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

    /// Holds operations of these kinds that arrive from now on, in addition to the kinds held
    /// already.
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

    /// Returns the number of operations held now.
    pub fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Ends all holds. The held operations run now, in the order of their arrival.
    pub fn release(&self) {
        let mut state = self.state();
        state.holds = [false; 4];
        let held = mem::take(&mut state.held);
        drop(state);
        for (kind, operation) in held {
            self.run(kind, operation);
        }
    }

    /// Runs the `count` operations that have been held longest. Others stay held.
    pub fn let_through(&self, count: usize) {
        for _ in 0..count {
            let Some((kind, operation)) = self.state().held.pop_front() else {
                return;
            };
            self.run(kind, operation);
        }
    }

    /// Makes the next operation of this kind that runs fail with `errno`, without effect. Called
    /// again, it applies to the one after that.
    pub fn fail_next(&self, kind: Kind, errno: i32) {
        self.state().failures[kind as usize].push_back(errno);
    }

    /// Makes every operation of this kind that runs from now on fail with `errno`, without effect,
    /// as on a file system without that operation.
    pub fn refuse(&self, kind: Kind, errno: i32) {
        self.state().refused[kind as usize] = Some(errno);
    }

    /// Ends the effect of `fail_next` and `refuse`.
    pub fn fail_no_more(&self) {
        let mut state = self.state();
        state.failures = Default::default();
        state.refused = Default::default();
    }

    /// Returns the number of operations of this kind that have arrived, held ones included.
    pub fn count(&self, kind: Kind) -> u64 {
        self.state().arrived[kind as usize]
    }

    /// Returns the file's content as stored, without the file system and its caches.
    pub fn contents(&self) -> &File {
        &self.0.contents
    }

    /// Holds an operation that arrives, or runs it.
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
        // No operation runs under the lock. A waiting test may panic under it, but does not leave
        // the state inconsistent.
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
