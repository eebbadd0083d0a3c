//! A device's interrupts where they should not go: the host's vector (e10vector), another processor (e10cpu).

use crate::interrupts::{self, HOST, OWN};
use crate::nvme::Nvme;
use crate::{Run, end, time};

/// How many commands.
const COMMANDS: u32 = 50;
/// How long each interrupt is waited for, milliseconds.
const PAUSE: u64 = 20;

/// The device's interrupts on the host's vector.
pub fn e10vector(run: &Run) {
    commands(run, 0, HOST);
}

/// The device's interrupts to the processor that is not the guest's.
pub fn e10cpu(run: &Run) {
    commands(run, 1, OWN);
}

fn commands(run: &Run, apic: u32, vector: u8) {
    let (apic, vector) = if run.is_calm {
        (0, OWN)
    } else {
        (apic, vector)
    };
    let mut nvme = match Nvme::find() {
        Ok(nvme) => nvme,
        Err(why) => {
            run.result(format_args!("error={why}"));
            end()
        }
    };
    let (identified, ran) = run.measured(|| {
        let before = interrupts::count(vector);
        nvme.set_interrupt(apic, vector);
        let identified = (0..COMMANDS).fold(0, |identified, _| {
            let ran = interrupts::count(vector);
            let is_good = nvme.identify();
            time::until(PAUSE, || interrupts::count(vector) != ran);
            identified + u32::from(is_good)
        });
        nvme.clear_interrupt();
        (identified, interrupts::count(vector) - before)
    });
    run.result(format_args!("identified={identified} ran={ran}"));
}
