//! Values of the papers, as far as they are quoted here: *vIOMMU* (ATC 2011) and *Utilizing the
//! IOMMU Scalably* (ATC 2015).

/// A value of a paper and ours that is nearest to it.
pub struct Value {
    /// Place in the paper, and meaning.
    pub what: &'static str,
    /// The value; empty where it is not quoted.
    pub theirs: &'static str,
    /// The key of ours; its meaning is near, never the same: other hardware, other load.
    pub ours: Option<&'static str>,
}

const fn value(what: &'static str, theirs: &'static str, ours: Option<&'static str>) -> Value {
    Value { what, theirs, ours }
}

/// The values.
pub const VALUES: [Value; 11] = [
    value(
        "vIOMMU, bare metal, strict: share of 10 GbE",
        "0.43",
        Some("nic_1500_strict_1thr_share"),
    ),
    value(
        "vIOMMU, bare metal, deferred",
        "0.91",
        Some("nic_1500_deferred_1thr_share"),
    ),
    value(
        "vIOMMU, bare metal, optimistic",
        "1.00",
        Some("nic_1500_optimistic4096_1thr_share"),
    ),
    value(
        "vIOMMU, guest: strict, best samecore, sidecore",
        "0.11, 0.82, 1.00",
        None,
    ),
    value(
        "vIOMMU, share of maps that find a mapping at 10 ms",
        "0.92",
        Some("reuse_optimistic4096_hit_rate"),
    ),
    value(
        "ATC'15, deferred and scalable, 16 cores: share of no IOMMU",
        "0.885 to 1.00",
        None,
    ),
    value(
        "ATC'15, strict, 16 cores: share of no IOMMU",
        "about 1/6",
        None,
    ),
    value(
        "ATC'15, table memory of magazines against Linux",
        "1.2 x",
        None,
    ),
    value("ATC'15, table memory of identity mappings", "3.4 x", None),
    value("ATC'15, table memory of kmalloc", "unbounded", None),
    value("ATC'15 Table 1, Figures 2-7: single values", "", None),
];
