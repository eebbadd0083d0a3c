//! The kernel's ring itself.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use io_uring::{IoUring, squeue, types};

/// A ring of one disk, bound to the thread that first enters it.
pub(super) struct Ring {
    pub(super) io: IoUring,
    /// Made disabled: entering it enables it and binds it to its thread.
    enabled: bool,
    /// Operations in flight at most.
    depth: u32,
    /// Number 0 among its registered files, so that operations need not look the file up; else its descriptor.
    file: Target,
}

/// How entries name the file.
#[derive(Clone, Copy)]
enum Target {
    Registered,
    Descriptor(types::Fd),
}

impl Ring {
    /// The best ring this kernel makes for `depth` operations on `file`, which counts completions in `wake`, silent at first.
    pub(super) fn new(depth: u32, file: &File, wake: &File) -> io::Result<Self> {
        // Every slot and a cancellation of each, twice: the queue is never full of what the kernel has not seen.
        let entries = (4 * depth).next_power_of_two();
        let best = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .build(entries);
        let io = match best {
            Ok(io) => io,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries)?,
            Err(error) => return Err(error),
        };
        io.submitter().register_eventfd(wake.as_raw_fd())?;
        let fd = file.as_raw_fd();
        let file = match io.submitter().register_files(&[fd]) {
            Ok(()) => Target::Registered,
            Err(_) => Target::Descriptor(types::Fd(fd)),
        };
        let mut ring = Self {
            io,
            enabled: false,
            depth,
            file,
        };
        ring.set_notify(false);
        Ok(ring)
    }

    /// Whether this kernel lets us have rings at all.
    pub(super) fn probe() -> io::Result<()> {
        IoUring::new(1).map(drop)
    }

    /// What an entry on the file is built with.
    pub(super) fn fd(&self) -> types::Fd {
        match self.file {
            Target::Registered => types::Fd(0),
            Target::Descriptor(fd) => fd,
        }
    }

    /// An entry built with [`fd`](Self::fd), ready to be pushed.
    pub(super) fn on_file(&self, entry: squeue::Entry) -> squeue::Entry {
        match self.file {
            Target::Registered => entry.flags(squeue::Flags::FIXED_FILE),
            Target::Descriptor(_) => entry,
        }
    }

    /// Enters the kernel; false for what a later try may mend.
    pub(super) fn enter(&mut self) -> bool {
        if !self.enabled {
            // Fails only if the ring was not made disabled (the fallback for old kernels).
            let _ = self.io.submitter().register_enable_rings();
            self.enabled = true;
            self.add_workers();
        }
        self.io.submit().is_ok()
    }

    /// Adds room for all of this ring's operations to the threads with which the kernel waits for storage on this thread's
    /// behalf. They belong to the thread, not to the ring, and there are four for each CPU at first: a handful of
    /// requests that one slow disk does not answer would keep the flushes of all others from being begun. Threads are
    /// made only while operations wait in others, so there are never more than operations in flight.
    fn add_workers(&self) {
        let submitter = self.io.submitter();
        // Makes the kernel's record of this thread, of which the limit is a part.
        // SAFETY: submits nothing, waits for nothing.
        let entered = unsafe { submitter.enter::<libc::sigset_t>(0, 0, 0, None) };
        // Zero leaves a limit as it is, and tells it.
        let mut limits = [0; 2];
        if entered.is_ok() && submitter.register_iowq_max_workers(&mut limits).is_ok() {
            let bounded = limits[0].saturating_add(self.depth);
            // As many as the user may have processes; a kernel before 5.15 keeps its own limit.
            let _ = submitter.register_iowq_max_workers(&mut [bounded, 0]);
        }
    }

    /// The next completion.
    pub(super) fn next(&mut self) -> Option<io_uring::cqueue::Entry> {
        self.io.completion().next()
    }

    /// Whether the kernel has something for us: completions, or work it deferred to our next entry.
    pub(super) fn has_news(&mut self) -> bool {
        self.io.submission().taskrun() || !self.io.completion().is_empty()
    }

    /// Whether completions are counted in the eventfd.
    pub(super) fn set_notify(&mut self, on: bool) {
        if on {
            self.io.completion().enable_eventfd();
        } else {
            self.io.completion().disable_eventfd();
        }
    }
}

pub(super) fn make_eventfd() -> io::Result<File> {
    // SAFETY: plain system call; a new descriptor, or an error.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just made it, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}
