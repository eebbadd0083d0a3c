//! The table, the bands, and one JSON object.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use report::{Host, Object};

use super::machine::{KINDS, Machine};
use super::modes::{Figures as Reads, Mode};

/// Ticks per 1,000 reads above which a run shows the machine's load and not its mode, so that its
/// bands do not apply.
const TICKS_MAX: f64 = 60.0;

/// Figures found, and claims that failed.
pub struct Figures {
    object: Object,
    tables: String,
    failed: Vec<String>,
    passed: u32,
}

impl Figures {
    /// Creates the figures, with the conditions.
    pub fn new(machine: &Machine) -> Self {
        let mode = "exitless-hv on an emulated AMD machine (QEMU TCG): counts only, no times";
        let mut object = Object::new(&Host::read(), mode);
        object.value("guest_kernel", machine.kernel());
        object.value("qemu", machine.qemu().to_string());
        Self {
            object,
            tables: String::new(),
            failed: Vec::new(),
            passed: 0,
        }
    }

    /// Sets a figure.
    pub fn set(&mut self, key: &str, value: f64) {
        self.object.number(key, value);
    }

    /// Returns a figure that was set.
    pub fn get(&self, key: &str) -> Option<f64> {
        self.object.get(key)
    }

    /// Prints a line for a reader.
    pub fn say(&mut self, line: &str) {
        println!("{line}");
        self.tables.push_str(line);
        self.tables.push('\n');
    }

    /// Checks a claim.
    pub fn claim(&mut self, what: &str, holds: bool) {
        if holds {
            self.passed += 1;
        } else {
            self.failed.push(what.to_owned());
            println!("FAILED {what}");
        }
    }

    /// Checks a claim that has a reason.
    pub fn claim_ok<T>(&mut self, what: &str, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.passed += 1;
                Some(value)
            }
            Err(error) => {
                self.failed.push(what.to_owned());
                println!("FAILED {what}: {error:#}");
                None
            }
        }
    }

    /// Reports one kernel's modes: the thesis's Table 3.1 and Figure 3.3 as one.
    pub fn modes(&mut self, kernel: &str, suffix: &str, runs: &[Reads]) {
        let mut text = format!(
            "\nexits per 1,000 interrupts of the assigned NVMe controller, Linux {kernel}\n"
        );
        let _ = write!(text, "  {:<12}", "");
        runs.iter().for_each(|run| {
            let _ = write!(text, "{:>12}", run.mode.option());
        });
        let row = |text: &mut String, name: &str, of: &dyn Fn(&Reads) -> f64, digits: usize| {
            let values: Vec<f64> = runs.iter().map(of).collect();
            if digits > 1 || values.iter().any(|value| *value != 0.0) {
                let _ = write!(text, "\n  {name:<12}");
                values.iter().for_each(|value| {
                    let _ = write!(text, "{value:>12.*}", digits.min(2));
                });
            }
        };
        for kind in KINDS {
            row(
                &mut text,
                kind,
                &|run| run.device_exits(kind) as f64 * 1000.0 / run.reads as f64,
                1,
            );
        }
        row(
            &mut text,
            "other",
            &|run| run.guest.saturating_sub(1) as f64 * 1000.0 / run.reads as f64,
            1,
        );
        row(&mut text, "all", &Reads::exits_per_1000, 2);
        text.push_str("\n  apart from these:");
        row(&mut text, "timer ticks", &Reads::ticks_per_1000, 1);
        row(
            &mut text,
            "  exits",
            &|run| run.timer as f64 * 1000.0 / run.reads as f64,
            1,
        );
        row(
            &mut text,
            "watchdog/s",
            &|run| run.watchdog as f64 * 1000.0 / run.ms.max(1) as f64,
            1,
        );
        row(&mut text, "in ms", &|run| run.ms as f64, 1);
        row(&mut text, "% in guest *", &|run| run.in_guest * 100.0, 1);
        text.push_str("\n  * emulated: what an exit costs is what it costs the emulator");
        self.say(&text);
        for run in runs {
            self.mode(suffix, run);
        }
    }

    /// Compares runs of a mode with other runs of it, made at the same time: their medians may
    /// differ by 5 % or 2 per 1,000, or by the spread of those others. Returns the median runs.
    ///
    /// In mode `eli` each remaining exit coincides with a tick or not, by the phase of the two, and
    /// an emulator's phases are its host's: the runs of one kind differ by more than 5 %.
    pub fn compare(
        &mut self,
        (name, with): (&str, &[Reads]),
        (other, without): (&str, &[Reads]),
    ) -> Option<[Reads; 2]> {
        let (run, beside) = (median(with)?, median(without)?);
        let [found, wanted] = [run, beside].map(Reads::exits_per_1000);
        let all = || without.iter().map(Reads::exits_per_1000);
        let spread = all().fold(f64::MIN, f64::max) - all().fold(f64::MAX, f64::min);
        let most = (wanted * 0.05).max(2.0).max(spread);
        let key = run.mode.key();
        self.set(
            &format!("exits_per_1000_{key}{other}_spread"),
            round(spread),
        );
        let line = format!(
            "exits per 1,000 in mode {}: {found:.2} {name}, {wanted:.2} {other}, which are \
             {spread:.2} apart by themselves",
            run.mode.option()
        );
        self.say(&format!("  {line}"));
        self.claim(&line, (found - wanted).abs() <= most);
        Some([run.clone(), beside.clone()])
    }

    fn mode(&mut self, suffix: &str, run: &Reads) {
        let key = run.mode.key();
        let per_1000 = run.exits_per_1000();
        self.set(&format!("exits_per_1000_{key}{suffix}"), round(per_1000));
        self.set(
            &format!("device_exits_per_1000_{key}{suffix}"),
            round(run.device_exits_per_1000()),
        );
        if suffix.is_empty() {
            // Beside the figures of two processors.
            self.set(&format!("exits_per_1000_{key}_1cpu"), round(per_1000));
        }
        self.set(&format!("reads_verified_{key}{suffix}"), run.reads as f64);
        self.set(
            &format!("emulated_in_guest_percent_{key}{suffix}"),
            round(run.in_guest * 100.0),
        );
        self.set(
            &format!("ticks_per_1000_{key}{suffix}"),
            round(run.ticks_per_1000()),
        );
        self.set(
            &format!("timer_exits_per_s_{key}{suffix}"),
            per_second(run.timer, run.ms),
        );
        self.set(
            &format!("watchdog_exits_per_s_{key}{suffix}"),
            per_second(run.watchdog, run.ms),
        );
        if run.mode == Mode::Eli {
            self.set(
                &format!("timer_exits_per_s{suffix}"),
                per_second(run.timer, run.ms),
            );
            self.set(
                &format!("watchdog_exits_per_s{suffix}"),
                per_second(run.watchdog, run.ms),
            );
        }
        for (sum, value) in [
            ("direct_mode_device_exits", run.direct_exits),
            ("interrupts_lost_or_double", run.lost_or_double),
        ] {
            let key = format!("{sum}{suffix}");
            let before = self.object.get(&key).unwrap_or(0.0);
            self.set(&key, before + value as f64);
            let name = format!("{sum} is 0 in mode {}{suffix}: {value}", run.mode.option());
            self.claim(&name, value == 0);
        }
        let binds = run.ticks_per_1000() < TICKS_MAX;
        let mut band = |what: &str, found: f64, least: f64, most: f64, binds: bool| {
            let line = format!(
                "{what} in mode {}{suffix}: {found:.2}, {least} to {most}",
                run.mode.option()
            );
            if binds {
                self.claim(&line, (least..=most).contains(&found));
            } else {
                self.say(&format!(
                    "  not binding, with {:.0} ticks per 1,000 reads: {line}",
                    run.ticks_per_1000()
                ));
            }
        };
        // Messages between two processors of the guest are no exits of the device.
        let per_1000 = if run.cpus == 1 {
            per_1000
        } else {
            run.device_exits_per_1000()
        };
        let both = (run.device_exits("intr") + run.device_exits("eoi")) as f64 / run.reads as f64;
        match run.mode {
            Mode::Baseline => band("INTR and EOI exits per interrupt", both, 1.9, 2.05, true),
            Mode::Delivery => band("exits per 1,000", per_1000, 0.0, 1300.0, binds),
            Mode::Eli => band("exits per 1,000", per_1000, 0.0, 120.0, binds),
            Mode::EliTimer => band("exits per 1,000", per_1000, 0.0, 2.0, binds),
            // No device is assigned in these modes (`polling`).
            Mode::Elvis | Mode::Poll => {}
        }
        if run.mode == Mode::Eli {
            let catches = run.caught as f64 / run.ticks.max(1) as f64;
            band("catches per tick", catches, 0.0, 1.0, true);
            self.set(
                &format!("injection_catches_per_host_tick{suffix}"),
                round(catches),
            );
        }
        if run.mode == Mode::Baseline {
            self.set(
                &format!("baseline_exits_per_device_interrupt{suffix}"),
                round(both),
            );
        }
        // The emulated machine's clock is the host's: a watchdog of 20 ms gives 50 a second, at
        // each of the guest's processors.
        let watchdog = round(per_second(run.watchdog, run.ms) / f64::from(run.cpus));
        let line = format!(
            "watchdog exits per second in mode {}{suffix}: {watchdog}, at most 60",
            run.mode.option()
        );
        self.claim(&line, watchdog <= 60.0 || run.ms < 200);
    }

    /// Writes the object, prints the closing line, and returns the status.
    pub fn end(&mut self, path: &Path, wall: Duration) -> Result<u8> {
        self.set("wall_s", wall.as_secs_f64().round());
        self.object.value("failed", self.failed.clone());
        self.object
            .write(path)
            .with_context(|| format!("writing {}", path.display()))?;
        println!("\nfigures: {}", path.display());
        println!("{} passed, {} failed", self.passed, self.failed.len());
        Ok(u8::from(!self.failed.is_empty()))
    }
}

/// Returns the run in the middle by its exits.
fn median(runs: &[Reads]) -> Option<&Reads> {
    let mut sorted: Vec<_> = runs.iter().collect();
    sorted.sort_by(|a, b| a.exits_per_1000().total_cmp(&b.exits_per_1000()));
    sorted.get(runs.len() / 2).copied()
}

/// Rounds to two decimals.
pub fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn per_second(count: u64, ms: u64) -> f64 {
    round(count as f64 * 1000.0 / ms.max(1) as f64)
}
