//! End and restart of a device's use: its reset, memory decoding turned off, a reboot, a VMM that
//! is killed.

use harness::assign::runs::kill_at_random_points;
use harness::assign::{AssignLab, Mode, Session};
use lab::LabConfig;
use lab::assigned::Device;

use super::common::{BEHIND, DISK, PATTERN, SEED, all_with, bound, check_disk, disk_script, guest};

/// Returns a script that sets `A` to the address of the controller in a guest.
fn find() -> String {
    format!("A=$({})", Device::Nvme.search())
}

/// Returns a script of verified I/O, with a check of the pattern after it.
fn again(seconds: u32) -> String {
    format!(
        "workload mixed {DISK} --seconds {seconds} --depth 8 --skip {BEHIND} && \
         workload check-pattern {DISK} --bytes {PATTERN} --seed {SEED}"
    )
}

#[test]
#[ignore = "two minutes of the lab: make soak"]
fn a_device_is_usable_after_its_reset_a_reboot_and_decoding_that_was_off() {
    let lab = bound(LabConfig::default());
    let mut guest = guest(Mode::Shared);
    guest.restarts = true;
    let mut session = lab.begin(&guest, &all_with("")).unwrap();
    check_disk(&session.run(&disk_script(1)).unwrap());

    let reset = format!(
        "{} && D=/sys/bus/pci/devices/$A && cat $D/reset_method && echo 1 >$D/reset && {}",
        find(),
        again(1)
    );
    let said = session.run(&reset).unwrap();
    assert!(said.contains("flr") && said.contains("mixed ok"), "{said}");

    // Under load memory decoding is turned off, and on again. The guest's driver may abandon its
    // controller then, and Linux 6.1 has an oops there. The machine goes on, and the next guest
    // finds the device in its initial state.
    let decode = format!(
        "{}; C=/sys/bus/pci/devices/$A/config; (workload mixed {DISK} --seconds 9 --depth 8 --skip \
         {BEHIND} 2>&1) & sleep 1; \
         for i in 1 2 3 4 5; do printf '\\000\\004' | dd of=$C bs=2 seek=2 conv=notrunc \
         2>/dev/null; sleep 0.1; \
         printf '\\006\\004' | dd of=$C bs=2 seek=2 conv=notrunc 2>/dev/null; sleep 0.1; done; \
         echo still $((1+1)) here",
        find()
    );
    let said = session.run(&decode).unwrap();
    assert!(said.contains("still 2 here"), "{said}");

    for how in ["echo b >/proc/sysrq-trigger", "reboot -f"] {
        session.start(how).unwrap();
        session.begin_again().unwrap();
        let said = session.run(&again(1)).unwrap();
        assert!(
            said.contains("mixed ok") && said.contains("check-pattern ok"),
            "{said}"
        );
        assert!(session.locked().unwrap() > 0);
    }
    ejected(&lab, &mut session);
    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    assert_eq!(
        run.outcome
            .log
            .matches("starting its machine again")
            .count(),
        2,
        "{}",
        run.outcome.log
    );
    assert!(run.faults.is_empty(), "{}", run.faults);
}

/// Makes the guest eject the controller: it disappears there, nothing is pinned for it, and its
/// group is free, while the machine goes on.
fn ejected(lab: &AssignLab, session: &mut Session<'_>) {
    let all = session.locked().unwrap();
    let eject = format!(
        "{} && for s in /sys/bus/pci/slots/*; do if grep -q ${{A%.*}} $s/address; then echo 0 \
         >$s/power; fi; done; \
         [ ! -e /sys/bus/pci/devices/$A ] && [ ! -e {DISK} ]",
        find()
    );
    session.run(&eject).unwrap();
    let rest = session.locked().unwrap();
    eprintln!("ejected: {all} KiB pinned before, {rest} then");
    assert!(rest < all);
    let group = format!(
        "exec 3<>/dev/vfio/$(basename $(readlink /sys/bus/pci/devices/{}/iommu_group))",
        lab.address(Device::Nvme)
    );
    lab.host().script(&group).expect("its group is free");
    let said = session.run(&lab.network_script("eth0", 5)).unwrap();
    assert!(said.contains("udp-echo ok count=5"), "{said}");
}

/// Number of labs, and of kills in each. The emulator may end by an assertion of its own
/// (`iotlb_to_section`) as devices are reset and mapped: seen once, at the eleventh guest of one
/// lab.
const LABS: u64 = 4;
const KILLS: u64 = 5;

#[test]
#[ignore = "eight minutes of the lab: make soak"]
fn a_killed_vmm_leaves_no_pin_no_busy_group_and_a_usable_device() {
    for seed in 0..LABS {
        let lab = bound(LabConfig::default());
        let of = kill_at_random_points(&lab, KILLS, 35 + seed).unwrap();
        eprintln!("{KILLS} kills: pages pinned at each {:?}", of.held);
        assert_eq!(of.clean as u64, KILLS);
    }
}
