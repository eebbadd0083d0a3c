//! Reports of a run: of windows between two markers, and at the end.

use core::sync::atomic::Ordering;

use bare::processor;

use super::Processor;
use crate::log::{self, say};
use crate::machine::measurement::Account;
use crate::memory::Canary;
use crate::report::{Count, TOTALS};
use crate::{core1, host, io_core, power};

/// Greatest number of windows that are reported.
const WINDOWS_MAX: u32 = 256;

impl Processor {
    pub(super) fn marker(&mut self, marker: u8) {
        match marker {
            1 => self.machine.begin_window(),
            // A line takes 90 ms on a serial line, with interrupts held: the number of reports is
            // bounded.
            2 if self.machine.windows() < WINDOWS_MAX => {
                let account = self.machine.end_window();
                self.report("window", &account);
            }
            _ => {
                if log::traces() {
                    say!("marker {marker}");
                }
            }
        }
    }

    /// Prints a report as a line of JSON.
    pub(super) fn report(&self, what: &str, account: &Account) {
        self.report_because(what, account, "");
    }

    /// Prints a report as a line of JSON, with the reason of the report.
    pub(super) fn report_because(&self, what: &str, account: &Account, why: &str) {
        use core::fmt::Write;
        let mut out = log::Line::begin();
        let now = self.machine.time().unwrap_or_default();
        let _ = write!(
            out,
            "{{\"report\":\"{what}\",\"mode\":\"{}\",\"windows\":{},",
            self.machine.options().mode.name(),
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
            ("watchdog_ms", self.machine.options().watchdog.into()),
            ("tick_ms", self.machine.options().tick.into()),
            ("tick_gap_us", account.gaps.now),
            ("tick_gap_us_max", account.gaps.window),
            ("tick_gap_us_max_total", account.gaps.total),
            ("qemu_spurious", host::HOST_SPURIOUS.load(Ordering::Relaxed)),
            ("core1_beats", core1::BEATS.load(Ordering::Relaxed)),
            (
                "core1_beats_extra",
                core1::BEATS_EXTRA.load(Ordering::Relaxed),
            ),
            ("core1_foreign", core1::FOREIGN.load(Ordering::Relaxed)),
            ("core1_nmis", core1::NMIS.load(Ordering::Relaxed)),
            ("total_pv_served", io_core::SERVED.load(Ordering::Relaxed)),
            ("total_pv_sent", io_core::SENT.load(Ordering::Relaxed)),
            ("total_pv_broken", io_core::BROKEN.load(Ordering::Relaxed)),
        ] {
            let _ = write!(out, "\"{key}\":{value},");
        }
        for (index, (key, _)) in TOTALS.iter().enumerate() {
            let value = self.machine.total_of(index);
            let _ = write!(out, "\"total_{key}\":{value},");
        }
        let cpus = self.machine.processors().len();
        let _ = write!(out, "\"cpus\":{cpus},");
        for index in (0..cpus).filter(|_| cpus > 1) {
            let exits = self.machine.counters(index).read().sum();
            let _ = write!(out, "\"total_exits_cpu{index}\":{exits},");
        }
        let lost = u64::from(!Canary::is_whole());
        let _ = write!(out, "\"canary_lost\":{lost},");
        let contained = self.machine.contains_dma();
        let _ = writeln!(out, "\"contained_dma\":{contained}}}");
    }

    /// Counts the faults that the IOMMU has recorded, and clears them.
    pub(super) fn look_at_dma(&mut self) {
        let counters = self.counters;
        let lost = self.machine.chips().dma_faults(|fault| {
            let count = match fault.is_interrupt() {
                true => Count::IrqBlocked,
                false => Count::DmaFaults,
            };
            counters.add(count, 1);
            if log::traces() {
                say!("dma: {fault}");
            }
        });
        self.counters.add(Count::DmaFaultsLost, lost.into());
    }

    /// Returns whether a millisecond or so has passed since the clock was last read. Reading the
    /// clock is slow: a device register, read three times.
    fn is_look_due(&mut self) -> bool {
        const CYCLES: u64 = 1_000_000;
        let now = processor::cycles();
        let is_due = now.wrapping_sub(self.looked) >= CYCLES;
        if is_due {
            self.looked = now;
        }
        is_due
    }

    /// Ends a run with a time limit (`until=`) once that has passed.
    pub(super) fn look_at_the_clock(&mut self) {
        if self.machine.options().until != 0
            && self.is_look_due()
            && let Some(ms) = self.machine.ms()
            && ms >= u64::from(self.machine.options().until)
            && self.machine.end()
        {
            say!("hv: {} ms are over", self.machine.options().until);
            // A window that the guest did not end: if the guest spins, this is its only report.
            let account = self.machine.end_window();
            self.report("time", &account);
            power::off();
        }
    }
}
