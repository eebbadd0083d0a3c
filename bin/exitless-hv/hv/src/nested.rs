//! Nested page tables: the guest's physical addresses are the machine's, but for the hypervisor's own 64 MiB and single pages that
//! show something else, or that exit when they are written.

use crate::memory::{self, OWN, PAGE, Page};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ALL: u64 = PRESENT | WRITABLE | USER;

const POOL: usize = 32;

/// What a guest may do with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    All,
    /// Reading; writes exit.
    Read,
    /// Nothing; every access exits.
    Nothing,
}

/// The tables.
#[repr(C, align(4096))]
pub struct Nested {
    root: [u64; 512],
    giants: [u64; 512],
    pool: [[u64; 512]; POOL],
    used: usize,
}

/// No table is left to split a large page with.
#[derive(Debug)]
pub struct Exhausted;

impl Nested {
    /// Before [`init`](Self::init).
    pub const EMPTY: Self = Self {
        root: [0; 512],
        giants: [0; 512],
        pool: [[0; 512]; POOL],
        used: 0,
    };

    /// Everything as it is, but for the hypervisor's own memory.
    pub fn init(&mut self) -> Result<(), Exhausted> {
        for (index, entry) in (0_u64..).zip(&mut self.giants) {
            *entry = index << 30 | ALL | LARGE;
        }
        self.root[0] = self.giants.as_ptr() as u64 | ALL;
        self.remove(OWN)
    }

    /// Takes a range from the guest, with what else is in its first and last 2 MiB. The caller
    /// flushes the TLB.
    ///
    /// # Errors
    /// The tables are full: part of it may be taken.
    pub fn remove(&mut self, range: core::ops::Range<u64>) -> Result<(), Exhausted> {
        const STEP: u64 = 2 << 20;
        let end = range.end.min(memory::MAPPED);
        for address in (range.start & !(STEP - 1)..end).step_by(STEP as usize) {
            let giant = (address >> 30) as usize;
            let table = Self::table(
                &mut self.pool,
                &mut self.used,
                &mut self.giants[giant],
                STEP,
            )?;
            self.pool[table][(address >> 21) as usize & 511] = 0;
        }
        Ok(())
    }

    /// Whether another page can be told apart from its neighbours, wherever it is.
    pub fn has_room(&self) -> bool {
        self.used + 2 <= POOL
    }

    /// For the control block.
    pub fn address(&self) -> u64 {
        self.root.as_ptr() as u64
    }

    /// The guest's page at `guest` is the machine's at `real`. The caller flushes the TLB.
    ///
    /// # Errors
    /// The tables are full: nothing changed.
    pub fn map(&mut self, guest: u64, real: u64, access: Access) -> Result<(), Exhausted> {
        let giant = (guest >> 30) as usize & 511;
        let middle = Self::table(
            &mut self.pool,
            &mut self.used,
            &mut self.giants[giant],
            1 << 21,
        )?;
        let at = (guest >> 21) as usize & 511;
        // Out of the pool and back, since the table that it points to is in the pool too.
        let mut entry = self.pool[middle][at];
        let low = Self::table(&mut self.pool, &mut self.used, &mut entry, PAGE)?;
        self.pool[middle][at] = entry;
        let bits = match access {
            Access::All => ALL,
            Access::Read => PRESENT | USER,
            Access::Nothing => 0,
        };
        self.pool[low][(guest >> 12) as usize & 511] = real & ADDRESS | bits;
        Ok(())
    }

    /// The table that `entry` points to, by its place in the pool; a large page is split into entries of `step` bytes.
    fn table(
        pool: &mut [[u64; 512]; POOL],
        used: &mut usize,
        entry: &mut u64,
        step: u64,
    ) -> Result<usize, Exhausted> {
        let first = pool.as_ptr() as u64;
        let is_present = *entry & PRESENT != 0;
        if is_present && *entry & LARGE == 0 {
            return Ok(((*entry & ADDRESS) - first) as usize / size_of::<Page>());
        }
        let index = *used;
        let table = pool.get_mut(index).ok_or(Exhausted)?;
        let large = if step == PAGE { 0 } else { LARGE };
        for (part, slot) in (0..).zip(table.iter_mut()) {
            // What the guest does not have it has no part of.
            *slot = if is_present {
                ((*entry & ADDRESS & !(step * 512 - 1)) + part * step) | ALL | large
            } else {
                0
            };
        }
        *used += 1;
        *entry = table.as_ptr() as u64 | ALL;
        Ok(index)
    }
}
