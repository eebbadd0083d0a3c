//! Every request type, on every back end.

use std::os::fd::RawFd;

use guest_mem::KeepAlive;

use super::support::*;
use crate::QueueDevice;
use crate::blk::request::{STATUS_IOERR, STATUS_OK, STATUS_UNSUPP, kind};
use crate::blk::{Blk, BlkConfig, BlkError, BlockIo, Completion, MemDisk, Op, Piece, Transfer};

fn each_disk(mut test: impl FnMut(&str, Box<dyn BlockIo>)) {
    test("memory", mem_disk());
    test("direct", raw_disk(Transfer::Direct).0);
    test("bounce", raw_disk(Transfer::Bounce).0);
}

#[test]
fn read_returns_the_blocks() {
    each_disk(|name, disk| {
        let mut guest = Guest::new(disk);
        // Cut at odd places: 100 + 4096 + 924 = 10 sectors.
        let data = [(DATA + 7, 100), (DATA + 0x2ff0, 4096), (DATA + 0x8000, 924)];
        assert_eq!(
            guest.run(kind::IN, 3, &[], &data),
            (STATUS_OK, 5121),
            "{name}"
        );
        let mut got = Vec::new();
        for (at, len) in data {
            got.extend(guest.driver.get(at, len as usize));
        }
        assert_eq!(got, image()[3 * 512..13 * 512], "{name}");
        assert_eq!(guest.blk.stats().read_bytes, 5120);
    });
}

#[test]
fn written_blocks_are_read_back_and_neighbours_stay() {
    each_disk(|name, disk| {
        let mut guest = Guest::new(disk);
        let bytes: Vec<u8> = (0..64 * 1024u32).map(|at| ((at * 31) >> 3) as u8).collect();
        guest.driver.put(DATA + 512, &bytes);
        let len = bytes.len() as u32;
        assert_eq!(
            guest.run(kind::OUT, 5, &[(DATA + 512, len)], &[]),
            (STATUS_OK, 1),
            "{name}"
        );
        assert_eq!(
            guest.run(kind::FLUSH, 0, &[], &[]),
            (STATUS_OK, 1),
            "{name}"
        );
        let all = len + 1024;
        let to = DATA + 0x20_0000;
        assert_eq!(
            guest.run(kind::IN, 4, &[], &[(to, all)]),
            (STATUS_OK, all + 1),
            "{name}"
        );
        let mut want = image()[4 * 512..][..all as usize].to_vec();
        want[512..512 + bytes.len()].copy_from_slice(&bytes);
        assert_eq!(guest.driver.get(to, all as usize), want, "{name}");
    });
}

#[test]
fn a_request_of_the_largest_size_goes_through() {
    for transfer in [Transfer::Direct, Transfer::Bounce] {
        let mut guest = Guest::new(raw_disk(transfer).0);
        let len = crate::blk::MAX_TRANSFER;
        assert_eq!(
            guest.run(kind::IN, 0, &[], &[(DATA, len)]),
            (STATUS_OK, len + 1)
        );
        assert_eq!(
            guest.driver.get(DATA, len as usize),
            image()[..len as usize]
        );
    }
}

fn range(guest: &Guest, sector: u64, sectors: u32, flags: u32) -> (u64, u32) {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    guest.driver.put(DATA, &bytes);
    (DATA, 16)
}

#[test]
fn write_zeroes_and_discard_clear_exactly_their_range() {
    each_disk(|name, disk| {
        let mut guest = Guest::new(disk);
        for (kind, flags) in [
            (kind::WRITE_ZEROES, 0),
            (kind::WRITE_ZEROES, 1),
            (kind::DISCARD, 0),
        ] {
            let sector = 16 + 32 * u64::from(kind) + 1024 * u64::from(flags);
            let buffer = range(&guest, sector, 16, flags);
            assert_eq!(
                guest.run(kind, 0, &[buffer], &[]),
                (STATUS_OK, 1),
                "{name} {kind}"
            );
            let to = DATA + 0x1000;
            assert_eq!(
                guest.run(kind::IN, sector - 1, &[], &[(to, 18 * 512)]).0,
                STATUS_OK
            );
            let mut want = image()[(sector as usize - 1) * 512..][..18 * 512].to_vec();
            want[512..17 * 512].fill(0);
            assert_eq!(guest.driver.get(to, 18 * 512), want, "{name} {kind}");
        }
    });
}

#[test]
fn bad_ranges_and_flags_get_their_status() {
    let mut guest = Guest::new(mem_disk());
    for (kind, sector, sectors, flags, status) in [
        (kind::DISCARD, 0, 8, 1, STATUS_UNSUPP),
        (kind::WRITE_ZEROES, 0, 8, 2, STATUS_UNSUPP),
        (kind::DISCARD, SECTORS - 4, 8, 0, STATUS_IOERR),
        (kind::WRITE_ZEROES, u64::MAX, 8, 0, STATUS_IOERR),
        (kind::WRITE_ZEROES, 0, u32::MAX, 0, STATUS_IOERR),
        (kind::DISCARD, SECTORS, 0, 0, STATUS_OK),
    ] {
        let buffer = range(&guest, sector, sectors, flags);
        assert_eq!(
            guest.run(kind, 0, &[buffer], &[]).0,
            status,
            "{kind} {sector} {sectors} {flags}"
        );
    }
    // Two ranges where one is advertised, and half a range.
    assert_eq!(
        guest.run(kind::DISCARD, 0, &[(DATA, 32)], &[]).0,
        STATUS_IOERR
    );
    assert_eq!(
        guest.run(kind::DISCARD, 0, &[(DATA, 8)], &[]).0,
        STATUS_IOERR
    );
}

#[test]
fn sectors_outside_the_disk_are_refused() {
    let mut guest = Guest::new(mem_disk());
    for sector in [SECTORS, SECTORS - 1, u64::MAX, u64::MAX / 512, 1 << 55] {
        assert_eq!(
            guest.run(kind::IN, sector, &[], &[(DATA, 1024)]),
            (STATUS_IOERR, 1),
            "{sector}"
        );
        assert_eq!(
            guest.run(kind::OUT, sector, &[(DATA, 1024)], &[]).0,
            STATUS_IOERR,
            "{sector}"
        );
    }
    assert_eq!(
        guest.run(kind::IN, SECTORS - 2, &[], &[(DATA, 1024)]).0,
        STATUS_OK
    );
    // No whole sectors; no sectors at all.
    assert_eq!(guest.run(kind::IN, 0, &[], &[(DATA, 1023)]).0, STATUS_IOERR);
    assert_eq!(guest.run(kind::IN, 0, &[], &[]), (STATUS_OK, 1));
}

#[test]
fn get_id_answers_the_serial_and_no_more() {
    let mut guest = Guest::new(mem_disk());
    guest.driver.put(DATA, &[0xaa; 40]);
    assert_eq!(
        guest.run(kind::GET_ID, 0, &[], &[(DATA, 3), (DATA + 3, 37)]),
        (STATUS_OK, 21)
    );
    let got = guest.driver.get(DATA, 40);
    assert_eq!(got[..20], *b"exitless\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(got[20..], [0xaa; 20]);
    assert_eq!(
        guest.run(kind::GET_ID, 0, &[], &[(DATA, 5)]),
        (STATUS_OK, 6)
    );
}

/// A disk of 1 MiB in blocks of so many bytes, without any.
struct Coarse(u32);

impl BlockIo for Coarse {
    fn capacity(&self) -> u64 {
        1 << 20
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn alignment(&self) -> u32 {
        self.0
    }

    fn depth(&self) -> u32 {
        1
    }

    fn transfer(&self) -> Transfer {
        Transfer::Bounce
    }

    fn attach(&mut self, _keep: KeepAlive) {}

    fn detach(&mut self) {}

    fn reserve(&mut self, _slot: u32, _len: u32) -> bool {
        false
    }

    fn buffer(&mut self, _slot: u32, _offset: u32) -> &mut [u8] {
        unreachable!("nothing is reserved")
    }

    fn unreserve(&mut self, _slot: u32) {}

    fn submit(&mut self, _slot: u32, _op: Op, _pieces: &[Piece]) {}

    fn flush(&mut self) {}

    fn poll(&mut self, _done: &mut Vec<Completion>) {}

    fn has_completions(&mut self) -> bool {
        false
    }

    fn cancel(&mut self, _slot: u32) {}

    fn arm(&mut self) {}

    fn disarm(&mut self) {}

    fn wake_fds(&self, _fds: &mut Vec<RawFd>) {}
}

#[test]
fn a_disk_in_larger_blocks_than_its_guest_would_see_is_refused() {
    let make = |needed, logical_block| {
        let config = BlkConfig {
            logical_block,
            ..Default::default()
        };
        Blk::new(config, Box::new(Coarse(needed))).map(drop)
    };
    for (needed, block) in [(512, 512), (512, 4096), (4096, 4096)] {
        assert_eq!(make(needed, block), Ok(()), "{needed} {block}");
    }
    for (needed, block) in [(4096, 512), (8192, 4096)] {
        assert_eq!(
            make(needed, block),
            Err(BlkError::Alignment { needed, block })
        );
    }
}

#[test]
fn unknown_types_are_unsupported() {
    let mut guest = Guest::new(mem_disk());
    for kind in [2, 3, 5, 14, 0x8000_0000, u32::MAX] {
        assert_eq!(
            guest.run(kind, 0, &[], &[(DATA, 512)]),
            (STATUS_UNSUPP, 1),
            "{kind}"
        );
    }
}

#[test]
fn a_read_only_disk_refuses_writing() {
    let mut guest = Guest::new(Box::new(MemDisk::new(image(), 8, true)));
    assert_ne!(guest.blk.features() & crate::blk::request::feature::RO, 0);
    assert_eq!(guest.run(kind::OUT, 0, &[(DATA, 512)], &[]).0, STATUS_IOERR);
    // Not offered, so not known.
    assert_eq!(
        guest.run(kind::DISCARD, 0, &[(DATA, 16)], &[]).0,
        STATUS_UNSUPP
    );
    assert_eq!(guest.run(kind::IN, 0, &[], &[(DATA, 512)]).0, STATUS_OK);
    assert_eq!(guest.driver.get(DATA, 512), image()[..512]);
}

#[test]
fn without_flush_writes_are_durable_and_still_right() {
    let (disk, mut file) = raw_disk(Transfer::Direct);
    let mask = !crate::blk::request::feature::FLUSH;
    let mut guest = Guest::with(disk, Default::default(), mask);
    guest.driver.put(DATA, &[0x5a; 512]);
    assert_eq!(guest.run(kind::OUT, 1, &[(DATA, 512)], &[]).0, STATUS_OK);
    assert_eq!(contents(&mut file)[512..1024], [0x5a; 512]);
}

/// A driver that keeps to it gives back all that it discards.
#[test]
fn discards_are_aligned_to_the_storage_where_its_blocks_are_larger() {
    for (block, discard_block, sectors) in [(512, 512, 1), (512, 4096, 8), (4096, 512, 8)] {
        let space = crate::blk::request::config_space(1, block, 1, 1, discard_block);
        assert_eq!(
            space[44..48],
            [sectors, 0, 0, 0],
            "discard_sector_alignment"
        );
    }
}

#[test]
fn configuration_space_says_what_is_advertised() {
    let guest = Guest::new(raw_disk(Transfer::Direct).0);
    let read = |at, len: usize| {
        let mut bytes = [0; 8];
        guest.blk.read_config(at, &mut bytes[..len]);
        u64::from_le_bytes(bytes)
    };
    assert_eq!(read(0, 8), SECTORS);
    assert_eq!(read(8, 4), 32768);
    assert_eq!(read(12, 4), 126);
    assert_eq!(read(20, 4), 512);
    assert_eq!(read(34, 2), 1);
    assert_eq!(read(36, 4), 1 << 22);
    assert_eq!(read(56, 1), 1);
    assert_eq!(read(58, 8), 0);
    assert_eq!(read(u64::MAX, 8), 0);
    // A disk that clears a range at once, while others wait, takes shorter ones.
    let guest = Guest::new(mem_disk());
    let mut sectors = [0; 4];
    guest.blk.read_config(36, &mut sectors);
    assert_eq!(u32::from_le_bytes(sectors), 2048);
}
