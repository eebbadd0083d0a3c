//! One list of cases for two devices: requests that break the specification's rules, and accesses
//! of single bytes, against the IOMMU of `exitless run` and against QEMU's.
//!
//! `guest/iommu-cases` is a module that runs them in a guest and prints the results; it has no
//! expectations. Those are in `rules`, each with the section that it follows from; `seen` parses
//! the module's lines and compares them with a rule; `qemu` boots a guest of plain QEMU, again
//! after a case in which it hangs.
//!
//! The guest is Debian's 6.1: it does not parse the ACPI table VIOT, so functions need no driver
//! for the IOMMU, and it has none.
//!
//! Left out: configuration fields that a driver must not write; hosts other than QEMU's TCG.

mod case_log;
mod qemu;
mod rules;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::packages::Version;
use serde_json::json;

use super::PviommuLabArgs;
use super::figures::Figures;
use crate::system::guest::{Driver, Guest, Mode};
use crate::system::host::{GuestModule, Host, Kernels};
use crate::system::workloads;
use case_log::{CaseLog, Verdict};
use rules::{RULES, Rule};

/// Name of this row.
pub(super) const NAME: &str = "spec";

/// Kernels of a lab whose guests have the module.
pub const KERNELS: Kernels = Kernels {
    both: None,
    guest: None,
    module: Some(GuestModule::Cases),
};

/// Time limit of one boot and all cases: some wait seconds for an event that must not come.
const LIMIT: Duration = Duration::from_secs(600);

/// Shows the module's lines as it prints them.
const KERNEL_OPTIONS: &str = "loglevel=6";

/// Verdicts on one device, by the names of the cases.
pub struct Verdicts(BTreeMap<&'static str, Verdict>);

impl Verdicts {
    /// Compares the output of a module with the rules.
    ///
    /// # Errors
    /// A case is in one of the lists only: they are of different versions.
    fn of(seen: &CaseLog) -> Result<Self> {
        for name in seen.steps.keys() {
            let is_known = RULES.iter().any(|rule| rule.name == name);
            ensure!(
                is_known,
                "the module ran {name}, for which there is no rule"
            );
        }
        let judged = RULES.iter().map(|rule| {
            let steps = seen.steps.get(rule.name);
            let steps = steps.with_context(|| format!("the module did not run {}", rule.name))?;
            Ok((rule.name, case_log::judge(rule.expected, steps)))
        });
        Ok(Self(judged.collect::<Result<_>>()?))
    }

    fn count(&self, is_one: impl Fn(&Verdict) -> bool) -> usize {
        self.0.values().filter(|verdict| is_one(verdict)).count()
    }

    /// Returns the number of cases that met their rules.
    pub fn passed(&self) -> usize {
        self.count(|verdict| *verdict == Verdict::Passed)
    }

    /// Returns the names of those that did not, in the list's order.
    pub fn failed(&self) -> Vec<&'static str> {
        let rules = RULES.iter().map(|rule| rule.name);
        rules
            .filter(|name| matches!(self.0.get(name), Some(Verdict::Failed(_))))
            .collect()
    }

    /// Returns the number of cases that such a device does not support.
    pub fn not_applicable(&self) -> usize {
        self.count(|verdict| *verdict == Verdict::NotApplicable)
    }

    /// Renders a line for each that did not: name, section, expectation, result.
    pub fn failures(&self) -> String {
        let mut text = String::new();
        for rule in RULES {
            if let Some(Verdict::Failed(seen)) = self.0.get(rule.name) {
                let Rule {
                    name,
                    section,
                    expected,
                    ..
                } = rule;
                let _ = writeln!(text, "  {name} (§{section}): expected {expected}: {seen}");
            }
        }
        text
    }
}

/// Verdicts on both devices.
pub struct Compared {
    /// Verdicts on `exitless run --iommu virtio`.
    pub ours: Verdicts,
    /// Verdicts on QEMU.
    pub qemu: Verdicts,
    /// Version of QEMU.
    pub qemu_version: Version,
}

impl Compared {
    /// Renders a line for each case: the expectation, and the result of either device where it
    /// differs.
    pub fn table(&self) -> String {
        let width = |of: fn(&Rule) -> usize| RULES.iter().map(of).max().unwrap_or(0);
        let names = width(|rule| rule.name.len());
        let expected = width(|rule| rule.expected.len());
        let ours = self.ours.0.values().map(|own| own.to_string().len());
        let own = ours.chain(["ours".len()]).max().unwrap_or(0);
        let mut text = format!(
            "{:<names$}  {:<17}{:<expected$}  {:<own$}  QEMU {}\n",
            "case", "VIRTIO 1.3", "expected", "ours", self.qemu_version
        );
        for rule in RULES {
            let told = |verdicts: &Verdicts| {
                let verdict = verdicts.0.get(rule.name);
                verdict.map_or_else(String::new, ToString::to_string)
            };
            let source = format!("§{} {}", rule.section, rule.level);
            let _ = writeln!(
                text,
                "{:<names$}  {source:<17}{:<expected$}  {:<own$}  {}",
                rule.name,
                rule.expected,
                told(&self.ours),
                told(&self.qemu)
            );
        }
        for (name, verdicts) in [("ours", &self.ours), ("QEMU's", &self.qemu)] {
            let _ = writeln!(
                text,
                "{name}: {} of {} passed, {} not applicable",
                verdicts.passed(),
                RULES.len(),
                verdicts.not_applicable()
            );
        }
        text
    }
}

/// Returns the number of cases.
pub fn cases() -> usize {
    RULES.len()
}

/// Runs the list against both devices, and adds the counts to the figures.
///
/// # Errors
/// A guest that does not boot or does not run the list, except one of QEMU's that hangs in a case;
/// a file of figures that cannot be written.
pub(super) fn measure(args: &PviommuLabArgs, figures: &mut Option<Figures>) -> Result<Compared> {
    eprintln!("pviommu-lab: {NAME}, exitless");
    let host = Host::start_with_kernels(KERNELS)?;
    let ours = ours(&host).context("the list under exitless run")?;
    let figures = match figures {
        Some(figures) => figures,
        None => figures.insert(Figures::new(&host, args.reads)?),
    };
    host.shutdown()?;
    figures.put("spec_cases", json!(cases()));
    figures.put("spec_passed", json!(ours.passed()));
    figures.put("spec_failed", json!(ours.failed()));
    figures.write(&args.report)?;
    eprintln!("pviommu-lab: {NAME}, QEMU's virtio-iommu");
    let (seen, qemu_version) = qemu::run().context("the list under QEMU")?;
    let qemu = Verdicts::of(&seen)?;
    figures.put("qemu_spec_version", json!(qemu_version.to_string()));
    figures.put("qemu_spec_passed", json!(qemu.passed()));
    figures.put("qemu_spec_not_applicable", json!(qemu.not_applicable()));
    figures.put("qemu_spec_failed", json!(qemu.failed()));
    figures.write(&args.report)?;
    Ok(Compared {
        ours,
        qemu,
        qemu_version,
    })
}

/// Runs the list under `exitless run`, on a host whose guests have the module.
///
/// # Errors
/// The guest does not boot, or does not reach the list's end.
pub fn ours(host: &Host) -> Result<Verdicts> {
    let mut guest = Guest::new(Mode::Virtio, "true");
    guest.driver = Driver::Module(&[]);
    guest.kernel_options = KERNEL_OPTIONS.into();
    guest.idle = "adaptive";
    guest.flags.push("--rng".into());
    guest.limit = LIMIT;
    workloads::add_network(&mut guest);
    let outcome = guest.try_run(host)?;
    let seen = CaseLog::of(&outcome.console);
    if let Some((_, name)) = seen.unfinished.as_ref().filter(|_| !seen.is_done) {
        anyhow::bail!("{name} has no end\n{}", outcome.tail());
    }
    ensure!(seen.is_done, "the list was not run\n{}", outcome.tail());
    outcome.check()?;
    Verdicts::of(&seen)
}
