//! Pages of a space: first and last, and reserved regions.

use alloc::vec::Vec;

use crate::{ApertureError, IovaPfn, IovaRange};

/// The space an allocator hands out, as a device and its platform limit it.
///
/// Reserved regions may overlap each other and reach past the ends; [`Aperture::usable`] is what
/// remains.
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
    /// Pages `first` to `last`, inclusive, without `reserved`. Page 0 is best left out: drivers and
    /// devices take address 0 for "none".
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
        // The next page that may be usable, as a number that may be one past the space.
        let mut next = first.raw();
        for range in &reserved {
            let end = range.first().raw().min(last.raw() + 1);
            usable.extend(IovaRange::new(IovaPfn::new(next), end.saturating_sub(next)));
            next = next.max(range.last().raw() + 1);
        }
        let rest = (last.raw() + 1).saturating_sub(next);
        usable.extend(IovaRange::new(IovaPfn::new(next), rest));
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
    /// [`ApertureError::Bits`] for fewer than 13 or more than 64 bits.
    pub fn of_bits(bits: u32) -> Result<Self, ApertureError> {
        if !(13..=64).contains(&bits) {
            return Err(ApertureError::Bits { bits });
        }
        let last = IovaPfn::new((u64::MAX >> (64 - bits)) >> address::PAGE_SHIFT);
        Self::new(IovaPfn::new(1), last, &[MSI_WINDOW])
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

    /// The pages that are neither outside nor reserved: ascending, disjoint, with a gap between any
    /// two.
    pub fn usable(&self) -> &[IovaRange] {
        &self.usable
    }

    /// Whether all of `range` is usable.
    pub fn allows(&self, range: IovaRange) -> bool {
        allows(&self.usable, range)
    }
}

/// Whether one of these ranges, which ascend, has all of `range`.
pub(crate) fn allows(usable: &[IovaRange], range: IovaRange) -> bool {
    let after = usable.partition_point(|u| u.first() <= range.first());
    after > 0 && usable[after - 1].contains(range)
}

#[cfg(test)]
mod tests;
