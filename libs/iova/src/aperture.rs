//! Which pages there are: first and last, reserved regions, and how many cores will ask.

use alloc::vec::Vec;

use crate::{ApertureError, IovaPfn, IovaRange};

/// The space an allocator hands out, as a device and its platform limit it.
///
/// Reserved regions may overlap each other and reach past the ends; [`Aperture::usable`] is what remains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aperture {
    first: IovaPfn,
    last: IovaPfn,
    reserved: Vec<IovaRange>,
    usable: Vec<IovaRange>,
}

/// The interrupt window of x86, 0xfee0_0000 to 0xfeef_ffff: writes there are messages, not data.
pub const MSI_WINDOW: IovaRange = match IovaRange::new(IovaPfn::new(0xfee00), 0x100) {
    Some(range) => range,
    None => unreachable!(),
};

impl Aperture {
    /// Pages `first` to `last`, inclusive, without `reserved`. Page 0 is best left out: drivers and devices take
    /// address 0 for "none".
    ///
    /// # Errors
    /// [`ApertureError::Empty`] where no page remains.
    pub fn new(
        first: IovaPfn,
        last: IovaPfn,
        reserved: &[IovaRange],
    ) -> Result<Self, ApertureError> {
        let mut reserved = reserved.to_vec();
        reserved.sort_by_key(|range| range.first());
        let mut usable = Vec::new();
        let mut next = Some(first);
        let add = |from: IovaPfn, to: u64, usable: &mut Vec<IovaRange>| {
            if to >= from.raw() {
                usable.extend(IovaRange::new(from, to - from.raw() + 1));
            }
        };
        for range in &reserved {
            let Some(from) = next else { break };
            if range.first() > last {
                break;
            }
            if range.first() > from {
                add(from, range.first().raw() - 1, &mut usable);
            }
            if range.last() >= from {
                next = (range.last() < IovaPfn::MAX).then(|| IovaPfn::new(range.last().raw() + 1));
            }
        }
        if let Some(from) = next {
            add(from, last.raw(), &mut usable);
        }
        if usable.is_empty() {
            return Err(ApertureError::Empty { first, last });
        }
        Ok(Self {
            first,
            last,
            reserved,
            usable,
        })
    }

    /// Pages 1 to the last one of a `bits`-bit space (13 to 64), without the [`MSI_WINDOW`].
    ///
    /// # Errors
    /// [`ApertureError::Empty`] for fewer than 13 or more than 64 bits.
    pub fn of_bits(bits: u32) -> Result<Self, ApertureError> {
        let first = IovaPfn::new(1);
        if !(13..=64).contains(&bits) {
            return Err(ApertureError::Empty {
                first,
                last: IovaPfn::new(0),
            });
        }
        let last = IovaPfn::new(u64::MAX >> (64 - bits) >> address::PAGE_SHIFT);
        Self::new(first, last, &[MSI_WINDOW])
    }

    /// First page, which may be reserved.
    pub fn first(&self) -> IovaPfn {
        self.first
    }

    /// Last page, inclusive, which may be reserved.
    pub fn last(&self) -> IovaPfn {
        self.last
    }

    /// The reserved regions as given, by first page.
    pub fn reserved(&self) -> &[IovaRange] {
        &self.reserved
    }

    /// What is neither outside nor reserved: ascending, disjoint, with a gap between any two.
    pub fn usable(&self) -> &[IovaRange] {
        &self.usable
    }

    /// Whether all of `range` is usable.
    pub fn allows(&self, range: IovaRange) -> bool {
        let after = self.usable.partition_point(|u| u.first() <= range.first());
        after > 0 && self.usable[after - 1].contains(range)
    }
}

#[cfg(test)]
mod tests;
