//! A caged disk beside one in this process over the same contents: the same answers, the same
//! bytes in memory, the same contents.

use fake_mem::ArrayMem;
use guest_mem::Gpa;
use proptest::prelude::*;

use super::*;
use crate::QueueDevice;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP, kind};
use crate::blk::tests::support::{DATA, contents, file_with};
use crate::blk::{RawDisk, RawDiskOptions, Transfer};

#[test]
fn each_request_is_done_on_bytes_alone() {
    let mut guest = CagedGuest::new(small(), mem_disk());
    assert_eq!(
        guest.run(kind::IN, 3, &[], &[(DATA, 1024)]),
        (STATUS_OK, 1025)
    );
    assert_eq!(guest.guest.driver.get(DATA, 1024), image()[1536..2560]);
    guest.guest.driver.put(DATA, &[7; 512]);
    assert_eq!(guest.run(kind::OUT, 9, &[(DATA, 512)], &[]), (STATUS_OK, 1));
    assert_eq!(guest.run(kind::FLUSH, 0, &[], &[]), (STATUS_OK, 1));
    let to = (DATA + 4096, 512);
    assert_eq!(guest.run(kind::IN, 9, &[], &[to]), (STATUS_OK, 513));
    assert_eq!(guest.guest.driver.get(DATA + 4096, 512), [7; 512]);
    let id = guest.run(kind::GET_ID, 0, &[], &[(DATA, 20)]);
    assert_eq!(id, (STATUS_OK, 21));
    assert_eq!(guest.guest.driver.get(DATA, 8), b"exitless");
    assert_eq!(guest.run(99, 0, &[], &[]), (STATUS_UNSUPP, 1));
    let past_end = guest.run(kind::IN, 1 << 40, &[], &[(DATA, 512)]);
    assert_eq!(past_end, (STATUS_IOERR, 1));
    let mut range = [0; 16];
    range[..8].copy_from_slice(&9u64.to_le_bytes());
    range[8..12].copy_from_slice(&1u32.to_le_bytes());
    guest.guest.driver.put(DATA, &range);
    let zeroes = guest.run(kind::WRITE_ZEROES, 0, &[(DATA, 16)], &[]);
    assert_eq!(zeroes, (STATUS_OK, 1));
    guest.run(kind::IN, 9, &[], &[(DATA, 512)]);
    assert_eq!(guest.guest.driver.get(DATA, 512), [0; 512]);
    let stats = guest.guest.blk.stats();
    assert_eq!((stats.requests, stats.errors), (9, 2));
}

#[test]
fn a_request_larger_than_a_slot_passes_in_windows() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let mut file = file_with(&image());
        let again = file.try_clone().expect("a descriptor");
        let options = RawDiskOptions {
            transfer,
            depth: 8,
            ..RawDiskOptions::default()
        };
        let disk = RawDisk::from_file(again, options).expect("a disk");
        let mut guest = CagedGuest::new(small(), Box::new(disk));
        let len = 1 << 20;
        let pieces: Vec<_> = (0..16)
            .map(|at| (DATA + at * 0x1_1000 + 3, len / 16))
            .collect();
        assert_eq!(guest.run(kind::IN, 8, &[], &pieces), (STATUS_OK, len + 1));
        let mut got = Vec::new();
        for (at, len) in &pieces {
            got.extend(guest.guest.driver.get(*at, *len as usize));
        }
        assert_eq!(got, image()[4096..][..len as usize]);
        for (at, len) in &pieces {
            guest.guest.driver.put(*at, &vec![0x33; *len as usize]);
        }
        assert_eq!(guest.run(kind::OUT, 8, &pieces, &[]), (STATUS_OK, 1));
        let mut wanted = image();
        wanted[4096..][..len as usize].fill(0x33);
        assert_eq!(contents(&mut file), wanted);
    }
}

fn with_a_long_queue() -> CagedGuest {
    let config = BlkConfig {
        queue_size: 1024,
        ..BlkConfig::default()
    };
    CagedGuest::with(small(), mem_disk(), config)
}

#[test]
fn chains_of_one_byte_descriptors_are_whole_requests() {
    let mut guest = with_a_long_queue();
    // 16 bytes of header, 512 of data, in as many descriptors.
    let header = guest.guest.header(0, kind::OUT, 5);
    guest.guest.driver.put(DATA, &[0x5a; 512]);
    let header_bytes = (0..16).map(|at| (header + at, 1));
    let data_bytes = (0..512).map(|at| (DATA + at, 1));
    let readable: Vec<_> = header_bytes.chain(data_bytes).collect();
    guest.guest.driver.add(&readable, &[(header + 48, 1)]);
    let mut dma = guest.guest.dma();
    assert_eq!(guest.wait_used(&mut dma).1, 1);
    assert_eq!(guest.guest.status(0), STATUS_OK);
    let to = (DATA + 4096, 512);
    assert_eq!(guest.run(kind::IN, 5, &[], &[to]), (STATUS_OK, 513));
    assert_eq!(guest.guest.driver.get(DATA + 4096, 512), [0x5a; 512]);
}

#[test]
fn a_thousand_chains_of_one_byte_end_the_device_and_not_the_worker() {
    let mut guest = with_a_long_queue();
    for _ in 0..1024 {
        guest.guest.driver.add(&[], &[(DATA, 1)]);
    }
    let mut dma = guest.guest.dma();
    guest.guest.settle(&mut dma);
    assert!(guest.guest.blk.needs_reset());
    assert_eq!(guest.guest.driver.used(), None);
    guest.guest.reactivate();
    let read = guest.run(kind::IN, 0, &[], &[(DATA, 512)]);
    assert_eq!(read, (STATUS_OK, 513));
}

/// A request of a property test.
#[derive(Clone, Debug)]
struct Made {
    kind: u32,
    sector: u64,
    readable: Vec<(u64, u32)>,
    writable: Vec<(u64, u32)>,
}

fn cuts() -> impl Strategy<Value = Vec<(u64, u32)>> {
    let cut = prop_oneof![
        (0u64..0x4_0000, 1u32..3000),
        (0u64..0x4_0000, (1u32..24).prop_map(|blocks| blocks * 512)),
        (0u64..0x200, Just(16u32)).prop_map(|(block, len)| (block * 512, len)),
    ];
    prop::collection::vec(cut.prop_map(|(at, len)| (DATA + at, len)), 0..4)
}

fn made() -> impl Strategy<Value = Made> {
    let kinds = prop_oneof![
        4 => Just(kind::IN),
        4 => Just(kind::OUT),
        1 => Just(kind::FLUSH),
        1 => Just(kind::GET_ID),
        1 => Just(kind::DISCARD),
        1 => Just(kind::WRITE_ZEROES),
        1 => any::<u32>(),
    ];
    let sector = prop_oneof![8 => 0u64..64, 1 => 8180u64..8200, 1 => any::<u64>()];
    let all = (kinds, sector, cuts(), cuts(), 0u32..10);
    all.prop_map(|(kind, sector, mut readable, mut writable, odd)| {
        // Most have what their kind says, some have anything.
        match kind {
            kind::IN if odd > 0 => readable.clear(),
            kind::OUT if odd > 0 => writable.clear(),
            _ => {}
        }
        Made {
            kind,
            sector,
            readable,
            writable,
        }
    })
}

/// Bytes of memory that are compared.
const COMPARED: u64 = 0x4_8000;

fn memory(mem: &ArrayMem) -> Vec<u8> {
    let pages = 0..COMPARED / 4096;
    let page = |page| mem.get::<4096>(Gpa::new(DATA + page * 4096));
    pages.flat_map(page).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_caged_disk_answers_as_one_in_this_process(
        requests in prop::collection::vec(made(), 1..12),
        seed in any::<u8>(),
    ) {
        let mut caged = CagedGuest::new(small(), mem_disk());
        let mut plain = Guest::new(mem_disk());
        // Requests for ranges find something like one at each block.
        let mut bytes: Vec<u8> = (0..COMPARED).map(|at| (at * 13) as u8 ^ seed).collect();
        for (block, bytes) in (0u64..).zip(bytes.chunks_mut(512)) {
            bytes[..8].copy_from_slice(&(block % 64).to_le_bytes());
            bytes[8..16].copy_from_slice(&(block / 2 % 8).to_le_bytes());
        }
        caged.guest.driver.put(DATA, &bytes);
        plain.driver.put(DATA, &bytes);
        for made in requests {
            let Made { kind, sector, readable, writable } = &made;
            let one = caged.run(*kind, *sector, readable, writable);
            let other = plain.run(*kind, *sector, readable, writable);
            prop_assert_eq!(one, other, "{:?}", made);
            let wanted = memory(&plain.mem);
            // After an error nothing is promised of the data.
            match one.0 {
                STATUS_OK => prop_assert!(memory(&caged.guest.mem) == wanted, "{made:?}"),
                _ => caged.guest.driver.put(DATA, &wanted),
            }
        }
        let (one, other) = (caged.guest.blk.stats(), plain.blk.stats());
        prop_assert_eq!((one.requests, one.errors), (other.requests, other.errors));
        prop_assert_eq!(one.read_bytes, other.read_bytes);
    }
}
