//! Rows of histograms, as the kernel prints them, and their counts by name.

use crate::reasons::{ISA_VMX, Kind, MSR_EOI, MSR_INITIAL_COUNT, MSR_TSC_DEADLINE, MSR_X2APIC};
use crate::reasons::{TIMER_VECTOR, Traced, WINDOWS, svm_kind, vmx_kind};

/// Keys and hit count.
pub type Rows = Vec<(Vec<u64>, u64)>;

/// Rows of all histograms.
#[derive(Default)]
pub struct Counts {
    /// `isa`, `exit_reason`.
    pub exits: Rows,
    /// `vector`.
    pub eoi: Rows,
    /// `vector`.
    pub pv_eoi: Rows,
    /// `ecx`, `write`.
    pub msrs: Rows,
    /// `exit_reason`, of exits for the host's tick.
    pub ticks: Rows,
    /// `exit_reason`, of exits for another interrupt.
    pub other_interrupts: Rows,
    /// `exit_reason`, `vector`.
    pub injected: Rows,
}

impl Counts {
    /// Returns the counts by name, from the rows.
    pub fn traced(&self) -> Traced {
        let mut traced = Traced::default();
        for (keys, count) in &self.exits {
            // Other histograms of the same event have one key.
            let [isa, code] = keys[..] else { continue };
            let kind = if isa == ISA_VMX {
                vmx_kind(code)
            } else {
                svm_kind(code)
            };
            *traced.of_kind(kind) += count;
        }
        for (keys, count) in &self.msrs {
            *match keys[0] {
                MSR_TSC_DEADLINE | MSR_INITIAL_COUNT => &mut traced.timer_msrs,
                MSR_EOI => &mut traced.eoi_msrs,
                ecx if MSR_X2APIC.contains(&ecx) => &mut traced.apic_msrs,
                _ => &mut traced.other_msrs,
            } += count;
        }
        (traced.timer_eois, traced.other_eois) = by_vector(&self.eoi);
        (traced.timer_pv_eois, traced.other_pv_eois) = by_vector(&self.pv_eoi);
        traced.ticks = total(&self.ticks);
        traced.other_interrupts = total(&self.other_interrupts);
        for (keys, count) in &self.injected {
            if let [reason, vector] = keys[..]
                && WINDOWS.contains(&reason)
            {
                *if vector == TIMER_VECTOR {
                    &mut traced.timer_windows
                } else {
                    &mut traced.other_windows
                } += count;
            }
        }
        traced
    }
}

impl Traced {
    fn of_kind(&mut self, kind: Kind) -> &mut u64 {
        match kind {
            Kind::Interrupt => &mut self.interrupts,
            Kind::Window => &mut self.windows,
            Kind::Hlt => &mut self.hlts,
            Kind::Pause => &mut self.pauses,
            Kind::Timer => &mut self.timers,
            Kind::Apic => &mut self.apic,
            Kind::PageFault => &mut self.page_faults,
            Kind::Misconfiguration => &mut self.misconfigurations,
            Kind::Io => &mut self.io,
            Kind::Msr => &mut self.msrs,
            Kind::Other => &mut self.others,
        }
    }
}

fn total(rows: &Rows) -> u64 {
    rows.iter().map(|(_, count)| count).sum()
}

/// Returns the counts of the timer's vector, and of all others.
fn by_vector(rows: &Rows) -> (u64, u64) {
    let (timer, others): (Rows, Rows) = rows
        .iter()
        .cloned()
        .partition(|(keys, _)| keys[0] == TIMER_VECTOR);
    (total(&timer), total(&others))
}

/// Returns all that the histogram with this filter has counted, of an event that has several.
pub fn total_under(text: &str, filter: &str) -> u64 {
    const INFO: &str = "# trigger info: ";
    let is_ours = |section: &&str| {
        let info = section.lines().next().unwrap_or_default();
        info.ends_with(&format!(" if {filter} [active]"))
    };
    let sections = text.split(INFO).skip(1);
    sections
        .filter(is_ours)
        .map(|text| total(&parse(text)))
        .sum()
}

/// Rows of a histogram: the key fields' values, in order, and the hit count.
pub fn parse(text: &str) -> Rows {
    text.lines()
        .filter_map(|line| {
            let (keys, rest) = line.strip_prefix('{')?.split_once('}')?;
            let count = rest
                .split_once("hitcount:")?
                .1
                .split_whitespace()
                .next()?
                .parse()
                .ok()?;
            let keys = keys
                .split(',')
                .map(|field| field.split_once(':')?.1.trim().parse().ok())
                .collect::<Option<Vec<u64>>>()?;
            Some((keys, count))
        })
        .collect()
}
