//! Sharing of a disk image by processes: `exitless serve`, `exitless run` and QEMU's programs, each
//! with each other.
//!
//! Where this machine cannot boot a guest, `run` ends at KVM, after it has locked its disks. To see
//! it hold one lock it is given a second disk that the test has locked: it waits for that one.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use denied::Denied;
use disk_image::lock::{Access, LIVE_PATIENCE, Locking, lock};
use held_fs::{HeldFs, Kind};
use spawned::files::{self, make_qcow2};
use tempfile::TempDir;
use vhost_blk::queue::{Extent, Op};
use vhost_blk::{Client, Options};

const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");
const MIB: u64 = 1 << 20;
/// Far longer than anything here takes on a machine that is not stuck.
const LONG: Duration = Duration::from_secs(60);
/// Duration for which a program must go on waiting.
const A_WHILE: Duration = Duration::from_millis(500);

/// Returns whether QEMU's programs are here; says so if not.
fn has_qemu() -> bool {
    let programs = ["qemu-img", "qemu-io", "qemu-storage-daemon"];
    let found = programs
        .iter()
        .all(|program| Command::new(program).arg("--version").output().is_ok());
    if !found {
        println!(
            "skipped: no qemu-img, qemu-io and qemu-storage-daemon on the PATH (Debian: \
             qemu-utils, qemu-system-common)"
        );
    }
    found
}

/// A folder with images.
struct Images(TempDir);

impl Images {
    fn new() -> Self {
        let images = Self(TempDir::new().unwrap());
        fs::write(images.path("kernel"), files::kernel()).unwrap();
        images
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The path of a raw image of a MiB of zeroes.
    fn raw(&self, name: &str) -> String {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(MIB).unwrap();
        text(&path)
    }

    /// The path of an empty qcow2 image; `more` are arguments of qemu-img.
    fn qcow2(&self, name: &str, more: &[&str]) -> String {
        make_qcow2(self.0.path(), &[more, &[name, "1M"]].concat());
        text(&self.path(name))
    }

    /// `exitless run` with these disks.
    fn run(&self, disks: &[&str]) -> Command {
        let mut run = Command::new(EXITLESS);
        run.args(["run", "--iommu", "none", "--kernel"]);
        run.arg(self.path("kernel"));
        for disk in disks {
            run.args(["--disk", disk]);
        }
        run
    }

    /// `exitless serve` with these devices, and the socket of the last one, which is made when all
    /// are open.
    fn serve(&self, blocks: &[&str]) -> (Command, PathBuf) {
        let mut serve = Command::new(EXITLESS);
        serve.args(["serve", "--idle", "sleep"]);
        let mut socket = PathBuf::new();
        for (at, block) in blocks.iter().enumerate() {
            // Names that no other daemon of this test has.
            socket = tempfile::Builder::new()
                .tempfile_in(self.0.path())
                .unwrap()
                .path()
                .to_owned();
            serve.arg("--block");
            serve.arg(format!("id=d{at},socket={},{block}", socket.display()));
        }
        (serve, socket)
    }

    /// A daemon that serves these devices.
    fn served(&self, blocks: &[&str]) -> Program {
        let (serve, socket) = self.serve(blocks);
        let mut daemon = Program::start(serve);
        daemon.wait_for_file(&socket);
        daemon
    }

    /// A qemu-storage-daemon that serves this image.
    fn qemu(&self, format: &str, path: &str, read_only: bool) -> Program {
        let (read_only, writable) = if read_only {
            (",read-only=on", "off")
        } else {
            ("", "on")
        };
        let socket = self.path(&format!("qemu-{format}-{writable}.sock"));
        let mut qemu = Command::new("qemu-storage-daemon");
        qemu.arg("--blockdev");
        qemu.arg(format!(
            "driver=file,node-name=f,filename={path}{read_only}"
        ));
        qemu.arg("--blockdev");
        qemu.arg(format!("driver={format},node-name=n,file=f{read_only}"));
        qemu.arg("--export");
        qemu.arg(format!(
            "type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={},writable={writable}",
            socket.display()
        ));
        let mut daemon = Program::start(qemu);
        daemon.wait_for_file(&socket);
        daemon
    }
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// A program that runs; killed with this.
struct Program {
    child: Child,
    log: tempfile::NamedTempFile,
}

impl Program {
    fn start(mut command: Command) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let output = log.reopen().unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        Self { child, log }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap()
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn wait_until(&mut self, what: &str, is_done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_done(self) {
            assert!(self.is_running(), "it ended before {what}: {}", self.said());
            assert!(start.elapsed() < LONG, "no {what}: {}", self.said());
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn wait_for_file(&mut self, path: &Path) {
        self.wait_until(&format!("{} is there", path.display()), |_| path.exists());
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a plain system call; the child has not been waited for, so the number is still
        // its own.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Waits for its end; the exit status.
    fn end(&mut self) -> Option<i32> {
        let start = Instant::now();
        while self.is_running() {
            assert!(start.elapsed() < LONG, "it does not end: {}", self.said());
            thread::sleep(Duration::from_millis(5));
        }
        self.child.wait().unwrap().code()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        // A test that fails while the kernel holds a write of the program releases it later.
        for _ in 0..200 {
            if !self.is_running() {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Our program ends with status 2, and its last line has every one of `words`.
fn refuses(command: Command, words: &[&str]) {
    let what = format!("{command:?}");
    let mut program = Program::start(command);
    let status = program.end();
    let said = program.said();
    assert_eq!(status, Some(2), "{what}: {said}");
    let last = said.lines().last().unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "{what}: no {word:?} in: {last}");
    }
}

fn qemu_command(words: &[&str]) -> Output {
    let (program, arguments) = words.split_first().unwrap();
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null());
    output.output().unwrap()
}

/// QEMU's program fails over the lock of the file that it was given last.
fn qemu_refuses(words: &[&str]) {
    let output = qemu_command(words);
    let said = said(&output);
    assert!(!output.status.success(), "{words:?} succeeded: {said}");
    for word in ["lock", words.last().unwrap()] {
        assert!(said.contains(word), "{words:?}: no {word:?} in: {said}");
    }
}

fn qemu_succeeds(words: &[&str]) {
    let output = qemu_command(words);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
}

/// Locks a file in this process for as long as what is returned lives.
fn locked(path: &str) -> File {
    let file = File::options().read(true).write(true).open(path).unwrap();
    lock(file, Path::new(path), Access::Write, &Locking::default()).unwrap()
}

#[test]
fn an_image_that_is_served_is_refused_to_everybody_else() {
    if !has_qemu() {
        return;
    }
    let images = Images::new();
    let (raw, qcow2) = (images.raw("a.raw"), images.qcow2("b.qcow2", &[]));
    let raw_block = format!("path={raw}");
    let qcow2_block = format!("path={qcow2},format=qcow2");
    let daemon = images.served(&[&raw_block, &qcow2_block]);
    let holder = format!("exitless (process {})", daemon.child.id());
    // All at once, because ours wait a while before they give up.
    let readers_block = format!("{raw_block},readonly=on");
    thread::scope(|scope| {
        let words = [raw.as_str(), &holder, "readonly=on"];
        for block in [raw_block.as_str(), &readers_block] {
            let (serve, run) = (images.serve(&[block]).0, images.run(&[block]));
            scope.spawn(move || refuses(serve, &words));
            scope.spawn(move || refuses(run, &words));
        }
        scope.spawn(|| refuses(images.serve(&[&qcow2_block]).0, &[&qcow2, &holder]));
        scope.spawn(|| qemu_refuses(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &raw]));
        scope.spawn(|| qemu_refuses(&["qemu-io", "-f", "qcow2", "-c", "write 0 4k", &qcow2]));
        scope.spawn(|| qemu_refuses(&["qemu-io", "-r", "-f", "qcow2", "-c", "read 0 4k", &qcow2]));
        scope.spawn(|| qemu_refuses(&["qemu-img", "check", &qcow2]));
        for (format, path) in [("raw", &raw), ("qcow2", &qcow2)] {
            let copy = text(&images.path(&format!("copy of {format}")));
            scope.spawn(move || {
                let convert = [
                    "qemu-img", "convert", "-f", format, "-O", "raw", path, &copy,
                ];
                let output = qemu_command(&convert);
                assert!(!output.status.success(), "{convert:?} succeeded");
                let said = said(&output);
                assert!(said.contains(path) && said.contains("lock"), "{said}");
            });
        }
        scope.spawn(|| {
            let resize = ["qemu-img", "resize", "-f", "raw", &raw, "2M"];
            let output = qemu_command(&resize);
            assert!(!output.status.success());
            assert!(said(&output).contains(&raw), "{}", said(&output));
        });
        // Readers that do not mind.
        scope.spawn(|| qemu_succeeds(&["qemu-img", "info", "-U", "-f", "raw", &raw]));
        scope.spawn(|| qemu_succeeds(&["qemu-img", "info", "-U", "-f", "qcow2", &qcow2]));
    });
    assert_eq!(fs::metadata(&raw).unwrap().len(), MIB);
    drop(daemon);
    qemu_succeeds(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &raw]);
}

#[test]
fn an_image_of_a_machine_is_refused_to_everybody_else() {
    if !has_qemu() {
        return;
    }
    let images = Images::new();
    let (disk, other) = (images.raw("disk.raw"), images.raw("other.raw"));
    let _other = locked(&other);
    // How long `run` waits for the other disk is bounded: again, if this machine was too slow.
    let is_seen = || {
        let (disk_option, other_option) = (format!("path={disk}"), format!("path={other}"));
        let mut first = Program::start(images.run(&[&disk_option, &other_option]));
        first.wait_until("it waits", |first| {
            first.said().contains(&format!("waiting for {other}"))
        });
        let write = qemu_command(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &disk]);
        let mut second = Program::start(images.run(&[&disk_option]));
        while second.is_running() && !second.said().contains("waiting for") {
            thread::sleep(Duration::from_millis(5));
        }
        if !first.is_running() {
            return false;
        }
        assert!(!write.status.success(), "{}", said(&write));
        assert!(said(&write).contains(&disk), "{}", said(&write));
        let user = format!("exitless (process {}) writes to it", first.child.id());
        assert!(
            second.said().contains(&disk) && second.said().contains(&user),
            "{}",
            second.said()
        );
        true
    };
    assert!((0..10).any(|_| is_seen()), "never in time");
}

#[test]
fn an_image_that_qemu_uses_is_refused_with_the_name_of_its_user() {
    if !has_qemu() {
        return;
    }
    let images = Images::new();
    let (raw, qcow2) = (images.raw("a.raw"), images.qcow2("b.qcow2", &[]));
    let with_raw = images.qemu("raw", &raw, false);
    let with_qcow2 = images.qemu("qcow2", &qcow2, false);
    let user = |qemu: &Program| format!("(process {})", qemu.child.id());
    thread::scope(|scope| {
        for options in ["", ",readonly=on"] {
            let block = format!("path={raw}{options}");
            let words = [&raw, "qemu-storage", &user(&with_raw), "readonly=on"];
            let (serve, run) = (images.serve(&[&block]).0, images.run(&[&block]));
            let words = words.map(str::to_owned);
            for command in [serve, run] {
                let words = words.clone();
                scope.spawn(move || refuses(command, &words.each_ref().map(String::as_str)));
            }
        }
        let block = format!("path={qcow2},format=qcow2");
        refuses(
            images.serve(&[&block]).0,
            &[&qcow2, "qemu-storage", &user(&with_qcow2)],
        );
    });
}

#[test]
fn readers_share_an_image_whoever_they_are() {
    if !has_qemu() {
        return;
    }
    let images = Images::new();
    let (raw, qcow2) = (images.raw("a.raw"), images.qcow2("b.qcow2", &[]));
    let other = images.raw("other.raw");
    let raw_block = format!("path={raw},readonly=on");
    let qcow2_block = format!("path={qcow2},format=qcow2,readonly=on");
    let _qemu = [
        images.qemu("raw", &raw, true),
        images.qemu("qcow2", &qcow2, true),
    ];
    let _daemons = [(); 2].map(|()| images.served(&[&raw_block, &qcow2_block]));
    let _other = locked(&other);
    qemu_succeeds(&["qemu-io", "-r", "-f", "raw", "-c", "read 0 4k", &raw]);
    qemu_succeeds(&["qemu-io", "-r", "-f", "qcow2", "-c", "read 0 4k", &qcow2]);
    thread::scope(|scope| {
        // The same disk twice, and one that another program writes to: it is only about that one
        // that `run` complains.
        let run = images.run(&[&raw_block, &raw_block, &format!("path={other}")]);
        scope.spawn(|| refuses(run, &[&other, "writes to it"]));
        // And a writer is not let in.
        let run = images.run(&[&format!("path={raw}")]);
        scope.spawn(|| refuses(run, &[&raw, "reads it and lets nobody write"]));
    });
    qemu_refuses(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &raw]);
}

#[test]
fn overlays_share_a_backing_file_that_nobody_writes_to() {
    if !has_qemu() {
        return;
    }
    let images = Images::new();
    let raw = images.raw("base.raw");
    let base = images.qcow2("base.qcow2", &["-F", "raw", "-b", &raw]);
    let on = |base: &str, format, name: &str| {
        let path = images.qcow2(name, &["-F", format, "-b", base]);
        format!("path={path},format=qcow2,backing=on")
    };
    let _daemons = ["1.qcow2", "2.qcow2"].map(|name| images.served(&[&on(&base, "qcow2", name)]));
    // The other way round: a file at the bottom that is written to.
    let written = images.raw("written.raw");
    let overlay = on(&written, "raw", "3.qcow2");
    let _qemu = images.qemu("raw", &written, false);
    thread::scope(|scope| {
        scope.spawn(|| qemu_refuses(&["qemu-io", "-f", "raw", "-c", "write 0 4k", &raw]));
        let serve = images.serve(&[&format!("path={base},format=qcow2,backing=on")]);
        scope.spawn(|| refuses(serve.0, &[&base, "lets nobody write"]));
        let run = images.run(&[&format!("path={raw}")]);
        scope.spawn(|| refuses(run, &[&raw, "lets nobody write"]));
        let serve = images.serve(&[&overlay]);
        let words = ["3.qcow2", &written, "qemu-storage", "backing file"];
        scope.spawn(move || refuses(serve.0, &words));
    });
}

#[test]
fn one_daemon_is_told_at_once_that_it_has_the_image_itself() {
    let images = Images::new();
    let raw = images.raw("a.raw");
    let block = format!("path={raw}");
    let (serve, _) = images.serve(&[&block, &block]);
    let mut daemon = Program::start(serve);
    assert_eq!(daemon.end(), Some(2));
    // A wait would have been reported.
    assert!(!daemon.said().contains("waiting"), "{}", daemon.said());
    assert!(daemon.said().contains(&format!(
        "in use: this process ({}) writes to it",
        daemon.child.id()
    )));
}

#[test]
fn a_successor_waits_for_a_predecessor_that_ends_and_says_so() {
    let images = Images::new();
    let raw = images.raw("a.raw");
    let block = format!("path={raw}");
    let mut first = images.served(&[&block]);
    let (serve, socket) = images.serve(&[&block]);
    let mut second = Program::start(serve);
    second.wait_until("it waits", |second| second.said().contains("waiting for"));
    assert!(!socket.exists());
    first.signal(libc::SIGTERM);
    assert_eq!(first.end(), Some(0));
    second.wait_for_file(&socket);
    second.wait_until("it is ready", |second| second.said().contains("ready"));
    let said = second.said();
    let waiting = format!("waiting for {raw}: in use: exitless (process");
    let [waits, ready] = said.lines().collect::<Vec<_>>()[..] else {
        panic!("it said something else: {said}");
    };
    assert!(waits.contains(&waiting), "{said}");
    assert!(ready.contains("ready: serving 1 device"), "{said}");
}

#[test]
fn a_signal_ends_the_wait_for_an_image() {
    let images = Images::new();
    let raw = images.raw("a.raw");
    let _lock = locked(&raw);
    let (serve, _) = images.serve(&[&format!("path={raw}")]);
    let mut daemon = Program::start(serve);
    daemon.wait_until("it waits", |daemon| daemon.said().contains("waiting for"));
    daemon.signal(libc::SIGTERM);
    // A refusal would be status 2.
    assert_eq!(daemon.end(), Some(0), "{}", daemon.said());
}

/// Has `daemon` write a block of ones at the beginning of its disk, and returns when the kernel
/// holds the write.
fn hold_a_write(fs: &HeldFs, name: &str, socket: &Path) -> Client {
    let mut client = Client::connect(socket, Options::new(1, 4096)).unwrap();
    let (memory, layout, queues) = client.parts();
    let queue = &mut queues[0];
    let slot = queue.take_slot().unwrap();
    memory.write(layout.data(0, slot), &[1; 4096]);
    let gate = fs.gate(name);
    gate.hold(&[Kind::Write]);
    let extent = Extent {
        sector: 0,
        bytes: 4096,
    };
    assert!(queue.submit(memory, layout, slot, Op::Write, extent, 0));
    queue.publish(memory);
    gate.wait_until_held(1);
    client
}

/// A daemon is killed while the kernel holds a write of its to `file`: `block` is what it serves,
/// `successor` what its successor does, and the write is held for `hold` after that one has
/// reported that it waits.
fn killed_in_mid_write(fs: &HeldFs, file: &str, block: &str, successor: &str, hold: Duration) {
    let images = Images::new();
    let (serve, socket) = images.serve(&[block]);
    let mut first = Program::start(serve);
    first.wait_for_file(&socket);
    let client = hold_a_write(fs, file, &socket);
    first.signal(libc::SIGKILL);
    drop(client);
    let (serve, socket) = images.serve(&[successor]);
    let mut second = Program::start(serve);
    second.wait_until("it waits", |second| second.said().contains("waiting for"));
    thread::sleep(hold);
    assert!(second.is_running(), "{}", second.said());
    assert!(!socket.exists(), "it serves before the write has ended");
    assert!(
        second.said().contains(&text(&fs.path(file))),
        "{}",
        second.said()
    );
    let gate = fs.gate(file);
    assert_ne!(gate.held(), 0);
    gate.release();
    second.wait_for_file(&socket);
    // The write was over before the successor began.
    if file.ends_with(".raw") {
        let mut block = [0; 4096];
        gate.contents().read_exact_at(&mut block, 0).unwrap();
        assert_eq!(block, [1; 4096]);
    }
}

#[test]
fn a_predecessor_killed_in_mid_write_is_waited_for_raw() {
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    thread::scope(|scope| {
        for direct in ["off", "on"] {
            let fs = &fs;
            scope.spawn(move || {
                let name = format!("direct-{direct}.raw");
                fs.create(&name, MIB);
                let block = format!("path={},direct={direct}", fs.path(&name).display());
                // Longer than a live holder is waited for.
                let hold = LIVE_PATIENCE + Duration::from_millis(500);
                killed_in_mid_write(fs, &name, &block, &block, hold);
            });
        }
    });
}

#[test]
fn a_predecessor_killed_in_mid_write_is_waited_for_qcow2() {
    if !has_qemu() {
        return;
    }
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    let images = Images::new();
    let image = fs::read(images.qcow2("a.qcow2", &[])).unwrap();
    fs.create("a.qcow2", 0)
        .contents()
        .write_all(&image)
        .unwrap();
    let block = format!("path={},format=qcow2", fs.path("a.qcow2").display());
    killed_in_mid_write(&fs, "a.qcow2", &block, &block, A_WHILE);
}

#[test]
fn a_predecessor_killed_in_mid_write_to_a_backing_file_is_waited_for() {
    if !has_qemu() {
        return;
    }
    let Some(fs) = HeldFs::mount_or_skip() else {
        return;
    };
    fs.create("base.raw", MIB);
    let base = text(&fs.path("base.raw"));
    let images = Images::new();
    let overlay = images.qcow2("top.qcow2", &["-F", "raw", "-b", &base]);
    killed_in_mid_write(
        &fs,
        "base.raw",
        &format!("path={base}"),
        &format!("path={overlay},format=qcow2,backing=on"),
        A_WHILE,
    );
}

/// Has the program live on a system whose files cannot be locked: F_OFD_SETLK and F_OFD_GETLK fail
/// with ENOLCK.
fn without_locks(command: &mut Command) {
    Denied::default()
        .call_with(libc::SYS_fcntl, 1, libc::F_OFD_SETLK as u32, libc::ENOLCK)
        .call_with(libc::SYS_fcntl, 1, libc::F_OFD_GETLK as u32, libc::ENOLCK)
        .apply(command);
}

#[test]
fn where_nothing_can_be_locked_that_is_said_and_can_be_switched_off() {
    let images = Images::new();
    let raw = images.raw("a.raw");
    let block = format!("path={raw}");
    let words = [raw.as_str(), "refuses locks", "locking=off"];
    let (mut serve, _) = images.serve(&[&block]);
    without_locks(&mut serve);
    refuses(serve, &words);
    let mut run = images.run(&[&block]);
    without_locks(&mut run);
    refuses(run, &words);

    let (mut serve, socket) = images.serve(&[&format!("{block},locking=off")]);
    without_locks(&mut serve);
    Program::start(serve).wait_for_file(&socket);
    // Nor does the lock of another process matter then.
    let _lock = locked(&raw);
    images.served(&[&format!("{block},locking=off")]);
}
