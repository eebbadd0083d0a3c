//! The system calls alone: a swapper without residency state, checks and devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Instant;

use anyhow::Result;
use guest_mem::{Gpa, GuestRam, Hva, PAGE_SIZE, PhysMem, SlotMapping};
use report::host;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FallocateFlags, fallocate};
use uffd::{Features, Modes, Protection, Source, Uffd};

use crate::image::Image;
use crate::memory::memory;
use crate::{BATCH, Cpus, Waiting};

/// A guest's memory, and its faults.
pub struct Bare {
    // Before the mapping, which is to outlast its registration.
    uffd: Uffd,
    /// Memory as a guest sees it.
    pub mapping: SlotMapping,
    /// Memory as its owner sees it.
    pub ram: GuestRam,
    image: Image,
    pagemap: File,
}

impl Bare {
    /// Empty.
    pub fn new(pages: usize, image: &Image) -> Result<Self> {
        let (ram, mapping) = memory(pages)?;
        let features = Features::MISSING_SHARED
            | Features::MINOR_SHARED
            | Features::WRITE_PROTECT
            | Features::WRITE_PROTECT_SHARED
            | Features::WRITE_PROTECT_ASYNC;
        let uffd = Uffd::open(Source::Kernel, features)?;
        register(&uffd, &mapping)?;
        Ok(Self {
            uffd,
            mapping,
            ram,
            image: image.clone(),
            pagemap: File::open("/proc/self/pagemap")?,
        })
    }

    /// Runs `with` while another thread serves faults, each with the `around` pages that it lies
    /// in.
    pub fn served<R>(
        &self,
        cpus: Cpus,
        waiting: Waiting,
        around: usize,
        with: impl FnOnce() -> R,
    ) -> Result<R> {
        let end = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                host::pin(cpus.pager)?;
                self.serve(waiting, around, &end)
            });
            let result = with();
            rustix::io::write(&end, &1_u64.to_ne_bytes())?;
            server.join().expect("it does not panic")?;
            Ok(result)
        })
    }

    fn serve(&self, waiting: Waiting, around: usize, end: &OwnedFd) -> io::Result<()> {
        let mut idle = 0_u32;
        loop {
            let Some(fault) = self.uffd.next_fault()? else {
                idle += 1;
                // Spinning, rarely: a look costs what a fault's message does.
                if waiting == Waiting::Spins && !idle.is_multiple_of(1024) {
                    std::hint::spin_loop();
                    continue;
                }
                let mut fds = [
                    PollFd::new(&self.uffd, PollFlags::IN),
                    PollFd::from_borrowed_fd(end.as_fd(), PollFlags::IN),
                ];
                let forever = waiting == Waiting::Sleeps;
                let now = rustix::event::Timespec::default();
                poll(&mut fds, (!forever).then_some(&now))?;
                if !fds[1].revents().is_empty() {
                    return Ok(());
                }
                continue;
            };
            let inside = fault.address.raw() - self.mapping.hva().raw();
            let page = (inside / PAGE_SIZE) as usize / around * around;
            for page in page..page + around {
                let gpa = Gpa::new(page as u64 * PAGE_SIZE);
                let filled = self.ram.write(gpa, self.image.page(page));
                filled.expect("a page of the memory");
            }
            let (at, len) = (self.at(page), around as u64 * PAGE_SIZE);
            let mut done = 0;
            while done < len {
                let at = Hva::new(at.raw() + done);
                let protection = Protection::WriteProtected;
                done += self.uffd.map_present(at, len - done, protection)?;
            }
        }
    }

    fn at(&self, page: usize) -> Hva {
        Hva::new(self.mapping.hva().raw() + page as u64 * PAGE_SIZE)
    }

    /// Takes all of so many pages away, a batch at a time: unmapped, their markers read, and given
    /// back. Nanoseconds of each batch.
    pub fn evict(&self, pages: usize, cpus: Cpus) -> io::Result<Vec<f64>> {
        host::pin(cpus.pager)?;
        let mut words = [0_u8; 8 * BATCH];
        let mut times = Vec::with_capacity(pages / BATCH);
        for first in (0..pages).step_by(BATCH) {
            let start = Instant::now();
            let (offset, len) = (first as u64 * PAGE_SIZE, BATCH as u64 * PAGE_SIZE);
            self.mapping.unmap(offset, len)?;
            let at = self.at(first).raw() / PAGE_SIZE * 8;
            self.pagemap.read_exact_at(&mut words, at)?;
            std::hint::black_box(&words);
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(self.ram.memfd().expect("a file"), hole, offset, len)?;
            times.push(start.elapsed().as_nanos() as f64);
        }
        Ok(times)
    }
}

#[expect(unsafe_code, reason = "whoever registers a range answers for it")]
fn register(uffd: &Uffd, mapping: &SlotMapping) -> io::Result<()> {
    let modes = Modes::MISSING | Modes::MINOR | Modes::WRITE_PROTECT;
    // SAFETY: there are no references into a `SlotMapping`, and `Bare` drops it behind the
    // descriptor.
    unsafe { uffd.register(mapping.hva(), mapping.len(), modes) }
}
