//! Time at which a guest's unmapped mappings are removed: each host policy, changed while the guest
//! runs, and the guest's own lazy mode.

use harness::assign::{AssignLab, Mode};
use lab::LabConfig;
use lab::assigned::Device;
use serde_json::Value;

use super::common::{
    DISK, PAUSE, all_with, bound, check_disk, check_pins_beside, disk_script, guest, rogue,
};

/// Bounds of the policies: mappings, and milliseconds.
const WINDOW: u64 = 64;
const AGE_MS: u64 = 100;
/// Policies, as written to the file.
const POLICIES: [&str; 4] = ["strict", "async", "deferred", "optimistic=256"];
/// Largest number of mappings that one of them may leave stale, for a device.
const QUOTA: u64 = 256;
/// Reads of a window.
const IO: u64 = 200;
/// Delay after its bound with which the end of a call may be seen: an emulated processor may be off
/// its host's for as long.
const LATE_NS: u64 = 1_000_000_000;

/// Rogue DMA is tried after the age that the policy allows, plus the delay of the emulated
/// processors.
#[test]
#[ignore = "four minutes of the lab: make soak"]
fn each_policy_keeps_its_contract_and_no_rogue_dma_arrives_after_its_age() {
    let lab = bound(LabConfig::default());
    let host = lab.host();
    host.put("policy", b"strict\n").unwrap();
    let file = host.path("policy");
    let options = format!(",policy-file={file},window={WINDOW},age={AGE_MS}");
    let guest = guest(Mode::Shared);
    let mut session = lab.begin(&guest, &all_with(&options)).unwrap();
    for policy in POLICIES {
        host.put("policy", format!("{policy}\n").as_bytes())
            .unwrap();
        check_disk(&session.run(&disk_script(1)).unwrap());
        session.run(&window()).unwrap();
        let wait = if policy == "strict" { 0 } else { AGE_MS + 1000 };
        rogue(&lab, &mut session, &format!("{PAUSE} --wait-ms {wait}"));
    }
    // The guest's own lazy mode, over the strict host.
    host.put("policy", b"strict\n").unwrap();
    let lazy = format!(
        "G=/sys/bus/pci/devices/$({})/iommu_group && echo DMA-FQ >$G/type && cat $G/type",
        Device::Nvme.search()
    );
    let said = session.run(&lazy).unwrap();
    assert!(said.contains("DMA-FQ"), "{said}");
    check_disk(&session.run(&disk_script(1)).unwrap());
    session.run(&window()).unwrap();

    let run = session.end().unwrap();
    run.outcome.check().unwrap();
    check_pins_beside(&run, 3 * QUOTA);
    let windows: Vec<Value> = run.outcome.windows().to_vec();
    assert_eq!(windows.len(), POLICIES.len() + 1);
    for (policy, window) in POLICIES.iter().zip(&windows) {
        check_contract(&lab, policy, window);
    }
    let lazy = of_disk(&lab, &windows[POLICIES.len()]);
    eprintln!("DMA-FQ: {lazy}");
    assert_ne!(lazy["domains_told"], 0, "it flushes as a whole: {lazy:#}");
}

/// Returns the command of a window of a ledger.
fn window() -> String {
    format!("workload reads {DISK} --count {IO} --warmup 20 --random 3")
}

/// Returns the figures of the controller in a window.
fn of_disk<'a>(lab: &AssignLab, window: &'a Value) -> &'a Value {
    let devices = window["devices"].as_array().unwrap();
    let is_disk = |device: &&Value| device["address"] == lab.address(Device::Nvme);
    devices.iter().find(is_disk).unwrap()
}

fn check_contract(lab: &AssignLab, policy: &str, window: &Value) {
    let disk = of_disk(lab, window);
    let figure = |key: &str| disk[key].as_u64().unwrap();
    let io = IO;
    eprintln!(
        "{policy}: {} maps, {} calls to unmap, {} found again, stale {} of {}, for {} of {} us",
        figure("maps"),
        figure("unmaps"),
        figure("hits"),
        figure("stale_max"),
        figure("stale_allowed"),
        figure("stale_ns_max") / 1000,
        figure("stale_ns_allowed") / 1000,
    );
    assert_eq!(disk["policy"], policy.split('=').next().unwrap());
    assert!(figure("stale_max") <= figure("stale_allowed"), "{disk:#}");
    let limit = figure("stale_ns_allowed") + figure("longest_call_ns") + LATE_NS;
    assert!(figure("stale_ns_max") <= limit, "{disk:#}");
    match policy {
        "strict" => {
            assert_eq!(figure("stale_max"), 0);
            assert!(figure("maps") >= io && figure("unmaps") >= io, "{disk:#}");
        }
        "async" => assert!(figure("unmaps") >= io, "{disk:#}"),
        // If a guest reuses an IOVA at once, as a stock one does, the stale mapping is removed
        // first.
        "deferred" => assert!(figure("unmaps") <= figure("maps"), "{disk:#}"),
        _ => assert!(
            figure("hits") > io / 2 && figure("maps") < io / 2,
            "{disk:#}"
        ),
    }
}
