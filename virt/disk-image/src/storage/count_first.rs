//! Reference counts that go to the file before an entry that needs them.

use std::io;

use super::{Shared, held};
use crate::check::Count;
use crate::file_io::read_known;
use crate::header::{Layout, OFFSET_MASK, be64};

impl Shared {
    /// Counts the clusters that entries of the L1 table or the refcount table refer to, before the
    /// entries are written.
    pub(super) fn count_first(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let layout = *held(&self.layout);
        let Some(layout) = layout else { return Ok(()) };
        let end = offset + bytes.len() as u64;
        let tables = [
            (layout.l1_offset, layout.l1_entries * 8, false),
            (layout.reftable_offset, layout.reftable_bytes, true),
        ];
        for (table, table_bytes, is_reftable) in tables {
            let first = offset.max(table);
            let last = end.min(table + table_bytes);
            let mut at = first.next_multiple_of(8);
            while at + 8 <= last {
                let entry = be64(bytes, (at - offset) as usize) & OFFSET_MASK;
                if entry != 0 {
                    let own = is_reftable.then_some(((at - table) / 8, entry));
                    self.count(&layout, entry, own)?;
                }
                at += 8;
            }
        }
        Ok(())
    }

    /// Makes the reference count of the cluster at `target` at least one in the file. `own`: an
    /// entry of the refcount table (its index and value) that is not in the file yet.
    fn count(&self, layout: &Layout, target: u64, own: Option<(u64, u64)>) -> io::Result<()> {
        let cluster = target >> layout.cluster_bits;
        let index = cluster >> layout.refblock_bits();
        let within = cluster & ((1 << layout.refblock_bits()) - 1);
        let mut word = [0; 8];
        let block = match own {
            Some((at, block)) if at == index => block,
            _ if index * 8 >= layout.reftable_bytes => 0,
            _ => {
                read_known(
                    &*self.file,
                    &mut word,
                    layout.reftable_offset + index * 8,
                    self.known_len(),
                )?;
                u64::from_be_bytes(word) & OFFSET_MASK
            }
        };
        if block == 0 {
            // The library makes the block that counts a cluster before it uses the cluster.
            return Err(io::Error::other(format!(
                "the cluster at {target:#x} is not covered by a refcount block"
            )));
        }
        let width = layout.refcount_order;
        let (at, len) = (
            block + (within << width >> 3),
            (1_usize << width).div_ceil(8),
        );
        let bytes = &mut word[..len];
        read_known(&*self.file, bytes, at, self.known_len())?;
        let mut count = Count::at(bytes, within % (8 >> width).max(1), width);
        if count.get() != 0 {
            return Ok(());
        }
        count.set(1);
        let written = self.file.write_all_at(bytes, at);
        if let Some(order) = &self.order {
            held(order).add_fresh();
        }
        written
    }
}
