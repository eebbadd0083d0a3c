use std::fs;
use std::sync::mpsc::channel;

use clap::Parser;

use super::*;

fn of(text: &str) -> Result<DeviceConfig> {
    DeviceConfig::check(text, IommuArg::Vtd)
}

fn message<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    format!("{:#}", outcome.expect_err("refused"))
}

#[test]
fn an_address_is_completed_and_written_as_sysfs_writes_it() {
    for (text, address) in [
        ("0000:00:04.0", "0000:00:04.0"),
        ("00:04.0", "0000:00:04.0"),
        ("0000:AF:1F.7", "0000:af:1f.7"),
        ("10000:e1:00.0", "10000:e1:00.0"),
    ] {
        let device = of(&format!("vfio={text}")).expect(text);
        assert_eq!(device.address, address, "{text}");
        assert_eq!(device.policy, HostPolicy::Strict);
    }
}

#[test]
fn a_malformed_address_is_refused() {
    for text in [
        "",
        "04.0",
        "00:04",
        "0000:00:04",
        "0000:00:20.0",
        "0000:00:04.8",
        "0000:00:04.10",
        "0:00:04.0",
        "0000:0:04.0",
        "0000:00:4.0",
        "0000:00:04.",
        "0000:00:+4.0",
        "0000:g0:04.0",
        "1:0000:00:04.0",
        "0000:00:04.0/..",
        "0000-00-04.0",
        "../0000:00:04.0",
        "123456789:00:04.0",
    ] {
        let text = format!("vfio={text}");
        assert!(message(of(&text)).contains("is no PCI address"), "{text}");
    }
}

#[test]
fn each_policy_is_read_with_its_bounds() {
    let ms = Duration::from_millis;
    let window = |entries, age| Window { entries, age };
    for (keys, policy) in [
        ("", HostPolicy::Strict),
        (",policy=strict", HostPolicy::Strict),
        (",policy=async", HostPolicy::Async(window(250, ms(10)))),
        (
            ",policy=async,window=1",
            HostPolicy::Async(window(1, ms(10))),
        ),
        (
            ",policy=deferred,window=64K,age=10000",
            HostPolicy::Deferred(window(65_536, ms(10_000))),
        ),
        (
            ",policy=optimistic=256",
            HostPolicy::Optimistic(Optimistic {
                quota: 256,
                residency: ms(10),
            }),
        ),
        (
            ",age=1,policy=optimistic=65536",
            HostPolicy::Optimistic(Optimistic {
                quota: 65_536,
                residency: ms(1),
            }),
        ),
    ] {
        let device = of(&format!("vfio=00:04.0{keys}")).expect(keys);
        assert_eq!(device.policy, policy, "{keys}");
    }
}

#[test]
fn a_malformed_request_is_refused_with_what_would_do() {
    for (text, words) in [
        ("", "names no device: write vfio=0000:00:04.0"),
        ("policy=strict", "names no device"),
        ("0000:00:04.0", "write vfio=0000:00:04.0"),
        ("vfio=00:04.0,vfio=00:05.0", "given twice"),
        ("vfio=00:04.0,polcy=strict", "did you mean \"policy\"?"),
        ("vfio=00:04.0,policy=defered", "did you mean \"deferred\"?"),
        (
            "vfio=00:04.0,policy=lazy",
            "is no policy (strict, async, deferred, optimistic=N)",
        ),
        ("vfio=00:04.0,policy=", "is no policy"),
        ("vfio=00:04.0,policy=optimistic", "optimistic=256"),
        (
            "vfio=00:04.0,policy=optimistic=0",
            "optimistic is 1 to 65536, not 0",
        ),
        ("vfio=00:04.0,policy=optimistic=65537", "not 65537"),
        ("vfio=00:04.0,policy=optimistic=many", "is no number"),
        ("vfio=00:04.0,policy=deferred=3", "window=N"),
        (
            "vfio=00:04.0,policy=deferred,window=0",
            "window is 1 to 65536, not 0",
        ),
        (
            "vfio=00:04.0,policy=deferred,window=128K",
            "window is 1 to 65536",
        ),
        (
            "vfio=00:04.0,policy=deferred,age=0",
            "age is 1 to 10000 ms, not 0",
        ),
        ("vfio=00:04.0,policy=deferred,age=10001", "not 10001"),
        ("vfio=00:04.0,window=5", "window is for"),
        ("vfio=00:04.0,age=5", "age is for"),
        ("vfio=00:04.0,policy=optimistic=5,window=5", "window is for"),
        ("vfio=00:04.0,require-dma-domains=yes", "on or off"),
        ("vfio=00:04.0,dma-before-te", "on or off"),
        ("vfio=00:04.0,policy-file=", "name the file"),
    ] {
        let refused = message(of(text));
        assert!(refused.contains(words), "{text}: {refused}");
        assert!(refused.starts_with("--device"), "{text}: {refused}");
    }
}

#[test]
fn a_summary_says_what_is_pinned_and_what_may_be_stale() {
    for (keys, iommu, words) in [
        ("", IommuArg::Vtd, "device 0000:00:04.0: policy strict"),
        (
            "",
            IommuArg::None,
            "device 0000:00:04.0: all memory pinned (--iommu none)",
        ),
        (
            ",policy=async,window=9",
            IommuArg::Vtd,
            "device 0000:00:04.0: policy async (at most 9 mappings stale, until the host has \
             unmapped them)",
        ),
        (
            ",policy=optimistic=1,age=7,dma-before-te=on,require-dma-domains=on,policy-file=F",
            IommuArg::Vtd,
            "device 0000:00:04.0: policy optimistic (at most 1 mapping stale, for 7 ms), followed \
             in F, only in DMA domains, \
             all memory pinned until translation is on",
        ),
    ] {
        let device = DeviceConfig::check(&format!("vfio=00:04.0{keys}"), iommu).expect(keys);
        assert_eq!(device.summary(iommu != IommuArg::None), words);
    }
}

#[test]
fn without_an_iommu_nothing_that_is_about_mappings_is_taken() {
    DeviceConfig::check("vfio=00:04.0", IommuArg::None).expect("the baseline");
    for key in [
        "policy=strict",
        "window=5",
        "age=5",
        "require-dma-domains=off",
        "dma-before-te=on",
        "policy-file=F",
    ] {
        let refused = message(DeviceConfig::check(
            &format!("vfio=00:04.0,{key}"),
            IommuArg::None,
        ));
        assert!(
            refused.contains("--iommu none") && refused.contains(key.split('=').next().unwrap()),
            "{refused}"
        );
    }
}

/// A command that has these arguments alone.
#[derive(Parser)]
struct Command {
    #[command(flatten)]
    run: RunArgs,
}

fn together(more: &[&str], locked: LockedMemory) -> Result<Vec<DeviceConfig>> {
    let words = ["run", "--kernel", "K", "--memory", "64M"];
    let command = Command::try_parse_from(words.iter().chain(more)).expect("arguments");
    let ram = RamConfig::check(&command.run.memory).expect("memory");
    check(&command.run, ram, &locked)
}

#[test]
fn devices_that_exclude_each_other_or_another_option_are_refused() {
    let one = ["--device", "vfio=00:04.0"];
    for (more, words) in [
        (
            &["--device", "vfio=0000:00:04.0"][..],
            "vfio=0000:00:04.0 is given twice",
        ),
        (
            &["--iommu", "none", "--resident", "32M"],
            "--resident does not go with --device and --iommu none",
        ),
        (
            &["--iommu", "none", "--balloon", "target=0"],
            "--balloon does not go with --device and --iommu none",
        ),
        (
            &[
                "--resident",
                "32M",
                "--device",
                "vfio=00:05.0,dma-before-te=on",
            ],
            "dma-before-te does not go with --resident",
        ),
    ] {
        let refused = message(together(
            &[&one[..], more].concat(),
            LockedMemory::UNLIMITED,
        ));
        assert!(refused.contains(words), "{more:?}: {refused}");
    }
}

#[test]
fn a_limit_of_memory_requires_that_the_guest_confines_its_devices() {
    let device = ["--device", "vfio=00:04.0"];
    let requires = |more: &[&str]| {
        let all = together(&[&device[..], more].concat(), LockedMemory::UNLIMITED);
        all.expect("devices")[0].requires_dma_domains
    };
    assert!(!requires(&[]));
    assert!(requires(&["--resident", "32M"]));
}

#[test]
fn pinning_all_of_memory_is_refused_before_the_start_where_it_cannot_work() {
    let small = LockedMemory::limited(48 << 20, 1 << 20);
    let one = ["--device", "vfio=00:04.0"];
    let two = ["--device", "vfio=00:04.0", "--device", "vfio=00:05.0"];
    let none = ["--iommu", "none"];
    // Behind the IOMMU only what the guest maps counts.
    assert_eq!(together(&two, small).expect("devices").len(), 2);
    let refused = message(together(&[&one[..], &none].concat(), small));
    for words in [
        "0000:00:04.0 with --iommu none",
        "64 MiB",
        "RLIMIT_MEMLOCK",
        "48 MiB",
        "ulimit -l",
    ] {
        assert!(refused.contains(words), "no {words:?} in: {refused}");
    }
    // The second device pins all of it once more.
    let enough_for_one = LockedMemory::limited(65 << 20, 1 << 20);
    together(&[&one[..], &none].concat(), enough_for_one).expect("one device");
    together(&[&two[..], &none].concat(), enough_for_one).expect_err("two devices");
    let before = ["--device", "vfio=00:06.0,dma-before-te=on"];
    let refused = together(&[&one[..], &before].concat(), small).expect_err("too small");
    assert!(
        refused
            .to_string()
            .contains("0000:00:06.0 with dma-before-te=on"),
        "{refused}"
    );
}

#[test]
fn a_policy_is_followed_and_what_is_none_changes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("policy");
    fs::write(&file, "deferred\n").expect("written");
    let text = format!("vfio=00:04.0,window=7,age=3,policy-file={}", file.display());
    let device = of(&text).expect("bounds are for what the file says");
    let (send, receive) = channel();
    let set = move |policy| send.send(policy).expect("received");
    device.follow_policy(Box::new(set)).expect("followed");
    let next = || {
        receive
            .recv_timeout(Duration::from_secs(20))
            .expect("a policy")
    };
    let age = Duration::from_millis(3);
    assert_eq!(next(), HostPolicy::Deferred(Window { entries: 7, age }));
    fs::write(&file, "nonsense").expect("written");
    fs::write(&file, "optimistic=4096").expect("written");
    assert_eq!(
        next(),
        HostPolicy::Optimistic(Optimistic {
            quota: 4096,
            residency: age
        })
    );
}
