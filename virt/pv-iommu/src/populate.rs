//! Population of guest memory ahead of device accesses, hinted at by MAP requests.
//!
//! A device's first access to a page costs its sidecore a page fault: the page is not yet in the
//! process's page tables, and if the guest has not touched it either, not in memory. A MAP request
//! names pages that devices are about to access, and a guest's buffers lie close together. So a
//! thread of its own populates the whole window of 1 MiB that a MAP lies in, and the next window
//! once a MAP comes within 64 pages of the end:
//!
//! ```text
//! MAP ─▶ PopulateWindows::ask ── a bit, once a window ─▶ helper: at = window; given back? ─▶ populate
//! balloon ─▶ PopulateWindows::give_back ── a bit ─▶ at == window? the pages stay : they are discarded
//! ```
//! This follows the page pool and the prefetching of host page tables (HOPT) in the PVIOMMU paper,
//! as far as a process can.
//!
//! **Bounds.** Each window is requested once, regardless of the number of MAPs: there is a bit for
//! each MiB up to the end of RAM, and at most as many wake-ups of the helper. A MAP requests at
//! most [`WINDOWS_PER_MAP`] windows, however long it is. Only the guest's RAM is populated, which
//! the guest may use in any case, but which the host then has to provide: at most all of RAM.
//!
//! **Memory that the guest has given back** (balloon, free page reporting) must not be populated
//! again. A window with one such page is not populated any more. The owner stores the window's bit
//! *before* it discards pages and then loads the helper's window ([`PopulateWindows::give_back`]);
//! the helper stores its window before it loads that bit. All four accesses are sequentially
//! consistent, so at least one of the two threads sees the other's store: either the helper skips
//! the window, or the pages stay, which costs the host at most the 1 MiB that the helper was at,
//! once for each window. Neither waits.
//!
//! **Memory whose pages come and go** (`--resident`, a pager) is never populated by this module. A
//! page that is absent there belongs to the pager: its content is in the store or on a disk, and
//! the hole in the file marks it as absent. Populating it would put a page of zeroes there, over
//! the limit and unknown to the pager. No check beforehand can exclude that, since the owner
//! releases a page and the pager takes it at any time. There a MAP *requests* the pages instead
//! (`gather`, [`mod@crate::unit`]): the request goes through the pager, in its order.
//!
//! Left out: populating a window again, once the host's own reclaim has taken a page of it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};

use guest_mem::Gpa;

/// Bytes of a window.
pub const WINDOW: u64 = 1 << 20;
/// A MAP that ends at most this number of bytes before its window's end requests the next one.
pub const REFILL: u64 = 64 * guest_mem::PAGE_SIZE;
/// Most windows that one MAP requests, from its beginning on.
pub const WINDOWS_PER_MAP: u64 = 64;

/// No window.
const NONE: u64 = u64::MAX;

/// Windows of RAM: those to be populated, and those that must not be populated any more. Shared by
/// the owner's thread, which records requested and returned windows, and the helper thread.
#[derive(Debug)]
pub struct PopulateWindows {
    /// Windows that were requested. Written by the owner.
    asked: Bits,
    /// Windows that must not be populated: the guest has given back a page, or they are not wholly
    /// RAM. Written by the owner.
    given_back: Bits,
    /// The window that the helper is populating, or [`NONE`].
    at: AtomicU64,
    /// Number of windows populated. Written by the helper.
    populated: AtomicU64,
    /// Number of pages that were given back but stay in memory, because the helper was populating
    /// their window. Written by the owner.
    kept: AtomicU64,
    is_over: AtomicBool,
    helper: OnceLock<Thread>,
}

impl PopulateWindows {
    /// Creates the windows of the RAM in these pieces, each an address and a length in bytes.
    pub fn new(ram: impl Iterator<Item = (Gpa, u64)> + Clone) -> Self {
        let ends = ram.clone().map(|(gpa, len)| gpa.raw().saturating_add(len));
        let count = ends.max().unwrap_or(0) / WINDOW;
        let given_back = Bits::new(count);
        let is_ram = |window: u64| {
            let (start, end) = (window * WINDOW, (window + 1) * WINDOW);
            let mut pieces = ram.clone();
            pieces.any(|(gpa, len)| gpa.raw() <= start && end - gpa.raw() <= len)
        };
        for window in (0..count).filter(|&window| !is_ram(window)) {
            given_back.set(window);
        }
        Self {
            asked: Bits::new(count),
            given_back,
            at: AtomicU64::new(NONE),
            populated: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            helper: OnceLock::new(),
        }
    }

    /// Requests the windows of `[gpa, gpa + len)`, which devices are about to access. Does not
    /// wait. Called on the owner's thread.
    pub fn ask(&self, gpa: Gpa, len: u64) {
        let first = gpa.raw() / WINDOW;
        let last = gpa.raw().saturating_add(len).saturating_add(REFILL) / WINDOW;
        let last = last.min(first + (WINDOWS_PER_MAP - 1));
        let mut is_new = false;
        for window in first..=last.min(self.asked.count().saturating_sub(1)) {
            is_new |= self.asked.set(window);
        }
        if is_new && let Some(helper) = self.helper.get() {
            helper.unpark();
        }
    }

    /// Records that the guest has given back `[gpa, gpa + len)`, which lies in one window. Returns
    /// whether it may be discarded: if not, the helper is populating the window, and the pages stay
    /// in memory. Called on the owner's thread.
    #[must_use]
    pub fn give_back(&self, gpa: Gpa, len: u64) -> bool {
        let window = gpa.raw() / WINDOW;
        self.given_back.set(window);
        // Sequentially consistent, as the store to `given_back` above and the helper's store to
        // `at` and load of `given_back`: one of the two loads sees the other thread's store. If the
        // helper has left the window, the pages that it populated are discarded like any others.
        let is_free = self.at.load(Ordering::SeqCst) != window;
        if !is_free {
            let pages = len / guest_mem::PAGE_SIZE;
            self.kept.fetch_add(pages, Ordering::Relaxed);
        }
        is_free
    }

    /// Number of windows that have been populated.
    pub fn populated(&self) -> u64 {
        self.populated.load(Ordering::Relaxed)
    }

    /// Number of pages that were given back and stay in memory.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Returns a window that was requested, was not given back and is not `done`; marks it as done.
    fn next(&self, done: &mut [u64]) -> Option<u64> {
        let words = self.asked.0.iter().zip(&self.given_back.0).zip(done);
        for (at, ((asked, given_back), done)) in (0..).zip(words) {
            // Only a first check of `given_back`: `visit` checks it after it has stored `at`.
            let left = asked.load(Ordering::SeqCst) & !given_back.load(Ordering::SeqCst) & !*done;
            if left != 0 {
                let bit = left.trailing_zeros();
                *done |= 1 << bit;
                return Some(at * 64 + u64::from(bit));
            }
        }
        None
    }

    /// Populates a window by `populate`, unless the guest has given back a page of it.
    fn visit(
        &self,
        window: u64,
        populate: &mut impl FnMut(Gpa, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        self.at.store(window, Ordering::SeqCst);
        let result = match self.given_back.has(window) {
            true => Ok(()),
            false => populate(Gpa::new(window * WINDOW), WINDOW).map(|()| {
                self.populated.fetch_add(1, Ordering::Relaxed);
            }),
        };
        // Release: if the owner's load sees that the helper has left the window, it also sees the
        // populated pages.
        self.at.store(NONE, Ordering::Release);
        result
    }
}

/// A bit for each window, and their number.
#[derive(Debug)]
struct Bits(Box<[AtomicU64]>, u64);

impl Bits {
    fn new(count: u64) -> Self {
        let words = count.div_ceil(64);
        Self((0..words).map(|_| AtomicU64::new(0)).collect(), count)
    }

    fn count(&self) -> u64 {
        self.1
    }

    /// Sets a bit. Returns whether it was clear; false for one beyond the end.
    fn set(&self, at: u64) -> bool {
        let Some(word) = self.word(at) else {
            return false;
        };
        let bit = 1 << (at % 64);
        // Loaded first, so that a bit that is already set costs no store.
        word.load(Ordering::SeqCst) & bit == 0 && word.fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    fn has(&self, at: u64) -> bool {
        self.word(at)
            .is_some_and(|word| word.load(Ordering::SeqCst) & 1 << (at % 64) != 0)
    }

    fn word(&self, at: u64) -> Option<&AtomicU64> {
        let at = (at < self.1).then_some(at / 64)?;
        self.0.get(usize::try_from(at).ok()?)
    }
}

/// Handle of the helper thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Populator {
    windows: Arc<PopulateWindows>,
    thread: Option<JoinHandle<()>>,
}

impl Populator {
    /// Starts the thread. It calls `populate` for one window at a time. At the first error it calls
    /// `failed` and ends: no further window is populated.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        windows: Arc<PopulateWindows>,
        mut populate: impl FnMut(Gpa, u64) -> io::Result<()> + Send + 'static,
        failed: impl FnOnce(io::Error) + Send + 'static,
    ) -> io::Result<Self> {
        let shared = windows.clone();
        let mut done = vec![0; shared.asked.0.len()];
        let thread = thread::Builder::new()
            .name("populate".into())
            .spawn(move || {
                while !shared.is_over.load(Ordering::Acquire) {
                    match shared.next(&mut done) {
                        Some(window) => {
                            if let Err(error) = shared.visit(window, &mut populate) {
                                failed(error);
                                return;
                            }
                        }
                        // A request since then has left a token, so that this returns at once.
                        None => thread::park(),
                    }
                }
            })?;
        let _ = windows.helper.set(thread.thread().clone());
        // For windows requested before `helper` was set.
        thread.thread().unpark();
        Ok(Self {
            windows,
            thread: Some(thread),
        })
    }
}

impl Drop for Populator {
    /// Waits for the window that is being populated.
    fn drop(&mut self) {
        self.windows.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn windows(ram: &[(u64, u64)]) -> Arc<PopulateWindows> {
        let ram = ram.iter().map(|&(gpa, len)| (Gpa::new(gpa), len));
        Arc::new(PopulateWindows::new(ram))
    }

    /// Returns the windows that a helper would populate now.
    fn asked(windows: &PopulateWindows) -> Vec<u64> {
        let mut done = vec![0; windows.asked.0.len()];
        std::iter::from_fn(|| windows.next(&mut done)).collect()
    }

    /// Starts a helper that sends each window it populates, and continues when it receives the
    /// result.
    fn helper(
        windows: &Arc<PopulateWindows>,
    ) -> (Populator, Receiver<u64>, Sender<io::Result<()>>) {
        let ((say, at), (go_on, goes_on)) = (channel(), channel());
        let populate = move |gpa: Gpa, len| {
            assert_eq!((gpa.raw() % WINDOW, len), (0, WINDOW));
            say.send(gpa.raw() / WINDOW).expect("the test listens");
            goes_on.recv().unwrap_or(Ok(()))
        };
        let helper = Populator::start(windows.clone(), populate, drop).expect("a thread");
        (helper, at, go_on)
    }

    #[test]
    fn a_map_asks_for_its_window_and_near_its_end_for_the_next() {
        let page = guest_mem::PAGE_SIZE;
        for (gpa, len, expected) in [
            (0, page, &[0][..]),
            (MIB, page, &[1]),
            // MAPs that end 65 and 64 pages before the end of their window.
            (2 * MIB - 66 * page, page, &[1]),
            (2 * MIB - 65 * page, page, &[1, 2]),
            (2 * MIB - page, page, &[1, 2]),
            (MIB / 2, 2 * MIB, &[0, 1, 2]),
            // The last window has no successor.
            (8 * MIB - page, page, &[7]),
            // No RAM, and a window that is RAM only in part.
            (9 * MIB, page, &[]),
            (16 * MIB, page, &[]),
            (u64::MAX - page + 1, page, &[]),
            (0, u64::MAX, &[0, 1, 2, 3, 4, 5, 6, 7]),
        ] {
            let windows = windows(&[(0, 8 * MIB), (9 * MIB + page, MIB)]);
            windows.ask(Gpa::new(gpa), len);
            assert_eq!(asked(&windows), expected, "{gpa:#x}, {len:#x}");
        }
        let windows = windows(&[(0, 1 << 30)]);
        windows.ask(Gpa::new(0), 1 << 30);
        assert_eq!(asked(&windows).len() as u64, WINDOWS_PER_MAP);
    }

    #[test]
    fn each_window_is_populated_once_however_often_it_is_asked_for() {
        let windows = windows(&[(0, 4 * MIB)]);
        // Before there is a helper.
        windows.ask(Gpa::new(0), 1);
        let (helper, at, go_on) = helper(&windows);
        assert_eq!(at.recv(), Ok(0));
        for turn in 0..1_000_000 {
            windows.ask(Gpa::new(turn % (2 * MIB - REFILL - 1)), 1);
        }
        go_on.send(Ok(())).expect("it waits");
        assert_eq!(at.recv(), Ok(1));
        go_on.send(Ok(())).expect("it waits");
        // No third one: the next that comes is of another window.
        windows.ask(Gpa::new(3 * MIB), 1);
        assert_eq!(at.recv(), Ok(3));
        drop(go_on);
        drop(helper);
        assert_eq!(windows.populated(), 3);
    }

    #[test]
    fn a_window_that_the_guest_gave_back_is_left_alone() {
        let windows = windows(&[(0, 4 * MIB)]);
        let (helper, at, go_on) = helper(&windows);
        assert!(windows.give_back(Gpa::new(MIB + 8192), 4096));
        windows.ask(Gpa::new(MIB), 4096);
        windows.ask(Gpa::new(2 * MIB), 4096);
        // Only the second window, which the helper is populating now.
        assert_eq!(at.recv(), Ok(2));
        assert!(
            !windows.give_back(Gpa::new(2 * MIB), 8192),
            "discarded under the helper"
        );
        assert!(windows.give_back(Gpa::new(3 * MIB), 8192));
        go_on.send(Ok(())).expect("it waits");
        drop(go_on);
        drop(helper);
        // The helper has left the window: pages given back later are discarded.
        assert!(windows.give_back(Gpa::new(2 * MIB), 4096));
        assert_eq!((windows.populated(), windows.kept()), (1, 2));
    }

    /// Models the pages of a host: a discarded page does not come back, under any interleaving of
    /// the threads.
    #[test]
    fn no_page_that_was_discarded_comes_back() {
        const ROUNDS: u64 = 400;
        for round in 0..ROUNDS {
            let windows = windows(&[(0, 64 * MIB)]);
            let is_there: Arc<Vec<AtomicBool>> =
                Arc::new((0..64).map(|_| AtomicBool::new(false)).collect());
            let host = is_there.clone();
            let populate = move |gpa: Gpa, _| {
                for _ in 0..(round * 11 + gpa.raw() / WINDOW * 5) % 89 {
                    std::hint::spin_loop();
                }
                host[(gpa.raw() / WINDOW) as usize].store(true, Ordering::SeqCst);
                Ok(())
            };
            let helper = Populator::start(windows.clone(), populate, drop).expect("a thread");
            let mut discarded = Vec::new();
            for window in 0..64 {
                windows.ask(Gpa::new(window * MIB), 4096);
                for _ in 0..(round * 7 + window * 13) % 97 {
                    std::hint::spin_loop();
                }
                if windows.give_back(Gpa::new(window * MIB), 4096) {
                    is_there[window as usize].store(false, Ordering::SeqCst);
                    discarded.push(window);
                }
            }
            drop(helper);
            let back = |&&window: &&u64| is_there[window as usize].load(Ordering::SeqCst);
            assert_eq!(discarded.iter().find(back), None, "round {round}");
            assert_eq!(windows.kept(), 64 - discarded.len() as u64);
        }
    }

    #[test]
    fn a_host_that_refuses_is_asked_once() {
        let windows = windows(&[(0, 4 * MIB)]);
        let (say, said) = channel();
        let populate = |_, _| Err(io::ErrorKind::InvalidInput.into());
        let failed = move |error: io::Error| say.send(error.kind()).expect("the test listens");
        let helper = Populator::start(windows.clone(), populate, failed).expect("a thread");
        windows.ask(Gpa::new(0), 4 * MIB);
        assert_eq!(said.recv(), Ok(io::ErrorKind::InvalidInput));
        assert!(said.recv().is_err());
        assert!(windows.give_back(Gpa::new(0), 4096));
        drop(helper);
        assert_eq!(windows.populated(), 0);
    }
}
