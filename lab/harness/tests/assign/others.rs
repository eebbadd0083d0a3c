//! Guests that use their IOMMU in another way than a stock one with one vCPU, or do not use it.

use harness::assign::{AssignLab, AssignedRun, Mode, rogue_script};
use lab::LabConfig;
use lab::assigned::Device;

use super::common::{
    PAUSE, UNBIND, all_with, bound, check_disk, check_pins, devices, disk_script, field, guest,
    line, rogue, sum,
};

/// KiB of the guest's memory, and of the largest part of it that is no RAM or reserved.
const MEMORY_KIB: u64 = 256 << 10;
const RESERVED_KIB: u64 = 2 << 10;

#[test]
#[ignore = "five minutes of the lab: make soak"]
fn guests_that_use_their_iommu_otherwise_get_what_they_ask_for_and_it_is_said() {
    let lab = bound(LabConfig::default());
    two_vcpus_with_pieces_cut_by_the_guest(&lab);
    pass_through_pins_all_and_is_reported(&lab);
    pass_through_is_refused_where_domains_are_required(&lab);
    without_translation_nothing_is_reached_and_it_is_said(&lab);
    without_translation_all_is_reached_where_that_is_asked_for(&lab);
    without_an_iommu_all_is_pinned(&lab);
}

/// Maps and unmaps random sizes by the guest's own VFIO; the guest's kernel uses large pages for
/// them too.
fn two_vcpus_with_pieces_cut_by_the_guest(lab: &AssignLab) {
    let mut guest = guest(Mode::Shared);
    guest.cpus = 2;
    let mut session = lab.begin(&guest, &all_with("")).unwrap();
    check_disk(&session.run(&disk_script(2)).unwrap());
    rogue(lab, &mut session, PAUSE);
    let said = session
        .run(&rogue_script("--remap --pieces --count 64 --seed 3"))
        .expect("nothing arrived");
    let pieces = line(&said, "pieces ");
    eprintln!("{pieces}");
    assert_eq!(field(pieces, "arrived"), "0");
    assert_ne!(field(pieces, "rogues"), "0");
    session.run(UNBIND).unwrap();
    assert_eq!(session.locked().unwrap(), 0);
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    check_pins(&run);
    let cut = sum(devices(&run.outcome.ledger), "cut");
    eprintln!("2 vCPUs: mappings cut {cut}");
}

/// Returns the program's output line with these words.
fn said(run: &AssignedRun, words: &str) -> String {
    let line = run.outcome.log.lines().find(|line| line.contains(words));
    let line = line.unwrap_or_else(|| panic!("no line with {words:?}: {}", run.outcome.log));
    eprintln!("{line}");
    line.to_owned()
}

fn pass_through_pins_all_and_is_reported(lab: &AssignLab) {
    let mut guest = guest(Mode::Shared);
    guest.kernel_options = "iommu=pt".into();
    let mut session = lab.begin(&guest, &[(Device::Nvme, "")]).unwrap();
    check_disk(&session.run(&disk_script(1)).unwrap());
    let held = session.locked().unwrap();
    eprintln!("iommu=pt: {held} KiB pinned");
    assert!(held >= MEMORY_KIB - RESERVED_KIB, "{held} KiB");
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    said(
        &run,
        "a pass-through context: all of the guest's memory is pinned",
    );
    assert!(run.faults.is_empty(), "{}", run.faults);
    let device = &devices(&run.outcome.ledger)[0];
    assert_ne!(device["pass_through"], 0);
}

/// `edu` has no driver in the guest, so that nothing waits for it.
fn pass_through_is_refused_where_domains_are_required(lab: &AssignLab) {
    let mut guest = guest(Mode::Shared);
    guest.kernel_options = "iommu=pt".into();
    let session = lab
        .begin(&guest, &[(Device::Edu, ",require-dma-domains=on")])
        .unwrap();
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    said(
        &run,
        "a pass-through context, which is refused: the device reaches nothing",
    );
    assert_eq!(run.locked.max(), 0, "{:?}", run.locked);
}

fn without_translation_nothing_is_reached_and_it_is_said(lab: &AssignLab) {
    let mut guest = guest(Mode::Shared);
    guest.kernel_options = "intel_iommu=off".into();
    let mut session = lab.begin(&guest, &[(Device::Nvme, "")]).unwrap();
    // Its driver starts the controller, which then cannot read its queue.
    session.run("sleep 5").unwrap();
    let log = lab.take_faults().unwrap();
    eprintln!("intel_iommu=off: {log}");
    assert!(log.of(lab.address(Device::Nvme)).next().is_some(), "{log}");
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    said(
        &run,
        "has not turned translation on: the device reaches nothing",
    );
    assert_eq!(run.locked.max(), 0, "{:?}", run.locked);
}

fn without_translation_all_is_reached_where_that_is_asked_for(lab: &AssignLab) {
    let mut guest = guest(Mode::Shared);
    guest.kernel_options = "intel_iommu=off".into();
    let mut session = lab
        .begin(&guest, &[(Device::Nvme, ",dma-before-te=on")])
        .unwrap();
    check_disk(&session.run(&disk_script(1)).unwrap());
    let held = session.locked().unwrap();
    eprintln!("dma-before-te=on: {held} KiB pinned");
    assert!(held >= MEMORY_KIB - RESERVED_KIB, "{held} KiB");
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    assert!(run.faults.is_empty(), "{}", run.faults);
}

fn without_an_iommu_all_is_pinned(lab: &AssignLab) {
    let mut session = lab
        .begin(&guest(Mode::None), &[(Device::Nvme, "")])
        .unwrap();
    check_disk(&session.run(&disk_script(1)).unwrap());
    let held = session.locked().unwrap();
    eprintln!("--iommu none: {held} KiB pinned");
    assert!(held >= MEMORY_KIB - RESERVED_KIB, "{held} KiB");
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    assert!(run.faults.is_empty(), "{}", run.faults);
}
