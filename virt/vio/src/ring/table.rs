//! Indirect tables: copied once, then walked here (virtio 1.2 §2.7.5.3, §2.8.7).

use guest_mem::{Dma, Intent, Iova};

use super::chain::{Chain, DESC_F_WRITE, DESC_SIZE, MAX_INDIRECT, RawDescriptor, Sum, Violation};
use super::parked::{RingStop, wait_for_all};

/// Entries copied at once, so that a table of the usual size needs no memory of its own.
const FEW: usize = 8 * DESC_SIZE as usize;

/// Room for a table; at most 16 KiB, made when the first long table is met.
#[derive(Debug, Default)]
pub(super) struct Table {
    bytes: Vec<u8>,
}

impl Table {
    /// Copies the table behind `desc` and gives its bytes to `walk`.
    #[inline]
    fn with<D: Dma>(
        &mut self,
        dma: &mut D,
        desc: RawDescriptor,
        chain: &mut Chain,
        walk: impl FnOnce(&[u8], &mut Chain, &mut Sum) -> Result<(), Violation>,
    ) -> Result<(), RingStop> {
        let entries = desc.len / DESC_SIZE;
        if entries == 0 || !desc.len.is_multiple_of(DESC_SIZE) || entries > MAX_INDIRECT {
            return Err(Violation::IndirectLength(desc.len).into());
        }
        let len = desc.len as usize;
        let mut few = [0; FEW];
        let bytes = if len <= FEW {
            &mut few[..len]
        } else {
            self.bytes.resize(len, 0);
            &mut self.bytes[..]
        };
        let at = Iova::new(desc.addr);
        if let Err(stop) = dma.read(at, bytes) {
            let table = (at, desc.len, Intent::Read);
            return Err(wait_for_all(dma, stop, std::iter::once(table)).into());
        }
        let mut sum = chain.sum();
        walk(bytes, chain, &mut sum)?;
        Ok(chain.close(sum)?)
    }

    /// Appends the chain in a split ring's table: linked by `next`. `desc`'s own WRITE flag is
    /// ignored (§2.7.5.3.2).
    #[inline]
    pub(super) fn walk_linked<D: Dma>(
        &mut self,
        dma: &mut D,
        desc: RawDescriptor,
        chain: &mut Chain,
    ) -> Result<(), RingStop> {
        self.with(dma, desc, chain, |bytes, chain, sum| {
            let (entries, _) = bytes.as_chunks::<{ DESC_SIZE as usize }>();
            // At most MAX_INDIRECT.
            let size = entries.len() as u16;
            let fetch = |index| Ok(words(&entries[usize::from(index)]));
            chain.follow(sum, size, 0, false, fetch).map(|_| ())
        })
    }

    /// Appends the chain in a packed ring's table: every entry in turn. WRITE is their only flag;
    /// the rest is ignored (§2.8.7).
    #[inline]
    pub(super) fn walk_row<D: Dma>(
        &mut self,
        dma: &mut D,
        desc: RawDescriptor,
        chain: &mut Chain,
    ) -> Result<(), RingStop> {
        self.with(dma, desc, chain, |bytes, chain, sum| {
            let (entries, _) = bytes.as_chunks::<{ DESC_SIZE as usize }>();
            for entry in entries {
                let (addr, rest) = words(entry);
                let flags = (rest >> 48) as u16 & DESC_F_WRITE;
                chain.push_words(sum, addr, rest as u32, flags)?;
            }
            Ok(())
        })
    }
}

/// The two little-endian words of an entry.
#[inline(always)]
fn words(entry: &[u8; DESC_SIZE as usize]) -> (u64, u64) {
    let word = u128::from_le_bytes(*entry);
    (word as u64, (word >> 64) as u64)
}
