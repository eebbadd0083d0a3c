//! Memory of another process: its table, its bounds, its copies against a list of bytes, and its
//! lifetime.

#![cfg(not(miri))] // no memory files there

mod support;

use std::error::Error;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use guest_mem::{
    DirectMap, Dma, DmaFault, FileError, ForeignErrorKind, ForeignRam, ForeignRegion, Gpa, Intent,
    Iova, MAX_FOREIGN_BYTES, Perm, PhysMem, SourceId, Stop, View, keeps_mapped,
};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, OFlags, SealFlags, memfd_create};
use support::{get, memfd, put, region};

const PAGE: u64 = 4096;
const DISK: SourceId = SourceId::new(0, 1, 0);

fn ram(regions: &[ForeignRegion]) -> ForeignRam {
    ForeignRam::empty()
        .with_regions(regions)
        .expect("a good table")
}

fn refused(regions: &[ForeignRegion]) -> (usize, ForeignErrorKind) {
    let error = ForeignRam::empty()
        .with_regions(regions)
        .expect_err("a wrong table");
    assert!(error.to_string().contains(&error.region.to_string()));
    assert!(error.source().is_some());
    (error.region, error.kind)
}

fn refused_file(region: ForeignRegion) -> FileError {
    match refused(&[region]) {
        (0, ForeignErrorKind::File(error)) => error,
        other => panic!("not about the file: {other:?}"),
    }
}

#[test]
fn empty_has_no_byte() {
    let ram = ForeignRam::empty();
    let gpa = Gpa::new(0);
    let not_ram = Stop::Fault(DmaFault::NotRam { gpa });
    assert_eq!(ram.read(gpa, &mut [0]), Err(not_ram));
    assert_eq!(ram.write(gpa, &[0]), Err(not_ram));
    assert_eq!(ram.read_u64(gpa), Err(not_ram));
    assert_eq!(ram.store_u32_release(gpa, 0), Err(not_ram));
    assert_eq!(ram.host(gpa, 1, Intent::Read), Err(not_ram));
    assert_eq!(ram.run(gpa), Err(not_ram));
    assert_eq!(ram.lasting_piece(gpa), None);
    assert_eq!(
        ram.host(gpa, 0, Intent::Read),
        Err(DmaFault::BadRange.into())
    );
    assert_eq!((ram.bytes(), ram.is_lost()), (0, false));
}

#[test]
fn wrong_tables_name_the_region_and_the_field() {
    let file = memfd(4 * PAGE);
    let good = region(0, PAGE, &file, 0);
    let second = |gpa, len, offset| refused(&[good.clone(), region(gpa, len, &file, offset)]);

    assert!(matches!(
        second(PAGE, 0, 0),
        (1, ForeignErrorKind::File(FileError::Empty))
    ));
    assert!(matches!(
        second(PAGE + 8, PAGE, 0),
        (1, ForeignErrorKind::Misaligned { gpa }) if gpa.raw() == PAGE + 8
    ));
    assert!(matches!(
        second(PAGE, PAGE, 512),
        (
            1,
            ForeignErrorKind::File(FileError::Misaligned { offset: 512 })
        )
    ));
    assert!(matches!(
        second(0u64.wrapping_sub(PAGE), PAGE, 0),
        (1, ForeignErrorKind::Wraps { len: PAGE, .. })
    ));
    assert!(matches!(
        second(PAGE, MAX_FOREIGN_BYTES, 0),
        (1, ForeignErrorKind::TooMuch { .. })
    ));
    assert!(matches!(
        second(PAGE, PAGE + 1, 3 * PAGE),
        (
            1,
            ForeignErrorKind::File(FileError::PastEnd { size: 16384, .. })
        )
    ));
    assert!(matches!(
        second(PAGE, PAGE, 0u64.wrapping_sub(PAGE)),
        (1, ForeignErrorKind::File(FileError::PastEnd { .. }))
    ));
}

#[test]
fn overlap_names_both_regions_whatever_their_order() {
    let file = memfd(8 * PAGE);
    let low = region(0, 3 * PAGE, &file, 0);
    let high = region(2 * PAGE, PAGE, &file, 0);
    assert!(matches!(
        refused(&[low.clone(), high.clone()]),
        (1, ForeignErrorKind::Overlap { gpa, other: 0 }) if gpa.raw() == 2 * PAGE
    ));
    assert!(matches!(
        refused(&[high, low.clone()]),
        (0, ForeignErrorKind::Overlap { other: 1, .. })
    ));
    assert!(matches!(
        refused(&[low.clone(), low]),
        (1, ForeignErrorKind::Overlap { other: 0, .. })
    ));
}

#[test]
fn files_that_are_not_writable_memory_are_refused() {
    let open = |path: &str, flags| {
        let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap();
        Arc::new(file)
    };
    // The same file, opened again with less.
    let file = memfd(PAGE);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    for flags in [OFlags::RDONLY, OFlags::WRONLY, OFlags::PATH] {
        let error = refused_file(region(0, PAGE, &open(&path, flags), 0));
        assert!(matches!(error, FileError::NotReadWrite), "{error:?}");
    }
    let error = refused_file(region(0, PAGE, &open("/dev/zero", OFlags::RDWR), 0));
    assert!(matches!(error, FileError::NotRegular { .. }), "{error:?}");
    let error = refused_file(region(0, 1, &open("/proc/self/comm", OFlags::RDWR), 0));
    assert!(
        matches!(error, FileError::FileSystem { magic: 0x9fa0 }),
        "{error:?}"
    );
    let sealed = memfd_create(c"sealed", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, PAGE).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    let error = refused_file(region(0, PAGE, &Arc::new(sealed), 0));
    assert!(matches!(error, FileError::Map { .. }), "{error:?}");
}

#[test]
fn accesses_reach_the_file_at_its_offset() {
    let file = memfd(8 * PAGE);
    put(&file, 3 * PAGE + 8, b"12345678abcdefgh");
    let ram = ram(&[region(1 << 40, 4 * PAGE, &file, 3 * PAGE)]);
    let gpa = Gpa::new((1 << 40) + 8);
    assert_eq!(ram.read_u64(gpa).unwrap().to_le_bytes(), *b"12345678");
    assert_eq!(ram.run(gpa), Ok(4 * PAGE - 8));
    ram.store_u32_release(gpa, u32::from_le_bytes(*b"four"))
        .unwrap();
    ram.write(Gpa::new((1 << 40) + 12), b"copy").unwrap();
    assert_eq!(get(&file, 3 * PAGE + 8, 12), b"fourcopyabcd");
    let misaligned = Gpa::new((1 << 40) + 4);
    assert_eq!(ram.read_u64(misaligned), Err(DmaFault::BadRange.into()));
    assert_eq!(ram.bytes(), 4 * PAGE);
}

#[test]
fn region_of_odd_length_ends_at_its_last_byte() {
    let file = memfd(PAGE + 10);
    let ram = ram(&[region(0, PAGE + 10, &file, 0)]);
    assert!(ram.write(Gpa::new(PAGE), &[1; 10]).is_ok());
    let gpa = Gpa::new(PAGE + 10);
    let not_ram = Err(DmaFault::NotRam { gpa }.into());
    assert_eq!(ram.write(Gpa::new(PAGE), &[1; 11]), not_ram);
    assert_eq!(ram.read_u64(Gpa::new(PAGE + 8)).map(|_| ()), not_ram);
    assert_eq!(ram.run(Gpa::new(PAGE)), Ok(10));
}

#[test]
fn touching_regions_are_crossed_by_copies_and_split_leases() {
    let (low, high) = (memfd(2 * PAGE), memfd(2 * PAGE));
    let ram = ram(&[
        region(2 * PAGE, PAGE, &high, PAGE),
        region(0, 2 * PAGE, &low, 0),
    ]);
    let across = Gpa::new(2 * PAGE - 4);
    ram.write(across, b"lowrhigh").unwrap();
    assert_eq!(get(&low, 2 * PAGE - 4, 4), b"lowr");
    assert_eq!(get(&high, PAGE, 4), b"high");
    assert_eq!(
        ram.host(across, 8, Intent::Read),
        Err(DmaFault::BadRange.into())
    );

    let mut direct = DirectMap::new();
    let mut view = View::new(&mut direct, &ram, DISK);
    let at = Iova::new(2 * PAGE - 4);
    let first = view.lease(at, 8, Perm::Read).unwrap();
    let second = view.lease(Iova::new(2 * PAGE), 4, Perm::Read).unwrap();
    assert_eq!((first.len, second.len), (4, 4));
    let window = view.window(at, 8, Perm::Read);
    assert_eq!(window.err(), Some(DmaFault::BadRange.into()));
    // Both regions are kept by one and the same.
    let keep = ram.keep_alive();
    drop(ram);
    for lease in [&first, &second] {
        assert!(keeps_mapped(&keep, lease.hva, 4));
        assert!(!keeps_mapped(&keep, lease.hva, 4 * PAGE));
    }
    assert_eq!(direct.in_flight(), 2);
}

#[test]
fn a_write_that_leaves_ram_writes_nothing() {
    let (low, high) = (memfd(PAGE), memfd(PAGE));
    let ram = ram(&[region(0, PAGE, &low, 0), region(PAGE, PAGE, &high, 0)]);
    let long = vec![1; 2 * PAGE as usize];
    let gpa = Gpa::new(2 * PAGE);
    let not_ram = Err(DmaFault::NotRam { gpa }.into());
    assert_eq!(ram.write(Gpa::new(1), &long), not_ram);
    assert_eq!(get(&low, 0, PAGE as usize), vec![0; PAGE as usize]);
    let wraps = ram.write(Gpa::new(u64::MAX - 1), &[0; 4]);
    assert_eq!(wraps, Err(DmaFault::BadRange.into()));
}

#[test]
fn an_unchanged_region_keeps_its_mapping_also_under_another_descriptor() {
    let (stays, goes) = (memfd(PAGE), memfd(PAGE));
    let before = ram(&[region(0, PAGE, &stays, 0), region(PAGE, PAGE, &goes, 0)]);
    let hva = before.host(Gpa::new(0), 1, Intent::Read).unwrap();
    let gone = before.host(Gpa::new(PAGE), 1, Intent::Read).unwrap();
    // As the same table is sent again: the same file, another descriptor; and elsewhere in the
    // guest.
    let again = Arc::new(stays.try_clone().unwrap());
    let after = before
        .with_regions(&[region(8 * PAGE, PAGE, &again, 0)])
        .unwrap();
    assert_eq!(after.host(Gpa::new(8 * PAGE), 1, Intent::Read), Ok(hva));
    assert!(after.host(Gpa::new(PAGE), 1, Intent::Read).is_err());
    assert!(!keeps_mapped(&after.keep_alive(), gone, 1));
    // The old handle is as it was.
    assert_eq!(before.host(Gpa::new(PAGE), 1, Intent::Read), Ok(gone));
    assert!(keeps_mapped(&before.keep_alive(), gone, 1));
}

#[test]
fn windows_and_watches_keep_their_memory_and_refresh_to_the_new_table() {
    let (old, new) = (memfd(PAGE), memfd(PAGE));
    put(&old, 8, &7u16.to_le_bytes());
    put(&new, 8, &9u16.to_le_bytes());
    let mut direct = DirectMap::new();
    let first = ram(&[region(0, PAGE, &old, 0)]);
    let mut window = View::new(&mut direct, &first, DISK)
        .window(Iova::new(0), 16, Perm::Read)
        .unwrap();
    let watch = window.watch_u16(8);
    assert_eq!(watch.load_relaxed(), 7);
    assert!(window.is_watched_by(&watch, 8));
    assert!(!window.is_watched_by(&watch, 6));
    assert!(!window.is_watched_by(&watch, 15));

    let second = first.with_regions(&[region(0, PAGE, &new, 0)]).unwrap();
    drop(first);
    direct.memory_changed();
    let mut view = View::new(&mut direct, &second, DISK);
    assert!(!window.is_current(view.generation()));
    view.refresh(&mut window).unwrap();
    assert_eq!(window.load_u16(8), 9);
    // The watch has kept the old page, and the window does not match it.
    assert!(!window.is_watched_by(&watch, 8));
    assert_eq!(watch.load_relaxed(), 7);
    put(&old, 8, &8u16.to_le_bytes());
    assert_eq!(watch.load_relaxed(), 8);
}

#[test]
#[should_panic(expected = "not in flight")]
fn ending_one_lease_too_many_panics() {
    let ram = ram(&[region(0, PAGE, &memfd(PAGE), 0)]);
    let mut direct = DirectMap::new();
    let mut view = View::new(&mut direct, &ram, DISK);
    let lease = view.lease(Iova::new(0), 1, Perm::Read).unwrap();
    view.release(lease.id);
    view.release(lease.id);
}

#[test]
fn handles_travel_between_threads() {
    let file = memfd(PAGE);
    let ram = ram(&[region(0, PAGE, &file, 0)]);
    let other = ram.clone();
    let thread = std::thread::spawn(move || other.write(Gpa::new(0), b"there"));
    thread.join().unwrap().unwrap();
    let mut buf = [0; 5];
    ram.read(Gpa::new(0), &mut buf).unwrap();
    assert_eq!(&buf, b"there");
}

/// The model: the bytes of each region, wherever they come from.
struct Naive(Vec<(u64, Vec<u8>)>);

impl Naive {
    fn byte(&mut self, gpa: u64) -> Option<&mut u8> {
        self.0.iter_mut().find_map(|(start, bytes)| {
            let inside = gpa.checked_sub(*start)?;
            bytes.get_mut(usize::try_from(inside).ok()?)
        })
    }

    /// Returns the first address of `[gpa, gpa + len)` that is not RAM.
    fn first_hole(&mut self, gpa: u64, len: u64) -> Option<u64> {
        (gpa..gpa + len).find(|&at| self.byte(at).is_none())
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, usize),
    Write(u64, Vec<u8>),
    Word(u64),
    Run(u64),
    Lease(u64, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let gpa = 0..14 * PAGE;
    prop_oneof![
        (gpa.clone(), 1..3 * PAGE as usize).prop_map(|(gpa, len)| Step::Read(gpa, len)),
        (gpa.clone(), prop::collection::vec(any::<u8>(), 1..6000))
            .prop_map(|(gpa, bytes)| Step::Write(gpa, bytes)),
        gpa.clone().prop_map(|gpa| Step::Word(gpa & !7)),
        gpa.clone().prop_map(Step::Run),
        (gpa, 1..3 * PAGE as u32).prop_map(|(gpa, len)| Step::Lease(gpa, len)),
    ]
}

/// Regions in a random order, some touching, some with holes between, lengths not always whole
/// pages.
fn table() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let one = (0..3u64, 1..4u64, prop_oneof![Just(0), 1..PAGE]);
    prop::collection::vec(one, 0..6)
        .prop_map(|list| {
            let mut at = 0;
            let mut regions = Vec::new();
            for (hole, pages, less) in list {
                at += hole.saturating_sub(1) * PAGE;
                regions.push((at, pages * PAGE - less));
                at += pages * PAGE;
            }
            regions
        })
        .prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn agrees_with_a_list_of_bytes(table in table(), steps in prop::collection::vec(step(), 1..40)) {
        let mut naive = Naive(Vec::new());
        let mut regions = Vec::new();
        let mut files: Vec<(u64, Arc<OwnedFd>, usize)> = Vec::new();
        for (number, &(gpa, len)) in table.iter().enumerate() {
            let file = memfd(PAGE + len);
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7 / 3) as u8 ^ number as u8).collect();
            put(&file, PAGE, &bytes);
            regions.push(region(gpa, len, &file, PAGE));
            files.push((gpa, file, len as usize));
            naive.0.push((gpa, bytes));
        }
        let ram = ram(&regions);
        let mut direct = DirectMap::new();
        let hole = |gpa| Stop::Fault(DmaFault::NotRam { gpa: Gpa::new(gpa) });
        for step in steps {
            match step {
                Step::Read(gpa, len) => {
                    let want = naive.first_hole(gpa, len as u64).map_or(Ok(()), |at| Err(hole(at)));
                    let mut buf = vec![0; len];
                    prop_assert_eq!(ram.read(Gpa::new(gpa), &mut buf), want);
                    if want.is_ok() {
                        for (at, byte) in (gpa..).zip(&buf) {
                            prop_assert_eq!(naive.byte(at), Some(&mut byte.clone()));
                        }
                    }
                    let mut again = vec![0; len];
                    let answer = View::new(&mut direct, &ram, DISK).read(Iova::new(gpa), &mut again);
                    prop_assert_eq!(answer, want);
                    prop_assert!(want.is_err() || again == buf);
                }
                Step::Write(gpa, bytes) => {
                    let want = naive.first_hole(gpa, bytes.len() as u64);
                    let answer = ram.write(Gpa::new(gpa), &bytes);
                    prop_assert_eq!(answer, want.map_or(Ok(()), |at| Err(hole(at))));
                    if want.is_none() {
                        for (at, byte) in (gpa..).zip(bytes) {
                            *naive.byte(at).unwrap() = byte;
                        }
                    }
                }
                Step::Word(gpa) => {
                    let answer = ram.read_u64(Gpa::new(gpa));
                    match naive.first_hole(gpa, 8) {
                        Some(at) => prop_assert_eq!(answer, Err(hole(at))),
                        None => {
                            let want: Vec<u8> =
                                (gpa..gpa + 8).map(|at| *naive.byte(at).unwrap()).collect();
                            prop_assert_eq!(&answer.unwrap().to_le_bytes()[..], &want[..]);
                        }
                    }
                }
                Step::Run(gpa) => {
                    let region = table.iter().find(|&&(start, len)| (start..start + len).contains(&gpa));
                    let want = region.map(|&(start, len)| start + len - gpa).ok_or(hole(gpa));
                    prop_assert_eq!(ram.run(Gpa::new(gpa)), want);
                    let run = View::new(&mut direct, &ram, DISK).direct_run(Iova::new(gpa));
                    prop_assert_eq!(run.map(|run| (run.iova.raw(), run.len)), region.copied());
                    if let Some(run) = run {
                        let start = Gpa::new(run.iova.raw());
                        prop_assert_eq!(ram.host(start, run.len, Intent::Write), Ok(run.hva));
                    }
                }
                Step::Lease(gpa, len) => {
                    let answer = View::new(&mut direct, &ram, DISK).lease(Iova::new(gpa), len, Perm::Read);
                    match ram.run(Gpa::new(gpa)) {
                        Err(stop) => prop_assert_eq!(answer.unwrap_err(), stop.into()),
                        Ok(run) => {
                            let lease = answer.unwrap();
                            prop_assert_eq!(u64::from(lease.len), run.min(u64::from(len)));
                            prop_assert_eq!(ram.host(Gpa::new(gpa), 1, Intent::Read), Ok(lease.hva));
                            let keep = ram.keep_alive();
                            prop_assert!(keeps_mapped(&keep, lease.hva, run));
                            prop_assert!(!keeps_mapped(&keep, lease.hva, run + 1));
                            View::new(&mut direct, &ram, DISK).release(lease.id);
                        }
                    }
                }
            }
        }
        prop_assert_eq!(direct.in_flight(), 0);
        // All writes are in the files, and nothing else.
        for (gpa, file, len) in files {
            let want = &naive.0.iter().find(|(start, _)| *start == gpa).unwrap().1;
            prop_assert!(&get(&file, PAGE, len) == want);
            prop_assert!(get(&file, 0, PAGE as usize).iter().all(|&byte| byte == 0));
        }
    }
}
