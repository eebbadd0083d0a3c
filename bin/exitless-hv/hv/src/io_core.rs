//! The I/O core (modes `elvis` and `poll`): the second core, which polls the ring of the block
//! function between its beats, and completes.
//!
//! ```text
//!   guest's core: ask ── settings, a number ─▶ this core ── the same number ─▶ ask returns
//!   this core: poll ─▶ copies ─▶ used ring ─▶ elvis: an IPI with the guest's vector, no exit
//!                                          └▶ poll: vector noted, an IPI of the host's: exits
//! ```
//! Disk, queue and the last settings are its own. Between the cores are the
//! [`Mailbox`], vectors that are requested, and numbers. It takes no lock of the machine, so that a
//! core that holds one may wait for it; its answer takes one poll at most, which is bounded
//! ([`elvis::poller`]).

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use address::Iova;
use bare::apic;
use eli::hosts::Source;
use eli::{Vector, VectorSet};
use elvis::poller::{Outcome, Poller, Settings};
use virtqueue::{Memory, OutOfReach};

use crate::hpet::Clock;
use crate::log::{self, say};
use crate::memory::{self, Guest, MAPPED};

/// Settings on their way from the guest's core, which alone asks, to this one.
struct Mailbox {
    /// Number of the last that were asked for.
    asked: AtomicU32,
    /// Number of the last that hold.
    taken: AtomicU32,
    settings: UnsafeCell<Settings>,
}

// SAFETY: the guest's core writes the settings while both numbers are equal, and the I/O core reads
// them while they are not; each changes the number of its own behind that (`ask`, `take`).
unsafe impl Sync for Mailbox {}

static MAILBOX: Mailbox = Mailbox {
    asked: AtomicU32::new(0),
    taken: AtomicU32::new(0),
    settings: UnsafeCell::new(Settings::NONE),
};

/// Pending bits of the message table, alone in a page that the guest reads.
#[repr(C, align(4096))]
pub struct PendingBits(AtomicU64, [u64; 511]);

impl PendingBits {
    /// Returns the page's address.
    pub fn address(&self) -> u64 {
        core::ptr::from_ref(self) as u64
    }
}

/// See [`PendingBits`].
pub static PENDING: PendingBits = PendingBits(AtomicU64::new(0), [0; 511]);
/// Whether the second core polls; read by `run.s`.
#[unsafe(no_mangle)]
static CORE1_POLLS: AtomicBool = AtomicBool::new(false);
/// Vectors of the guest's that this core requests (mode `poll`).
static REQUESTED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
/// One more than the number of resets before the queue that has stopped; 0: none has.
static STOPPED: AtomicU64 = AtomicU64::new(0);
/// Requests served.
pub static SERVED: AtomicU64 = AtomicU64::new(0);
/// Interrupts sent, for completions and for stopped queues.
pub static SENT: AtomicU64 = AtomicU64::new(0);
/// Queues that broke the protocol.
pub static BROKEN: AtomicU64 = AtomicU64::new(0);

/// Form of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// An IPI with the guest's own vector.
    Direct,
    /// An IPI of the host's, behind which the guest's interrupt is injected.
    Injected,
}

/// State of the I/O core alone.
struct IoCore {
    memory: DeviceMemory,
    disk: &'static mut [u8],
    /// Local APIC of the guest's processor.
    to: u32,
    completion: Completion,
    poller: Poller,
    taken: u32,
}

/// Written by [`begin`] before [`CORE1_POLLS`] is set, and used by the second core alone since
/// then.
static mut IO_CORE: Option<IoCore> = None;

/// Has the second core, which runs, poll from now on.
///
/// # Safety
/// Not called again. The disk is memory that nothing else uses.
pub unsafe fn begin(
    memory: &'static Guest,
    is_checked: bool,
    disk: &'static mut [u8],
    to: u32,
    completion: Completion,
) {
    let core = IoCore {
        memory: DeviceMemory { memory, is_checked },
        disk,
        to,
        completion,
        poller: Poller::default(),
        taken: 0,
    };
    // SAFETY: the caller's: the core does not poll yet.
    unsafe { (&raw mut IO_CORE).write(Some(core)) }
    // Release: pairs with `core1_poll`'s Acquire.
    CORE1_POLLS.store(true, Ordering::Release);
}

/// Has the I/O core go by these settings, and by no others any more when this returns. Returns
/// whether it does: it has a second.
///
/// For the guest's core alone.
pub fn ask(settings: Settings, clock: Clock) -> bool {
    const LIMIT_MS: u32 = 1000;
    let number = MAILBOX.asked.load(Ordering::Relaxed).wrapping_add(1);
    // SAFETY: the last were taken (or no core takes any more, and the guest has been stopped), so
    // that the other core does not look.
    unsafe { MAILBOX.settings.get().write(settings) }
    // Release: pairs with `take`'s Acquire.
    MAILBOX.asked.store(number, Ordering::Release);
    let (start, counts) = (clock.now(), clock.period().counts(LIMIT_MS));
    // Acquire: pairs with `take`'s Release: what the I/O core did by the old settings is done.
    while MAILBOX.taken.load(Ordering::Acquire) != number {
        if clock.now() - start > counts {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}

/// Takes the vectors that the I/O core has requested since the last time.
pub fn take_requested() -> VectorSet {
    let mut words = [0; 8];
    for (word, pair) in REQUESTED.iter().zip(words.as_chunks_mut::<2>().0) {
        // Acquire: pairs with `send`'s Release.
        let taken = word.swap(0, Ordering::Acquire);
        *pair = [taken as u32, (taken >> 32) as u32];
    }
    VectorSet::from_words(words)
}

/// Returns whether the queue that was set up behind `epoch` resets has stopped.
pub fn has_stopped(epoch: u32) -> bool {
    // Relaxed: the guest learns it by an interrupt, or when it reads the status.
    STOPPED.load(Ordering::Relaxed) == u64::from(epoch) + 1
}

/// Polls once, between the second core's interrupts.
#[unsafe(no_mangle)]
extern "C" fn core1_poll() {
    if !CORE1_POLLS.load(Ordering::Acquire) {
        return;
    }
    let core = &raw mut IO_CORE;
    // SAFETY: `begin` has written it before that flag was set; since then only this function uses
    // it, and no interrupt comes within.
    if let Some(core) = unsafe { (*core).as_mut() } {
        core.take();
        core.poll();
    }
}

impl IoCore {
    /// Takes other settings, if there are any.
    fn take(&mut self) {
        // Acquire: pairs with `ask`'s Release.
        let asked = MAILBOX.asked.load(Ordering::Acquire);
        if asked == self.taken {
            return;
        }
        self.taken = asked;
        // SAFETY: the guest's core does not write them before it has read the number below.
        let settings = unsafe { *MAILBOX.settings.get() };
        let outcome = self.poller.configure(settings, &self.memory);
        self.act(settings.epoch, outcome);
        MAILBOX.taken.store(asked, Ordering::Release);
    }

    fn poll(&mut self) {
        let outcome = self.poller.poll(&self.memory, self.disk);
        if outcome == Outcome::default() {
            core::hint::spin_loop();
            return;
        }
        self.act(self.poller.epoch(), outcome);
    }

    fn act(&self, epoch: u32, outcome: Outcome) {
        SERVED.fetch_add(outcome.has_served.into(), Ordering::Relaxed);
        let bits = self.poller.pending().into_iter().rev();
        let bits = bits.fold(0, |bits, is_pending| bits << 1 | u64::from(is_pending));
        PENDING.0.store(bits, Ordering::Relaxed);
        if let Some(why) = outcome.stopped {
            BROKEN.fetch_add(1, Ordering::Relaxed);
            STOPPED.store(u64::from(epoch) + 1, Ordering::Relaxed);
            if log::traces() {
                say!("block: the ring has stopped until a reset: {why}");
            }
        }
        for vector in outcome.send.into_iter().flatten() {
            self.send(vector);
        }
    }

    fn send(&self, vector: Vector) {
        let vector = match self.completion {
            Completion::Direct => vector,
            Completion::Injected => {
                let bit = 1 << (vector % 64);
                // Release: pairs with `take_requested`'s Acquire.
                REQUESTED[usize::from(vector / 64)].fetch_or(bit, Ordering::Release);
                Source::Completion.vector()
            }
        };
        SENT.fetch_add(1, Ordering::Relaxed);
        let command = u64::from(self.to) << 32 | ASSERTED | u64::from(vector);
        // In x2APIC mode a command is not ordered behind stores (APM 2, §16.11.2): the used ring is
        // to be seen before its interrupt.
        core::sync::atomic::fence(Ordering::SeqCst);
        // SAFETY: a fixed interrupt at the guest's processor, with a vector that policy has looked
        // at or the host's own.
        unsafe { apic::write(apic::ICR, command) }
    }
}

/// In a command: physical, fixed, an edge.
const ASSERTED: u64 = 1 << 14;

/// Guest memory as the block function reaches it: every byte is checked to be the guest's, unless
/// that defence is off.
struct DeviceMemory {
    memory: &'static Guest,
    is_checked: bool,
}

impl DeviceMemory {
    /// Returns the address of `len` bytes that are the guest's.
    fn check(&self, at: Iova, len: usize) -> Result<u64, OutOfReach> {
        let is_there = match self.is_checked {
            true => self.memory.contains(at.raw(), len as u64),
            false => at
                .raw()
                .checked_add(len as u64)
                .is_some_and(|end| end <= MAPPED),
        };
        is_there.then_some(at.raw()).ok_or(OutOfReach(at))
    }
}

impl Memory for DeviceMemory {
    fn read(&self, at: Iova, buf: &mut [u8]) -> Result<(), OutOfReach> {
        let from = self.check(at, buf.len())?;
        // SAFETY: it is memory, mapped, and nothing of ours (without the defence that is what is to
        // be shown); `buf` is ours.
        unsafe { memory::copy(from as *const u8, buf.as_mut_ptr(), buf.len()) }
        Ok(())
    }

    fn write(&self, at: Iova, buf: &[u8]) -> Result<(), OutOfReach> {
        let to = self.check(at, buf.len())?;
        // SAFETY: as above.
        unsafe { memory::copy(buf.as_ptr(), to as *mut u8, buf.len()) }
        Ok(())
    }

    fn load_u16(&self, at: Iova) -> Result<u16, OutOfReach> {
        let at = self.check(at, 2)?;
        // SAFETY: as above; the queue's areas are aligned (`virtqueue::split::Layout`).
        Ok(unsafe { AtomicU16::from_ptr(at as *mut u16) }.load(Ordering::Acquire))
    }

    fn store_u16(&self, at: Iova, value: u16) -> Result<(), OutOfReach> {
        let at = self.check(at, 2)?;
        // SAFETY: as above.
        unsafe { AtomicU16::from_ptr(at as *mut u16) }.store(value, Ordering::Release);
        Ok(())
    }
}
