use super::*;

mod planted;

/// The beginning of a window with histograms.
fn beginning() -> Snapshot {
    Snapshot {
        traced: Some(Traced::default()),
        page_faults: Some(PageFaults::default()),
        ..Snapshot::default()
    }
}

/// A window of 100 exits: 30 iommu, 7 doorbell, 8 device, 12 interrupt, 6 apic, 10 hlt, 20 timer, 5
/// memory, and 2 without a cause.
fn a_hundred() -> Snapshot {
    Snapshot {
        kvm: [100, 0, 0, 0],
        traced: Some(Traced {
            hlts: 10,
            timers: 20,
            page_faults: 45,
            io: 5,
            interrupts: 12,
            apic: 6,
            ..Traced::default()
        }),
        page_faults: Some(PageFaults {
            register_page: 30,
            memory: 5,
        }),
        user: UserExits {
            iommu: 30,
            device_pio: 5,
            device_mmio: 3,
            ..UserExits::default()
        },
        owner: OwnerCounts {
            doorbells: 7,
            ..OwnerCounts::default()
        },
        ..Snapshot::default()
    }
}

fn exits(end: &Snapshot) -> Exits {
    Window::between(&beginning(), end).exits
}

#[test]
fn every_exit_is_charged_once() {
    let exits = exits(&a_hundred());
    assert_eq!((exits.iommu, exits.doorbell, exits.memory), (30, 7, 5));
    assert_eq!(exits.other_device, 8);
    assert_eq!(exits.timer + exits.hlt, 30);
    assert_eq!((exits.unattributed, exits.overlap), (2, 0));
}

#[test]
fn a_retry_at_the_armed_page_is_the_iommus() {
    let mut end = a_hundred();
    // The owner is notified of one store; the vCPU tries it three times.
    end.user.iommu = 0;
    end.owner.gate_faults = 10;
    let exits = exits(&end);
    assert_eq!((exits.iommu, exits.memory), (30, 5));
    assert_eq!((exits.unattributed, exits.overlap), (2, 0));
}

#[test]
fn a_page_fault_that_nobody_saw_is_unattributed() {
    let mut end = a_hundred();
    end.owner.doorbells -= 4;
    let exits = exits(&end);
    assert_eq!((exits.memory, exits.unattributed), (5, 2 + 4));
}

#[test]
fn a_page_fault_that_two_claim_is_overlap() {
    let mut end = a_hundred();
    end.user.iommu += 1;
    end.owner.doorbells += 2;
    let exits = exits(&end);
    // And what is missing elsewhere makes up for none of it.
    assert_eq!((exits.unattributed, exits.overlap), (2, 1 + 2));
}

#[test]
fn without_addresses_page_faults_in_memory_are_unattributed() {
    let mut end = a_hundred();
    end.page_faults = None;
    let exits = exits(&end);
    assert_eq!((exits.iommu, exits.memory), (30, 0));
    assert_eq!((exits.unattributed, exits.overlap), (2 + 5, 0));
}

#[test]
fn registers_that_intel_traps_without_a_page_fault_are_the_iommus() {
    let mut end = a_hundred();
    let traced = end.traced.as_mut().expect("histograms");
    traced.page_faults -= 29;
    traced.misconfigurations += 29;
    end.page_faults = Some(PageFaults {
        register_page: 1,
        memory: 5,
    });
    let exits = exits(&end);
    assert_eq!((exits.iommu, exits.memory), (30, 5));
    assert_eq!((exits.unattributed, exits.overlap), (2, 0));
}

#[test]
fn without_histograms_the_rest_is_unattributed() {
    let end = Snapshot {
        kvm: [50, 10, 5, 5],
        ..Snapshot::default()
    };
    let window = Window::between(&Snapshot::default(), &end);
    assert!(!window.histograms);
    assert_eq!((window.exits.hlt, window.exits.interrupt), (10, 10));
    assert_eq!((window.exits.unattributed, window.exits.overlap), (30, 0));
}

#[test]
fn a_pause_is_the_windows_that_it_fell_into() {
    let at = |pauses, pause_reason: Option<&str>| Snapshot {
        swap: Some(Swap {
            counts: SwapCounts {
                pauses,
                ..SwapCounts::default()
            },
            resident: 3,
            stored: 4,
            tracked: 5,
            pause_reason: pause_reason.map(String::from),
        }),
        ..Snapshot::default()
    };
    let reason = |begin: &Snapshot, end: &Snapshot| {
        let swap = Window::between(begin, end).swap.expect("there is a pager");
        (swap.counts.pauses, swap.pause_reason)
    };
    let (never, once) = (at(0, None), at(1, Some("full")));
    assert_eq!(reason(&never, &never), (0, None));
    assert_eq!(reason(&never, &once), (1, Some("full".into())));
    assert_eq!(reason(&once, &once), (0, None));
    // The pager begins behind the first snapshot.
    let before = Snapshot::default();
    assert_eq!(reason(&before, &once), (1, Some("full".into())));
    // What stands is not subtracted.
    let stands = Window::between(&never, &once).swap;
    let stands = stands.expect("there is a pager");
    assert_eq!((stands.resident, stands.stored, stands.tracked), (3, 4, 5));
}

#[test]
fn the_reason_of_a_pause_stands_beside_the_counts_of_swap_or_is_null() {
    let swap = |pause_reason| {
        let swap = Swap {
            counts: SwapCounts::default(),
            resident: 3,
            stored: 4,
            tracked: 5,
            pause_reason,
        };
        serde_json::to_value(swap).expect("plain values")
    };
    assert_eq!(swap(None)["pause_reason"], serde_json::Value::Null);
    let full = swap(Some("full".into()));
    assert_eq!(
        (&full["pause_reason"], &full["pauses"], &full["tracked"]),
        (&"full".into(), &0.into(), &5.into())
    );
}

#[test]
fn a_balloon_stands_as_at_the_end_and_was_told_what_came_since() {
    let at = |actual, inflated| BalloonFigures {
        target: 9,
        actual,
        free: Some(actual),
        counts: BalloonCounts {
            inflated,
            ..BalloonCounts::default()
        },
        ..BalloonFigures::default()
    };
    let snapshot = |balloon| Snapshot {
        balloon,
        ..Snapshot::default()
    };
    let begin = snapshot(Some(at(100, 100)));
    let end = snapshot(Some(at(70, 110)));
    let found = Window::between(&begin, &end).balloon;
    assert_eq!(found, Some(at(70, 10)));
    assert_eq!(
        Window::between(&snapshot(None), &end).balloon,
        Some(at(70, 110))
    );
    assert_eq!(Window::between(&begin, &snapshot(None)).balloon, None);
}
