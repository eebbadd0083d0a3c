//! Addresses in the assigned device's commands: the hypervisor's memory (e11), where a write is
//! another processor's NMI (e12).

use crate::device::find;
use crate::tables::Page;
use crate::{Run, WINDOW_MS, time};

/// The hypervisor's last page, of which it says whether it is as it was.
const CANARY: u64 = 0x3400_0000 - 0x1000;
/// Commands in a window.
const COMMANDS: u64 = 10;
/// A message to the processor that is not the guest's.
const MESSAGE: u64 = 0xfee0_1000;
/// A message's data: an NMI.
const NMI: u64 = 4 << 8;

static BLOCK: Page = Page::new();
static OWN: Page = Page::new();

/// Data of the device over the hypervisor's memory.
pub fn e11(run: &Run) {
    let mut nvme = find(run);
    let identified = run.measured(|| {
        (0..COMMANDS).fold(0, |identified, _| {
            let is_good = if run.is_calm {
                nvme.identify(WINDOW_MS / COMMANDS / 2)
            } else {
                nvme.identify_to(CANARY, WINDOW_MS / COMMANDS / 2)
            };
            time::wait(WINDOW_MS / COMMANDS);
            identified + u32::from(is_good)
        })
    });
    run.result(format_args!("identified={identified}"));
}

/// Data of the device where processors take messages: of every 32 bytes the upper half, which names
/// an entry of a table where interrupts are remapped, is NMIs; the lower half, which is a message
/// as it is, is of no vector.
pub fn e12(run: &Run) {
    let mut nvme = find(run);
    for at in 0..64 {
        let is_upper = at % 4 >= 2;
        BLOCK.set(at, if is_upper { NMI << 32 | NMI } else { 0 });
    }
    let is_there = nvme.make_queues();
    let is_written = is_there && nvme.write_block(&BLOCK);
    let read = run.measured(|| {
        (0..COMMANDS).fold(0, |read, _| {
            let place = if run.is_calm { OWN.address() } else { MESSAGE };
            let is_good = is_written && nvme.read_block(place, WINDOW_MS / COMMANDS / 2);
            time::wait(WINDOW_MS / COMMANDS);
            read + u32::from(is_good)
        })
    });
    let written = u32::from(is_written);
    run.result(format_args!("written={written} read={read}"));
}
