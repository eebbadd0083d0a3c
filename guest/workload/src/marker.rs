//! Markers: one byte written to an I/O port, by which the VMM cuts its counting into windows.
//!
//! UNSAFETY: stock cloud kernels have no `/dev/port`, and a port can otherwise only be reached by
//! `ioperm(2)` and the `out` instruction. Both are confined to this module.
//!
//! A trap of emulated hosts: QEMU 7.2 (TCG) takes a task register of type 9 only (as LTR leaves it
//! there), where hardware has 11 (busy), and refuses every port in ring 3 otherwise. A VMM that
//! writes the segment registers back (`KVM_SET_SREGS`) once the guest runs therefore makes `out` a
//! general-protection fault in the lab. Measured: QEMU with vAPIC does, without it does not.
//!
//! One marker is exactly one exit, of a kind (port I/O) that none of the measured requests makes.

use std::io;
use std::marker::PhantomData;

/// The port. Between the ranges of the PC's own devices; 0x80 is left to the kernel's delays.
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
/// The last phase of `compile`, `compress` or `collect` is over; their phase *i* begins with [`ITERATION`] plus *i*.
pub const OVER: u8 = 35;

/// The right to write markers, which Linux gives to one thread.
#[derive(Debug)]
pub struct Markers {
    /// Not `Send`: the right stays with the thread that asked.
    thread: PhantomData<*const ()>,
}

impl Markers {
    /// Asks for the port.
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
                thread: PhantomData,
            })
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Writes one marker.
    #[expect(unsafe_code, reason = "the out instruction; see the module's head")]
    pub fn write(&self, value: u8) {
        // SAFETY: `self` proves that this thread may use PORT (`open` succeeded, and the type is not
        // `Send`), so the instruction does not fault; it reads two registers, touches neither
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
