//! Commands as descriptors.

use dma_map::invalidate::Command;
use iova::IovaRange;

use vtd::spec::invalidate::{
    ContextDescriptor, DescriptorType, Granularity, IotlbDescriptor, WaitDescriptor,
};
use vtd::spec::registers::Capability;

/// Most descriptors of one range; a range in more aligned pieces is covered by one larger piece.
const PIECES: usize = 4;

/// Most descriptors of one batch, its wait apart: more become one domain-wide descriptor. The
/// smallest queue holds two such batches less one descriptor.
pub(super) const BATCH: usize = 126;

/// Encoder of descriptors, according to the capabilities of the unit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoder {
    capability: Capability,
}

impl Encoder {
    pub(super) fn new(capability: Capability) -> Self {
        Self { capability }
    }

    fn iotlb(self, g: Granularity, did: u16) -> IotlbDescriptor {
        IotlbDescriptor::new()
            .with_kind(DescriptorType::IOTLB.0)
            .with_g(g)
            .with_did(did)
            .with_dr(self.capability.drd())
            .with_dw(self.capability.dwd())
    }

    fn domain(self, did: u16) -> u128 {
        self.iotlb(Granularity::DOMAIN, did).into_bits()
    }

    fn global(self) -> u128 {
        self.iotlb(Granularity::GLOBAL, 0).into_bits()
    }

    /// Everything that the commands name, at most [`BATCH`] descriptors.
    pub(super) fn batch(self, did: u16, commands: &[Command], out: &mut Vec<u128>) {
        if commands.contains(&Command::Global) {
            out.push(self.global());
            return;
        }
        for command in commands {
            match *command {
                Command::Pages(range) if out.len() + PIECES <= BATCH => {
                    self.pages(did, range, true, out);
                }
                // As a domain-wide one covers all the others.
                _ => {
                    out.clear();
                    out.push(self.domain(did));
                    return;
                }
            }
        }
    }

    /// All of `range`, in at most [`PIECES`] descriptors; possibly more than it.
    pub(super) fn pages(self, did: u16, range: IovaRange, only_leaves: bool, out: &mut Vec<u128>) {
        if !self.capability.psi() {
            out.push(self.domain(did));
            return;
        }
        let largest = u32::from(self.capability.mamv());
        let piece = |first: u64, am: u32| {
            // At most MAMV, 6 bits.
            self.iotlb(Granularity::SELECTIVE, did)
                .with_am(am as u8)
                .with_ih(only_leaves)
                .with_addr(first)
                .into_bits()
        };
        let before = out.len();
        let (mut first, last) = (range.first().raw(), range.last().raw());
        loop {
            let left = last - first + 1;
            let am = first.trailing_zeros().min(left.ilog2()).min(largest);
            out.push(piece(first, am));
            if left == 1 << am {
                return;
            }
            if out.len() - before == PIECES {
                break;
            }
            first += 1 << am;
        }
        // The smallest aligned power of two that holds the first and the last page.
        out.truncate(before);
        let first = range.first().raw();
        let am = u64::BITS - (first ^ last).leading_zeros();
        out.push(match am <= largest {
            true => piece(first >> am << am, am),
            false => self.domain(did),
        });
    }

    /// Everything, contexts first.
    pub(super) fn all(self, out: &mut Vec<u128>) {
        let contexts = ContextDescriptor::new()
            .with_kind(DescriptorType::CONTEXT.0)
            .with_g(Granularity::GLOBAL);
        out.extend([contexts.into_bits(), self.global()]);
    }

    /// Stores `data` at `status`, a multiple of 4, when everything before is done.
    pub(super) fn wait(status: u64, data: u32) -> u128 {
        WaitDescriptor::new()
            .with_kind(DescriptorType::WAIT.0)
            .with_sw(true)
            .with_data(data)
            .with_addr(status >> 2)
            .into_bits()
    }
}

#[cfg(test)]
mod tests;
