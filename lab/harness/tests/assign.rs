//! Devices to assign, in the emulated host: the parts of `harness::assign` see what was done.
//!
//! A start takes half a minute, so it runs when `EXITLESS_LAB=1` is set, as `make test` does, and
//! says so otherwise. The programs have to be built (`make build`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use harness::assign::{AssignLab, Guest, Mode, rogue_script};
use lab::LabConfig;
use lab::assigned::{Device, DmaAccess};
use workload::pattern;

/// Bytes of the namespace that have the pattern.
const PATTERN: usize = 4 << 20;
const SEED: u64 = 7;

/// All in one lab, since a start costs more than what is done in it.
#[test]
fn devices_of_the_host_work_and_reach_what_is_mapped_alone() {
    if std::env::var_os("EXITLESS_LAB").is_none() {
        eprintln!("skipped: set EXITLESS_LAB=1 to start the emulated host");
        return;
    }
    let lab = AssignLab::start(LabConfig::default()).expect("the lab starts");
    lab.bind(Device::Edu).unwrap();
    rogue_dma_is_blocked_and_logged(&lab);
    revoked_iova_that_is_mapped_again_reaches_the_new_page_alone(&lab);
    network_card_exchanges_echoes(&lab);
    namespace_is_read_and_written(&lab);
    guest_without_devices_pins_nothing_and_has_vfio(&lab);
    refused_start_is_an_outcome(&lab);

    let (answered, content) = lab.shutdown().unwrap();
    assert!(answered >= 50, "{answered} echoes");
    pattern::check(SEED, 0, &content[..PATTERN]).expect("what the host wrote");
}

/// Lines that `workload dma-rogue` printed in the emulated host.
fn rogue(lab: &AssignLab, options: &str) -> String {
    let said = lab
        .host()
        .script(&rogue_script(options))
        .expect("nothing arrived");
    eprint!("{said}");
    said
}

/// Value of `key` in a line of `key=value`.
fn field<'a>(line: &'a str, key: &str) -> &'a str {
    let fields = line
        .split_whitespace()
        .filter_map(|word| word.split_once('='));
    let found = fields.into_iter().find(|(name, _)| *name == key);
    found.unwrap_or_else(|| panic!("no {key} in {line:?}")).1
}

fn rogue_dma_is_blocked_and_logged(lab: &AssignLab) {
    lab.take_faults().unwrap();
    let locked = lab.watch_locked("workload").unwrap();
    let said = rogue(lab, "--pause-ms 2500");
    let locked = locked.finish().unwrap();
    // The page that copies go through stays mapped, another one now and then.
    assert!((4..=16).contains(&locked.max()), "{locked:?}");

    let log = lab.take_faults().unwrap();
    eprintln!("{log}");
    let attempts: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("rogue "))
        .collect();
    let states: Vec<&str> = attempts
        .iter()
        .map(|line| line.split(' ').nth(1).unwrap())
        .collect();
    let expected = ["unmapped", "read-only", "revoked", "unmapped", "revoked"];
    assert_eq!(states, expected);
    for line in attempts {
        assert_eq!(field(line, "blocked"), "yes", "{line}");
        let iova = field(line, "iova").trim_start_matches("0x");
        let iova = u64::from_str_radix(iova, 16).unwrap();
        let access = match field(line, "access") {
            "write" => DmaAccess::Write,
            _ => DmaAccess::Read,
        };
        let is_logged = log.has(lab.address(Device::Edu), access, iova);
        assert!(is_logged, "{line} is not in the log:\n{log}");
    }
}

fn revoked_iova_that_is_mapped_again_reaches_the_new_page_alone(lab: &AssignLab) {
    let said = rogue(lab, "--remap --pieces --count 24 --seed 3");
    let pieces = said
        .lines()
        .find(|line| line.starts_with("pieces "))
        .unwrap();
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

/// The same commands as for a virtio disk: from 4 KiB to 256 KiB each, direct, one at a time and
/// many in flight.
fn namespace_is_read_and_written(lab: &AssignLab) {
    let disk = "/dev/nvme0n1";
    let script = format!(
        "workload write-pattern {disk} --bytes {PATTERN} --seed {SEED} && \
         workload check-pattern {disk} --bytes {PATTERN} --seed {SEED} && \
         workload reads {disk} --count 100 --random 1 --no-markers && \
         workload mixed {disk} --seconds 3 --depth 8 --trim --skip {} && \
         workload check-pattern {disk} --bytes {PATTERN} --seed {SEED}",
        PATTERN >> 12
    );
    let said = lab.host().script(&script).expect("verified");
    for done in [
        "write-pattern ok",
        "check-pattern ok",
        "reads ok count=100",
        "mixed ok",
    ] {
        assert!(said.contains(done), "{said}");
    }
}

fn refused_start_is_an_outcome(lab: &AssignLab) {
    let mut guest = Guest::new(Mode::Trap, "true");
    guest.flags.push("--no-such-flag".into());
    let run = lab.run(&guest, &[]).expect("it ends");
    assert_eq!(run.outcome.exit, 2, "{}", run.outcome.tail());
    assert_eq!(run.outcome.script, None);
    assert!(run.outcome.ledger.is_null(), "{}", run.outcome.ledger);
}

fn guest_without_devices_pins_nothing_and_has_vfio(lab: &AssignLab) {
    const SCRIPT: &str = "[ ! -e /dev/vfio/vfio ] && lab-load vfio && [ -c /dev/vfio/vfio ] && \
                          echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts && \
                          [ -d /sys/bus/pci/drivers/vfio-pci ] && [ -d /sys/bus/pci/drivers/nvme ]";
    let mut guest = Guest::new(Mode::Trap, SCRIPT);
    guest.limit = Duration::from_secs(240);
    let run = lab.run(&guest, &[]).expect("it runs");
    run.outcome.check().expect("it has the modules");
    assert!(run.locked.samples().len() > 10, "{:?}", run.locked);
    assert_eq!(run.locked.max(), 0, "{:?}", run.locked);
    assert!(run.faults.is_empty(), "{}", run.faults);
    assert!(!run.outcome.ledger.is_null());
}
