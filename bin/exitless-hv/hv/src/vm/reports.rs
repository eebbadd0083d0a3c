//! What is told of a run: windows between markers, and the end.

use core::sync::atomic::Ordering;

use bare::processor;

use super::Vm;
use crate::log::say;
use crate::measurement::Account;
use crate::report::Count;
use crate::{core1, host, power, vmcb};

impl Vm {
    pub(super) fn marker(&mut self, marker: u8) {
        match marker {
            1 => {
                let now = self.chips.time().unwrap_or_default();
                self.measurement.begin(now, processor::cycles());
            }
            2 => {
                let account = self.measurement.end();
                self.report("window", &account);
            }
            _ => {
                if self.traces() {
                    say!("marker {marker}");
                }
            }
        }
    }

    /// A line of JSON.
    pub(super) fn report(&self, what: &str, account: &Account) {
        use core::fmt::Write;
        let mut out = crate::log::output();
        let now = self.chips.time().unwrap_or_default();
        let core = self.interrupts.core().counts();
        let _ = write!(
            out,
            "{{\"report\":\"{what}\",\"mode\":\"{}\",\"windows\":{},",
            self.options.mode.name(),
            account.windows
        );
        let _ = write!(
            out,
            "\"ms\":{},\"host_ticks_made\":{},",
            now.ms.wrapping_sub(account.since.ms),
            now.ticks.wrapping_sub(account.since.ticks)
        );
        let cycles = processor::cycles() - account.cycles;
        let _ = write!(out, "\"cycles\":{cycles},");
        let _ = account.counts.keys(&mut out);
        for (key, value) in [
            ("total_injected", core.injected),
            ("total_reflected", core.reflected),
            ("total_software", core.software),
            ("total_own_gates", core.own_gates),
            ("total_stolen", core.stolen),
            ("total_forced", core.forced),
            ("total_suspended", core.suspended),
            ("total_aliased", u64::from(self.interrupts.core().aliased())),
            ("qemu_spurious", host::HOST_SPURIOUS.load(Ordering::Relaxed)),
            ("core1_beats", core1::BEATS.load(Ordering::Relaxed)),
            ("core1_foreign", core1::FOREIGN.load(Ordering::Relaxed)),
            ("core1_nmis", core1::NMIS.load(Ordering::Relaxed)),
        ] {
            let _ = write!(out, "\"{key}\":{value},");
        }
        let contained = self.chips.contains_dma();
        let _ = writeln!(out, "\"contained_dma\":{contained}}}");
    }

    /// Takes what the IOMMU has blocked.
    pub(super) fn look_at_dma(&mut self) {
        let (mut logged, counts) = (self.options.trace, &mut self.measurement);
        let lost = self.chips.dma_faults(|fault| {
            let count = match fault.is_interrupt() {
                true => Count::IrqBlocked,
                false => Count::DmaFaults,
            };
            counts.add(count, 1);
            if logged > 0 {
                logged -= 1;
                say!("dma: {fault}");
            }
        });
        self.options.trace = logged;
        self.measurement.add(Count::DmaFaultsLost, lost.into());
    }

    /// The end, and why.
    pub(super) fn stop(&mut self, why: &str) -> ! {
        let vmcb = &self.pages.vmcb;
        say!(
            "hv: {why}: exit {:#x} {:#x} {:#x} during {:#x}, rip {:#x} flags {:#x} rsp {:#x} cr0 {:#x} cr3 {:#x} cr4 {:#x}, direct {}",
            vmcb.get(vmcb::EXIT),
            vmcb.get(vmcb::EXIT_INFO1),
            vmcb.get(vmcb::EXIT_INFO2),
            vmcb.get(vmcb::EXIT_DURING),
            vmcb.get(vmcb::RIP),
            vmcb.get(vmcb::RFLAGS),
            vmcb.get(vmcb::RSP),
            vmcb.get(vmcb::CR0),
            vmcb.get(vmcb::CR3),
            vmcb.get(vmcb::CR4),
            self.interrupts.was_direct()
        );
        self.report("stopped", &self.measurement.total());
        power::off()
    }

    /// The end of a run that has a time (`until=`).
    pub(super) fn look_at_the_clock(&mut self) {
        if self.options.until != 0
            && let Some(ms) = self.chips.ms()
            && ms >= u64::from(self.options.until)
        {
            say!("hv: {} ms are over", self.options.until);
            self.report("time", &self.measurement.total());
            power::off();
        }
    }
}
