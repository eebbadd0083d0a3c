//! The driver of `libs/vfio` (`examples/nvme`) on an emulated NVMe controller behind an emulated
//! VT-d, in a stock kernel.
//!
//! Each run moves verified blocks under a policy, then asks the device for DMA without permission.
//! Accesses that succeeded are compared with the policy's bounds, those that failed with the
//! kernel's log of faults, and system calls with the savings that the policy promises.

use std::path::Path;
use std::time::Duration;

use lab::assigned::{self, Device, DmaAccess};
use lab::{Lab, LabConfig, build};

use crate::{may_start, started};

/// Bytes of the namespace.
const NAMESPACE: u64 = 16 << 20;

/// Returns the configuration with a VT-d unit, a controller behind it, whose namespace is a file in
/// `dir`, and the driver.
pub fn with_controller(config: LabConfig, dir: &Path) -> LabConfig {
    let namespace = dir.join("namespace");
    let file = std::fs::File::create(&namespace).unwrap();
    file.set_len(NAMESPACE).unwrap();
    let config = assigned::with_nvme(assigned::with_unit(config), &namespace).unwrap();
    config.with_file(build::nvme_driver().unwrap(), "/bin/nvme")
}

/// Policies under which the device can access unmapped memory until a flush.
const WITH_WINDOW: [&str; 2] = ["deferred", "optimistic"];
const WITHOUT: [&str; 4] = ["strict", "strict-combining", "shared", "async"];

/// Short run: one policy without a window, and one with.
pub fn a_driver_in_user_space(lab: &Lab) {
    // The kernel's own driver is still bound.
    let address = Device::Nvme.find(lab).unwrap();
    let refused = lab
        .exec("/bin/nvme", [address.as_str(), "--overwrite"])
        .expect("it runs");
    let said = refused.stderr_text();
    assert_eq!(refused.status, 1, "{said}");
    assert!(said.contains("bound to nvme, not to vfio-pci"), "{said}");
    assigned::bind_to_vfio(lab, &address).unwrap();
    let said = drive(lab, &address, "strict", 2000);
    // Only the first refused accesses, since the kernel logs no more than ten lines in five
    // seconds: the IOVAs of read-only memory, and of memory that was just unmapped.
    let refused = said.lines().filter(|line| line.ends_with(REFUSED));
    let iovas = refused.map(|line| line.split_whitespace().nth(2).unwrap());
    let log = assigned::take_faults(lab).unwrap();
    for iova in iovas.take(2) {
        let digits = iova.trim_end_matches(':').trim_start_matches("0x");
        let page = u64::from_str_radix(digits, 16).unwrap();
        assert!(
            log.has(&address, DmaAccess::Write, page),
            "no {iova} in {log}"
        );
    }
    drive(lab, &address, "deferred", 2000);
}

#[test]
#[ignore = "some minutes: `make vfio`, `make soak`"]
fn a_hundred_thousand_blocks_under_each_policy() {
    if !may_start() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let lab = started(&with_controller(LabConfig::default(), dir.path()));
    let address = Device::Nvme.find(&lab).unwrap();
    assigned::bind_to_vfio(&lab, &address).unwrap();
    let blocks = std::env::var("VFIO_BLOCKS").map_or(100_000, |blocks| blocks.parse().unwrap());
    for policy in WITHOUT.iter().chain(&WITH_WINDOW) {
        drive(&lab, &address, policy, blocks);
    }
    lab.shutdown().unwrap();
}

/// Suffix of the driver's line on DMA that did not arrive.
const REFUSED: &str = "512 of 512 words untouched";

/// Runs the driver. Returns its output.
fn drive(lab: &Lab, address: &str, policy: &str, blocks: u64) -> String {
    let wanted = blocks.to_string();
    let driver = lab.command("/bin/nvme").args([address, "--overwrite"]);
    let driver = driver.args(["--policy", policy, "--blocks", &wanted, "--trespass"]);
    let out = driver.timeout(Duration::from_secs(1200)).output().unwrap();
    let (summary, said) = (out.stdout_text(), out.stderr_text());
    assert!(out.success(), "{policy}: {summary}{said}");
    eprint!("{summary}");
    let field = |name: &str| {
        let (_, rest) = summary.split_once(&format!("\"{name}\":")).unwrap();
        rest.split([',', '}']).next().unwrap().trim_matches('"')
    };
    let has_window = WITH_WINDOW.contains(&policy);
    for (what, expected) in [
        ("read_only", "refused"),
        ("mapped", "reached"),
        ("unmapped", if has_window { "reached" } else { "refused" }),
        ("flushed", "refused"),
        ("list", "refused"),
    ] {
        assert_eq!(field(what), expected, "{policy}, {what}: {said}");
    }
    let count = |name: &str| field(name).parse::<u64>().unwrap();
    assert!(count("blocks") >= blocks, "{summary}");
    // Savings of a policy. Their amount is not checked where it depends on time.
    let commands = count("commands");
    let (maps, unmaps) = (count("map_calls"), count("unmap_calls"));
    assert_eq!(maps + count("reused"), commands, "{summary}");
    match policy {
        "deferred" => assert!(maps == commands && unmaps < commands, "{summary}"),
        "optimistic" => assert!(maps < commands / 10 && unmaps <= maps, "{summary}"),
        // Half of the commands write, two at a time from the same memory. Commands that complete
        // together are unmapped together, by one call for neighbours: their number depends on time.
        "shared" => assert!(maps == commands / 4 * 3 && unmaps <= maps, "{summary}"),
        _ => assert!(maps == commands && unmaps <= maps, "{summary}"),
    }
    said
}
