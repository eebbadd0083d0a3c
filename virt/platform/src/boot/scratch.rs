//! Temporary copy of guest RAM that has no file: loaders write to a mapping of the copy's file, and
//! the written bytes are then copied into guest RAM.

use std::io;
use std::os::fd::BorrowedFd;

use guest_mem::{Gpa, GuestRam, HugePages, PhysMem, Region};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::BootError;

/// Bytes copied at a time.
const CHUNK: u64 = 1 << 20;

/// Memory with the same regions and a file, which allocates only the bytes that are written to it.
pub struct Copy(GuestRam);

impl Copy {
    pub fn new(ram: &GuestRam) -> Result<Self, BootError> {
        let regions: Vec<_> = ram.regions().iter().map(|it| (it.gpa, it.len)).collect();
        let copy = GuestRam::with_pages(&regions, HugePages::Never);
        copy.map(Self)
            .map_err(|error| BootError::Map(error.to_string()))
    }

    pub fn ram(&self) -> &GuestRam {
        &self.0
    }

    /// Copies the written bytes; the rest of `ram` stays as it is.
    pub fn move_into(self, ram: &GuestRam) -> Result<(), BootError> {
        let file = self.0.memfd().expect("it has one");
        let mut bytes = vec![0; CHUNK as usize];
        for region in self.0.regions() {
            let mut at = 0;
            while let Some((from, to)) = extent(file, region, at).map_err(BootError::Scratch)? {
                for start in (from..to).step_by(CHUNK as usize) {
                    let bytes = &mut bytes[..CHUNK.min(to - start) as usize];
                    let gpa = Gpa::new(region.gpa.raw() + start);
                    let copied = self.0.read(gpa, bytes).and_then(|()| ram.write(gpa, bytes));
                    copied.expect("both have the region");
                }
                at = to;
            }
        }
        Ok(())
    }
}

/// Returns the next written bytes of a region, from `at` on: start and end within the region.
fn extent(file: BorrowedFd<'_>, region: &Region, at: u64) -> io::Result<Option<(u64, u64)>> {
    let end = region.fd_offset + region.len;
    let from = match seek(file, SeekFrom::Data(region.fd_offset + at)) {
        Ok(from) if from < end => from,
        // The data found belongs to another region, or the rest is a hole.
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let to = seek(file, SeekFrom::Hole(from))?.min(end);
    Ok(Some((from - region.fd_offset, to - region.fd_offset)))
}
