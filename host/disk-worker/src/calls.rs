//! The system calls that a worker may make once it serves: those of its loop, of the threads that
//! wait for storage, of the heap, and of the end.
//!
//! Nothing here opens a file, makes a descriptor or process, reaches another process, or makes
//! memory executable.

use confine::{Call, When};

const fn always(number: i64) -> Call {
    Call {
        number,
        when: When::Always,
    }
}

/// Returns all of them, for a disk of `capacity` bytes.
pub(crate) fn allowed(capacity: u64) -> Vec<Call> {
    let of_disk = Call {
        number: libc::SYS_fallocate,
        when: When::KeepsSize(capacity),
    };
    ALWAYS.iter().copied().chain([of_disk]).collect()
}

/// Those that do not depend on the disk.
const ALWAYS: &[Call] = &[
    // Of the eventfd that tells the start.
    always(libc::SYS_close),
    // Eventfds, and waiting for them. (`poll` is not there on Arm.)
    always(libc::SYS_read),
    always(libc::SYS_write),
    #[cfg(target_arch = "x86_64")]
    always(libc::SYS_poll),
    always(libc::SYS_ppoll),
    // After a stop, of a call with a time limit.
    always(libc::SYS_restart_syscall),
    // Locks between the threads.
    always(libc::SYS_futex),
    // The disk's file.
    always(libc::SYS_preadv),
    always(libc::SYS_preadv2),
    always(libc::SYS_pwritev),
    always(libc::SYS_fdatasync),
    // The heap.
    always(libc::SYS_brk),
    always(libc::SYS_munmap),
    always(libc::SYS_madvise),
    Call {
        number: libc::SYS_mmap,
        when: When::PlainMemory,
    },
    Call {
        number: libc::SYS_mprotect,
        when: When::NotExecutable,
    },
    always(libc::SYS_mremap),
    // The end.
    always(libc::SYS_exit),
    always(libc::SYS_exit_group),
];
