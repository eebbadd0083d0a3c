//! `serve --check` and a start agree: what the one refuses the other refuses, for the same reason.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::program::{RunResult, end, exitless, start};
use spawned::files::{NOBODY, has_qemu_img, make_qcow2, patch};

/// One configuration that cannot be served.
struct Case {
    /// Arguments of `serve`.
    args: &'static [&'static str],
    /// Words of the message of both.
    says: &'static [&'static str],
    /// As a user without rights; needs root.
    is_nobody: bool,
}

const fn case(args: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case {
        args,
        says,
        is_nobody: false,
    }
}

const fn nobody(args: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case {
        is_nobody: true,
        ..case(args, says)
    }
}

const A: &str = "id=a,path=a.raw,socket=a.sock";

/// In the folder that [`folder`] makes.
const BAD: &[Case] = &[
    // Processors.
    case(&["--block", A, "--cpu", "99"], &["cpu 99"]),
    case(
        &["--block", A, "--cpu", "0,99", "--cores", "2"],
        &["cpu 99"],
    ),
    case(&["--block", A, "--cpu", "0,0"], &["CPU 0 is listed twice"]),
    case(
        &["--block", A, "--cpu", "0-1,1"],
        &["CPU 1 is listed twice"],
    ),
    // One image, used by two devices that exclude each other.
    case(
        &["--block", A, "--block", "id=b,path=a.raw,socket=b.sock"],
        &[
            "device b",
            "in use: this process",
            "writes to it",
            "readonly=on",
        ],
    ),
    case(
        &[
            "--block",
            A,
            "--block",
            "id=b,path=./hard.raw,socket=b.sock",
        ],
        &["device b", "hard.raw", "in use: this process"],
    ),
    case(
        &["--block", A, "--block", "id=b,path=soft.raw,socket=b.sock"],
        &["device b", "soft.raw", "in use: this process"],
    ),
    case(
        &[
            "--block",
            A,
            "--block",
            "id=b,path=a.raw,socket=b.sock,readonly=on",
        ],
        &["device b", "in use: this process", "writes to it"],
    ),
    case(
        &[
            "--block",
            "id=b,path=a.raw,socket=b.sock,readonly=on",
            "--block",
            A,
        ],
        &["device a", "in use: this process", "lets nobody write"],
    ),
    case(
        &[
            "--block",
            A,
            "--block",
            "id=b,path=a.raw,socket=b.sock",
            "--block",
            "id=c,path=ram:1M,socket=c.sock",
        ],
        &["device b"],
    ),
    // Images.
    case(
        &["--block", "id=a,path=absent.raw,socket=a.sock"],
        &["absent.raw", "No such file"],
    ),
    case(
        &[
            "--block",
            "id=a,path=absent.qcow2,format=qcow2,socket=a.sock",
        ],
        &["absent.qcow2", "No such file"],
    ),
    case(&["--block", "id=a,path=dir,socket=a.sock"], &["dir"]),
    case(
        &["--block", "id=a,path=dir,format=qcow2,socket=a.sock"],
        &["dir"],
    ),
    case(
        &["--block", "id=a,path=empty.raw,socket=a.sock"],
        &["empty.raw"],
    ),
    case(
        &["--block", "id=a,path=odd.raw,socket=a.sock"],
        &["odd.raw"],
    ),
    case(
        &["--block", "id=a,path=sector.raw,block=4096,socket=a.sock"],
        &["sector.raw"],
    ),
    case(
        &["--block", "id=a,path=a.raw,format=qcow2,socket=a.sock"],
        &["a.raw", "not a qcow2 image"],
    ),
    case(
        &["--block", "id=a,path=magic.raw,socket=a.sock"],
        &["magic.raw", "format=qcow2"],
    ),
    case(
        &["--block", "id=a,path=magic.raw,format=qcow2,socket=a.sock"],
        &["magic.raw"],
    ),
    nobody(
        &["--block", "id=a,path=a.raw,socket=open/a.sock"],
        &["a.raw", "ermission denied"],
    ),
    nobody(
        &[
            "--block",
            "id=a,path=secret.raw,readonly=on,socket=open/a.sock",
        ],
        &["secret.raw", "ermission denied"],
    ),
    // Memory.
    case(
        &["--block", "id=a,path=ram:100T,socket=a.sock"],
        &["104857600 MiB", "more than this host has", "use files"],
    ),
    case(
        &["--block", "id=a,path=ram:9000000T,socket=a.sock"],
        &["more than this host has"],
    ),
    // Sockets.
    case(
        &["--block", "id=a,path=a.raw,socket=absent/a.sock"],
        &["absent/a.sock", "No such file"],
    ),
    case(
        &["--block", "id=a,path=a.raw,socket=a.raw/a.sock"],
        &["a.raw/a.sock"],
    ),
    case(
        &["--block", "id=a,path=a.raw,socket=a.raw"],
        &["a.raw exists and is no socket"],
    ),
    case(
        &["--block", "id=a,path=a.raw,socket=dir"],
        &["dir exists and is no socket"],
    ),
    case(
        &["--block", "id=a,path=a.raw,socket=soft.sock"],
        &["soft.sock exists and is no socket"],
    ),
    case(
        &["--block", "id=a,path=a.raw,socket=served.sock"],
        &["served.sock is served by another process"],
    ),
    case(
        &[
            "--block",
            "id=a,path=a.raw,socket=/tmp/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
        ],
        &["a socket's path has 1 to 107"],
    ),
    case(
        &["--block", A, "--block", "id=b,path=ram:1M,socket=a.sock"],
        &["two devices have the socket a.sock"],
    ),
    case(
        &[
            "--block",
            A,
            "--block",
            "id=b,path=ram:1M,socket=./dir/../a.sock",
        ],
        &["two devices have the socket ./dir/../a.sock"],
    ),
    case(
        &["--block", A, "--block", "id=a,path=ram:1M,socket=b.sock"],
        &["two devices have the id \"a\""],
    ),
    nobody(
        &["--block", "id=a,path=ram:1M,socket=a.sock"],
        &["a.sock cannot be written", "ermission denied"],
    ),
    nobody(
        &["--block", "id=a,path=ram:1M,socket=open/a.sock,group=0"],
        &["cannot be given to group 0"],
    ),
    nobody(
        &["--block", "id=a,path=ram:1M,socket=open/b.sock"],
        &["open/b.sock", "cannot be replaced"],
    ),
    // Counters.
    case(
        &["--block", A, "--stats", "/dev/null/x"],
        &["--stats /dev/null/x cannot be written"],
    ),
    case(
        &["--block", A, "--stats", "dir"],
        &["--stats dir", "no regular file"],
    ),
];

/// Folder with the files of the cases. The listener serves `served.sock`.
fn folder() -> (TempDir, [UnixListener; 2]) {
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| folder.path().join(name);
    let image = |name: &str, len: u64| File::create(at(name)).unwrap().set_len(len).unwrap();
    image("a.raw", 1 << 20);
    image("secret.raw", 1 << 20);
    image("empty.raw", 0);
    image("odd.raw", 1000);
    image("sector.raw", 4608);
    fs::write(
        at("magic.raw"),
        [b"QFI\xfb".as_slice(), &[0; 65532]].concat(),
    )
    .unwrap();
    fs::hard_link(at("a.raw"), at("hard.raw")).unwrap();
    symlink("a.raw", at("soft.raw")).unwrap();
    symlink("absent.sock", at("soft.sock")).unwrap();
    fs::create_dir(at("dir")).unwrap();
    fs::create_dir(at("open")).unwrap();
    let mode = |name: &str, mode| {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    mode("", 0o755);
    mode("open", 0o777);
    mode("secret.raw", 0o600);
    mode("a.raw", 0o644);
    let listeners =
        ["served.sock", "open/b.sock"].map(|name| UnixListener::bind(at(name)).unwrap());
    mode("open/b.sock", 0o700);
    (folder, listeners)
}

fn serve(folder: &Path, args: &[&str], is_nobody: bool) -> Command {
    let mut command = exitless(folder, &["serve", "--idle", "sleep"]);
    command.args(args);
    if is_nobody {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// All that is in a folder, with what distinguishes one file from another put in its place, and the
/// times of changes.
fn listing(folder: &Path) -> Vec<(String, i64)> {
    use std::os::unix::fs::MetadataExt;
    let mut found = Vec::new();
    for folder in [folder.to_owned(), folder.join("open"), folder.join("dir")] {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let about = fs::symlink_metadata(entry.path()).unwrap();
            let (inode, mode) = (about.ino(), about.mode());
            // A folder has another time when something in it was made and removed.
            let time = if about.is_dir() {
                0
            } else {
                about.mtime_nsec()
            };
            found.push((format!("{} {inode} {mode:o}", entry.path().display()), time));
        }
    }
    found.sort();
    found
}

fn names(folder: &Path) -> Vec<String> {
    listing(folder).into_iter().map(|(name, _)| name).collect()
}

/// Runs the cases, a few at a time; those that are not refused as they should be.
fn not_refused(folder: &Path, more: &[&str]) -> Vec<String> {
    let is_root = rustix::process::geteuid().is_root();
    let cases: Vec<&Case> = BAD
        .iter()
        .filter(|case| is_root || !case.is_nobody)
        .collect();
    let mut wrong = Vec::new();
    for cases in cases.chunks(8) {
        let run = |case: &&Case| {
            start(&mut serve(
                folder,
                &[case.args, more].concat(),
                case.is_nobody,
            ))
        };
        let running: Vec<Child> = cases.iter().map(run).collect();
        for (case, ended) in cases.iter().zip(running.into_iter().map(end)) {
            let says_all = case.says.iter().all(|word| ended.error.contains(word));
            if ended.status != Some(2) || !says_all || ended.error.lines().count() != 1 {
                wrong.push(format!("{:?} {more:?}: {ended:?}", case.args));
            }
        }
    }
    if !is_root {
        println!("skipped: cases of a user without rights, which take root");
    }
    wrong
}

#[test]
fn a_check_refuses_what_a_start_refuses_for_the_same_reason() {
    let (folder, _listeners) = folder();
    let path = folder.path();
    let before = listing(path);
    let mut wrong = not_refused(path, &["--check"]);
    assert_eq!(listing(path), before, "a check left or changed something");
    wrong.extend(not_refused(path, &[]));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let before: Vec<String> = before.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names(path), before, "a start left something");
}

/// Waits until the daemon says that it is ready, and ends it.
fn becomes_ready(mut child: Child) -> Result<(), RunResult> {
    use std::io::{BufRead, BufReader};
    let mut error = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while error.read_line(&mut said).unwrap() > 0 && !said.contains("ready") {}
    let is_ready = said.contains("ready");
    if is_ready {
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    let ended = RunResult {
        error: said,
        ..end(child)
    };
    match is_ready && ended.status == Some(0) {
        true => Ok(()),
        false => Err(ended),
    }
}

#[test]
fn a_check_finds_good_what_a_start_serves_and_leaves_nothing() {
    let (folder, _listeners) = folder();
    drop(UnixListener::bind(folder.path().join("stale.sock")).unwrap());
    for args in [
        &["--block", A] as &[&str],
        &["--block", A, "--cpu", "0"],
        &["--block", "id=a,path=a.raw,socket=stale.sock,mode=0600"],
        &[
            "--block",
            "id=a,path=a.raw,socket=a.sock,readonly=on",
            "--block",
            "id=b,path=soft.raw,socket=b.sock,readonly=on",
        ],
        &[
            "--block",
            "id=a,path=a.raw,socket=a.sock,locking=off",
            "--block",
            "id=b,path=a.raw,socket=b.sock,locking=off",
        ],
        &[
            "--block",
            "id=a,path=ram:1M,socket=open/../a.sock",
            "--block",
            "id=b,path=null:1T,socket=open/a.sock",
        ],
    ] {
        let before = listing(folder.path());
        let check = [args, &["--check"]].concat();
        let check = end(start(&mut serve(folder.path(), &check, false)));
        assert_eq!(check.status, Some(0), "{args:?}: {check:?}");
        assert!(
            check.output.ends_with("the configuration is good\n"),
            "{check:?}"
        );
        assert_eq!(check.error, "");
        assert_eq!(listing(folder.path()), before, "{args:?}");
        let child = start(&mut serve(folder.path(), args, false));
        becomes_ready(child).unwrap_or_else(|ended| panic!("{args:?}: {ended:?}"));
    }
}

#[test]
fn a_check_says_who_has_an_image_and_does_not_wait() {
    let (folder, _listeners) = folder();
    let mut daemon = start(&mut serve(folder.path(), &["--block", A], false));
    let deadline = Instant::now() + Duration::from_secs(20);
    while !folder.path().join("a.sock").exists() {
        assert!(
            Instant::now() < deadline,
            "no daemon: {:?}",
            daemon.try_wait()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    let args = ["--block", "id=b,path=hard.raw,socket=b.sock", "--check"];
    let begin = Instant::now();
    let check = end(start(&mut serve(folder.path(), &args, false)));
    let took = begin.elapsed();
    assert_eq!(check.status, Some(2), "{check:?}");
    let holder = format!("in use: exitless (process {}) writes to it", daemon.id());
    assert!(check.error.contains(&holder), "{check:?}");
    // A start waits for two seconds.
    assert!(took < Duration::from_secs(2), "{took:?}");
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(end(daemon).status, Some(0));
}

#[test]
fn a_check_looks_behind_an_image_and_at_what_hinders_writing() {
    if !has_qemu_img() {
        return;
    }
    let (folder, _listeners) = folder();
    let path = folder.path();
    make_qcow2(path, &["-b", "a.raw", "-F", "raw", "top.qcow2"]);
    make_qcow2(path, &["other.qcow2", "1M"]);
    let above = ["-b", "other.qcow2", "-F", "qcow2", "upper.qcow2"];
    make_qcow2(path, &above);
    // Marked dirty: bit 0 of the incompatible features, whose eight bytes are at 72. To read it
    // does no harm.
    fs::copy(path.join("other.qcow2"), path.join("dirty.qcow2")).unwrap();
    patch(&path.join("dirty.qcow2"), |image| image[79] |= 1);
    const TOP: &str = "id=t,path=top.qcow2,format=qcow2,backing=on,socket=t.sock";
    let cases: [(&[&str], &[&str]); 5] = [
        (
            &["--block", TOP, "--block", A],
            &[
                "device a",
                "a.raw",
                "in use: this process",
                "lets nobody write",
            ],
        ),
        (
            &["--block", A, "--block", TOP],
            &["device t", "a.raw", "in use: this process", "writes to it"],
        ),
        (
            &[
                "--block",
                TOP,
                "--block",
                "id=u,path=top.qcow2,format=qcow2,backing=on,socket=u.sock",
            ],
            &["device u", "top.qcow2", "in use: this process"],
        ),
        (
            &[
                "--block",
                "id=u,path=upper.qcow2,format=qcow2,backing=on,socket=u.sock",
                "--block",
                "id=o,path=other.qcow2,format=qcow2,socket=o.sock",
            ],
            &["device o", "in use: this process"],
        ),
        (
            &[
                "--block",
                "id=d,path=dirty.qcow2,format=qcow2,socket=d.sock",
            ],
            &["dirty.qcow2", "dirty"],
        ),
    ];
    let before = names(path);
    for (args, says) in cases {
        for more in [&["--check"] as &[&str], &[]] {
            let ended = end(start(&mut serve(path, &[args, more].concat(), false)));
            assert_eq!(ended.status, Some(2), "{args:?} {more:?}: {ended:?}");
            for word in says {
                assert!(ended.error.contains(word), "{args:?} {more:?}: {ended:?}");
            }
        }
    }
    assert_eq!(names(path), before, "something was left");
}
