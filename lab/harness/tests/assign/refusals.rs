//! Devices that cannot be assigned, and limits of the user who starts a machine: each is reported
//! in a line that names the cause.

use harness::assign::{AssignLab, Mode, rogue_script};
use lab::LabConfig;
use lab::assigned::{self, Device};

use super::common::guest;

/// Adds two functions behind a bridge that does not distinguish them, one of which is bound to the
/// host's own driver.
fn with_shared_group(mut config: LabConfig) -> LabConfig {
    let args = [
        "-device",
        "pcie-pci-bridge,id=conventional",
        "-device",
        "pci-testdev,bus=conventional,addr=1",
        "-device",
        "virtio-rng-pci,bus=conventional,addr=2",
    ];
    config.qemu_args.extend(args.map(str::to_owned));
    config
}

/// Returns the error of a run with this device, which must be refused.
fn refused(lab: &AssignLab, address: &str) -> String {
    let host = lab.host();
    let script = format!(
        "exitless run --kernel {} --initrd {} --memory 256M --device vfio={address} 2>&1; echo \
         status=$?",
        host.kernel(),
        host.initrd()
    );
    let said = host.script(&script).unwrap();
    eprintln!("{said}");
    assert!(
        said.contains("status=1") || said.contains("status=2"),
        "{said}"
    );
    said
}

fn has_all(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "no {word:?}: {said}");
    }
}

#[test]
#[ignore = "a minute of the lab: make soak"]
fn devices_that_cannot_be_had_and_limits_are_said_in_a_line() {
    let lab = AssignLab::start(with_shared_group(LabConfig::default())).unwrap();
    let host = lab.host();
    let nvme = lab.address(Device::Nvme);
    let said = refused(&lab, nvme);
    has_all(
        &said,
        &[
            nvme,
            "bound to nvme",
            "driver_override",
            "/driver/unbind",
            "drivers_probe",
        ],
    );
    has_all(
        &refused(&lab, "0000:1f:1f.7"),
        &["no PCI device 0000:1f:1f.7"],
    );

    let found = |id: &str| {
        let script = format!("cd /sys/bus/pci/devices && dirname $(grep -l {id} */device)");
        host.script(&script).unwrap().trim().to_owned()
    };
    let (testdev, rng) = (found("0x0005"), found("0x1005"));
    host.script(&assigned::bind_script(&testdev)).unwrap();
    let said = refused(&lab, &testdev);
    has_all(&said, &["not viable", &rng, "virtio-pci"]);

    lab.bind(Device::Nvme).unwrap();
    let session = lab
        .begin(&guest(Mode::Shared), &[(Device::Nvme, "")])
        .unwrap();
    has_all(&refused(&lab, nvme), &["/dev/vfio/", "busy"]);
    session.end().unwrap().outcome.check().unwrap();

    little_locked_memory(&lab);
}

/// A user who is not root, and may lock four pages: the guest's own VFIO maps more for `edu`, and
/// finds that no DMA arrives. The guest goes on. (A driver of the guest's kernel would retry for
/// minutes.)
fn little_locked_memory(lab: &AssignLab) {
    lab.bind(Device::Edu).unwrap();
    let host = lab.host();
    let edu = lab.address(Device::Edu);
    let rogue = rogue_script("--pieces --count 20 --seed 3");
    let script = format!("{rogue}; echo said $?; echo goes $((1+1)) on");
    let run = format!(
        "cd /tmp && ulimit -l 16 && exec timeout 240 exitless run --kernel {} --initrd {} --memory \
         256M --iommu-mode trap \
         --device vfio={edu} --cmdline 'console=ttyS0 quiet panic=-1 {}' </dev/null\n",
        host.kernel(),
        host.initrd(),
        lab::guest_image::run_option(&script).unwrap()
    );
    host.put("limited.sh", run.as_bytes()).unwrap();
    let script = format!(
        "grep -q ^nobody: /etc/passwd || echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd; chmod \
         755 /root; \
         G=$(basename $(readlink /sys/bus/pci/devices/{edu}/iommu_group)); chmod 666 /dev/kvm \
         /dev/vfio/vfio /dev/vfio/$G; \
         su nobody -s /bin/sh -c 'sh {}' 2>&1; echo status=$?",
        host.path("limited.sh")
    );
    let said = host.script(&script).unwrap();
    eprintln!("{said}");
    let line = said.lines().find(|line| line.contains("RLIMIT_MEMLOCK"));
    let line = line.unwrap_or_else(|| panic!("no line about the limit: {said}"));
    eprintln!("{line}");
    has_all(
        &said,
        &["goes 2 on", "exitless-guest: status=0", "status=0"],
    );
    assert_eq!(said.matches("RLIMIT_MEMLOCK").count(), 1, "once: {said}");
}
