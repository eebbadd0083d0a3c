//! Exit reasons as the kernel's tracepoints count them, where tracefs lets us: histogram triggers in a trace
//! instance of our own (the kernel's `trace/histogram.rst`), on the threads that run vCPUs.
//!
//! KVM's statistics do not say why most exits happened. Three histograms do:
//! `kvm:kvm_exit` by reason, `kvm:kvm_msr` by register (a write to the TSC deadline or the initial count is
//! the guest's timer), and `irq_vectors:local_timer_entry` (a host timer that interrupted a running vCPU).
//! The kernel counts; nothing is recorded event by event. Without tracefs the ledger has the coarser
//! statistics and a larger *unattributed* column.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/kernel/tracing";

const EVENTS: [(&str, &str); 3] = [
    ("events/kvm/kvm_exit", "isa,exit_reason"),
    ("events/kvm/kvm_msr", "ecx,write"),
    ("events/irq_vectors/local_timer_entry", "vector"),
];

/// Why a vCPU left the guest, as far as the hardware's code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A host interrupt, or the window for one of the guest's.
    Interrupt,
    /// `hlt`.
    Hlt,
    /// The guest programmed its timer, or the timer of the host that stands in for it fired.
    Timer,
    /// A spinning `pause`.
    Pause,
    /// Another write to the local APIC: end of interrupt, inter-processor interrupt.
    Apic,
    /// Second-level page fault: a first touch of memory, or MMIO (subtracted by the ledger).
    PageFault,
    /// Port I/O.
    Io,
    /// Anything else: CPUID, other MSRs, control registers, hypercalls.
    Other,
}

/// Counts by reason since the histograms were set up.
pub type Reasons = BTreeMap<Reason, u64>;

/// The histograms; removed when dropped.
#[derive(Debug)]
pub struct ExitHistogram {
    instance: PathBuf,
}

impl ExitHistogram {
    /// Sets the histograms up for the threads `tids`.
    ///
    /// # Errors
    /// No tracefs, no permission, or a kernel without these events.
    pub fn new(tids: &[i32]) -> io::Result<Self> {
        let instance = Path::new(ROOT).join(format!("instances/exitless-{}", std::process::id()));
        fs::create_dir(&instance)?;
        let this = Self { instance };
        let filter = tids
            .iter()
            .map(|tid| format!("common_pid=={tid}"))
            .collect::<Vec<_>>()
            .join("||");
        for (event, keys) in EVENTS {
            fs::write(
                this.instance.join(event).join("trigger"),
                format!("hist:keys={keys}:size=2048 if {filter}"),
            )?;
        }
        Ok(this)
    }

    /// The counts so far.
    pub fn read(&self) -> io::Result<Reasons> {
        let text = |i: usize| fs::read_to_string(self.instance.join(EVENTS[i].0).join("hist"));
        Ok(combine(
            &parse(&text(0)?),
            &parse(&text(1)?),
            &parse(&text(2)?),
        ))
    }
}

impl Drop for ExitHistogram {
    fn drop(&mut self) {
        for (event, keys) in EVENTS {
            // A trigger that was never set, or a kernel that has dropped it: nothing left to undo.
            let _ = fs::write(
                self.instance.join(event).join("trigger"),
                format!("!hist:keys={keys}:size=2048"),
            );
        }
        let _ = fs::remove_dir(&self.instance);
    }
}

/// Rows of a histogram: the key fields' values, in order, and the hit count.
fn parse(text: &str) -> Vec<(Vec<u64>, u64)> {
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

const ISA_VMX: u64 = 1;
const MSR_TSC_DEADLINE: u64 = 0x6e0;
const MSR_X2APIC: std::ops::RangeInclusive<u64> = 0x800..=0x8ff;
const MSR_X2APIC_INITIAL_COUNT: u64 = 0x838;

fn combine(
    exits: &[(Vec<u64>, u64)],
    msrs: &[(Vec<u64>, u64)],
    timers: &[(Vec<u64>, u64)],
) -> Reasons {
    let mut reasons = Reasons::new();
    let mut add = |reason, count| *reasons.entry(reason).or_insert(0) += count;
    let mut msr_exits = 0;
    for (keys, count) in exits {
        let [isa, code] = keys[..] else { continue };
        match if isa == ISA_VMX {
            vmx_reason(code)
        } else {
            svm_reason(code)
        } {
            Some(reason) => add(reason, *count),
            None => msr_exits += count,
        }
    }
    // Which register: of the exits for MSRs, those the other histogram can name.
    let (mut timer, mut apic) = (0, 0);
    for (keys, count) in msrs {
        match keys[0] {
            MSR_TSC_DEADLINE | MSR_X2APIC_INITIAL_COUNT => timer += count,
            ecx if MSR_X2APIC.contains(&ecx) => apic += count,
            _ => {}
        }
    }
    let timer = timer.min(msr_exits);
    let apic = apic.min(msr_exits - timer);
    add(Reason::Timer, timer);
    add(Reason::Apic, apic);
    add(Reason::Other, msr_exits - timer - apic);
    // A host timer that fired on a vCPU thread interrupted the guest (or, rarely, its exit path).
    let fired: u64 = timers.iter().map(|(_, count)| count).sum();
    let interrupts = reasons.entry(Reason::Interrupt).or_insert(0);
    let fired = fired.min(*interrupts);
    *interrupts -= fired;
    *reasons.entry(Reason::Timer).or_insert(0) += fired;
    reasons
}

/// Exit codes of AMD's APM volume 2, appendix C; `None` for MSR accesses.
fn svm_reason(code: u64) -> Option<Reason> {
    Some(match code {
        0x060 | 0x064 => Reason::Interrupt,
        0x077 => Reason::Pause,
        0x078 => Reason::Hlt,
        0x07b => Reason::Io,
        0x07c => return None,
        0x400 => Reason::PageFault,
        0x401 | 0x402 => Reason::Apic,
        _ => Reason::Other,
    })
}

/// Basic exit reasons of Intel's SDM volume 3, appendix C; `None` for MSR accesses.
fn vmx_reason(code: u64) -> Option<Reason> {
    Some(match code {
        1 | 7 => Reason::Interrupt,
        12 => Reason::Hlt,
        30 => Reason::Io,
        31 | 32 => return None,
        40 => Reason::Pause,
        44 | 45 | 56 => Reason::Apic,
        48 | 49 => Reason::PageFault,
        52 => Reason::Timer,
        _ => Reason::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXITS: &str = "# event histogram\n#\n# trigger info: hist:keys=isa,exit_reason:vals=hitcount:sort=hitcount:size=2048 [active]\n#\n\n\
        { isa:          2, exit_reason:        120 } hitcount:         40\n\
        { isa:          2, exit_reason:        124 } hitcount:        100\n\
        { isa:          2, exit_reason:         96 } hitcount:         30\n\
        { isa:          2, exit_reason:       1024 } hitcount:          5\n\n\
        Totals:\n    Hits: 175\n    Entries: 4\n    Dropped: 0\n";
    const MSRS: &str = "{ ecx:       1760, write:          1 } hitcount:         60\n\
        { ecx:       2059, write:          1 } hitcount:         30\n";
    const TIMERS: &str = "{ vector:        236 } hitcount:         12\n";

    #[test]
    fn reasons_add_up_to_the_exits() {
        let reasons = combine(&parse(EXITS), &parse(MSRS), &parse(TIMERS));
        assert_eq!(reasons[&Reason::Hlt], 40);
        assert_eq!(reasons[&Reason::Timer], 60 + 12);
        assert_eq!(reasons[&Reason::Apic], 30);
        assert_eq!(reasons[&Reason::Other], 10);
        assert_eq!(reasons[&Reason::Interrupt], 30 - 12);
        assert_eq!(reasons[&Reason::PageFault], 5);
        assert_eq!(reasons.values().sum::<u64>(), 175);
    }

    #[test]
    fn what_is_no_row_is_no_count() {
        assert!(parse("{ broken\n{ a: x } hitcount: 3\nTotals:\n").is_empty());
    }
}
