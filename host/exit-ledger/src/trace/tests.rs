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
    let reasons = combine(&Counts {
        exits: parse(EXITS),
        msrs: parse(MSRS),
        timers: parse(TIMERS),
        eoi: vec![(vec![236], 20), (vec![35], 30)],
        pv_eoi: vec![(vec![236], 15), (vec![35], 30)],
        injected: vec![
            (vec![0x64, 236], 4),
            (vec![0x64, 35], 9),
            (vec![0x60, 236], 7),
        ],
    });
    assert_eq!(reasons[&Reason::Hlt], 40);
    // Deadline writes, five ends of interrupt, twelve host timers, four windows.
    assert_eq!(reasons[&Reason::Timer], 60 + 5 + 12 + 4);
    assert_eq!(reasons[&Reason::Apic], 30 - 5);
    assert_eq!(reasons[&Reason::Other], 10);
    assert_eq!(reasons[&Reason::Interrupt], 30 - 12 - 4);
    assert_eq!(reasons[&Reason::PageFault], 5);
    assert_eq!(reasons.values().sum::<u64>(), 175);
}

#[test]
fn instances_of_killed_processes_are_leftovers() {
    let names = [
        "exitless-8",
        "exitless_7",
        "exitless-12",
        "exitless-7",
        // Somebody else's.
        "exitless",
        "exitless-",
        "exitless-self",
        "exitless-5x",
        "exitless-4294967296",
        "exitless7",
        "other-7",
    ];
    assert_eq!(leftovers(names, |pid| pid == 8), [7, 12]);
    assert!(leftovers(names, |_| true).is_empty());
}

#[test]
fn writes_are_rows_by_address() {
    let text = "{ gpa:  3221237760 } hitcount:          7\n";
    assert_eq!(parse(text), [(vec![0xc000_3000], 7)]);
}

#[test]
fn what_is_no_row_is_no_count() {
    assert!(parse("{ broken\n{ a: x } hitcount: 3\nTotals:\n").is_empty());
    assert_eq!(combine(&Counts::default()).values().sum::<u64>(), 0);
}
