//! A device's interrupts where they should not go: the host's vector (e10vector), another processor
//! (e10cpu, bar), all of them (broadcast_message), and as a level that is not ended
//! (level_message).

use crate::interrupts::{self, HOST, OWN};
use crate::nvme::Nvme;
use crate::service::held;
use crate::{Run, WINDOW_MS, end, time};

/// Number of commands.
const COMMANDS: u32 = 50;
/// Time that each interrupt is waited for, milliseconds.
const PAUSE: u64 = WINDOW_MS / COMMANDS as u64;
/// A message's address; the destination processor's field in it; and the bits that make it a
/// logical destination of all processors.
const ADDRESS: u32 = 0xfee0_0000;
const PROCESSOR: u32 = 1 << 12;
const ALL: u32 = 0xff << 12 | 3 << 2;
/// A message's data: an NMI; a level, asserted.
const NMI: u32 = 4 << 8;
const LEVEL: u32 = 3 << 14;
/// Bytes by which a window of registers is moved: to where there is nothing, in the same 256 MiB.
const FAR: u64 = 64 << 20;

/// The device's interrupts on the host's vector.
pub fn e10vector(run: &Run) {
    commands(run, ADDRESS, HOST);
}

/// The device's interrupts to the processor that is not the guest's.
pub fn e10cpu(run: &Run) {
    commands(run, ADDRESS + PROCESSOR, OWN);
}

/// The device's interrupts to all processors, by a logical identifier.
pub fn broadcast_message(run: &Run) {
    commands(run, ADDRESS + ALL, OWN);
}

/// The device's interrupt as a level of the host's class, which the guest does not end.
pub fn level_message(run: &Run) {
    let mut nvme = find(run);
    held(run, |vector| {
        let trigger = if run.is_calm { 0 } else { LEVEL };
        nvme.set_interrupt(ADDRESS, trigger | u32::from(vector));
        nvme.identify(1000);
    });
    nvme.clear_interrupt();
}

/// The device's registers moved, its message table with them, and a message there that is another
/// processor's NMI.
pub fn bar(run: &Run) {
    /// Fewer: what does not answer is waited for.
    const FEW: u64 = 10;
    let mut nvme = find(run);
    let identified = run.measured(|| {
        let was = nvme.place();
        if run.is_calm {
            nvme.set_interrupt(ADDRESS, u32::from(OWN));
        } else {
            nvme.move_to(was + FAR);
            nvme.set_interrupt(ADDRESS + PROCESSOR, NMI);
        }
        let identified = (0..FEW).fold(0, |identified, _| {
            let is_good = nvme.identify(WINDOW_MS / FEW / 2);
            time::wait(WINDOW_MS / FEW);
            identified + u32::from(is_good)
        });
        nvme.clear_interrupt();
        identified
    });
    run.result(format_args!("identified={identified}"));
}

/// Finds the controller; without one the run ends.
pub fn find(run: &Run) -> Nvme {
    match Nvme::find() {
        Ok(nvme) => nvme,
        Err(why) => {
            run.result(format_args!("error={why}"));
            end()
        }
    }
}

fn commands(run: &Run, address: u32, vector: u8) {
    let (address, vector) = if run.is_calm {
        (ADDRESS, OWN)
    } else {
        (address, vector)
    };
    let mut nvme = find(run);
    let (identified, ran) = run.measured(|| {
        let before = interrupts::count(vector);
        nvme.set_interrupt(address, u32::from(vector));
        let identified = (0..COMMANDS).fold(0, |identified, _| {
            let is_good = nvme.identify(1000);
            time::wait(PAUSE);
            identified + u32::from(is_good)
        });
        nvme.clear_interrupt();
        (identified, interrupts::count(vector) - before)
    });
    run.result(format_args!("identified={identified} ran={ran}"));
}
