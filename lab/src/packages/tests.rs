use super::*;

fn version(text: &str) -> Version {
    text.parse().expect("a version")
}

fn put_kernel(cache: &Path, dir: &str, release: &str) {
    let boot = cache.join(dir).join("boot");
    fs::create_dir_all(&boot).expect("a directory");
    fs::write(boot.join(format!("vmlinuz-{release}")), "").expect("a file");
}

#[test]
fn each_part_is_missing_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = dir.path();
    let needs = Needs {
        qemu: version("999.1"),
        host_kernel: Some(version("6.12")),
        guest_kernel: None,
    };
    let all = [
        Wanted::Busybox,
        Wanted::Kernel(Some(version("6.12"))),
        Wanted::Kernel(None),
        Wanted::Qemu(version("999.1")),
    ];
    assert_eq!(missing(cache, &needs), all);
    put_kernel(cache, "linux-own", "6.12.95+deb13-cloud-amd64");
    // The distribution's own is of that series: nothing to fetch for it.
    assert_eq!(missing(cache, &needs), [all[0], all[3]]);
    fs::create_dir_all(qemu_dir(cache, version("999.0"))).expect("a directory");
    fs::create_dir_all(busybox_dir(cache)).expect("a directory");
    assert_eq!(missing(cache, &needs), [all[3]]);
    fs::create_dir_all(qemu_dir(cache, version("999.2"))).expect("a directory");
    assert_eq!(missing(cache, &needs), []);
}

#[test]
fn the_oldest_that_will_do_is_taken() {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["qemu-999.10", "qemu-999.9", "qemu-999.2"] {
        fs::create_dir(dir.path().join(name)).expect("a directory");
    }
    let found = find_qemu(dir.path(), version("999.3"));
    assert!(matches!(found, Some(Qemu::Unpacked(_, v)) if v == version("999.9")));
}

#[test]
fn a_series_is_not_the_beginning_of_a_number() {
    let dir = tempfile::tempdir().expect("a directory");
    put_kernel(dir.path(), "linux-own", "6.12.1-cloud-amd64");
    assert!(find_kernel(dir.path(), Some(version("6.1"))).is_none());
    assert!(find_kernel(dir.path(), Some(version("6.12"))).is_some());
}

#[test]
fn what_is_known_against_a_qemu_is_said_at_each_start() {
    let dir = tempfile::tempdir().expect("a directory");
    let kernel = Kernel {
        root: dir.path().into(),
        release: "6.1.0-56-cloud-amd64".into(),
    };
    let caveat = |qemu| {
        let packages = Packages {
            qemu,
            host: kernel.clone(),
            guest: kernel.clone(),
            busybox: dir.path().into(),
        };
        packages.caveat()
    };
    let unpacked = || Qemu::Unpacked(dir.path().into(), version("10.0"));
    let installed = |text| Qemu::Installed("/usr/bin/qemu".into(), version(text));
    let old = caveat(installed("7.2")).expect("it loses interrupts");
    assert!(old.contains("lose an interrupt") && old.contains("QEMU 10.0 is better"));
    let twice = "deliver an interrupt twice: a guest with several vCPUs that stalls or ends in a triple fault may be the lab's fault;";
    assert!(caveat(installed("10.0")).is_some_and(|said| said.contains(twice)));
    assert!(caveat(unpacked()).is_some_and(|said| said.contains(twice)));
    fs::write(dir.path().join(STAMP), MENDED).expect("a file");
    assert_eq!(caveat(unpacked()), None);
}
