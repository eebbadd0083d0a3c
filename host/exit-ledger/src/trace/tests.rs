use super::*;
use crate::reasons::{Reason, combine};
use kernel::{Event, Kernel};

mod kernel;

const EXITS: &str = "# event histogram\n#\n\
     # trigger info: hist:keys=isa,exit_reason:vals=hitcount:sort=hitcount:size=2048 [active]\n#\n\
     \n\
        { isa:          2, exit_reason:        120 } hitcount:         40\n\
        { isa:          2, exit_reason:        124 } hitcount:        100\n\
        { isa:          2, exit_reason:         96 } hitcount:         21\n\
        { isa:          2, exit_reason:        100 } hitcount:          9\n\
        { isa:          2, exit_reason:       1024 } hitcount:          5\n\n\
        Totals:\n    Hits: 175\n    Entries: 5\n    Dropped: 0\n";
const MSRS: &str = "{ ecx:       1760, write:          1 } hitcount:         60\n\
        { ecx:       2059, write:          1 } hitcount:         30\n\
        { ecx:        372, write:          0 } hitcount:         10\n";
const TICKS: &str = "{ reason:         96 } hitcount:         12\n";

/// Readings of all histograms, which agree.
fn counts() -> Counts {
    Counts {
        exits: parse(EXITS),
        msrs: parse(MSRS),
        ticks: parse(TICKS),
        other_interrupts: vec![(vec![96], 8)],
        eoi: vec![(vec![236], 20), (vec![35], 55)],
        pv_eoi: vec![(vec![236], 15), (vec![35], 30)],
        injected: vec![
            (vec![0x64, 236], 4),
            (vec![0x64, 35], 5),
            (vec![0x60, 236], 7),
        ],
    }
}

#[test]
fn reasons_add_up_to_the_exits() {
    let split = combine(&counts().traced());
    assert_eq!(split.of(Reason::Hlt), 40);
    // Deadline writes, five ends of interrupt, twelve host timers, four windows.
    assert_eq!(split.of(Reason::Timer), 60 + 5 + 12 + 4);
    assert_eq!(split.of(Reason::Apic), 30 - 5);
    assert_eq!(split.of(Reason::Other), 10);
    assert_eq!(split.of(Reason::Interrupt), 30 - 12 - 4);
    assert_eq!(split.of(Reason::PageFault), 5);
    assert_eq!((split.of(Reason::Unnamed), split.overlap), (0, 0));
    assert_eq!(split.reasons.values().sum::<u64>(), 175);
}

#[test]
fn more_ticks_than_interrupt_exits_are_reported_as_overlap() {
    let mut counts = counts();
    counts.ticks = vec![(vec![96], 21 + 6)];
    counts.other_interrupts.clear();
    let split = combine(&counts.traced());
    assert_eq!(split.overlap, 6);
    // Windows are exits of another kind: what is left of them makes up for nothing.
    assert_eq!(split.of(Reason::Interrupt), 9 - 4);
    assert_eq!(split.of(Reason::Timer), 60 + 5 + 27 + 4);
    assert_eq!(split.reasons.values().sum::<u64>(), 175 + split.overlap);
}

#[test]
fn an_msr_that_no_tracepoint_named_is_not_the_processors() {
    let mut counts = counts();
    counts.msrs.pop();
    let split = combine(&counts.traced());
    assert_eq!(
        (split.of(Reason::Other), split.of(Reason::Unnamed)),
        (0, 10)
    );
}

#[test]
fn writes_are_rows_by_address() {
    let text = "{ gpa:  3221237760 } hitcount:          7\n";
    assert_eq!(parse(text), [(vec![0xc000_3000], 7)]);
}

#[test]
fn malformed_rows_are_not_counted() {
    assert!(parse("{ broken\n{ a: x } hitcount: 3\nTotals:\n").is_empty());
    let split = combine(&Counts::default().traced());
    assert_eq!((split.reasons.values().sum::<u64>(), split.overlap), (0, 0));
}

#[test]
fn histograms_of_one_event_are_told_apart_by_their_filters() {
    let text = "# event histogram\n#\n\
         # trigger info: hist:keys=common_pid:vals=hitcount:sort=hitcount:size=2048 if \
         (common_pid==7)&&((fault_address>=0&&fault_address<4096)) [active]\n#\n\n\
        { common_pid:          7 } hitcount:       3586\n\nTotals:\n    Hits: 3586\n\n\n\
        # event histogram\n#\n\
        # trigger info: hist:keys=common_pid:vals=hitcount:sort=hitcount:size=2048 if \
        (common_pid==7)&&((fault_address>=8192&&fault_address<12288)) [active]\n#\n\n\
        { common_pid:          7 } hitcount:       2202\n\nTotals:\n    Hits: 2202\n";
    let [low, high] = [0..4096, 8192..12288].map(|range| triggers::page_faults(&[7], &[range]));
    assert_eq!(total_under(text, &low.filter), 3586);
    assert_eq!(total_under(text, &high.filter), 2202);
    assert_eq!(total_under(text, "common_pid==7"), 0);
}

const VCPU: u64 = 7;

/// An event on a vCPU's thread.
fn event(name: &str, fields: &[(&str, u64)]) -> Event {
    let pid = [("common_pid", VCPU)];
    let fields = fields.iter().chain(&pid);
    Event {
        event: format!("events/{name}"),
        fields: fields
            .map(|(name, value)| ((*name).into(), *value))
            .collect(),
    }
}

/// Whether `kvm_exit` comes before the handler of the interrupt that it was for.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Linux 6.1 on AMD.
    HandlerFirst,
    /// Linux 6.12, and Intel.
    ExitFirst,
}

/// A thread that runs a vCPU.
struct Thread {
    order: Order,
    kernel: Kernel,
    names: Names,
}

impl Thread {
    fn new(order: Order) -> Self {
        let names = Names::of_process(1);
        let triggers = triggers::triggers(&[VCPU as i32], &names);
        let kernel = Kernel::new(&names.definitions(), &triggers);
        Self {
            order,
            kernel,
            names,
        }
    }

    /// Enters, and leaves for `reason` of SVM's; with the handlers that then run, in the order in
    /// which they do.
    fn exit(&mut self, reason: u64, handlers: &[&str]) {
        const INTERRUPTS_OFF: u64 = 1;
        let flags = match self.order {
            Order::HandlerFirst => 0,
            Order::ExitFirst => INTERRUPTS_OFF,
        };
        let exit = event(
            "kvm/kvm_exit",
            &[("isa", 2), ("exit_reason", reason), ("common_flags", flags)],
        );
        self.kernel.happen(&event("kvm/kvm_entry", &[]));
        match self.order {
            Order::HandlerFirst => {
                self.host(handlers);
                self.kernel.happen(&exit);
            }
            Order::ExitFirst => {
                self.kernel.happen(&exit);
                self.host(handlers);
            }
        }
    }

    /// Handlers of interrupts run.
    fn host(&mut self, handlers: &[&str]) {
        for handler in handlers {
            self.kernel.happen(&event(handler, &[("vector", 236)]));
        }
    }

    /// Injects `vector`.
    fn inject(&mut self, vector: u64) {
        self.kernel
            .happen(&event("kvm/kvm_inj_virq", &[("vector", vector)]));
    }

    fn traced(&self) -> Traced {
        let rows = |event: &str| self.kernel.rows(event);
        let counts = Counts {
            exits: rows(triggers::EXITS),
            ticks: rows(&Names::directory(&self.names.ticked)),
            other_interrupts: rows(&Names::directory(&self.names.interrupted)),
            injected: rows(&Names::directory(&self.names.injected)),
            ..Counts::default()
        };
        counts.traced()
    }
}

const INTERRUPT: u64 = 96;
const WINDOW: u64 = 100;
const HLT: u64 = 120;
const TICK: &str = "irq_vectors/local_timer_entry";
const RESCHEDULE: &str = "irq_vectors/reschedule_entry";
const ORDERS: [Order; 2] = [Order::HandlerFirst, Order::ExitFirst];

#[test]
fn an_exit_is_the_first_handlers() {
    for order in ORDERS {
        let mut thread = Thread::new(order);
        thread.exit(INTERRUPT, &[TICK]);
        thread.exit(INTERRUPT, &[TICK, RESCHEDULE]);
        thread.exit(INTERRUPT, &[RESCHEDULE, TICK]);
        thread.exit(INTERRUPT, &[]);
        let traced = thread.traced();
        assert_eq!(traced.interrupts, 4, "{order:?}");
        assert_eq!((traced.ticks, traced.other_interrupts), (2, 1), "{order:?}");
    }
}

#[test]
fn a_tick_in_host_code_is_no_exit() {
    for order in ORDERS {
        let mut thread = Thread::new(order);
        for before in [
            (HLT, vec![]),
            (INTERRUPT, vec![RESCHEDULE]),
            (INTERRUPT, vec!["irq/irq_handler_entry"]),
        ] {
            thread.exit(before.0, &before.1);
            thread.host(&[TICK, TICK]);
        }
        // The entry forgets them: nor do they count for the next exit.
        thread.exit(INTERRUPT, &[RESCHEDULE]);
        let traced = thread.traced();
        assert_eq!((traced.interrupts, traced.ticks), (3, 0), "{order:?}");
        assert_eq!(traced.other_interrupts, 3, "{order:?}");
    }
}

#[test]
fn a_tick_that_came_with_an_exit_for_something_else_took_none() {
    for order in ORDERS {
        let mut thread = Thread::new(order);
        thread.exit(HLT, &[TICK]);
        thread.exit(INTERRUPT, &[RESCHEDULE]);
        assert_eq!(thread.traced().ticks, 0, "{order:?}");
    }
}

#[test]
fn an_exit_for_one_tick_is_not_counted_for_two() {
    for order in ORDERS {
        let mut thread = Thread::new(order);
        thread.exit(INTERRUPT, &[TICK]);
        thread.host(&[TICK]);
        assert_eq!(thread.traced().ticks, 1, "{order:?}");
    }
}

#[test]
fn a_window_that_ended_in_the_timers_injection_is_the_timers() {
    let mut thread = Thread::new(Order::ExitFirst);
    for vector in [236, 35] {
        thread.exit(WINDOW, &[]);
        thread.inject(vector);
    }
    thread.exit(INTERRUPT, &[RESCHEDULE]);
    thread.inject(236);
    let traced = thread.traced();
    assert_eq!(traced.windows, 2);
    assert_eq!((traced.timer_windows, traced.other_windows), (1, 1));
}

#[test]
fn an_injection_that_is_made_again_is_one_window() {
    let mut thread = Thread::new(Order::ExitFirst);
    thread.exit(WINDOW, &[]);
    thread.inject(236);
    thread.inject(236);
    let traced = thread.traced();
    assert_eq!((traced.windows, traced.timer_windows), (1, 1));
}
