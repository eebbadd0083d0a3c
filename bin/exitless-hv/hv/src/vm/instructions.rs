//! Instructions, and interrupts of the processor's own, that would take something of the host's.

use core::arch::asm;

use eli::event::Event;

use super::Processor;
use crate::log::say;
use crate::report::{Cause, Count};
use crate::vmcb;

/// Exit codes of what [`Processor::intercepted`] answers.
pub mod exit {
    /// A system management interrupt.
    pub const SMI: u64 = 0x62;
    /// INIT.
    pub const INIT: u64 = 0x63;
    /// IRET.
    pub const IRET: u64 = 0x74;
    /// RSM.
    pub const RSM: u64 = 0x73;
    /// INVD.
    pub const INVD: u64 = 0x76;
    /// INVLPGA.
    pub const INVLPGA: u64 = 0x7a;
    /// A task switch.
    pub const TASK_SWITCH: u64 = 0x7d;
    /// MONITOR.
    pub const MONITOR: u64 = 0x8a;
    /// MWAIT, when the monitor is armed.
    pub const MWAIT_ARMED: u64 = 0x8c;
}

impl Processor {
    pub(super) fn intercepted(&mut self, code: u64) -> Cause {
        match code {
            exit::SMI => {
                // It waits for the host's global interrupt flag: firmware handles it here, where
                // the processor leaves that mode for what it was in.
                self.counters.add(Count::Nmis, self.area.window_nmi());
                Cause::Host
            }
            exit::INIT => self.stop("the guest's processor got INIT"),
            exit::INVD => {
                // SAFETY: what the caches hold, the host's too, is written back before it is
                // dropped.
                unsafe { asm!("wbinvd", options(nostack, preserves_flags)) }
                self.pages.vmcb.skip(2);
                Cause::Guest
            }
            // In none of the modes in which direct delivery is possible; the new task would be
            // loaded by hand.
            exit::TASK_SWITCH => {
                say!(
                    "instructions: a task switch to {:#x} is not carried out",
                    self.pages.vmcb.get(vmcb::EXIT_INFO1)
                );
                self.stop("the guest switched tasks")
            }
            // RSM, INVLPGA, MONITOR, MWAIT: there are none.
            _ => {
                const UNDEFINED: u8 = 6;
                self.raise(Event::exception(UNDEFINED, None));
                Cause::Guest
            }
        }
    }
}
