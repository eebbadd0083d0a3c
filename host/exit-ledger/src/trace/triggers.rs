//! Histograms of the ledger, as the text that sets each: data, so that tests can run the joins
//! without a kernel.
//!
//! A join is written so: `v=field` stores a value under the thread; another event that names `$v`
//! finds it or counts nothing. A plain `x=$v` leaves `$v` as it is, and only an expression, such as
//! `$v+common_pid`, unsets it.

use std::ops::Range;

/// A histogram trigger: where it is set, what it does, and of which events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// Directory of the event.
    pub event: String,
    /// The histogram.
    pub text: String,
    /// The condition; empty of all events.
    pub filter: String,
}

impl Trigger {
    /// Creates a trigger of `event`, with the histogram `hist`, for the events that `filter` lets
    /// pass.
    fn new(event: &str, hist: &str, filter: &str) -> Self {
        Self {
            event: event.to_owned(),
            text: format!("hist:{hist}"),
            filter: filter.to_owned(),
        }
    }

    /// Returns the text that sets it.
    pub fn line(&self) -> String {
        if self.filter.is_empty() {
            self.text.clone()
        } else {
            format!("{} if {}", self.text, self.filter)
        }
    }

    /// Returns the text that unsets it: the filter counts, since two histograms of one event may
    /// differ in nothing else.
    pub fn undo(&self) -> String {
        format!("!{}", self.line())
    }
}

/// Names of the synthetic events, which all instances share.
#[derive(Clone, Debug)]
pub struct Names {
    /// An injection, with the exit before it.
    pub injected: String,
    /// An exit for an interrupt that was the host's tick.
    pub ticked: String,
    /// One that was another.
    pub interrupted: String,
}

impl Names {
    /// Returns those of this process.
    pub fn of_process(pid: u32) -> Self {
        Self {
            injected: format!("exitless_{pid}"),
            ticked: format!("exitless_tick_{pid}"),
            interrupted: format!("exitless_irq_{pid}"),
        }
    }

    /// Returns the names.
    pub fn all(&self) -> [&str; 3] {
        [&self.injected, &self.ticked, &self.interrupted]
    }

    /// Returns the events' definitions.
    pub fn definitions(&self) -> [String; 3] {
        [
            format!("{} unsigned int reason; unsigned int vector", self.injected),
            format!("{} unsigned int reason", self.ticked),
            format!("{} unsigned int reason", self.interrupted),
        ]
    }

    /// Returns the directory of a synthetic event.
    pub fn directory(name: &str) -> String {
        format!("events/synthetic/{name}")
    }
}

/// Every exit.
pub const EXITS: &str = "events/kvm/kvm_exit";
/// Ends of interrupts.
pub const EOI: &str = "events/kvm/kvm_eoi";
/// Ends of interrupt that were paravirtual.
pub const PV_EOI: &str = "events/kvm/kvm_pv_eoi";
/// Model-specific registers.
pub const MSRS: &str = "events/kvm/kvm_msr";
/// Page faults of the second level.
pub const PAGE_FAULTS: &str = "events/kvm/kvm_page_fault";
/// Accesses by address; the second on Intel, where KVM takes a doorbell without decoding the
/// instruction.
pub const WRITES: [&str; 2] = ["events/kvm/kvm_mmio", "events/kvm/kvm_fast_mmio"];
const ENTRY: &str = "events/kvm/kvm_entry";
const INJECTIONS: &str = "events/kvm/kvm_inj_virq";
/// Handlers of interrupts, the host's tick first: an exit is the first's of them that runs.
const HANDLERS: [&str; 6] = [
    "irq_vectors/local_timer_entry",
    "irq_vectors/reschedule_entry",
    "irq_vectors/call_function_entry",
    "irq_vectors/call_function_single_entry",
    "irq_vectors/irq_work_entry",
    "irq/irq_handler_entry",
];
/// Exits for a host interrupt: SVM's, VMX's.
const FOR_INTERRUPT: &str = "((isa==2&&exit_reason==96)||(isa==1&&exit_reason==1))";
/// `TRACE_FLAG_IRQS_OFF`.
const INTERRUPTS_OFF: &str = "common_flags&1";

/// Returns the histograms of the threads `tids`.
pub fn triggers(tids: &[i32], names: &Names) -> Vec<Trigger> {
    let threads = of_threads(tids);
    let plain = [
        (EXITS, "isa,exit_reason"),
        (EOI, "vector"),
        (PV_EOI, "vector"),
        (MSRS, "ecx,write"),
    ];
    let mut all: Vec<Trigger> = plain
        .iter()
        .map(|(event, keys)| Trigger::new(event, &format!("keys={keys}:size=2048"), &threads))
        .collect();
    all.extend(injections(&threads, &names.injected));
    all.extend(interrupts(&threads, names));
    all
}

/// Injections by vector and the exit before them: the first after each exit, since an entry that is
/// called off is tried again.
fn injections(threads: &str, name: &str) -> [Trigger; 3] {
    let join = format!(
        "keys=common_pid:r=$er,v=vector,told=$er+common_pid:onmatch(kvm.kvm_exit).trace({name},$r,$v)"
    );
    [
        Trigger::new(EXITS, "keys=common_pid:er=exit_reason", threads),
        Trigger::new(INJECTIONS, &join, threads),
        Trigger::new(&Names::directory(name), "keys=reason,vector:size=2048", ""),
    ]
}

/// Returns triggers that count exits for an interrupt by whether it was the host's tick, in both
/// orders of exit and handler. One trigger each, since it ends where a variable is not set.
fn interrupts(threads: &str, names: &Names) -> Vec<Trigger> {
    let handled = format!("({threads})&&{FOR_INTERRUPT}&&!({INTERRUPTS_OFF})");
    let pending = format!("({threads})&&{FOR_INTERRUPT}&&({INTERRUPTS_OFF})");
    let mut all = vec![
        Trigger::new(ENTRY, "keys=common_pid:fresh=common_pid", threads),
        Trigger::new(EXITS, "keys=common_pid:due=exit_reason", &pending),
    ];
    for (i, handler) in HANDLERS.into_iter().enumerate() {
        let event = format!("events/{handler}");
        let matched = handler.replace('/', ".");
        let name = if i == 0 {
            &names.ticked
        } else {
            &names.interrupted
        };
        let first = format!("keys=common_pid:first{i}=$fresh+common_pid");
        let found = format!(
            "keys=common_pid:found{i}=$first{i}+common_pid:onmatch({matched}).trace({name},exit_reason)"
        );
        let forgotten = format!("keys=common_pid:forgotten{i}=$first{i}+common_pid");
        // An expression has another type than the synthetic event's field: what is traced is a
        // plain copy.
        let came = format!(
            "keys=common_pid:came{i}=$due,spent{i}=$due+common_pid:onmatch(kvm.kvm_exit).trace({name},$came{i})"
        );
        all.extend([
            Trigger::new(&event, &first, threads),
            Trigger::new(EXITS, &found, &handled),
            Trigger::new(ENTRY, &forgotten, threads),
            Trigger::new(&event, &came, threads),
        ]);
    }
    all.push(Trigger::new(
        ENTRY,
        "keys=common_pid:not_due=$due+common_pid",
        threads,
    ));
    for name in [&names.ticked, &names.interrupted] {
        all.push(Trigger::new(
            &Names::directory(name),
            "keys=reason:size=2048",
            "",
        ));
    }
    all
}

/// Returns a trigger that counts page faults of the threads `tids` at addresses in any of `ranges`.
pub fn page_faults(tids: &[i32], ranges: &[Range<u64>]) -> Trigger {
    let inside: Vec<_> = ranges
        .iter()
        .map(|Range { start, end }| format!("(fault_address>={start}&&fault_address<{end})"))
        .collect();
    let filter = format!("({})&&({})", of_threads(tids), inside.join("||"));
    Trigger::new(PAGE_FAULTS, "keys=common_pid:size=2048", &filter)
}

/// Writes of the threads `tids` to `[first, end)` by address: in general, and on Intel, where KVM
/// takes a doorbell without decoding the instruction.
pub fn writes(tids: &[i32], first: u64, end: u64) -> [Trigger; 2] {
    /// `type` of a write in `kvm_mmio`.
    const MMIO_WRITE: u32 = 2;
    let threads = of_threads(tids);
    let range = format!("gpa>={first}&&gpa<{end}");
    let keys = "keys=gpa:size=2048";
    let is_write = format!("({threads})&&{range}&&type=={MMIO_WRITE}");
    let fast = format!("({threads})&&{range}");
    [
        Trigger::new(WRITES[0], keys, &is_write),
        Trigger::new(WRITES[1], keys, &fast),
    ]
}

/// Returns a filter for the events of these threads.
fn of_threads(tids: &[i32]) -> String {
    let threads: Vec<_> = tids
        .iter()
        .map(|tid| format!("common_pid=={tid}"))
        .collect();
    threads.join("||")
}
