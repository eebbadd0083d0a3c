//! Messages that reach the guest, and rogue DMA that does not.

use guest_mem::Iova;
use vio::blk::request::{STATUS_IOERR, STATUS_OK, kind};
use vtd::spec::registers as reg;
use vtd::unit::FRCD;

use vio_faults::Fault;
use virtio_pci::function::{MSIX_PENDING, MSIX_TABLE};

use super::support::*;

const ROGUE_SECTOR: u64 = 64;
const ROGUE_IOVA: u64 = 0x12_3456_7000;

#[test]
fn a_completion_sends_the_message_of_its_vectors_table_entry() {
    let mut guest = Guest::by_hand(Mode::Trap, NO_LIMIT, mem_disk());
    assert_eq!(guest.messages.take(), []);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.wait_used();
    assert_eq!(guest.messages.take(), [message(1)]);
    // Moved by the driver: the next message goes there.
    let moved = (0x0000_0001_fee0_5000_u64, 0x77_u32);
    guest.bar_write(MSIX_TABLE + 16, &moved.0.to_le_bytes());
    guest.bar_write(MSIX_TABLE + 24, &moved.1.to_le_bytes());
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.wait_used();
    assert_eq!(guest.messages.take(), [moved]);
    assert_eq!(guest.counts().interrupts, 2);
}

#[test]
fn masked_vectors_pend_and_are_sent_once_when_unmasked() {
    let mut guest = Guest::by_hand(Mode::Trap, NO_LIMIT, mem_disk());
    guest.bar_write(MSIX_TABLE + 16 + 12, &1_u32.to_le_bytes());
    for _ in 0..2 {
        guest.request(0, kind::IN, 3, DATA, 512);
        guest.wait_used();
    }
    assert_eq!(guest.messages.take(), []);
    assert_eq!(guest.bar_read(MSIX_PENDING, 8), 0b10);
    guest.bar_write(MSIX_TABLE + 16 + 12, &0_u32.to_le_bytes());
    assert_eq!(guest.messages.take(), [message(1)]);
    assert_eq!(guest.bar_read(MSIX_PENDING, 8), 0);
    // And by the function's mask.
    let control = guest.msix_control();
    guest.config_write(control, 2, 0xc000);
    guest.request(0, kind::IN, 3, DATA, 512);
    guest.wait_used();
    assert_eq!(guest.messages.take(), []);
    guest.config_write(control, 2, 0x8000);
    assert_eq!(guest.messages.take(), [message(1)]);
}

/// A guest whose disk does this, and where the first fault record must say it was.
fn attacked(mode: Mode, fault: Fault, op: u32) -> Guest<ByHand> {
    let disk = vio::blk::MemDisk::new(image(), 16, false);
    let mut guest = Guest::by_hand(mode, NO_LIMIT, blk(Box::new(disk), Some(fault)));
    guest.messages.take();
    guest.request(0, op, ROGUE_SECTOR, DATA, 512);
    guest.wait_used();
    guest.settle();
    guest
}

#[track_caller]
fn assert_recorded(guest: &mut Guest<ByHand>, iova: u64, reason: u32, is_read: bool) {
    let record = [0, 4, 8, 12].map(|at| guest.read4(FRCD + at));
    let t = u32::from(is_read) << 30;
    assert_eq!(
        record,
        [
            (iova & !0xfff) as u32,
            (iova >> 32) as u32,
            u32::from(DISK.0),
            1 << 31 | t | reason
        ]
    );
    assert_eq!(
        guest.read4(reg::FSTS) & 0x7fff_ffff,
        2,
        "PPF, record 0, nothing else"
    );
    assert_eq!(guest.messages.count(FAULT_MESSAGE), 1);
}

#[test]
fn dma_to_an_unmapped_address_is_blocked_and_recorded_with_reason_5() {
    for mode in MODES {
        let fault = Fault::DmaUnmapped {
            sector: ROGUE_SECTOR,
            iova: Iova::new(ROGUE_IOVA),
        };
        let mut guest = attacked(mode, fault, kind::IN);
        assert_recorded(&mut guest, ROGUE_IOVA, 5, false);
        assert_eq!(guest.request_status(0), STATUS_OK, "{mode:?}");
        // The guest handles it as Linux does, and all is quiet again.
        guest.write4(FRCD + 12, 1 << 31);
        guest.write4(reg::FSTS, 0x83);
        guest.settle();
        assert_eq!(guest.read4(reg::FSTS), 0, "{mode:?}");
        assert_eq!(guest.read4(FRCD + 12) >> 31, 0, "{mode:?}");
    }
}

#[test]
fn writing_to_a_buffer_mapped_read_only_is_blocked_and_recorded_with_reason_5() {
    for mode in MODES {
        let fault = Fault::WriteToReadOnly {
            sector: ROGUE_SECTOR,
        };
        let disk = vio::blk::MemDisk::new(image(), 16, false);
        let mut guest = Guest::by_hand(mode, NO_LIMIT, blk(Box::new(disk), Some(fault)));
        guest.map(DATA, R);
        guest.flush(&[flush_page(DATA)]);
        guest.put(DATA, &[0x42; 512]);
        guest.request(0, kind::OUT, ROGUE_SECTOR, DATA, 512);
        guest.wait_used();
        guest.settle();
        assert_recorded(&mut guest, DATA + IOVA, 5, false);
        assert_eq!(guest.get(DATA, 512), [0x42; 512], "{mode:?}");
        assert_eq!(guest.request_status(0), STATUS_OK, "{mode:?}");
    }
}

#[test]
fn reading_what_may_only_be_written_is_blocked_and_recorded_with_reason_6() {
    for mode in MODES {
        let mut guest = Guest::by_hand(mode, NO_LIMIT, mem_disk());
        guest.map(DATA, W);
        guest.flush(&[flush_page(DATA)]);
        guest.messages.take();
        guest.request(0, kind::OUT, 3, DATA, 512);
        guest.wait_used();
        guest.settle();
        assert_recorded(&mut guest, DATA + IOVA, 6, true);
        assert_eq!(guest.request_status(0), STATUS_IOERR, "{mode:?}");
    }
}
