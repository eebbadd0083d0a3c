//! Second-level tables of the assigned device: the guest's memory, each page at its own address,
//! and nothing else (VT-d 4.1, §3.7 and §9.8).

use vtd_spec::tables::SlPte;

use crate::memory::PAGE;

const LARGE: u64 = 2 << 20;
const GIANT: u64 = 1 << 30;
/// Tables below the giants: a range has two ends, each of which takes two.
const POOL: usize = 64;

/// The tables.
#[repr(C, align(4096))]
pub struct SecondLevel {
    /// Of 512 GiB each, for a unit of 48 bits.
    root: [u64; 512],
    /// Of 1 GiB each.
    giants: [u64; 512],
    pool: [[u64; 512]; POOL],
    used: usize,
}

/// No table is left for one more end of a range.
#[derive(Debug)]
pub struct Exhausted;

impl SecondLevel {
    /// Of nothing.
    pub const EMPTY: Self = Self {
        root: [0; 512],
        giants: [0; 512],
        pool: [[0; 512]; POOL],
        used: 0,
    };

    /// Address of the first table for a unit of 39 bits (`levels` 3) or 48.
    pub fn address(&mut self, levels: u8) -> u64 {
        let giants = self.giants.as_ptr() as u64;
        if levels == 3 {
            return giants;
        }
        self.root[0] = table(giants);
        self.root.as_ptr() as u64
    }

    /// Allows whole pages from `start` to `end`, below 512 GiB.
    ///
    /// # Errors
    /// No table is left. A part of it may be reached.
    pub fn allow(&mut self, start: u64, end: u64) -> Result<(), Exhausted> {
        let mut at = start.next_multiple_of(PAGE);
        let end = (end & !(PAGE - 1)).min(crate::memory::MAPPED);
        while at < end {
            let fits = |size: u64| at.is_multiple_of(size) && end - at >= size;
            let giant = (at / GIANT) as usize;
            if fits(GIANT) {
                self.giants[giant] = leaf(at, true);
                at += GIANT;
                continue;
            }
            let middle = Self::below(&mut self.pool, &mut self.used, &mut self.giants[giant])?;
            let large = (at / LARGE % 512) as usize;
            if fits(LARGE) {
                self.pool[middle][large] = leaf(at, true);
                at += LARGE;
                continue;
            }
            // Out of the pool and back, since the table that it points to is in the pool too.
            let mut entry = self.pool[middle][large];
            let low = Self::below(&mut self.pool, &mut self.used, &mut entry)?;
            self.pool[middle][large] = entry;
            self.pool[low][(at / PAGE % 512) as usize] = leaf(at, false);
            at += PAGE;
        }
        Ok(())
    }

    /// Returns the table that `entry` points to, by its place in the pool; a new one where there is
    /// none.
    fn below(
        pool: &mut [[u64; 512]; POOL],
        used: &mut usize,
        entry: &mut u64,
    ) -> Result<usize, Exhausted> {
        let first = pool.as_ptr() as u64;
        let frame = SlPte::from_bits(*entry).addr() * PAGE;
        if frame != 0 {
            return Ok(((frame - first) / PAGE) as usize);
        }
        let index = *used;
        let new = pool.get(index).ok_or(Exhausted)?;
        *entry = table(new.as_ptr() as u64);
        *used += 1;
        Ok(index)
    }
}

fn leaf(address: u64, is_large: bool) -> u64 {
    let entry = SlPte::new().with_r(true).with_w(true).with_ps(is_large);
    entry.with_addr(address / PAGE).into_bits()
}

fn table(address: u64) -> u64 {
    let entry = SlPte::new().with_r(true).with_w(true);
    entry.with_addr(address / PAGE).into_bits()
}
