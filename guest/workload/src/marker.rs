//! Markers: one byte written to an I/O port, by which the VMM divides its counts into windows.
//!
//! UNSAFETY: stock cloud kernels have no `/dev/port`, and a port can otherwise only be reached by
//! `ioperm(2)` and the `out` instruction. Both are confined to this module.
//!
//! A quirk of emulated hosts: QEMU 7.2 (TCG) accepts a task register of type 9 only (as LTR leaves
//! it there), where hardware has 11 (busy), and otherwise refuses every port in ring 3. If a VMM
//! writes the segment registers back (`KVM_SET_SREGS`) once the guest runs, `out` is therefore a
//! general-protection fault in the lab. Measured: QEMU does so with vAPIC, and does not without it.
//!
//! One marker is exactly one exit, of a kind (port I/O) that none of the measured requests makes.

use std::fs::File;
use std::io::{self, Write};
use std::marker::PhantomData;

/// The port. It is between the ranges of the PC's own devices; 0x80 is left to the kernel's delays.
pub const PORT: u16 = 0xe0;

/// A window of measured requests begins.
pub const BEGIN: u8 = 1;
/// A window of measured requests ends.
pub const END: u8 = 2;
/// The first value free for other purposes.
pub const USER: u8 = 3;
/// Iteration 0 of `sequential` begins; iteration *i* has this plus *i*.
pub const ITERATION: u8 = 16;
/// The iterations of `sequential` are over, and its child begins.
pub const ALLOC: u8 = 32;
/// The child of `sequential` has filled its memory, and is to read it again.
pub const CHECK: u8 = 33;
/// The child of `sequential` has ended.
pub const ALLOC_END: u8 = 34;
/// The last phase of `compile`, `compress` or `collect` is over; their phase *i* begins with
/// [`ITERATION`] plus *i*.
pub const OVER: u8 = 35;

/// Windows of equally many requests; requests between them, and before the first, are in no window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestWindows {
    warmup: u64,
    count: u64,
    windows: u64,
}

impl RequestWindows {
    /// Creates `windows` of `count` requests each, `warmup` before each of them.
    ///
    /// # Errors
    /// `InvalidInput` if one of them is 0, or their total overflows.
    pub fn new(warmup: u64, count: u64, windows: u64) -> io::Result<Self> {
        let this = Self {
            warmup,
            count,
            windows,
        };
        let total = warmup
            .checked_add(count)
            .and_then(|each| each.checked_mul(windows));
        // A window is opened by the request before it.
        match total {
            Some(_) if warmup > 0 && count > 0 && windows > 0 => Ok(this),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{windows} windows of {count} requests, {warmup} before each: at least 1 of all"
                ),
            )),
        }
    }

    /// Returns the number of all requests.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.windows * (self.warmup + self.count)
    }

    /// Returns the number of requests in windows.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.windows * self.count
    }

    /// Returns the marker due when so many requests have been answered; `None` beyond
    /// [`total`](Self::total).
    #[must_use]
    pub fn marker_after(&self, answered: u64) -> Option<u8> {
        let each = self.warmup + self.count;
        match answered % each {
            _ if answered == 0 || answered > self.total() => None,
            0 => Some(END),
            at if at == self.warmup => Some(BEGIN),
            _ => None,
        }
    }
}

/// File by which a program adds lines to Linux's trace: `workload marker N` is that of a marker.
const TRACE_MARKER: &str = "/sys/kernel/tracing/trace_marker";

/// Permission to write markers, which Linux gives to one thread.
#[derive(Debug)]
pub struct Markers {
    /// Trace that markers are written to as well.
    trace: Option<File>,
    /// Not `Send`: the permission belongs to the requesting thread.
    thread: PhantomData<*const ()>,
}

impl Markers {
    /// Requests access to the port.
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_SYS_RAWIO`.
    #[expect(
        unsafe_code,
        reason = "no safe wrapper of ioperm exists; see the module's head"
    )]
    pub fn open() -> io::Result<Self> {
        // SAFETY: ioperm takes three integers and touches no memory of ours; it changes only which
        // port instructions this thread may execute.
        let result = unsafe { libc::ioperm(libc::c_ulong::from(PORT), 1, 1) };
        if result == 0 {
            Ok(Self {
                trace: None,
                thread: PhantomData,
            })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Requests the same; each marker is a line of the kernel's trace too, for comparison with its
    /// counts.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); `/sys/kernel/tracing` is not mounted.
    pub fn open_traced() -> io::Result<Self> {
        let trace = File::options().write(true).open(TRACE_MARKER);
        let named = |error: io::Error| {
            let text = format!("{TRACE_MARKER}: {error} (mount -t tracefs t /sys/kernel/tracing)");
            io::Error::new(error.kind(), text)
        };
        Ok(Self {
            trace: Some(trace.map_err(named)?),
            ..Self::open()?
        })
    }

    /// Writes one marker. A trace that is full or off drops the line; the reader of the trace
    /// notices it.
    pub fn write(&self, value: u8) {
        self.write_port(value);
        if let Some(mut trace) = self.trace.as_ref() {
            let _ = trace.write_all(format!("workload marker {value}\n").as_bytes());
        }
    }

    #[expect(unsafe_code, reason = "the out instruction; see the module's head")]
    fn write_port(&self, value: u8) {
        // SAFETY: `self` proves that this thread may use PORT (`open` succeeded, and the type is
        // not `Send`), so the instruction does not fault; it reads two registers, touches neither
        // memory, stack nor flags, and no PC device listens at 0xe0.
        unsafe {
            std::arch::asm!(
                "out dx, al",
                in("dx") PORT,
                in("al") value,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_as_many_requests_as_it_says() {
        let windows = RequestWindows::new(3, 5, 2).unwrap();
        let marked: Vec<(u64, u8)> = (0..40)
            .filter_map(|answered| Some((answered, windows.marker_after(answered)?)))
            .collect();
        assert_eq!(marked, [(3, BEGIN), (8, END), (11, BEGIN), (16, END)]);
        assert_eq!((windows.total(), windows.counted()), (16, 10));
    }

    #[test]
    fn a_window_that_nothing_opens_is_refused() {
        for (warmup, count, windows) in [
            (0, 5, 2),
            (3, 0, 2),
            (3, 5, 0),
            (u64::MAX, 1, 1),
            (1 << 62, 1, 4),
        ] {
            let refused = RequestWindows::new(warmup, count, windows).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
