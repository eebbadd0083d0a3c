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
    // The distribution's own kernel is of that series, so none is fetched.
    assert_eq!(missing(cache, &needs), [all[0], all[3]]);
    fs::create_dir_all(qemu_dir(cache, version("999.0"))).expect("a directory");
    fs::create_dir_all(busybox_dir(cache)).expect("a directory");
    assert_eq!(missing(cache, &needs), [all[3]]);
    fs::create_dir_all(qemu_dir(cache, version("999.2"))).expect("a directory");
    assert_eq!(missing(cache, &needs), []);
}

/// Obstacles are reported before any attempt: a cache directory that cannot be created, and no
/// space for missing parts.
#[test]
fn obstacles_of_a_fetch_are_reported_in_advance() {
    let dir = tempfile::tempdir().expect("a directory");
    let needs = Needs {
        qemu: version("999.1"),
        ..Needs::default()
    };
    let file = dir.path().join("file");
    fs::write(&file, "").expect("a file");
    let found = obstacles(&file.join("below/lab"), &needs);
    let said = found
        .iter()
        .find(|said| said.contains("nothing can be kept"));
    let said = said.unwrap_or_else(|| panic!("{found:?}"));
    assert!(said.contains("file: ") && said.contains("EXITLESS_LAB_DIR"));
    // A directory that does not exist yet, but can be created. The disk of this test may lack
    // space; that is a different error.
    let found = obstacles(&dir.path().join("new/lab"), &needs);
    let is_kept = |said: &String| said.contains("nothing can be kept");
    assert!(!found.iter().any(is_kept), "{found:?}");
    let complete = Needs::default();
    put_kernel(dir.path(), "linux-own", "6.1.0-1-cloud-amd64");
    fs::create_dir_all(qemu_dir(dir.path(), complete.qemu)).expect("a directory");
    fs::create_dir_all(busybox_dir(dir.path())).expect("a directory");
    assert_eq!(obstacles(dir.path(), &complete), [""; 0]);
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

/// A start warns of the faults of its QEMU; the lab's own patched copy has neither.
#[test]
fn a_qemu_that_is_not_mended_is_warned_of_at_each_start() {
    let said = |text: &str, delivers_once| warning(version(text), delivers_once);
    let lost = said("7.2", false).expect("a warning");
    assert!(
        lost.contains("QEMU 7.2") && lost.contains("lose an interrupt"),
        "{lost}"
    );
    let twice = said("10.0", false).expect("a warning");
    assert!(
        twice.contains("QEMU 10.0") && twice.contains("PATH"),
        "{twice}"
    );
    assert!(twice.contains("twice"), "{twice}");
    assert_eq!(said("10.0", true), None);
    // The patch does not fix the other fault of an old QEMU.
    assert!(said("7.2", true).is_some());
}
