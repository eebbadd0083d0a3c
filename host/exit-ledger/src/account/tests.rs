use super::*;

#[test]
fn every_exit_is_charged_once() {
    let begin = Snapshot {
        reasons: Some(Reasons::new()),
        ..Snapshot::default()
    };
    let end = Snapshot {
        kvm: [100, 0, 0, 0],
        reasons: Some(Reasons::from([
            (Reason::Hlt, 10),
            (Reason::Timer, 20),
            (Reason::PageFault, 45),
            (Reason::Io, 5),
            (Reason::Interrupt, 12),
            (Reason::Apic, 6),
        ])),
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
    };
    let exits = Window::between(&begin, &end).exits;
    assert_eq!(exits.memory, 45 - 30 - 7 - 3);
    assert_eq!(exits.other_device, 8);
    assert_eq!(exits.timer + exits.hlt, 30);
    // 100 = 30 iommu + 7 doorbell + 8 device + 12 + 6 + 10 + 20 + 5 memory + 2 nobody claims.
    assert_eq!(exits.unattributed, 2);
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
    assert_eq!(window.exits.unattributed, 30);
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
