//! Second-level entries are implemented twice, independently: by the driver that writes such tables
//! (`dma-map`, as words) and by the unit that walks them (`vtd`, by field). Here the two are
//! compared.

use address::PhysAddr;
use dma_map::table::{Entry, Format, VtdSecondLevel};
use iova::Access;
use proptest::prelude::*;
use vtd::spec::tables as walked;

#[test]
fn one_size() {
    assert_eq!(
        size_of::<dma_map::table::Table>() as u64,
        512 * walked::PTE_LEN
    );
}

proptest! {
    /// The driver's and the unit's decoding of a word agree.
    #[test]
    fn words_read_the_same(word: u64, low in 0..0x100u64, level in 1..=3u32) {
        let word = word & !0xff | low;
        let pte = walked::SlPte::from_bits(word);
        let found = VtdSecondLevel::decode(word, level);
        let phys = PhysAddr::new(pte.addr() << 12);
        if level > 1 && !pte.ps() && pte.r() && pte.w() {
            prop_assert_eq!(found, Entry::Table(phys));
        } else if pte.r() || pte.w() {
            let Entry::Leaf(leaf) = found else { panic!("{word:#x}: {found:?}") };
            prop_assert_eq!(leaf.phys, phys);
            let may = (leaf.access != Access::Write, leaf.access != Access::Read);
            prop_assert_eq!(may, (pte.r(), pte.w()));
        }
    }
}

/// The unit decodes the words of a driver's table as intended: pages of each size, and the link to
/// a table.
#[test]
fn words_of_a_table_mean_the_same_to_the_unit() {
    let frame = PhysAddr::new(0xa_bcc0_0000_0000 & !0x3fff_ffff);
    for (access, r, w) in [
        (Access::Read, true, false),
        (Access::Write, false, true),
        (Access::ReadWrite, true, true),
    ] {
        for level in 1..=3 {
            let word = VtdSecondLevel::leaf(frame, access, level);
            let pte = walked::SlPte::from_bits(word);
            assert_eq!((pte.r(), pte.w(), pte.ps()), (r, w, level > 1));
            assert_eq!(pte.addr() << 12, frame.raw());
            assert!(!pte.snp() && !pte.tm());
        }
    }
    let table = walked::SlPte::from_bits(VtdSecondLevel::table(frame, 4));
    assert!(table.r() && table.w() && !table.ps() && !table.snp() && !table.tm());
    assert_eq!(table.addr() << 12, frame.raw());
}
