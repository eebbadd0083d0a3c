use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::*;

impl Assignment {
    /// A host with everything, and an NVMe drive that is bound to vfio-pci.
    pub fn complete() -> Self {
        Self {
            groups: vec![Group {
                id: 4,
                file: Some(Ok(())),
                devices: vec![nvme(Some("vfio-pci"))],
            }],
            firmware_table: Some("DMAR"),
            container: Some(Ok(())),
            has_vfio_pci: true,
            remaps_interrupts: true,
            allows_unsafe_interrupts: false,
            dma_entry_limit: Some(65_535),
            locked: LockedMemory::UNLIMITED,
            user: 0,
        }
    }
}

fn nvme(driver: Option<&str>) -> Device {
    device("0000:00:04.0", 0x01_08_02, driver)
}

fn device(address: &str, class: u32, driver: Option<&str>) -> Device {
    let host = HostDevice {
        address: address.into(),
        driver: driver.map(Into::into),
        class,
        vendor: 0x1b36,
        device: 0x10,
    };
    Device {
        host,
        can_reset: true,
    }
}

/// A host with everything but for this group.
fn with_group(devices: Vec<Device>, file: Option<Result<(), String>>) -> Assignment {
    let id = 4;
    Assignment {
        groups: vec![Group { id, file, devices }],
        ..Assignment::complete()
    }
}

/// The first device's obstacle and commands.
fn first(facts: &Assignment) -> (Option<String>, Vec<String>) {
    let group = facts.reports().remove(0);
    let device = group.devices.into_iter().next().expect("a device");
    (device.obstacle, device.commands)
}

#[test]
fn a_device_of_vfio_can_be_assigned() {
    assert_eq!(first(&Assignment::complete()), (None, vec![]));
    let vendors = with_group(vec![nvme(Some("nvme_vfio_pci"))], Some(Ok(())));
    assert_eq!(first(&vendors).0, None);
}

#[test]
fn a_bound_device_has_the_commands_that_bind_it_to_vfio() {
    let (obstacle, commands) = first(&with_group(vec![nvme(Some("nvme"))], None));
    assert_eq!(obstacle.as_deref(), Some("bound to nvme, not to vfio-pci"));
    let folder = "/sys/bus/pci/devices/0000:00:04.0";
    let bind = [
        format!("echo vfio-pci > {folder}/driver_override"),
        format!("echo 0000:00:04.0 > {folder}/driver/unbind"),
        "echo 0000:00:04.0 > /sys/bus/pci/drivers_probe".to_owned(),
    ];
    assert_eq!(commands, bind);
    // What has no driver is not unbound.
    let (obstacle, commands) = first(&with_group(vec![nvme(None)], None));
    assert_eq!(obstacle.as_deref(), Some("bound to no driver"));
    assert_eq!(commands, [bind[0].clone(), bind[2].clone()]);
    // The module comes first, the owner of the file last.
    let facts = Assignment {
        has_vfio_pci: false,
        user: 1000,
        ..with_group(vec![nvme(Some("nvme"))], None)
    };
    let (_, commands) = first(&facts);
    assert_eq!(commands.first().unwrap(), "modprobe vfio-pci");
    assert_eq!(commands.last().unwrap(), "chown 1000 /dev/vfio/4");
    assert_eq!(commands[1..4], bind);
}

#[test]
fn a_group_goes_as_a_whole() {
    let others = vec![
        nvme(Some("vfio-pci")),
        device("0000:00:1f.0", 0x06_01_00, Some("lpc_ich")),
        device("0000:00:1f.1", 0x06_04_00, Some("pcieport")),
        device("0000:00:1f.2", 0x0c_05_00, None),
    ];
    let (obstacle, commands) = first(&with_group(others, Some(Ok(()))));
    let obstacle = obstacle.expect("one is in the way");
    assert!(obstacle.contains("0000:00:1f.0 (lpc_ich)"), "{obstacle}");
    // A port uses no DMA, and a device without a driver none.
    for address in ["0000:00:1f.1", "0000:00:1f.2", "0000:00:04.0"] {
        assert!(!obstacle.contains(address), "{obstacle}");
        assert!(
            !commands.iter().any(|it| it.contains(address)),
            "{commands:?}"
        );
    }
    // VFIO takes no bridge: it only loses its driver.
    let unbind = "echo 0000:00:1f.0 > /sys/bus/pci/devices/0000:00:1f.0/driver/unbind";
    assert_eq!(commands, [unbind]);
    // Where the bus is not known, no command is made up.
    let mut platform = device("thing.0", 0, Some("thing"));
    platform.host.vendor = 0;
    let others = vec![nvme(Some("vfio-pci")), platform];
    let (obstacle, commands) = first(&with_group(others, Some(Ok(()))));
    assert!(obstacle.is_some_and(|it| it.contains("thing.0 (thing)")));
    assert_eq!(commands, [""; 0]);
    let others = vec![
        nvme(Some("vfio-pci")),
        device("0000:00:04.1", 0x02_00_00, Some("e1000e")),
    ];
    let (_, commands) = first(&with_group(others, Some(Ok(()))));
    assert_eq!(commands.len(), 3, "{commands:?}");
}

#[test]
fn an_obstacle_without_a_command_is_named() {
    for (facts, words, command) in [
        (
            with_group(vec![device("0000:00:00.0", 0x06_00_00, None)], None),
            "a bridge",
            None,
        ),
        (
            with_group(vec![nvme(Some("vfio-pci"))], None),
            "a container has to be given it",
            None,
        ),
        (
            Assignment {
                user: 1000,
                ..with_group(
                    vec![nvme(Some("vfio-pci"))],
                    Some(Err("Permission denied".into())),
                )
            },
            "/dev/vfio/4: Permission denied",
            Some("chown 1000 /dev/vfio/4"),
        ),
        (
            Assignment {
                container: None,
                ..Assignment::complete()
            },
            "/dev/vfio/vfio cannot be used",
            None,
        ),
        (
            Assignment {
                remaps_interrupts: false,
                ..Assignment::complete()
            },
            "interrupts are not remapped",
            None,
        ),
    ] {
        let (obstacle, commands) = first(&facts);
        let obstacle = obstacle.expect(words);
        assert!(obstacle.contains(words), "{obstacle}");
        assert_eq!(commands.first().map(String::as_str), command, "{words}");
    }
    let accepted = Assignment {
        remaps_interrupts: false,
        allows_unsafe_interrupts: true,
        ..Assignment::complete()
    };
    assert_eq!(first(&accepted).0, None);
}

#[test]
fn each_finding_says_what_is_lacking_and_what_to_do() {
    let none = Assignment::default;
    let complete = Assignment::complete;
    let limited = LockedMemory::limited(8 << 20, 4 << 10);
    for (facts, key, state, value, next) in [
        (
            none(),
            "iommu",
            State::Missing,
            "describes no IOMMU",
            "firmware",
        ),
        (
            Assignment {
                firmware_table: Some("DMAR"),
                ..none()
            },
            "iommu",
            State::Missing,
            "DMAR",
            "intel_iommu=on",
        ),
        (
            Assignment {
                firmware_table: Some("IVRS"),
                ..none()
            },
            "iommu",
            State::Missing,
            "IVRS",
            "amd_iommu=off",
        ),
        (
            Assignment {
                container: None,
                ..complete()
            },
            "iommu",
            State::Limited,
            "1 group, but no /dev/vfio/vfio",
            "modprobe vfio-pci",
        ),
        (
            Assignment {
                container: Some(Err("denied".into())),
                ..complete()
            },
            "iommu",
            State::Limited,
            "denied",
            "chmod 666",
        ),
        (
            complete(),
            "iommu",
            State::Good,
            "1 device can be assigned now",
            "",
        ),
        (
            none(),
            "interrupt_remapping",
            State::Missing,
            "no IOMMU",
            "intremap=on",
        ),
        (
            Assignment {
                remaps_interrupts: false,
                ..complete()
            },
            "interrupt_remapping",
            State::Missing,
            "VFIO refuses",
            "allow_unsafe_interrupts",
        ),
        (
            Assignment {
                remaps_interrupts: false,
                allows_unsafe_interrupts: true,
                ..complete()
            },
            "interrupt_remapping",
            State::Limited,
            "forge any interrupt",
            "",
        ),
        (complete(), "interrupt_remapping", State::Good, "on", ""),
        (
            none(),
            "dma_mappings",
            State::Limited,
            "not known",
            "modprobe",
        ),
        (
            Assignment {
                dma_entry_limit: Some(100),
                ..complete()
            },
            "dma_mappings",
            State::Limited,
            "100 for a device",
            "dma_entry_limit",
        ),
        (complete(), "dma_mappings", State::Good, "65535", ""),
        (
            Assignment {
                locked: limited,
                ..complete()
            },
            "locked_memory",
            State::Limited,
            "8192 KiB (RLIMIT_MEMLOCK), 4 KiB used",
            "ulimit -l",
        ),
        (complete(), "locked_memory", State::Good, "no limit", ""),
    ] {
        let found = facts
            .findings()
            .into_iter()
            .find(|it| it.key == key)
            .unwrap();
        assert_eq!(found.state, state, "{key} {value}");
        assert!(found.value.contains(value), "{key}: {}", found.value);
        assert!(found.next.contains(next), "{key}: {}", found.next);
    }
}

#[test]
fn people_and_programs_get_the_same_devices() {
    let groups = with_group(vec![nvme(Some("nvme"))], None).reports();
    let text = table(&groups);
    for words in [
        "  group 4\n",
        "    0000:00:04.0  1b36:0010  NVMe controller, nvme: bound to nvme, not to vfio-pci\n",
        "      # echo 0000:00:04.0 > /sys/bus/pci/drivers_probe\n",
    ] {
        assert!(text.contains(words), "no {words:?} in: {text}");
    }
    let mut kept = Assignment::complete();
    assert!(table(&kept.reports()).ends_with("vfio-pci: can be assigned\n"));
    kept.groups[0].devices[0].can_reset = false;
    assert!(table(&kept.reports()).contains("can be assigned, and has no reset"));
    let value = json(&groups);
    let device = &value[0]["devices"][0];
    assert_eq!(value[0]["group"], 4);
    assert_eq!(device["address"], "0000:00:04.0");
    assert_eq!(device["vendor"], "1b36");
    assert_eq!(device["class"], "010802");
    assert_eq!(device["assignable"], false);
    assert_eq!(device["commands"].as_array().unwrap().len(), 3);
    assert_eq!(table(&[]), "");
    assert_eq!(json(&[]), json!([]));
}

/// Makes a machine with one group of a PCI device and one that is none.
fn make_machine(root: &Path) {
    let device = root.join("sys/devices/pci0000:00/0000:00:04.0");
    let bus = root.join("sys/bus/pci/devices");
    let group = root.join("sys/kernel/iommu_groups/12/devices");
    let platform = root.join("sys/devices/platform/thing");
    let drivers = root.join("sys/bus/pci/drivers");
    let parameters = root.join("sys/module/vfio_iommu_type1/parameters");
    let tables = root.join("sys/firmware/acpi/tables");
    for folder in [
        &device,
        &bus,
        &group,
        &platform,
        &parameters,
        &tables,
        &drivers.join("nvme"),
        &drivers.join("vfio-pci"),
        &root.join("dev/vfio"),
        &root.join("proc"),
    ] {
        fs::create_dir_all(folder).unwrap();
    }
    for (file, text) in [
        (device.join("vendor"), "0x1b36\n"),
        (device.join("device"), "0x0010\n"),
        (device.join("class"), "0x010802\n"),
        (device.join("reset"), ""),
        (parameters.join("dma_entry_limit"), "4242\n"),
        (parameters.join("allow_unsafe_interrupts"), "Y\n"),
        (tables.join("DMAR"), ""),
        (root.join("dev/vfio/vfio"), ""),
        (
            root.join("proc/interrupts"),
            "  1:  9  0  IR-IO-APIC  1-edge  i8042\n",
        ),
    ] {
        fs::write(file, text).unwrap();
    }
    symlink(drivers.join("nvme"), device.join("driver")).unwrap();
    symlink(&device, group.join("0000:00:04.0")).unwrap();
    symlink(&device, bus.join("0000:00:04.0")).unwrap();
    symlink(&platform, group.join("thing")).unwrap();
    // Groups of later numbers come later, and what is no number is none.
    for name in ["2", "odd"] {
        fs::create_dir_all(root.join("sys/kernel/iommu_groups").join(name)).unwrap();
    }
}

#[test]
fn a_machine_is_read_from_its_files() {
    let root = tempfile::tempdir().unwrap();
    make_machine(root.path());
    let facts = Assignment::probe(root.path());
    let ids: Vec<_> = facts.groups.iter().map(|group| group.id).collect();
    assert_eq!(ids, [2, 12]);
    assert_eq!(facts.groups[0].devices, []);
    let [pci, other] = &facts.groups[1].devices[..] else {
        panic!("{facts:?}");
    };
    assert_eq!(pci, &nvme(Some("nvme")));
    assert_eq!(
        other.unfit(),
        Some("no PCI device, which stays with the host")
    );
    assert_eq!(facts.groups[1].file, None);
    assert_eq!(facts.container, Some(Ok(())));
    assert_eq!(facts.firmware_table, Some("DMAR"));
    assert_eq!(facts.dma_entry_limit, Some(4242));
    assert!(facts.has_vfio_pci && facts.remaps_interrupts && facts.allows_unsafe_interrupts);
}

#[test]
fn a_machine_without_files_has_nothing() {
    let root = tempfile::tempdir().unwrap();
    let facts = Assignment::probe(root.path());
    let Assignment { locked, user, .. } = facts;
    let nothing = Assignment {
        locked,
        user,
        ..Assignment::default()
    };
    assert_eq!(facts, nothing);
}
