//! The locks themselves: byte for byte those of QEMU, their duration, and the holder that is named.

mod support;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use disk_image::ImageDisk;
use disk_image::lock::{Access, LIVE_PATIENCE, LockError, Locking, lock};
use support::{Loop, create, folder, follow, has_qemu, options, run};

const SIZE: u64 = 1 << 20;

fn opened(path: &Path) -> File {
    let options = File::options().read(true).write(true).open(path);
    options.expect("it opens")
}

fn raw(path: &Path) -> File {
    File::create(path)
        .and_then(|file| file.set_len(SIZE))
        .expect("a file");
    opened(path)
}

fn try_lock(path: &Path, access: Access) -> Result<File, LockError> {
    lock(opened(path), path, access, &Locking::default())
}

/// The bytes of `file` that the process in a folder of `/proc` has locked, as ranges, and how.
fn locks_on(path: &Path, process: &str) -> Vec<String> {
    use std::os::unix::fs::MetadataExt;
    let inode = format!(":{}", fs::metadata(path).expect("it is there").ino());
    let folder = format!("/proc/{process}/fdinfo");
    let mut locks: Vec<String> = fs::read_dir(folder)
        .expect("a process of ours")
        .filter_map(|entry| fs::read_to_string(entry.expect("listed").path()).ok())
        .flat_map(|text| {
            let lines = text.lines().filter(|line| line.starts_with("lock:"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        })
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().skip(2).collect();
            let [kind, advisory, how, _, place, first, last] = words[..] else {
                panic!("{line}");
            };
            place
                .ends_with(&inode)
                .then(|| format!("{kind} {advisory} {how} {first}-{last}"))
        })
        .collect();
    locks.sort();
    locks
}

#[test]
fn the_locks_are_those_of_qemu() {
    if !has_qemu() {
        return;
    }
    let (folder, base) = folder();
    create(&base, "", SIZE);
    let top = folder.path().join("top.qcow2");
    run(&format!(
        "qemu-img create -q -f qcow2 -b disk.qcow2 -F qcow2 {}",
        top.display()
    ));
    let theirs = {
        let mut qemu = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .arg(&top)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let start = Instant::now();
        let process = qemu.id().to_string();
        // It locks the files one after the other, the image first.
        while locks_on(&base, &process).len() < 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "no locks");
            thread::sleep(Duration::from_millis(5));
        }
        let locks = [&top, &base].map(|path| locks_on(path, &process));
        drop(qemu.stdin.take());
        qemu.wait().expect("it ends");
        locks
    };
    let disk = ImageDisk::open(&top, follow()).expect("it opens");
    let ours = [&top, &base].map(|path| locks_on(path, "self"));
    assert_eq!(ours, theirs);
    assert_eq!(ours[1][0], "OFDLCK ADVISORY READ 100-100");
    drop(disk);
    // A raw file to write to has the bytes of an image to write to.
    let path = folder.path().join("raw");
    raw(&path);
    let file = try_lock(&path, Access::Write).expect("free");
    assert_eq!(locks_on(&path, "self"), theirs[0]);
    drop(file);
}

/// Has another process lock a file and keep it: this one would know its own.
fn other_process(path: &Path) -> std::process::Child {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "holder", "--ignored", "--nocapture"])
        .env("DISK_IMAGE_HOLDER", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let start = Instant::now();
    while locks_on(path, &child.id().to_string()).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "no lock");
        thread::sleep(Duration::from_millis(5));
    }
    child
}

#[test]
#[ignore = "not a test: the other process of tests here"]
fn holder() {
    let Some(path) = std::env::var_os("DISK_IMAGE_HOLDER") else {
        return;
    };
    let _lock = try_lock(Path::new(&path), Access::Write).expect("free");
    // Until the parent closes its end.
    let mut nothing = String::new();
    std::io::stdin().read_line(&mut nothing).expect("a pipe");
}

#[test]
fn a_live_holder_is_named_and_waited_for_as_long_as_promised() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("raw");
    raw(&path);
    let mut child = other_process(&path);
    let start = Instant::now();
    let waiter = thread::spawn({
        let path = path.clone();
        move || try_lock(&path, Access::Read)
    });
    // A process that waits holds no lock meanwhile: the holder may want more of them, and QEMU
    // would fail if it could not get them.
    while !waiter.is_finished() {
        assert_eq!(locks_on(&path, "self"), [""; 0]);
        thread::sleep(Duration::from_millis(1));
    }
    let refused = waiter.join().expect("no panic");
    let refused = refused.expect_err("somebody writes to it");
    assert!(start.elapsed() >= LIVE_PATIENCE);
    let expected = format!("(process {}) writes to it", child.id());
    assert!(refused.to_string().ends_with(&expected), "{refused}");
    let LockError::InUse { by, .. } = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(by.len(), 1);
    // One that goes in time is no trouble.
    let waiter = thread::spawn({
        let path = path.clone();
        move || try_lock(&path, Access::Write)
    });
    drop(child.stdin.take());
    child.wait().expect("it ends");
    waiter.join().expect("no panic").expect("it was let go");
}

#[test]
fn lock_fails_at_once_when_the_caller_gives_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("raw");
    raw(&path);
    let mut child = other_process(&path);
    let locking = Locking {
        give_up: || true,
        ..Locking::default()
    };
    let refused = lock(opened(&path), &path, Access::Write, &locking);
    assert!(matches!(refused, Err(LockError::GivenUp)), "{refused:?}");
    drop(child.stdin.take());
    child.wait().expect("it ends");
}

#[test]
fn this_process_is_told_at_once() {
    let (_folder, path) = folder();
    raw(&path);
    let first = try_lock(&path, Access::Write).expect("free");
    let start = Instant::now();
    let refused = try_lock(&path, Access::Write).expect_err("it is in use");
    assert!(start.elapsed() < LIVE_PATIENCE, "it waited for itself");
    assert!(refused.to_string().contains("this process"), "{refused}");
    drop(first);
    try_lock(&path, Access::Write).expect("free again");
}

#[test]
fn a_child_does_not_inherit_a_lock() {
    let (_folder, path) = folder();
    raw(&path);
    let locked = try_lock(&path, Access::Write).expect("free");
    let mut child = Command::new("sleep").arg("60").spawn().expect("it starts");
    let descriptors = fs::read_dir(format!("/proc/{}/fd", child.id())).expect("a process of ours");
    let inherited = descriptors
        .filter_map(|entry| fs::read_link(entry.expect("listed").path()).ok())
        .any(|target| target == path);
    drop(locked);
    let again = try_lock(&path, Access::Write);
    child.kill().expect("it lives");
    child.wait().expect("it ends");
    assert!(!inherited);
    again.expect("the only descriptor is closed");
}

#[test]
fn locking_off_neither_locks_nor_minds() {
    if !has_qemu() {
        return;
    }
    let (_folder, path) = folder();
    create(&path, "", SIZE);
    let mut off = options();
    off.locking.is_on = false;
    let first = ImageDisk::open(&path, off).expect("it opens");
    assert!(locks_on(&path, "self").is_empty());
    let second = ImageDisk::open(&path, options()).expect("nobody has a lock");
    drop(ImageDisk::open(&path, off).expect("it does not look"));
    drop((first, second));
}

#[test]
fn a_block_device_has_one_writer_by_whatever_node_and_no_file_system() {
    let Some(device) = Loop::attach(512) else {
        return;
    };
    let [node, other] = &device.nodes;
    let direct = {
        use std::os::unix::fs::OpenOptionsExt;
        File::options()
            .read(true)
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(node)
            .expect("it opens")
    };
    let writer = lock(direct, node, Access::Write, &Locking::default()).expect("free");
    // It was opened again, as it was.
    let flags = fs::read_to_string(format!("/proc/self/fdinfo/{}", writer.as_raw_fd()));
    let flags = flags.expect("open");
    let flags = flags.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = i32::from_str_radix(flags.expect("a line").trim(), 8).expect("octal");
    assert_eq!(flags & libc::O_DIRECT, libc::O_DIRECT);
    assert_eq!(flags & libc::O_CLOEXEC, libc::O_CLOEXEC);
    assert_eq!(flags & libc::O_ACCMODE, libc::O_RDWR);
    let by_other_node = try_lock(other, Access::Write);
    assert!(
        matches!(by_other_node, Err(LockError::Claimed)),
        "{by_other_node:?}"
    );
    if has_qemu() {
        let mut write = Command::new("qemu-io");
        write.args(["-f", "host_device", "-c", "write 0 4k"]);
        let written = write.arg(node).output().expect("it runs");
        assert!(!written.status.success(), "QEMU took no notice");
        let said = String::from_utf8_lossy(&written.stderr);
        assert!(said.contains("lock"), "{said}");
    }
    drop(writer);
    drop(try_lock(other, Access::Write).expect("free again"));

    // What a mounted file system does.
    let claimed = {
        use std::os::unix::fs::OpenOptionsExt;
        File::options()
            .read(true)
            .custom_flags(libc::O_EXCL)
            .open(other)
            .expect("nobody has it")
    };
    let at_once = Locking {
        give_up: || true,
        ..Locking::default()
    };
    let writer = lock(opened(node), node, Access::Write, &at_once);
    assert!(matches!(writer, Err(LockError::GivenUp)), "{writer:?}");
    drop(try_lock(node, Access::Read).expect("reading needs no claim"));
    drop(claimed);
}
