//! Exit reasons as the kernel's tracepoints count them, where tracefs lets us: histogram triggers in a trace
//! instance of our own (the kernel's `trace/histogram.rst`), on the threads that run vCPUs.
//!
//! KVM's statistics do not say why most exits happened. Four histograms do:
//! * `kvm:kvm_exit` by reason;
//! * `kvm:kvm_eoi` and `kvm:kvm_pv_eoi` by vector: an end of interrupt that was not paravirtual is an exit, and
//!   one of the guest's timer vector is the timer's;
//! * `kvm:kvm_msr` by register: a write to the TSC deadline or the initial count is the guest's timer;
//! * which vector was injected after which exit, joined by the kernel from `kvm_exit` and `kvm_inj_virq` into a
//!   synthetic event: an interrupt window that ended in the timer's injection is the timer's;
//! * `irq_vectors:local_timer_entry`: a host timer that interrupted a running vCPU;
//! * on request, `kvm:kvm_mmio` and `kvm:kvm_fast_mmio` by address, in the PCI window: doorbells that another process
//!   reads, which are exits all the same.
//!
//! The kernel counts; nothing is recorded event by event. Without tracefs the ledger has the coarser
//! statistics and a larger *unattributed* column.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/kernel/tracing";

/// Vector of the local APIC timer in Linux guests (`LOCAL_TIMER_VECTOR`). Another guest's timer interrupts are
/// counted as interrupt delivery.
const TIMER_VECTOR: u64 = 0xec;

/// One histogram: event directory, keys.
type Histogram = (&'static str, &'static str);

const EXITS: Histogram = ("events/kvm/kvm_exit", "isa,exit_reason");
const EOI: Histogram = ("events/kvm/kvm_eoi", "vector");
const PV_EOI: Histogram = ("events/kvm/kvm_pv_eoi", "vector");
const MSRS: Histogram = ("events/kvm/kvm_msr", "ecx,write");
const TIMERS: Histogram = ("events/irq_vectors/local_timer_entry", "vector");
const MMIO: Histogram = ("events/kvm/kvm_mmio", "gpa");
/// On Intel, where KVM takes a doorbell without decoding the instruction.
const FAST_MMIO: Histogram = ("events/kvm/kvm_fast_mmio", "gpa");
/// The interrupts that are injected.
const INJECTIONS: &str = "events/kvm/kvm_inj_virq";
/// `type` of a write in `kvm_mmio`.
const MMIO_WRITE: u32 = 2;

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
    /// Name of the synthetic event.
    injected: String,
    /// Triggers that were set, to be unset: event directory and text.
    triggers: Vec<(String, String)>,
    /// Those that count writes by address.
    mmio: Vec<&'static str>,
}

impl ExitHistogram {
    /// Sets the histograms up for the threads `tids`. What processes that were killed have left of theirs is removed first: it would
    /// keep the tracepoints on for the whole host.
    ///
    /// # Errors
    /// No tracefs, no permission, or a kernel without these events.
    pub fn new(tids: &[i32]) -> io::Result<Self> {
        let pid = std::process::id();
        remove_leftovers(pid);
        let (instance, injected) = (instance_of(pid), injected_of(pid));
        fs::create_dir(&instance)?;
        let mut this = Self {
            instance,
            injected,
            triggers: Vec::new(),
            mmio: Vec::new(),
        };
        let filter = of_threads(tids);
        for (event, keys) in [EXITS, EOI, PV_EOI, MSRS, TIMERS] {
            this.trigger(event, &format!("hist:keys={keys}:size=2048"), &filter)?;
        }
        this.join_injections(&filter)?;
        Ok(this)
    }

    /// Counts writes to `[first, end)` by address, too. An event this kernel lacks counts nothing.
    ///
    /// # Errors
    /// The kernel lacks both.
    pub fn count_writes(&mut self, tids: &[i32], first: u64, end: u64) -> io::Result<()> {
        let threads = of_threads(tids);
        let range = format!("gpa>={first}&&gpa<{end}");
        let filters = [
            (MMIO, format!("({threads})&&{range}&&type=={MMIO_WRITE}")),
            (FAST_MMIO, format!("({threads})&&{range}")),
        ];
        let mut outcome = Ok(());
        for ((event, keys), filter) in filters {
            match self.trigger(event, &format!("hist:keys={keys}:size=2048"), &filter) {
                Ok(()) => self.mmio.push(event),
                Err(error) => outcome = Err(error),
            }
        }
        if self.mmio.is_empty() {
            outcome
        } else {
            Ok(())
        }
    }

    /// Addresses written, and how often; see [`count_writes`](Self::count_writes).
    pub fn writes(&self) -> io::Result<Vec<(u64, u64)>> {
        let mut writes = Vec::new();
        for event in &self.mmio {
            let text = fs::read_to_string(self.instance.join(event).join("hist"))?;
            writes.extend(
                parse(&text)
                    .into_iter()
                    .map(|(keys, count)| (keys[0], count)),
            );
        }
        Ok(writes)
    }

    /// Injections by vector and the exit before them.
    fn join_injections(&mut self, filter: &str) -> io::Result<()> {
        let name = self.injected.clone();
        let define = format!("{name} unsigned int reason; unsigned int vector");
        append(&Path::new(ROOT).join("synthetic_events"), &define)?;
        self.trigger(EXITS.0, "hist:keys=common_pid:er=exit_reason", filter)?;
        let join = format!(
            "hist:keys=common_pid:r=$er,v=vector:onmatch(kvm.kvm_exit).trace({name},$r,$v)"
        );
        self.trigger(INJECTIONS, &join, filter)?;
        self.trigger(
            &format!("events/synthetic/{name}"),
            "hist:keys=reason,vector:size=2048",
            "",
        )
    }

    fn trigger(&mut self, event: &str, text: &str, filter: &str) -> io::Result<()> {
        let condition = if filter.is_empty() {
            String::new()
        } else {
            format!(" if {filter}")
        };
        append(
            &self.instance.join(event).join("trigger"),
            &format!("{text}{condition}"),
        )?;
        self.triggers.push((event.to_owned(), text.to_owned()));
        Ok(())
    }

    /// The counts so far.
    pub fn read(&self) -> io::Result<Reasons> {
        let rows = |event: &str| {
            let path = self.instance.join(event).join("hist");
            fs::read_to_string(path).map(|text| parse(&text))
        };
        Ok(combine(&Counts {
            exits: rows(EXITS.0)?,
            eoi: rows(EOI.0)?,
            pv_eoi: rows(PV_EOI.0)?,
            msrs: rows(MSRS.0)?,
            timers: rows(TIMERS.0)?,
            injected: rows(&format!("events/synthetic/{}", self.injected))?,
        }))
    }
}

impl Drop for ExitHistogram {
    fn drop(&mut self) {
        // In reverse: the join uses the variable of the trigger before it. What the kernel has already
        // dropped leaves nothing to undo.
        for (event, text) in self.triggers.iter().rev() {
            let _ = append(
                &self.instance.join(event).join("trigger"),
                &format!("!{text}"),
            );
        }
        let _ = fs::remove_dir(&self.instance);
        let _ = append(
            &Path::new(ROOT).join("synthetic_events"),
            &format!("!{}", self.injected),
        );
    }
}

fn instance_of(pid: u32) -> PathBuf {
    Path::new(ROOT).join(format!("instances/exitless-{pid}"))
}

fn injected_of(pid: u32) -> String {
    format!("exitless_{pid}")
}

/// The processes, in order, of which instances or synthetic events stand among `names` and that are not alive.
fn leftovers<'a>(
    names: impl IntoIterator<Item = &'a str>,
    is_alive: impl Fn(u32) -> bool,
) -> Vec<u32> {
    let pids = names.into_iter().filter_map(|name| {
        let pid = name.strip_prefix("exitless")?.strip_prefix(['-', '_'])?;
        pid.parse::<u32>().ok()
    });
    let mut dead: Vec<u32> = pids.filter(|pid| !is_alive(*pid)).collect();
    dead.sort_unstable();
    dead.dedup();
    dead
}

/// Removes what a process that ended without dropping its [`ExitHistogram`] has left, `own` included, whose number may have been
/// another's before. What cannot be removed stays.
///
/// A process of another PID namespace that shares this tracefs counts as dead: its ledger becomes coarser.
fn remove_leftovers(own: u32) {
    let entries = fs::read_dir(Path::new(ROOT).join("instances"));
    let entries = entries.into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let defined = fs::read_to_string(Path::new(ROOT).join("synthetic_events")).unwrap_or_default();
    let defined = defined
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    names.extend(defined.map(str::to_owned));
    let is_alive = |pid: u32| pid != own && Path::new("/proc").join(pid.to_string()).exists();
    for pid in leftovers(names.iter().map(String::as_str), is_alive) {
        let (instance, injected) = (instance_of(pid), injected_of(pid));
        // The join before the trigger whose variable it uses.
        let joined = [format!("events/synthetic/{injected}"), INJECTIONS.into()];
        let counted = [EXITS, EOI, PV_EOI, MSRS, TIMERS, MMIO, FAST_MMIO];
        let counted = counted.map(|(event, _)| event.to_owned());
        for event in joined.iter().chain(&counted) {
            // All of an instance that is nobody's: opening for truncation removes its triggers.
            let trigger = instance.join(event).join("trigger");
            let _ = fs::File::options().write(true).truncate(true).open(trigger);
        }
        let _ = fs::remove_dir(&instance);
        let _ = append(
            &Path::new(ROOT).join("synthetic_events"),
            &format!("!{injected}"),
        );
    }
}

/// What is true of these threads' events.
fn of_threads(tids: &[i32]) -> String {
    let threads: Vec<_> = tids
        .iter()
        .map(|tid| format!("common_pid=={tid}"))
        .collect();
    threads.join("||")
}

/// Adds a line to a control file; truncating one would remove what others have set.
fn append(path: &Path, line: &str) -> io::Result<()> {
    use std::io::Write;
    let mut file = fs::File::options().append(true).open(path)?;
    file.write_all(line.as_bytes())
}

/// Rows of all histograms.
#[derive(Default)]
struct Counts {
    exits: Rows,
    eoi: Rows,
    pv_eoi: Rows,
    msrs: Rows,
    timers: Rows,
    injected: Rows,
}

/// Keys and hit count.
type Rows = Vec<(Vec<u64>, u64)>;

fn count_of(rows: &Rows, key: u64) -> u64 {
    rows.iter()
        .filter(|(keys, _)| keys[0] == key)
        .map(|(_, count)| count)
        .sum()
}

/// Rows of a histogram: the key fields' values, in order, and the hit count.
fn parse(text: &str) -> Rows {
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
/// Exit reasons of an interrupt window: SVM's virtual interrupt, VMX's window.
const WINDOWS: [u64; 2] = [0x64, 7];

fn combine(counts: &Counts) -> Reasons {
    let mut reasons = Reasons::new();
    let mut add = |reason, count| *reasons.entry(reason).or_insert(0) += count;
    let mut msr_exits = 0;
    for (keys, count) in &counts.exits {
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
    // Which register: of the exits for MSRs, those the other histograms can name.
    let (mut timer, mut apic) = (0, 0);
    for (keys, count) in &counts.msrs {
        match keys[0] {
            MSR_TSC_DEADLINE | MSR_X2APIC_INITIAL_COUNT => timer += count,
            ecx if MSR_X2APIC.contains(&ecx) => apic += count,
            _ => {}
        }
    }
    // Of the ends of interrupt that were written to the APIC, those of the timer's vector.
    let eoi = count_of(&counts.eoi, TIMER_VECTOR)
        .saturating_sub(count_of(&counts.pv_eoi, TIMER_VECTOR))
        .min(apic);
    let (timer, apic) = (timer + eoi, apic - eoi);
    let timer = timer.min(msr_exits);
    let apic = apic.min(msr_exits - timer);
    add(Reason::Timer, timer);
    add(Reason::Apic, apic);
    add(Reason::Other, msr_exits - timer - apic);
    // A host timer that fired on a vCPU thread interrupted the guest (or, rarely, its exit path); a window
    // that ended in the timer's injection was opened for it.
    let fired: u64 = counts.timers.iter().map(|(_, count)| count).sum();
    let windows: u64 = counts
        .injected
        .iter()
        .filter(|(keys, _)| {
            matches!(keys[..], [reason, vector]
                if WINDOWS.contains(&reason) && vector == TIMER_VECTOR)
        })
        .map(|(_, count)| count)
        .sum();
    let interrupts = reasons.entry(Reason::Interrupt).or_insert(0);
    let timers = (fired + windows).min(*interrupts);
    *interrupts -= timers;
    *reasons.entry(Reason::Timer).or_insert(0) += timers;
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
mod tests;
