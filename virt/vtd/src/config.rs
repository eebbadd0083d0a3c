//! Parameters of a unit.

/// Widest guest address that contexts may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AddressWidth {
    /// 39 bits, three levels of tables.
    Bits39,
    /// 48 bits, four levels; contexts of 39 bits work as well.
    Bits48,
}

impl AddressWidth {
    /// Width in bits.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Bits39 => 39,
            Self::Bits48 => 48,
        }
    }

    pub(crate) const fn levels(self) -> u32 {
        match self {
            Self::Bits39 => 3,
            Self::Bits48 => 4,
        }
    }

    /// CAP.SAGAW: all widths up to this one.
    pub(crate) const fn sagaw(self) -> u8 {
        match self {
            Self::Bits39 => 0b0_0010,
            Self::Bits48 => 0b0_0110,
        }
    }

    /// From AW of a context entry.
    pub(crate) const fn from_aw(aw: u8) -> Option<Self> {
        match aw {
            1 => Some(Self::Bits39),
            2 => Some(Self::Bits48),
            _ => None,
        }
    }
}

/// Leaves above 4 KiB that second-level tables may have, by the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LargePages {
    /// None.
    None,
    /// 2 MiB.
    TwoM,
    /// 2 MiB and 1 GiB.
    OneG,
}

impl LargePages {
    /// CAP.SLLPS: all sizes up to this one.
    pub(crate) const fn sllps(self) -> u8 {
        match self {
            Self::None => 0b00,
            Self::TwoM => 0b01,
            Self::OneG => 0b11,
        }
    }
}

/// Parameters of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Widest guest address.
    pub width: AddressWidth,
    /// CAP.CM: the guest must invalidate after making entries present, too. For shadowing only: it
    /// makes stock Linux strict everywhere.
    pub caching_mode: bool,
    /// Large pages that tables may have; PS at another level is a reserved bit. A unit whose
    /// mappings are repeated in an IOMMU of the host offers no others than that one has.
    pub large_pages: LargePages,
    /// ECAP.SC: a mapping may force the snooping of caches (SNP). Without it SNP is a reserved bit.
    /// A unit for assigned devices has it only where the host's IOMMU does the same; emulated
    /// devices are always coherent.
    pub snoop_control: bool,
    /// Fault recording registers, 8 to 222. One always stays empty.
    pub fault_records: usize,
    /// Most asynchronous pieces in flight, 0 to [`guest_mem::MAX_LEASES`].
    pub max_leases: usize,
    /// Longest wait of an invalidation for stale leases before
    /// [`Event::DrainLimit`](crate::Event::DrainLimit), in ns.
    pub drain_limit_ns: u64,
}

impl Default for Config {
    /// 48 bits, CM clear, all large pages, snoop control, 16 records, 4096 leases, 1 s.
    fn default() -> Self {
        Self {
            width: AddressWidth::Bits48,
            caching_mode: false,
            large_pages: LargePages::OneG,
            snoop_control: true,
            fault_records: 16,
            max_leases: 4096,
            drain_limit_ns: guest_mem::DRAIN_LIMIT_NS,
        }
    }
}
