//! Nested page tables: the guest's physical addresses are the machine's, but for the hypervisor's
//! own 64 MiB and single pages that show something else, or that exit when they are written.

use crate::memory::{self, OWN, PAGE, Page};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ALL: u64 = PRESENT | WRITABLE | USER;

/// Tables that split large pages: one for each 2 MiB in which a page is distinguished from its
/// neighbours, and one for each GiB in which there are such. They are taken back when none is left.
const POOL: usize = 32;
const _: () = assert!(POOL == u32::BITS as usize, "a bit for each");

/// Accesses to a page that a guest makes without an exit.
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
    /// Tables of the pool that are in use: a bit each.
    used: u32,
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

    /// Maps everything as it is, but for the hypervisor's own memory.
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
            let table = self.middle(giant)?;
            self.pool[table][(address >> 21) as usize & 511] = 0;
        }
        Ok(())
    }

    /// Returns whether another page can be distinguished from its neighbours, wherever it is. The
    /// caller flushes the TLB before the guest runs.
    pub fn has_room(&mut self) -> bool {
        const WANTED: u32 = 2;
        if self.used.count_zeros() < WANTED {
            self.collect();
        }
        self.used.count_zeros() >= WANTED
    }

    /// Returns the address for the control block.
    pub fn address(&self) -> u64 {
        self.root.as_ptr() as u64
    }

    /// Maps the guest's page at `guest` to the machine's at `real`. The caller flushes the TLB.
    ///
    /// # Errors
    /// The tables are full: nothing changed.
    pub fn map(&mut self, guest: u64, real: u64, access: Access) -> Result<(), Exhausted> {
        // Both may be taken from the pool: made sure of here, so that the first one is not taken
        // back for the second.
        if !self.has_room() && !self.is_split(guest) {
            return Err(Exhausted);
        }
        let middle = self.middle((guest >> 30) as usize & 511)?;
        let at = (guest >> 21) as usize & 511;
        let entry = self.pool[middle][at];
        let low = self.split(entry, PAGE)?;
        self.pool[middle][at] = self.address_of(low) | ALL;
        let bits = match access {
            Access::All => ALL,
            Access::Read => PRESENT | USER,
            Access::Nothing => 0,
        };
        self.pool[low][(guest >> 12) as usize & 511] = real & ADDRESS | bits;
        Ok(())
    }

    /// Returns whether a page's entry is in a table of its own already.
    fn is_split(&self, guest: u64) -> bool {
        let middle = self.table_of(self.giants[(guest >> 30) as usize & 511]);
        middle.is_some_and(|middle| {
            let entry = self.pool[middle][(guest >> 21) as usize & 511];
            self.table_of(entry).is_some()
        })
    }

    /// Returns the table of a GiB, which is split if it is not.
    fn middle(&mut self, giant: usize) -> Result<usize, Exhausted> {
        let table = self.split(self.giants[giant], 1 << 21)?;
        self.giants[giant] = self.address_of(table) | ALL;
        Ok(table)
    }

    fn address_of(&self, table: usize) -> u64 {
        self.pool[table].as_ptr() as u64
    }

    /// Returns the table that an entry points to, by its place in the pool.
    fn table_of(&self, entry: u64) -> Option<usize> {
        let is_table = entry & PRESENT != 0 && entry & LARGE == 0;
        is_table.then(|| ((entry & ADDRESS) - self.address_of(0)) as usize / size_of::<Page>())
    }

    /// Returns the table that `entry` points to; a large page is split into entries of `step`
    /// bytes.
    fn split(&mut self, entry: u64, step: u64) -> Result<usize, Exhausted> {
        if let Some(table) = self.table_of(entry) {
            return Ok(table);
        }
        let table = self.used.trailing_ones() as usize;
        if table == POOL {
            return Err(Exhausted);
        }
        self.used |= 1 << table;
        // What the guest does not have it has no part of.
        let is_present = entry & PRESENT != 0;
        let start = entry & ADDRESS & !(step * 512 - 1);
        for (part, slot) in (0..).zip(&mut self.pool[table]) {
            *slot = if is_present {
                Self::own(start, part, step)
            } else {
                0
            };
        }
        Ok(table)
    }

    /// Returns an entry under which the guest's addresses are the machine's: the `part`th of a
    /// table.
    const fn own(start: u64, part: u64, step: u64) -> u64 {
        let large = if step == PAGE { 0 } else { LARGE };
        (start + part * step) | ALL | large
    }

    /// Takes back tables in which nothing is distinguished any more.
    fn collect(&mut self) {
        const GIANT: u64 = 1 << 30;
        const STEP: u64 = 1 << 21;
        for giant in 0..self.giants.len() {
            let Some(middle) = self.table_of(self.giants[giant]) else {
                continue;
            };
            let start = giant as u64 * GIANT;
            for part in 0..512 {
                let first = start + part * STEP;
                if let Some(low) = self.table_of(self.pool[middle][part as usize])
                    && self.is_own(low, first, PAGE)
                {
                    self.used &= !(1 << low);
                    self.pool[middle][part as usize] = Self::own(start, part, STEP);
                }
            }
            if self.is_own(middle, start, STEP) {
                self.used &= !(1 << middle);
                self.giants[giant] = Self::own(start, 0, GIANT);
            }
        }
    }

    /// Returns whether all of a table is the guest's own, as it is.
    fn is_own(&self, table: usize, start: u64, step: u64) -> bool {
        /// Accessed, and dirty: the processor sets them.
        const SEEN: u64 = 3 << 5;
        let mut entries = (0..).zip(&self.pool[table]);
        entries.all(|(part, entry)| entry & !SEEN == Self::own(start, part, step))
    }
}
