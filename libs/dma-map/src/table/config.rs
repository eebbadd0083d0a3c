//! Configuration of the tables that a unit can walk.

/// Sizes of leaves that a unit knows, beside pages of 4 KiB, which all do: how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeafSizes(pub(super) u32);

impl LeafSizes {
    /// 4 KiB only.
    pub const FOUR_K: Self = Self(0);
    /// 4 KiB and 2 MiB.
    pub const TWO_M: Self = Self(1);
    /// 4 KiB, 2 MiB and 1 GiB.
    pub const ONE_G: Self = Self(2);
}

/// Shape of a tree of tables, as a unit can walk it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// Levels, within what the format has: 3 translate 39 bits, 4 48, 5 57.
    pub levels: u32,
    /// Leaf sizes.
    pub leaves: LeafSizes,
}
