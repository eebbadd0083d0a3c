//! What is told of a run: windows between markers, and the end.

use core::sync::atomic::Ordering;

use bare::processor;

use super::Vm;
use crate::log::say;
use crate::measurement::Account;
use crate::memory::Canary;
use crate::report::Count;
use crate::{core1, host, power};

/// Windows of a run that are reported.
const WINDOWS_MAX: u32 = 256;

impl Vm {
    pub(super) fn marker(&mut self, marker: u8) {
        match marker {
            1 => {
                let now = self.chips.time().unwrap_or_default();
                self.measurement.begin(now, processor::cycles());
            }
            // A line takes 90 ms on a serial line, with interrupts held: the guest gets so many.
            2 if self.measurement.windows() < WINDOWS_MAX => {
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
        self.report_because(what, account, "");
    }

    /// A line of JSON, and why there is one.
    pub(super) fn report_because(&self, what: &str, account: &Account, why: &str) {
        use core::fmt::Write;
        let mut out = crate::log::Line::begin();
        let now = self.chips.time().unwrap_or_default();
        let core = self.interrupts.core().counts();
        let _ = write!(
            out,
            "{{\"report\":\"{what}\",\"mode\":\"{}\",\"windows\":{},",
            self.options.mode.name(),
            account.windows
        );
        if !why.is_empty() {
            let _ = write!(out, "\"why\":\"{why}\",");
        }
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
            ("watchdog_ms", self.options.watchdog.into()),
            ("tick_ms", self.options.tick.into()),
            ("tick_gap_us", account.gaps.now),
            ("tick_gap_us_max", account.gaps.window),
            ("tick_gap_us_max_total", account.gaps.total),
            ("total_injected", core.injected),
            ("total_reflected", core.reflected),
            ("total_software", core.software),
            ("total_own_gates", core.own_gates),
            ("total_stolen", core.stolen),
            ("total_forced", core.forced),
            ("total_suspended", core.suspended),
            ("total_returned", core.returned),
            ("total_aliased", u64::from(self.interrupts.core().aliased())),
            ("qemu_spurious", host::HOST_SPURIOUS.load(Ordering::Relaxed)),
            ("core1_beats", core1::BEATS.load(Ordering::Relaxed)),
            (
                "core1_beats_extra",
                core1::BEATS_EXTRA.load(Ordering::Relaxed),
            ),
            ("core1_foreign", core1::FOREIGN.load(Ordering::Relaxed)),
            ("core1_nmis", core1::NMIS.load(Ordering::Relaxed)),
        ] {
            let _ = write!(out, "\"{key}\":{value},");
        }
        let lost = u64::from(!Canary::is_whole());
        let _ = write!(out, "\"canary_lost\":{lost},");
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

    /// The end of a run that has a time (`until=`).
    pub(super) fn look_at_the_clock(&mut self) {
        if self.options.until != 0
            && self.measurement.is_look_due()
            && let Some(ms) = self.chips.ms()
            && ms >= u64::from(self.options.until)
        {
            say!("hv: {} ms are over", self.options.until);
            // A window that the guest did not end: of a guest that spins, that is the account.
            let account = self.measurement.end();
            self.report("time", &account);
            power::off();
        }
    }
}
