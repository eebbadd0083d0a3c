//! A guest with an NVMe controller, a network card and `edu`, each in its own group, in each
//! register mode.

use harness::assign::{AssignLab, AssignedRun, Guest, Mode};
use lab::LabConfig;
use lab::assigned::Device;
use workload::pattern;

use super::common::{
    DEVICES, DISK, PATTERN, PAUSE, SEED, UNBIND, all_with, bound, check_disk, check_pins, devices,
    disk_script, guest, rogue, sum,
};

/// The only guest of `make test`.
#[test]
fn a_guest_uses_devices_of_the_host_which_reach_what_it_maps_alone() {
    if std::env::var_os("EXITLESS_LAB").is_none() {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
        return;
    }
    let lab = bound(LabConfig::default());
    let run = uses_all(&lab, guest(Mode::Shared), 1);
    assert_eq!(run.outcome.ledger["whole"]["exits"]["iommu"], 0);
    let (answered, content) = lab.shutdown().unwrap();
    assert!(answered >= 20, "{answered} echoes");
    pattern::check(SEED, 0, &content[..PATTERN]).expect("what the guest wrote");
}

/// Transfers data through the controller and the card, tries DMA that no mapping allows, and checks
/// pins.
pub fn uses_all(lab: &AssignLab, guest: Guest, seconds: u32) -> AssignedRun {
    let mut session = lab.begin(&guest, &all_with("")).expect("it starts");
    check_disk(&session.run(&disk_script(seconds)).unwrap());
    let said = session.run(&lab.network_script("eth0", 20)).unwrap();
    assert!(said.contains("udp-echo ok count=20"), "{said}");
    let held = session.locked().unwrap();
    assert!(held > 0, "drivers hold their rings");
    rogue(lab, &mut session, PAUSE);
    session.run(UNBIND).unwrap();
    assert_eq!(session.locked().unwrap(), 0, "no driver, no mapping");
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    check_pins(&run);
    let devices = devices(&run.outcome.ledger);
    assert_eq!(devices.len(), DEVICES.len());
    for device in devices {
        assert_eq!(device["pinned"], 0, "{device:#}");
        assert_eq!(device["refused"], 0, "{device:#}");
        assert_ne!(device["maps"], 0, "{device:#}");
        let is_edu = device["address"] == lab.address(Device::Edu);
        assert_eq!(device["host_faults"] != 0, is_edu, "{device:#}");
    }
    eprintln!(
        "{}: {} maps, {} unmaps, {} pages pinned at most, {DISK} verified",
        guest.mode.name(),
        sum(devices, "maps"),
        sum(devices, "unmaps"),
        sum(devices, "pinned_peak"),
    );
    run
}

#[test]
#[ignore = "four minutes of the lab: make soak"]
fn devices_work_alike_in_each_register_mode() {
    let lab = bound(LabConfig::default());
    for mode in Mode::VTD {
        let run = uses_all(&lab, guest(mode), 2);
        let exits = run.outcome.ledger["whole"]["exits"]["iommu"]
            .as_u64()
            .unwrap();
        let maps = sum(devices(&run.outcome.ledger), "maps");
        eprintln!("{}: {exits} register exits, {maps} maps", mode.name());
        assert_eq!(exits == 0, mode == Mode::Shared, "{mode:?}: {exits}");
    }
    let (_, content) = lab.shutdown().unwrap();
    pattern::check(SEED, 0, &content[..PATTERN]).expect("what the guest wrote");
}
