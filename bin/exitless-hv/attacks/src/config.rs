//! Configuration space of what is not the guest's: the host bridge's window (ecam), the power base
//! (powerbase), the messages of another device (otherdevice).

use bare::{pci, port};

use crate::delivery::HIDDEN;
use crate::tables::Page;
use crate::{POWER_OFF, Run, WINDOW_MS, time};

/// QEMU's q35: host bridge, LPC bridge, disk controller.
const HOST_BRIDGE: u16 = 0;
const LPC: u16 = 0x1f << 3;
const DISKS: u16 = 0x1f << 3 | 2;
/// The host bridge's window of configuration space in memory, and that it is on.
const WINDOW: u8 = 0x60;
const ON: u32 = 1;
/// The LPC bridge's base of the power ports, where it is moved to, and power's control there.
const POWER_BASE: u8 = 0x40;
const MOVED: u32 = 0xb000;
const POWER: u16 = 0xb004;

/// Configuration space over the hypervisor's memory.
pub fn ecam(run: &Run) {
    run.result(format_args!("going"));
    let was = pci::read(HOST_BRIDGE, WINDOW);
    run.measured(|| {
        if !run.is_calm {
            // SAFETY: no memory of this program's is there.
            unsafe { pci::write(HOST_BRIDGE, WINDOW, HIDDEN as u32 | ON) }
        }
        time::wait(WINDOW_MS);
    });
    let is_moved = pci::read(HOST_BRIDGE, WINDOW) != was;
    run.result(format_args!("survived=1 moved={}", u8::from(is_moved)));
}

/// Power's ports where no hypervisor looks, and then power off.
pub fn powerbase(run: &Run) {
    run.result(format_args!("going"));
    run.measured(|| {
        if !run.is_calm {
            // SAFETY: that is what the registers do.
            unsafe {
                pci::write(LPC, POWER_BASE, MOVED | 1);
                port::out16(POWER, POWER_OFF);
            }
        }
        time::wait(WINDOW_MS);
    });
    run.result(format_args!("survived=1"));
}

static RECEIVED: Page = Page::new();

/// Twenty messages of the machine's own disk controller, which is not assigned: the other
/// processor's NMIs.
pub fn otherdevice(run: &Run) {
    const TIMES: u64 = 20;
    const MESSAGE: u8 = 5;
    const COMMAND_ON: u32 = 6;
    /// The controller's registers: control, the first port's.
    const CONTROL: u64 = 4;
    const PORT: u64 = 0x100;
    const RECEIVED_AT: u64 = PORT + 8;
    const ENABLED: u64 = PORT + 0x14;
    const STARTED: u64 = PORT + 0x18;
    let sent = run.measured(|| {
        let found = pci::capability(DISKS, MESSAGE).zip(pci::memory(DISKS, 5));
        let Some((capability, registers)) = found.filter(|_| !run.is_calm) else {
            time::wait(WINDOW_MS);
            return 0;
        };
        let command = pci::read(DISKS, pci::COMMAND) & 0xffff | COMMAND_ON;
        let head = pci::read(DISKS, capability);
        // SAFETY: its messages are no memory; what it receives is a page that nothing else uses.
        unsafe {
            pci::write(DISKS, pci::COMMAND, command);
            pci::write(DISKS, capability + 4, 0xfee0_1000);
            pci::write(DISKS, capability + 8, 0);
            pci::write(DISKS, capability + 12, 4 << 8);
            pci::write(DISKS, capability, head | 1 << 16);
        }
        let poke = |register: u64, value: u32| {
            // SAFETY: the controller's registers, mapped as they are.
            unsafe { ((registers + register) as *mut u32).write_volatile(value) }
        };
        for _ in 0..TIMES {
            // Reset, on with interrupts; the first frame that a port receives is one.
            poke(CONTROL, 1);
            poke(CONTROL, 1 << 31 | 2);
            poke(RECEIVED_AT, RECEIVED.address() as u32);
            poke(ENABLED, u32::MAX);
            poke(STARTED, 1 << 4);
            time::wait(WINDOW_MS / TIMES);
        }
        TIMES
    });
    run.result(format_args!("sent={sent}"));
}
