//! Second-level entries are laid out twice: where a driver writes such tables (`dma-map`) and where a unit walks them
//! (`vtd`), which do not know each other. Here they meet.

use address::PhysAddr;
use dma_map::table::vtd as written;
use dma_map::table::{Format, VtdSecondLevel};
use iova::Access;
use proptest::prelude::*;
use vtd::spec::tables as walked;

#[test]
fn one_size() {
    assert_eq!(written::PTE_LEN, walked::PTE_LEN);
}

#[test]
fn each_bit_is_the_same_field() {
    for bit in (0..64).map(|n| 1 << n) {
        assert_same(bit);
    }
}

proptest! {
    #[test]
    fn all_words_read_the_same(word: u64) {
        assert_same(word);
    }
}

/// What a driver's table says is what the unit reads: pages of each size, and the way to a table.
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

fn assert_same(word: u64) {
    let (d, u) = (
        written::SlPte::from_bits(word),
        walked::SlPte::from_bits(word),
    );
    assert_eq!((d.r(), d.w(), d.ps()), (u.r(), u.w(), u.ps()), "{word:#x}");
    assert_eq!((d.snp(), d.tm()), (u.snp(), u.tm()), "{word:#x}");
    assert_eq!(d.addr(), u.addr(), "{word:#x}");
    assert_eq!(
        (d.ign0(), d.ign1(), d.ign2(), d.ign3()),
        (u.ign0(), u.ign1(), u.ign2(), u.ign3()),
        "{word:#x}"
    );
}
