//! Discards and zeroes in a file, by the calls that the file has for them.

use std::io::{self, ErrorKind};

use nix::fcntl::FallocateFlags;
use vio::blk::Op;
use vio::blk::range::{self, RangePlan, RangeStep};

use super::{Shared, checked_end, held};

/// Zeroes written where the file system cannot make them by itself.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

impl Shared {
    /// Does a discard or write-zeroes inside the file, by whatever calls it has for that.
    pub(super) fn range(&self, op: Op) -> io::Result<()> {
        let mut support = {
            let len = *held(&self.len);
            *held(&self.support).get_or_insert_with(|| self.file.range_support(len))
        };
        let before = support;
        let Some(plan) = RangePlan::of(op, &support) else {
            return Ok(());
        };
        let ended = range::run(plan, &mut support, |step| self.step(step));
        if support != before {
            // Another thread may have learned something else meanwhile: it will learn it again.
            *held(&self.support) = Some(support);
        }
        ended.map_err(io::Error::from_raw_os_error)
    }

    /// One call of it, answered as [`RangePlan::ended`] takes it.
    fn step(&self, step: RangeStep) -> i32 {
        let (done, moved) = match step {
            RangeStep::Fallocate { step, offset, len } => {
                let mode = FallocateFlags::from_bits_retain(step.mode());
                (self.file.fallocate(mode, offset, len), 0)
            }
            RangeStep::WriteZeroes { offset, len } => {
                let len = len.min(ZEROES.len() as u32);
                let written = self.file.write_all_at(&ZEROES[..len as usize], offset);
                (written, len as i32)
            }
        };
        match done {
            Ok(()) => moved,
            Err(error) => -error.raw_os_error().unwrap_or(match error.kind() {
                ErrorKind::Unsupported => libc::EOPNOTSUPP,
                _ => libc::EIO,
            }),
        }
    }

    /// Makes a range read as zeroes, in the part of the file that exists, and grows the file to its
    /// end. `unmap`: blocks may be given back.
    pub(super) fn zero(&self, unmap: bool, offset: u64, len: u64) -> io::Result<()> {
        self.alive()?;
        let end = checked_end(offset, len)?;
        let change = self.before(|order, layout| Ok(order.emptying(layout, offset, len)))?;
        let done = self.zero_now(unmap, offset, end);
        self.after(change);
        done
    }

    fn zero_now(&self, unmap: bool, offset: u64, end: u64) -> io::Result<()> {
        let mut file_len = held(&self.len);
        let inside = (*file_len).min(end).saturating_sub(offset);
        if end > *file_len {
            self.file.grow(end)?;
            *file_len = end;
        }
        drop(file_len);
        match inside {
            0 => Ok(()),
            len => self.range(Op::WriteZeroes { offset, len, unmap }),
        }
    }
}
