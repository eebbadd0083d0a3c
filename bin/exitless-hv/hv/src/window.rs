//! What is told of a run: windows between markers, and the end.

use core::sync::atomic::Ordering;

use bare::processor;

use crate::log::say;
use crate::report::Counts;
use crate::vm::Vm;
use crate::{core1, host, power, vmcb};

impl Vm {
    pub fn marker(&mut self, marker: u8) {
        let now = self
            .hpet
            .map_or((0, 0), |hpet| (hpet.milliseconds(), hpet.ticks()));
        match marker {
            1 => {
                self.window = self.counts;
                self.window_start = now;
                self.window_cycles = processor::cycles();
            }
            2 => {
                let counts = self.counts.since(&self.window);
                self.report("window", &counts, self.window_start);
                self.windows += 1;
            }
            _ => {
                if self.traces() {
                    say!("marker {marker}");
                }
            }
        }
    }

    /// A line of JSON.
    pub fn report(&self, what: &str, counts: &Counts, since: (u64, u64)) {
        use core::fmt::Write;
        let mut out = crate::log::output();
        let (ms, ticks) = self
            .hpet
            .map_or((0, 0), |hpet| (hpet.milliseconds(), hpet.ticks()));
        let core = self.core.counts();
        let _ = write!(
            out,
            "{{\"report\":\"{what}\",\"mode\":\"{}\",\"windows\":{},",
            self.options.mode.name(),
            self.windows
        );
        let _ = write!(
            out,
            "\"ms\":{},\"host_ticks_made\":{},",
            ms.wrapping_sub(since.0),
            ticks.wrapping_sub(since.1)
        );
        let cycles = processor::cycles() - self.window_cycles;
        let _ = write!(out, "\"cycles\":{cycles},");
        let _ = counts.keys(&mut out);
        for (key, value) in [
            ("total_injected", core.injected),
            ("total_reflected", core.reflected),
            ("total_software", core.software),
            ("total_own_gates", core.own_gates),
            ("total_stolen", core.stolen),
            ("total_forced", core.forced),
            ("total_suspended", core.suspended),
            ("total_relocated", core.relocated),
            ("qemu_spurious", host::HOST_SPURIOUS.load(Ordering::Relaxed)),
            ("core1_beats", core1::BEATS.load(Ordering::Relaxed)),
            ("core1_foreign", core1::FOREIGN.load(Ordering::Relaxed)),
            ("core1_nmis", core1::NMIS.load(Ordering::Relaxed)),
        ] {
            let _ = write!(out, "\"{key}\":{value},");
        }
        let _ = writeln!(out, "\"contained_dma\":false}}");
    }

    /// The end, and why.
    pub fn stop(&mut self, why: &str) -> ! {
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
            self.core.last().direct
        );
        self.report("stopped", &self.counts.clone(), (0, 0));
        power::off()
    }

    /// The end of a run that has a time (`until=`).
    pub fn look_at_the_clock(&mut self) {
        if self.options.until != 0
            && let Some(hpet) = self.hpet
            && hpet.milliseconds() >= u64::from(self.options.until)
        {
            say!("hv: {} ms are over", self.options.until);
            self.report("time", &self.counts.clone(), (0, 0));
            power::off();
        }
    }
}
