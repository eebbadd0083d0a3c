//! `SIGBUS` handler for mappings of files that another process may truncate.
//!
//! A process that holds a memory file without a seal on its size can truncate it under our mapping.
//! The next access then raises `SIGBUS`, which would end every guest of this process because of the
//! malice or accident of one. So mappings of foreign files are registered here, and a process-wide
//! handler puts private zeroed memory in place of one that faulted, and marks it lost. The
//! processor repeats the access, which reads zeroes; the owner finds [`Registration::is_lost`] and
//! stops that one guest.
//!
//! The *whole* mapping is replaced, not the page: one fault and one kernel mapping per lost file,
//! however the accesses are scattered (a page each would let a hostile process run us into the
//! kernel's bound on mappings), and huge pages need no care. If the host refuses that for lack of
//! memory commitment (strict overcommit), only the block that faulted is replaced.
//!
//! **Async-signal safety.** The handler runs between any two instructions of any thread. It loads
//! and stores static atomics, calls `mmap`, `sigaction` and `raise` (bare system calls), and
//! restores `errno`. No lock, no allocation, no unwinding.
//!
//! **Why it finds the right mapping.** A slot is live from before its memory can be accessed until
//! after the last access, so the slot of the memory that faulted cannot change while the handler
//! runs: the interrupted thread holds that mapping. Slots of *other* mappings may change under the
//! scan. Each slot has a version number, odd while it is live: a slot whose version changes during
//! the scan belongs to another mapping and is skipped. A slot dies before its memory is unmapped,
//! so an address of a live slot never belongs to any other mapping.
//!
//! **Forwarded to the previous disposition** (a Rust program's own, as a rule): faults elsewhere,
//! signals sent by processes, and early reports of memory errors, which no access waits for.
//!
//! An access by the *kernel* on our behalf raises no signal: the system call fails with `EFAULT`
//! and nothing is marked. A thread that blocks `SIGBUS` is killed by the fault.
//!
//! UNSAFETY: installs a signal handler, and maps over mappings that are registered.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst, compiler_fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void};

/// Most foreign mappings of the process at a time. 16384 × 40 bytes = 640 KiB, untouched until
/// used.
pub(crate) const MAX_MAPPINGS: usize = 16384;

/// One foreign mapping. All orderings are sequentially consistent: none of this is on a hot path,
/// and the argument above then needs no more than the order of the program's text.
struct Slot {
    /// Odd while live. Changed under the lock of `FREE` only.
    version: AtomicU64,
    start: AtomicUsize,
    /// End of the mapping, exclusive.
    end: AtomicUsize,
    /// Size of the file's pages in bytes, a power of two.
    block: AtomicUsize,
    lost: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        version: AtomicU64::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        block: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];
/// Slots from here on were never live.
static TOUCHED: AtomicUsize = AtomicUsize::new(0);
/// Slots below `TOUCHED` that are not live. Never locked by the handler.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// Mappings lost so far in this process.
static LOSSES: AtomicU64 = AtomicU64::new(0);
/// Disposition that our handler replaced; set before the handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Reason why memory could not be registered.
#[derive(Debug)]
pub(crate) enum RegisterError {
    /// All slots are live.
    Full,
    /// The host refused the handler.
    Handler(io::Error),
}

/// A mapping whose loss is survived, until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration(usize);

impl Registration {
    /// Registers `[start, start + len)`, and installs the handler the first time.
    ///
    /// # Safety
    /// The range is one mapping of whole pages of `block` bytes, which the caller owns, reaches
    /// only by atomic or opaque accesses, and unmaps only after it has dropped the registration.
    pub(crate) unsafe fn new(
        start: *mut u8,
        len: usize,
        block: usize,
    ) -> Result<Self, RegisterError> {
        install().map_err(RegisterError::Handler)?;
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match free.pop() {
            Some(number) => number,
            None => {
                let number = TOUCHED.load(SeqCst);
                if number == MAX_MAPPINGS {
                    return Err(RegisterError::Full);
                }
                TOUCHED.store(number + 1, SeqCst);
                number
            }
        };
        let slot = &SLOTS[number];
        slot.start.store(start.expose_provenance(), SeqCst);
        slot.end.store(start.addr() + len, SeqCst);
        slot.block.store(block, SeqCst);
        slot.lost.store(false, SeqCst);
        slot.version.fetch_add(1, SeqCst);
        Ok(Self(number))
    }

    /// Returns whether accesses have found the memory gone. Its content is lost: it reads as zeroes
    /// and later writes.
    pub(crate) fn is_lost(&self) -> bool {
        // A faulting access precedes this load in the thread. The fence keeps the compiler from
        // moving the load before it.
        compiler_fence(SeqCst);
        SLOTS[self.0].lost.load(SeqCst)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        SLOTS[self.0].version.fetch_add(1, SeqCst);
        free.push(self.0);
    }
}

/// Returns the number of mappings lost in this process. While it does not change, no result of
/// [`Registration::is_lost`] does.
#[inline]
pub(crate) fn losses() -> u64 {
    compiler_fence(SeqCst);
    LOSSES.load(SeqCst)
}

/// Installs the handler at the first call.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let outcome = INSTALLED.get_or_init(|| {
        // SAFETY: zero bits are a `sigaction` (no handler, no flags, empty mask); the calls get
        // pointers to live ones. The handler is async-signal-safe, as the module head argues.
        let failed = unsafe {
            let mut previous: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) < 0 {
                true
            } else {
                let previous = PREVIOUS.get_or_init(|| previous);
                let mut ours = *previous;
                let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
                ours.sa_sigaction = handler as usize;
                // On the alternate stack where a thread has one, as the previous handler may need
                // it.
                ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()) < 0
            }
        };
        match failed {
            true => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
            false => Ok(()),
        }
    });
    outcome.map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the location is the thread's own and always valid.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: with SA_SIGINFO the kernel gives a filled `siginfo_t`.
    let code = unsafe { (*info).si_code };
    // These three codes are synchronous to an access; only they are sure to carry its address.
    let is_fault = matches!(
        code,
        libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR
    );
    // SAFETY: as above, and these codes have the address field.
    if !(is_fault && replace_lost(unsafe { (*info).si_addr() }.addr())) {
        hand_on(signal, code, is_fault, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces the foreign mapping that holds `address`. Returns false if no registered mapping does,
/// or the host refuses.
fn replace_lost(address: usize) -> bool {
    for slot in &SLOTS[..TOUCHED.load(SeqCst)] {
        let version = slot.version.load(SeqCst);
        let (start, end) = (slot.start.load(SeqCst), slot.end.load(SeqCst));
        let block = slot.block.load(SeqCst);
        let is_stable = version % 2 == 1 && slot.version.load(SeqCst) == version;
        if !is_stable || !(start..end).contains(&address) {
            continue;
        }
        let replace = |start: usize, len: usize| {
            // SAFETY: inside the live slot's mapping, which its owner reaches by atomic or opaque
            // accesses only: to those, memory that turns to zeroes is memory that another process
            // changed. The interrupted thread holds the mapping, so it is not unmapped under us.
            let answer = unsafe {
                libc::mmap(
                    ptr::with_exposed_provenance_mut(start),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                    -1,
                    0,
                )
            };
            answer != libc::MAP_FAILED
        };
        // Registered ranges are whole blocks.
        if !replace(start, end - start) && !replace(address & !(block - 1), block) {
            return false;
        }
        slot.lost.store(true, SeqCst);
        LOSSES.fetch_add(1, SeqCst);
        return true;
    }
    false
}

/// Forwards the signal to the previous disposition.
fn hand_on(
    signal: c_int,
    code: c_int,
    is_fault: bool,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    let is_fault = is_fault || code == libc::BUS_ADRALN;
    let Some(previous) = PREVIOUS.get() else {
        return; // We are not installed before it is set.
    };
    match previous.sa_sigaction {
        libc::SIG_IGN if !is_fault => {}
        // A fault cannot be ignored: the kernel ends the process for it all the same.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: as in `install`. After that the access is repeated and ends the process; a
            // signal that no access waits for is sent once more, and arrives when this handler
            // returns.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, ptr::null_mut());
                if !is_fault {
                    libc::raise(signal);
                }
            }
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: neither of the two special values, so a function that was installed with
            // SA_SIGINFO; it gets the arguments that the kernel passed.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: as above, installed without SA_SIGINFO.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
