//! Trial of the host's io_uring: tried, not assumed.
//!
//! A host may have none (built without it), forbid all of it (`kernel.io_uring_disabled`, or a
//! seccomp filter, as the default profiles of container runtimes do) or a part: single system
//! calls, registrations by their number, operations (by restrictions, or a kernel that lacks them).
//! So a ring is made as it will be used, and everything that disks ask of one is asked once, of an
//! empty file in memory, where nothing is waited for. No operation of the trial has a buffer.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};
use rustix::fs::{MemfdFlags, memfd_create};

use super::super::call::{Call, Vectors};
use crate::blk::range::FallocateStep;

/// The host's refusal of io_uring, or of a part that disks need.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {error}")]
pub struct UringRefusal {
    /// The refused system call, or operation of a ring.
    pub what: &'static str,
    /// The host's answer.
    pub error: io::Error,
}

/// For `map_err`: the host refuses `what`.
pub(super) fn refused(what: &'static str) -> impl FnOnce(io::Error) -> UringRefusal {
    move |error| UringRefusal { what, error }
}

/// Asks `ring`, in which nothing is in flight, for everything that disks ask of one.
pub(super) fn try_operations(ring: &mut IoUring) -> Result<(), UringRefusal> {
    // Without a file every operation that is there fails for want of one, and the others as ever.
    let file = memfd_create("io_uring trial", MemfdFlags::CLOEXEC).ok();
    let fd = types::Fd(file.as_ref().map_or(-1, AsRawFd::as_raw_fd));
    let none = Vectors::new(&[], 0);
    let write = Call::Write {
        data: none,
        durable: false,
    };
    let punch = Call::Fallocate {
        mode: FallocateStep::Punch.mode(),
        offset: 0,
        len: 4096,
    };
    let operations = [
        ("READV in io_uring", Call::Read(none).entry(fd)),
        ("WRITEV in io_uring", write.entry(fd)),
        ("FSYNC in io_uring", Call::Sync.entry(fd)),
        ("FALLOCATE in io_uring", punch.entry(fd)),
        // Nothing has this number.
        (
            "ASYNC_CANCEL in io_uring",
            opcode::AsyncCancel::new(u64::MAX).build(),
        ),
    ];
    for (number, (what, entry)) in operations.iter().enumerate() {
        let entry = entry.clone().user_data(number as u64);
        // One after the other, since a kernel that refuses an entry submits none behind it.
        // SAFETY: it points to nothing, and its file stays open until it is answered, which is
        // waited for.
        let pushed = unsafe { ring.submission().push(&entry) };
        pushed.expect("the ring was empty");
        let answered = loop {
            match ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(refused("io_uring_enter")(error)),
                Ok(_) => match ring.completion().next() {
                    Some(answered) => break answered.result(),
                    None => continue,
                },
            }
        };
        match -answered {
            ..=0 => {}
            libc::EBADF if file.is_none() => {}
            libc::ENOENT if what.starts_with("ASYNC_CANCEL") => {}
            errno => return Err(refused(what)(io::Error::from_raw_os_error(errno))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use io_uring::register::Restriction;

    use super::*;

    const NAMES: [(&str, u8); 5] = [
        ("READV", opcode::Readv::CODE),
        ("WRITEV", opcode::Writev::CODE),
        ("FSYNC", opcode::Fsync::CODE),
        ("FALLOCATE", opcode::Fallocate::CODE),
        ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
    ];

    /// A ring of a kernel that refuses all operations but these.
    fn restricted(allowed: &[u8]) -> IoUring {
        let ring = IoUring::builder().setup_r_disabled().build(8).unwrap();
        let mut restrictions: Vec<_> = allowed
            .iter()
            .map(|&code| Restriction::sqe_op(code))
            .collect();
        let submitter = ring.submitter();
        submitter.register_restrictions(&mut restrictions).unwrap();
        submitter.register_enable_rings().unwrap();
        ring
    }

    #[test]
    fn an_operation_that_the_kernel_refuses_is_found_and_named() {
        let all = NAMES.map(|(_, code)| code);
        try_operations(&mut restricted(&all)).expect("all are allowed");
        for (name, code) in NAMES {
            let others: Vec<_> = all.into_iter().filter(|&other| other != code).collect();
            let refusal = try_operations(&mut restricted(&others)).expect_err(name);
            let said = refusal.to_string();
            assert!(said.starts_with(&format!("{name} in io_uring: ")), "{said}");
        }
    }
}
