//! Guest RAM: its list of regions, its bounds, and its copies, against a flat array of bytes.

use guest_mem::{
    DmaFault, Gpa, GuestRam, HugePages, Hva, Intent, PhysMem, RamError, Stop, keeps_mapped,
};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn ram(regions: &[(u64, u64)]) -> Result<GuestRam, RamError> {
    let regions: Vec<(Gpa, u64)> = regions.iter().map(|&(g, l)| (Gpa::new(g), l)).collect();
    GuestRam::new(&regions)
}

/// Without a memory file.
fn page() -> GuestRam {
    GuestRam::in_heap(&[(Gpa::new(0), 4096)]).expect("a page")
}

#[test]
fn wrong_region_lists_name_the_field() {
    assert!(matches!(ram(&[]), Err(RamError::NoRegions)));
    assert!(matches!(ram(&[(0x1000, 0)]), Err(RamError::Empty { gpa }) if gpa.raw() == 0x1000));
    assert!(matches!(
        ram(&[(0x10, 4096)]),
        Err(RamError::Misaligned { .. })
    ));
    assert!(matches!(
        ram(&[(0, 4097)]),
        Err(RamError::Misaligned { len: 4097, .. })
    ));
    assert!(matches!(
        ram(&[(u64::MAX - 4095, 8192)]),
        Err(RamError::TooLong { .. })
    ));
    assert!(matches!(
        ram(&[(0, 1 << 63)]),
        Err(RamError::TooLong { .. })
    ));
    assert!(matches!(
        ram(&[(0, 8192), (4096, 4096)]),
        Err(RamError::Overlap { gpa, previous_end }) if gpa.raw() == 4096 && previous_end.raw() == 8192
    ));
    assert!(matches!(
        ram(&[(8192, 4096), (0, 4096)]),
        Err(RamError::Overlap { .. })
    ));
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn absurd_size_is_an_error_of_the_host() {
    let answer = ram(&[(0, 1 << 60)]);
    assert!(matches!(answer, Err(RamError::Host(_))), "{answer:?}");
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn touching_regions_become_one_and_holes_stay() {
    let ram = ram(&[(0, 64 * KIB), (64 * KIB, 64 * KIB), (1 << 32, 64 * KIB)]).unwrap();
    let [low, high] = ram.regions() else {
        panic!("two regions expected: {:?}", ram.regions());
    };
    assert_eq!((low.gpa.raw(), low.len, low.fd_offset), (0, 128 * KIB, 0));
    assert_eq!((high.gpa.raw(), high.fd_offset), (1 << 32, 128 * KIB));
    assert_eq!(high.hva.offset_from(low.hva), Some(128 * KIB));
    let hole = Gpa::new(128 * KIB);
    assert_eq!(
        ram.write(Gpa::new(128 * KIB - 4), &[1; 8]),
        Err(DmaFault::NotRam { gpa: hole }.into())
    );
    assert_eq!(
        ram.read_u64(Gpa::new(128 * KIB - 8)),
        Ok(0),
        "nothing written"
    );
}

/// In every kind of memory, discarded bytes are zeroes, for the memory slot as well.
#[test]
#[cfg_attr(miri, ignore = "no mappings there")]
fn discarded_pages_read_as_zeroes_and_the_rest_stays() {
    let regions = [(Gpa::new(0), 4 << 20), (Gpa::new(1 << 32), 64 * KIB)];
    let kinds = [
        GuestRam::new(&regions).unwrap(),
        GuestRam::anonymous(&regions, HugePages::Never).unwrap(),
        GuestRam::anonymous(&regions, HugePages::Advise).unwrap(),
        GuestRam::in_heap(&regions).unwrap(),
    ];
    for ram in kinds {
        let high = Gpa::new(1 << 32);
        for gpa in [Gpa::new(0), Gpa::new(4 * KIB), Gpa::new(12 * KIB), high] {
            ram.write(gpa, &[7; 4096]).unwrap();
        }
        ram.discard(Gpa::new(4 * KIB), 8 * KIB).unwrap();
        ram.discard(high, 4 * KIB).unwrap();
        let bytes = |gpa| {
            let mut found = [1; 2];
            ram.read(gpa, &mut found).unwrap();
            found
        };
        let low = [0, 4 * KIB, 12 * KIB].map(|gpa| bytes(Gpa::new(gpa)));
        assert_eq!(low, [[7; 2], [0; 2], [7; 2]]);
        assert_eq!(bytes(high), [0; 2]);
        for (gpa, len) in [
            (1, 4096),
            (0, 1),
            (4 << 20, 4096),
            (0, 0),
            (u64::MAX - 4095, 4096),
        ] {
            let refused = ram.discard(Gpa::new(gpa), len).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}

/// Page faults of the calling thread so far that needed no I/O.
fn faults() -> i64 {
    // SAFETY: all zeroes are a value of this plain structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one structure to the given address.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    assert_eq!(result, 0);
    usage.ru_minflt
}

/// Another thread populates the pages: a later access raises no fault and finds their content.
#[test]
#[cfg_attr(miri, ignore = "no mappings there")]
fn populated_pages_raise_no_fault_and_keep_their_content() {
    const PAGES: u64 = 200;
    let regions = [(Gpa::new(0), 4 << 20), (Gpa::new(1 << 32), 64 * KIB)];
    let kinds = [
        GuestRam::with_pages(&regions, HugePages::Never).unwrap(),
        GuestRam::anonymous(&regions, HugePages::Never).unwrap(),
        GuestRam::in_heap(&regions).unwrap(),
    ];
    for (kind, ram) in kinds.iter().enumerate() {
        ram.write(Gpa::new(MIB + 5), &[7]).unwrap();
        // No other code has touched the pages of the first half.
        let touch = |from: u64| {
            let before = faults();
            for page in 0..PAGES {
                ram.write(Gpa::new(from + page * 4 * KIB), &[9]).unwrap();
            }
            faults() - before
        };
        if kind < 2 {
            let untouched = touch(3 * MIB);
            assert!(untouched >= PAGES as i64 - 1, "{untouched}");
        }
        std::thread::scope(|scope| {
            scope.spawn(|| ram.populate(Gpa::new(MIB), MIB).unwrap());
        });
        let populated = touch(MIB);
        // The heap's pages are the allocator's.
        assert!(populated < 20 || kind == 2, "kind {kind}: {populated}");
        let mut found = [0; 6];
        ram.read(Gpa::new(MIB), &mut found).unwrap();
        assert_eq!(found, [9, 0, 0, 0, 0, 7]);
        for (gpa, len) in [(1, 4096), (0, 1), (4 << 20, 4096), (0, 0)] {
            let refused = ram.populate(Gpa::new(gpa), len).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::InvalidInput);
        }
    }
}

/// It has one mapping: a guest's slot shows the memory that devices reach, and its pages cannot be
/// unmapped.
#[test]
#[cfg_attr(miri, ignore = "no mappings there")]
fn anonymous_memory_is_its_slots_mapping() {
    let regions = [(Gpa::new(0), 64 * KIB), (Gpa::new(1 << 32), 64 * KIB)];
    let ram = GuestRam::anonymous(&regions, HugePages::Never).unwrap();
    assert!(ram.memfd().is_none());
    for region in ram.regions() {
        let slot = ram.slot_mapping(region).unwrap();
        assert_eq!((slot.hva(), slot.len()), (region.hva, region.len));
        let refused = slot.unmap(0, 4096).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::Unsupported);
    }
    // It outlives its owner.
    let slot = ram.slot_mapping(&ram.regions()[1]).unwrap();
    ram.write(Gpa::new(1 << 32), b"guest").unwrap();
    drop(ram);
    // SAFETY: five bytes inside the mapping, which no thread writes.
    let seen = unsafe { *(slot.hva().raw() as *const [u8; 5]) };
    assert_eq!(&seen, b"guest");
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn memory_file_holds_the_regions_and_its_size_is_sealed() {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    let ram = ram(&[(0, 64 * KIB), (1 << 32, 64 * KIB)]).unwrap();
    ram.write(Gpa::new((1 << 32) + 5), b"guest").unwrap();
    let file = File::from(ram.memfd().unwrap().try_clone_to_owned().unwrap());
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, 64 * KIB + 5).unwrap();
    assert_eq!(&bytes, b"guest");
    assert!(
        file.set_len(4096).is_err(),
        "shrinking would make accesses SIGBUS"
    );
    assert!(file.set_len(1 << 20).is_err());
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn large_ram_starts_on_a_huge_page_boundary() {
    let ram = ram(&[(0, 8 << 20)]).unwrap();
    assert!(ram.regions()[0].hva.is_aligned(2 << 20));
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn clones_share_memory_and_keep_it_mapped() {
    let first = ram(&[(0, 64 * KIB)]).unwrap();
    let second = first.clone();
    first.store_u32_release(Gpa::new(4), 7).unwrap();
    let keep = first.keep_alive();
    let hva = first.host(Gpa::new(0), 64 * KIB, Intent::Read).unwrap();
    drop(first);
    assert_eq!(second.read_u64(Gpa::new(0)), Ok(7 << 32));
    drop(second);
    assert!(keeps_mapped(&keep, hva, 64 * KIB));
    assert!(!keeps_mapped(&keep, hva, 64 * KIB + 1));
    assert!(!keeps_mapped(&keep, Hva::new(hva.raw() - 1), 1));
    assert!(!keeps_mapped(&keep, Hva::new(u64::MAX), u64::MAX));
}

#[test]
fn foreign_keep_alive_keeps_nothing_mapped() {
    let keep: guest_mem::KeepAlive = std::sync::Arc::new(0u64);
    assert!(!keeps_mapped(&keep, Hva::new(4096), 1));
}

#[test]
fn misaligned_and_wrapping_words_are_bad_ranges() {
    let bad = Stop::Fault(DmaFault::BadRange);
    let mem = page();
    assert_eq!(mem.read_u64(Gpa::new(4)), Err(bad));
    assert_eq!(mem.store_u32_release(Gpa::new(2), 1), Err(bad));
    assert_eq!(mem.read(Gpa::new(u64::MAX), &mut [0; 2]), Err(bad));
    assert_eq!(mem.host(Gpa::new(0), 0, Intent::Read), Err(bad));
    assert_eq!(mem.host(Gpa::new(2), u64::MAX, Intent::Read), Err(bad));
    assert_eq!(mem.read(Gpa::new(u64::MAX), &mut []), Ok(()));
}

#[test]
fn u128_is_low_half_first() {
    let mem = page();
    mem.write(Gpa::new(16), &1_u64.to_le_bytes()).unwrap();
    mem.write(Gpa::new(24), &2_u64.to_le_bytes()).unwrap();
    assert_eq!(mem.read_u128(Gpa::new(16)), Ok(2 << 64 | 1));
    assert!(mem.read_u128(Gpa::new(4096 - 8)).is_err());
}

/// Finds the region in which `[gpa, gpa + len)` lies, byte by byte: the first check of every
/// access.
fn naive_region(regions: &[(u64, u64)], gpa: u64, len: u64) -> Option<usize> {
    regions.iter().position(|&(start, bytes)| {
        let (first, last) = (u128::from(gpa), u128::from(gpa) + u128::from(len));
        len != 0 && u128::from(start) <= first && last <= u128::from(start) + u128::from(bytes)
    })
}

#[test]
#[cfg_attr(miri, ignore = "no memory files there")]
fn ranges_at_every_edge_lie_in_a_region_or_nowhere() {
    // The first region does not begin at 0, and the last ends just below the end of the space.
    let top = u64::MAX - 0xffff;
    for regions in [
        vec![(0x1_0000, 0x2000), (0x1_4000, 0x1000), (top, 0x1000)],
        vec![(0, 0x2000), (0x4000, 0x1000)],
    ] {
        let ram = ram(&regions).unwrap();
        for (word, &(start, len)) in (1..).zip(&regions) {
            ram.write(Gpa::new(start), &[word; 16]).unwrap();
            ram.write(Gpa::new(start + len - 8), &[word + 8; 8])
                .unwrap();
        }
        let edges = regions
            .iter()
            .flat_map(|&(start, len)| [start, start + len]);
        let edges: Vec<u64> = edges.chain([0, u64::MAX, 1 << 48]).collect();
        let around =
            |edge: u64| [-17, -16, -8, -1, 0, 1, 8, 16].map(|by| edge.wrapping_add_signed(by));
        let starts: Vec<u64> = edges.iter().copied().flat_map(around).collect();
        let lens = [
            0,
            1,
            7,
            8,
            16,
            0x1000,
            0x1001,
            0x2000,
            0x2001,
            u64::MAX / 2,
            u64::MAX,
        ];
        for start in starts {
            let gpa = Gpa::new(start);
            for len in lens {
                let want = naive_region(&regions, start, len).map(|at| {
                    let region = ram.regions()[at];
                    region.hva.raw() + (start - region.gpa.raw())
                });
                let host = ram.host(gpa, len, Intent::Write);
                assert_eq!(
                    host.ok().map(Hva::raw),
                    want,
                    "{len:#x} bytes at {start:#x}"
                );
            }
            let run = naive_region(&regions, start, 1).map(|at| {
                let (first, len) = regions[at];
                len - (start - first)
            });
            assert_eq!(ram.run(gpa).ok(), run, "from {start:#x}");
            // An entry of a table equals its two halves.
            let half = |at: Option<Gpa>| ram.read_u64(at?).ok().map(u128::from);
            let whole = half(gpa.checked_add(8)).zip(half(Some(gpa)));
            let whole = whole.map(|(hi, lo)| hi << 64 | lo);
            assert_eq!(ram.read_u128(gpa).ok(), whole, "at {start:#x}");
        }
    }
}

/// Two regions with a hole between them; small, so that random ranges hit every boundary.
const REGIONS: [(u64, u64); 2] = [(4096, 8192), (20480, 4096)];
const TOP: usize = 28672;

fn first_outside(start: u64, len: u64) -> Option<u64> {
    (start..start + len).find(|byte| !REGIONS.iter().any(|r| (r.0..r.0 + r.1).contains(byte)))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Every copy lands where it should or is refused whole, naming the first byte outside; lengths
    /// cross the threshold of the string copy at every alignment.
    #[test]
    fn copies_agree_with_a_flat_array(
        copies in prop::collection::vec((0..TOP as u64 - 600, 0..600usize, any::<u8>()), 1..20),
    ) {
        let mem = GuestRam::in_heap(&REGIONS.map(|(gpa, len)| (Gpa::new(gpa), len))).unwrap();
        let mut model = vec![0u8; TOP];
        for (start, len, seed) in copies {
            let data: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect();
            let want = match first_outside(start, len as u64) {
                Some(gpa) => Err(Stop::Fault(DmaFault::NotRam { gpa: Gpa::new(gpa) })),
                None => Ok(()),
            };
            prop_assert_eq!(mem.write(Gpa::new(start), &data), want);
            prop_assert_eq!(mem.host(Gpa::new(start), len.max(1) as u64, Intent::Read).is_ok(),
                first_outside(start, len.max(1) as u64).is_none());
            if want.is_ok() {
                model[start as usize..start as usize + len].copy_from_slice(&data);
            }
        }
        for (gpa, len) in REGIONS {
            let mut got = vec![0; len as usize];
            mem.read(Gpa::new(gpa), &mut got).unwrap();
            prop_assert!(got == model[gpa as usize..(gpa + len) as usize]);
        }
    }

    /// Reading at every offset and length gives the same bytes as one large read.
    #[test]
    fn reads_agree_at_any_alignment(start in 0..64u64, len in 0..600usize) {
        let mem = page();
        let bytes: Vec<u8> = (0..4096u32).map(|i| (i * 7 / 3) as u8).collect();
        mem.write(Gpa::new(0), &bytes).unwrap();
        let mut got = vec![0xee; len];
        mem.read(Gpa::new(start), &mut got).unwrap();
        prop_assert!(got == bytes[start as usize..start as usize + len]);
    }
}
