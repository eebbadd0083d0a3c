//! A run of exits whose causes are known, as all sources would count it; and the same with one
//! source that is wrong.

use proptest::prelude::*;

use super::*;

/// Exits by cause.
#[derive(Clone, Debug)]
struct Causes {
    ticks: u64,
    interrupts: u64,
    timer_windows: u64,
    other_windows: u64,
    hlts: u64,
    pauses: u64,
    timer_msrs: u64,
    timer_eois: u64,
    other_eois: u64,
    paravirtual_eois: u64,
    apic_msrs: u64,
    other_msrs: u64,
    cpuids: u64,
    traps: u64,
    logged: u64,
    gate_faults: u64,
    /// Attempts at the armed page beyond the first of a store: the owner is not notified of them.
    retries: u64,
    memory: u64,
    user_doorbells: u64,
    doorbells: u64,
    user_iommu_doorbells: u64,
    iommu_doorbells: u64,
    pci_mmio: u64,
    pci_pio: u64,
    device_mmio: u64,
    device_pio: u64,
}

fn causes() -> impl Strategy<Value = Causes> {
    prop::array::uniform26(0..40_u64).prop_map(|n| Causes {
        ticks: n[0],
        interrupts: n[1],
        timer_windows: n[2],
        other_windows: n[3],
        hlts: n[4],
        pauses: n[5],
        timer_msrs: n[6],
        timer_eois: n[7],
        // Without any an end of interrupt is no exit there, whatever was traced.
        other_eois: n[8] + 1,
        paravirtual_eois: n[9],
        apic_msrs: n[10],
        other_msrs: n[11],
        cpuids: n[12],
        traps: n[13],
        logged: n[14],
        gate_faults: n[15],
        retries: n[16],
        memory: n[17],
        user_doorbells: n[18],
        doorbells: n[19],
        user_iommu_doorbells: n[20],
        iommu_doorbells: n[21],
        pci_mmio: n[22],
        pci_pio: n[23],
        device_mmio: n[24],
        device_pio: n[25],
    })
}

impl Causes {
    /// Returns the counts of all sources.
    fn counted(&self) -> Snapshot {
        let eoi_msrs = self.timer_eois + self.other_eois;
        let register_page = self.traps + self.logged + self.gate_faults + self.retries;
        let doorbells = self.user_doorbells + self.doorbells;
        let doorbells = doorbells + self.user_iommu_doorbells + self.iommu_doorbells;
        let traced = Traced {
            interrupts: self.ticks + self.interrupts,
            windows: self.timer_windows + self.other_windows,
            hlts: self.hlts,
            pauses: self.pauses,
            page_faults: register_page + doorbells + self.memory + self.pci_mmio + self.device_mmio,
            io: self.pci_pio + self.device_pio,
            msrs: self.timer_msrs + eoi_msrs + self.apic_msrs + self.other_msrs,
            others: self.cpuids,
            timer_msrs: self.timer_msrs,
            eoi_msrs,
            apic_msrs: self.apic_msrs,
            other_msrs: self.other_msrs,
            timer_eois: self.timer_eois + self.paravirtual_eois,
            timer_pv_eois: self.paravirtual_eois,
            other_eois: self.other_eois + self.paravirtual_eois,
            other_pv_eois: self.paravirtual_eois,
            ticks: self.ticks,
            other_interrupts: self.interrupts,
            timer_windows: self.timer_windows,
            other_windows: self.other_windows,
            ..Traced::default()
        };
        Snapshot {
            kvm: [traced.exits(), 0, 0, 0],
            traced: Some(traced),
            page_faults: Some(PageFaults {
                register_page,
                memory: self.memory,
            }),
            user: UserExits {
                iommu: self.traps,
                doorbell: self.user_doorbells,
                iommu_doorbell: self.user_iommu_doorbells,
                pci_config_mmio: self.pci_mmio,
                pci_config_pio: self.pci_pio,
                device_mmio: self.device_mmio,
                device_pio: self.device_pio,
            },
            owner: OwnerCounts {
                logged_writes: self.logged,
                gate_faults: self.gate_faults,
                doorbells: self.doorbells,
                iommu_doorbells: self.iommu_doorbells,
                ..OwnerCounts::default()
            },
            ..Snapshot::default()
        }
    }

    /// Returns the exits as the ledger must charge them.
    fn charged(&self, total: u64) -> Exits {
        Exits {
            total,
            iommu: self.traps + self.logged + self.gate_faults + self.retries,
            doorbell: self.user_doorbells + self.doorbells,
            iommu_doorbell: self.user_iommu_doorbells + self.iommu_doorbells,
            pci_config: self.pci_mmio + self.pci_pio,
            other_device: self.device_mmio + self.device_pio,
            interrupt: self.interrupts + self.other_windows,
            apic: self.apic_msrs + self.other_eois,
            hlt: self.hlts,
            timer: self.ticks + self.timer_windows + self.timer_msrs + self.timer_eois,
            pause: self.pauses,
            memory: self.memory,
            processor: self.cpuids + self.other_msrs,
            unattributed: 0,
            overlap: 0,
        }
    }
}

fn traced(snapshot: &mut Snapshot) -> &mut Traced {
    snapshot.traced.as_mut().expect("histograms")
}

fn faults(snapshot: &mut Snapshot) -> &mut PageFaults {
    snapshot.page_faults.as_mut().expect("addresses")
}

/// A counter that may be wrong.
type Source = fn(&mut Snapshot) -> &mut u64;

/// Each source of which an error either way shows.
const SOURCES: [Source; 26] = [
    |s| &mut s.kvm[0],
    |s| &mut traced(s).hlts,
    |s| &mut traced(s).pauses,
    |s| &mut traced(s).page_faults,
    |s| &mut traced(s).io,
    |s| &mut traced(s).msrs,
    |s| &mut traced(s).others,
    |s| &mut traced(s).timer_msrs,
    |s| &mut traced(s).eoi_msrs,
    |s| &mut traced(s).apic_msrs,
    |s| &mut traced(s).other_msrs,
    |s| &mut traced(s).timer_eois,
    |s| &mut traced(s).timer_pv_eois,
    |s| &mut traced(s).other_eois,
    |s| &mut traced(s).other_pv_eois,
    |s| &mut traced(s).interrupts,
    |s| &mut traced(s).windows,
    |s| &mut faults(s).memory,
    |s| &mut s.user.doorbell,
    |s| &mut s.user.pci_config_mmio,
    |s| &mut s.user.pci_config_pio,
    |s| &mut s.user.device_mmio,
    |s| &mut s.user.device_pio,
    |s| &mut s.owner.doorbells,
    |s| &mut s.user.iommu_doorbell,
    |s| &mut s.owner.iommu_doorbells,
];

/// Sources that joins count. A surplus is detected. A lack is not: those exits stay with
/// interrupts, which they are by their reasons.
const JOINS: [Source; 4] = [
    |s| &mut traced(s).ticks,
    |s| &mut traced(s).other_interrupts,
    |s| &mut traced(s).timer_windows,
    |s| &mut traced(s).other_windows,
];

/// Sources of accesses to registers. The page faults there are what counts: a surplus over them is
/// detected, and a lack changes nothing.
const HEARD_OF: [Source; 3] = [
    |s| &mut s.user.iommu,
    |s| &mut s.owner.logged_writes,
    |s| &mut s.owner.gate_faults,
];

/// Returns whether the causes and the unattributed exits, less the overlap, are all exits.
fn adds_up(exits: &Exits) -> bool {
    exits.claimed() + exits.unattributed == exits.total + exits.overlap
}

proptest! {
    #[test]
    fn a_run_is_charged_as_it_was(causes in causes()) {
        let end = causes.counted();
        prop_assert_eq!(exits(&end), causes.charged(end.kvm[0]));
    }

    #[test]
    fn planted_misattributions_are_found(causes in causes(), error in 1..9_u64) {
        for source in SOURCES.iter().chain(&JOINS) {
            let mut end = causes.counted();
            *source(&mut end) += error;
            let exits = exits(&end);
            prop_assert!(exits.unattributed + exits.overlap >= error, "{exits:?}");
            prop_assert!(adds_up(&exits), "{exits:?}");
        }
        for source in SOURCES {
            let mut end = causes.counted();
            let count = source(&mut end);
            let lost = error.min(*count);
            *count -= lost;
            let exits = exits(&end);
            prop_assert!(exits.unattributed + exits.overlap >= lost, "{exits:?}");
            prop_assert!(adds_up(&exits), "{exits:?}");
        }
    }

    #[test]
    fn a_register_access_too_many_is_found_and_one_too_few_changes_nothing(
        causes in causes(),
        error in 1..9_u64,
    ) {
        for source in HEARD_OF {
            let mut end = causes.counted();
            *source(&mut end) += causes.retries + error;
            let found = exits(&end);
            prop_assert_eq!((found.unattributed, found.overlap), (0, error));
            prop_assert!(adds_up(&found), "{found:?}");
            let mut end = causes.counted();
            *source(&mut end) = 0;
            prop_assert_eq!(exits(&end), causes.charged(end.kvm[0]));
        }
    }
}
