//! The same commands on devices that are not assigned, in the emulated host itself: the reference
//! for a guest's results.

use harness::assign::{AssignLab, Guest, Mode, rogue_script};
use lab::LabConfig;
use lab::assigned::Device;
use workload::pattern;

use super::common::{PATTERN, SEED, check_disk, check_rogues, disk_script, field, line};

/// All in one lab, since a start takes longer than the tests in it.
#[test]
#[ignore = "a minute of the lab: make soak"]
fn devices_work_in_the_host_and_reach_what_is_mapped_alone() {
    let lab = AssignLab::start(LabConfig::default()).expect("the lab starts");
    lab.bind(Device::Edu).unwrap();
    rogue_dma_is_blocked_and_logged(&lab);
    revoked_iova_that_is_mapped_again_reaches_the_new_page_alone(&lab);
    network_card_exchanges_echoes(&lab);
    namespace_is_read_and_written(&lab);
    refused_start_is_an_outcome(&lab);

    let (answered, content) = lab.shutdown().unwrap();
    assert!(answered >= 50, "{answered} echoes");
    pattern::check(SEED, 0, &content[..PATTERN]).expect("what the host wrote");
}

/// Returns the lines that `workload dma-rogue` printed in the emulated host.
fn rogue(lab: &AssignLab, options: &str) -> String {
    let said = lab
        .host()
        .script(&rogue_script(options))
        .expect("nothing arrived");
    eprint!("{said}");
    said
}

fn rogue_dma_is_blocked_and_logged(lab: &AssignLab) {
    lab.take_faults().unwrap();
    let locked = lab.watch_locked("workload").unwrap();
    let said = rogue(lab, "--pause-ms 2500");
    let locked = locked.finish().unwrap();
    // The page that copies go through stays mapped, and sometimes another one.
    assert!((4..=16).contains(&locked.max()), "{locked:?}");

    let log = lab.take_faults().unwrap();
    eprintln!("{log}");
    check_rogues(lab, &said, &log);
}

fn revoked_iova_that_is_mapped_again_reaches_the_new_page_alone(lab: &AssignLab) {
    let said = rogue(lab, "--remap --pieces --count 24 --seed 3");
    let pieces = line(&said, "pieces ");
    assert_eq!(field(pieces, "arrived"), "0");
    assert_eq!(field(pieces, "maps"), field(pieces, "unmaps"));
    assert_ne!(field(pieces, "rogues"), "0");
}

fn network_card_exchanges_echoes(lab: &AssignLab) {
    let script = format!("lab-load net && {}", lab.network_script("eth0", 50));
    let said = lab.host().script(&script).expect("echoes");
    assert!(said.contains("udp-echo ok count=50"), "{said}");
    assert!(lab.peer().answered() >= 50);
}

fn refused_start_is_an_outcome(lab: &AssignLab) {
    let mut guest = Guest::new(Mode::Trap, "true");
    guest.flags.push("--no-such-flag".into());
    let run = lab.run(&guest, &[]).expect("it ends");
    assert_eq!(run.outcome.exit, 2, "{}", run.outcome.tail());
    assert_eq!(run.outcome.script, None);
    assert!(run.outcome.ledger.is_null(), "{}", run.outcome.ledger);
}

/// Checks the same commands as for a virtio disk.
fn namespace_is_read_and_written(lab: &AssignLab) {
    check_disk(&lab.host().script(&disk_script(3)).expect("verified"));
}
