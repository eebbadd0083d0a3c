//! The driver of `libs/vfio` (`examples/nvme`) on an emulated NVMe controller behind an emulated VT-d, in a stock kernel.
//!
//! Each run moves verified blocks under a policy, then asks the device for DMA where it may not be. What came through is held
//! against what the policy allows, what did not against the kernel's log of faults, and system calls against what the policy is
//! there to save.

use std::path::Path;
use std::time::Duration;

use lab::{Lab, LabConfig, build};

use crate::{may_start, sh, started};

/// Bytes of the namespace.
const NAMESPACE: u64 = 16 << 20;

/// The configuration with a VT-d unit, a controller behind it, whose namespace is a file in `dir`, and the driver.
///
/// Caching mode is off, as it is by default: the unit remembers what it has translated, and only an invalidation makes
/// it forget.
pub fn with_controller(mut config: LabConfig, dir: &Path) -> LabConfig {
    let namespace = dir.join("namespace");
    let file = std::fs::File::create(&namespace).unwrap();
    file.set_len(NAMESPACE).unwrap();
    let drive = format!(
        "if=none,id=namespace,format=raw,cache=unsafe,file={}",
        namespace.display()
    );
    let args = ["-device", "intel-iommu,intremap=on", "-drive", &drive];
    let device = ["-device", "nvme,drive=namespace,serial=lab"];
    let args = args.iter().chain(&device).map(|arg| (*arg).to_owned());
    config.qemu_args.extend(args);
    config.kernel_options = "intel_iommu=on iommu.strict=1".to_owned();
    config.with_file(build::nvme_driver().unwrap(), "/bin/nvme")
}

/// Under these the device reaches what is unmapped until a flush.
const WITH_WINDOW: [&str; 2] = ["deferred", "optimistic"];
const WITHOUT: [&str; 4] = ["strict", "strict-combining", "shared", "async"];

/// Shortly: one policy without a window, and one with.
pub fn a_driver_in_user_space(lab: &Lab) {
    let address = unbound(lab);
    let refused = lab
        .exec("/bin/nvme", [address.as_str(), "--overwrite"])
        .expect("it runs");
    let said = refused.stderr_text();
    assert_eq!(refused.status, 1, "{said}");
    assert!(said.contains("bound to nvme, not to vfio-pci"), "{said}");
    bind(lab, &address);
    let said = drive(lab, &address, "strict", 2000);
    // What was refused first, since the kernel logs no more than ten lines in five seconds: the IOVAs of what is read-only, and
    // of what was just unmapped.
    let refused = said.lines().filter(|line| line.ends_with(REFUSED));
    let iovas = refused.map(|line| line.split_whitespace().nth(2).unwrap());
    let log = sh(lab, "dmesg");
    for iova in iovas.take(2) {
        let device = address.strip_prefix("0000:").unwrap();
        let fault = format!(
            "device [{device}] fault addr {}",
            iova.trim_end_matches(':')
        );
        assert!(log.contains(&fault), "no {fault} in {log}");
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
    let address = unbound(&lab);
    bind(&lab, &address);
    let blocks = std::env::var("VFIO_BLOCKS").map_or(100_000, |blocks| blocks.parse().unwrap());
    for policy in WITHOUT.iter().chain(&WITH_WINDOW) {
        drive(&lab, &address, policy, blocks);
    }
    lab.shutdown().unwrap();
}

/// The controller's address. The kernel's own driver has it so far.
fn unbound(lab: &Lab) -> String {
    let found = sh(lab, "grep -l 0x010802 /sys/bus/pci/devices/*/class");
    let folder = Path::new(found.trim()).parent().unwrap();
    folder.file_name().unwrap().to_str().unwrap().to_owned()
}

/// As a user does it.
fn bind(lab: &Lab, address: &str) {
    let device = format!("/sys/bus/pci/devices/{address}");
    sh(
        lab,
        &format!(
            "echo vfio-pci > {device}/driver_override && echo {address} > {device}/driver/unbind && \
             echo {address} > /sys/bus/pci/drivers_probe && readlink {device}/driver"
        ),
    );
}

/// How the driver's line ends of DMA that did not come through.
const REFUSED: &str = "512 of 512 words untouched";

/// Runs the driver; what it has said on the way.
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
    // What a policy saves. How much, where that is a matter of time, is not looked at.
    let commands = count("commands");
    let (maps, unmaps) = (count("map_calls"), count("unmap_calls"));
    assert_eq!(maps + count("reused"), commands, "{summary}");
    match policy {
        "deferred" => assert!(maps == commands && unmaps < commands, "{summary}"),
        "optimistic" => assert!(maps < commands / 10 && unmaps <= maps, "{summary}"),
        // Half of the commands write, two at a time from the same memory.
        "shared" => assert_eq!([maps, unmaps], [commands / 4 * 3; 2], "{summary}"),
        _ => assert_eq!([maps, unmaps], [commands; 2], "{summary}"),
    }
    said
}
