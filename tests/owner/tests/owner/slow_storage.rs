//! Stops while the kernel is in the middle of a request that does not end (`held-fs`): a reset and
//! Bus Master off are answered after the last access to memory, and the disk is alive.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use held_fs::{Gate, HeldFs, Kind};
use vio::blk::request::{STATUS_OK, kind};
use vio::blk::{RawDisk, RawDiskOptions, Transfer};

use super::support::*;

const DRAIN_LIMIT: Duration = Duration::from_millis(50);
const KINDS: [(u32, Kind); 3] = [
    (kind::IN, Kind::Read),
    (kind::OUT, Kind::Write),
    (kind::FLUSH, Kind::Sync),
];
/// The sector that requests are about, and their bytes.
const SECTOR: u64 = 8;
const LEN: u32 = 4096;

/// A machine whose disk lies in `fs`, with one request of this kind held in the kernel.
fn held(fs: &HeldFs, name: &str, o_direct: bool, kind: u32, held: Kind) -> (Guest<ByHand>, Gate) {
    let gate = fs.create(name, 0);
    gate.contents().write_all_at(&image(), 0).unwrap();
    let options = RawDiskOptions {
        o_direct,
        transfer: Transfer::Direct,
        depth: 16,
        ..RawDiskOptions::default()
    };
    let disk = RawDisk::open(&fs.path(name), options).unwrap();
    let device = blk(Box::new(disk), None);
    let mut guest = Guest::by_hand(Mode::Logged, DRAIN_LIMIT, device);
    guest.put(DATA, &[0x5a; LEN as usize]);
    gate.hold(&[held]);
    guest.request(0, kind, SECTOR, DATA, LEN);
    guest.until("it is held", |_| gate.held() == 1);
    (guest, gate)
}

/// A stop by `stop` with a request of every kind held: `is_over` only after the release, unless the
/// stop `may_cancel`; then `check`.
fn every_stop<T>(
    name: &str,
    may_cancel: bool,
    stop: impl Fn(&mut Guest<ByHand>) -> T,
    is_over: impl Fn(&mut Guest<ByHand>, &T) -> bool,
    check: impl Fn(&mut Guest<ByHand>, u32, &str),
) {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    for o_direct in [false, true] {
        for (kind, held_kind) in KINDS {
            let what = format!("{name}-{held_kind:?}-direct-{o_direct}");
            let (mut guest, gate) = held(&fs, &what, o_direct, kind, held_kind);
            let stopped = stop(&mut guest);
            guest.settle();
            // The drain limit passes, and much more time.
            guest.bus.skew += 100 * DRAIN_LIMIT.as_nanos() as u64;
            for _ in 0..5 {
                guest.settle();
                std::thread::sleep(Duration::from_millis(5));
            }
            // A read into the page cache may be given up before it has touched the guest's memory,
            // if anything may.
            let was_cancelled = is_over(&mut guest, &stopped);
            assert!(
                !was_cancelled || (may_cancel && kind == kind::IN && !o_direct),
                "{what}: the disk may still write"
            );
            gate.release();
            guest.until(&what, |guest| is_over(guest, &stopped));
            let at = SECTOR as usize * 512;
            let expected = match kind {
                kind::IN if !was_cancelled => image()[at..][..LEN as usize].to_vec(),
                _ => vec![0x5a; LEN as usize],
            };
            assert!(guest.get(DATA, LEN as usize) == expected, "{what}");
            if kind == kind::OUT {
                let mut stored = vec![0; LEN as usize];
                gate.contents()
                    .read_exact_at(&mut stored, at as u64)
                    .unwrap();
                assert!(stored == expected, "{what}");
            }
            check(&mut guest, kind, &what);
            guest.verified_io(1);
        }
    }
}

#[test]
fn a_reset_is_answered_after_the_storage_and_leaves_the_disk_alive() {
    every_stop(
        "reset",
        true,
        |guest| guest.set_status(0),
        |guest, ()| guest.status() == 0,
        |guest, _, what| {
            assert_eq!(guest.driver.used_idx(), 0, "{what}");
            guest.restart_driver();
        },
    );
}

#[test]
fn bus_master_off_is_answered_after_the_storage_and_the_request_is_a_success() {
    every_stop(
        "bus-master",
        false,
        |guest| {
            let answer = guest.bus.ask_later(set_command(2));
            (answer, std::cell::Cell::new(false))
        },
        |_, (answer, is_over)| {
            is_over.set(is_over.get() || answer.try_take().is_some());
            is_over.get()
        },
        |guest, _, what| {
            guest.bus.ask(set_command(6));
            guest.wait_used();
            assert_eq!(guest.request_status(0), STATUS_OK, "{what}");
            assert_eq!(guest.status() & 64, 0, "{what}: it needs no reset");
        },
    );
}
