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
