//! What `exitless serve` says about disk images that they refuse: the file once, the fault, and an advice
//! that works when it is carried out. (`run` opens an image after its virtual machine: see the unit tests of its disks.)

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::process::{Command, Output};

use tempfile::TempDir;

const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");

/// A folder in which programs run.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn raw(&self, name: &str) {
        let file = File::create(self.0.path().join(name)).unwrap();
        file.set_len(1 << 20).unwrap();
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.0.path());
        command.output().unwrap()
    }

    fn succeeds(&self, program: &str, arguments: &[&str]) {
        let done = self.command(program, arguments);
        assert!(done.status.success(), "{arguments:?}: {}", said(&done));
    }

    fn serve(&self, block: &str) -> Output {
        let block = format!("id=a,socket=a.sock,{block}");
        self.command(EXITLESS, &["serve", "--check", "--block", &block])
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn has_qemu() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        println!("skipped: no qemu-img on the PATH (Debian: qemu-utils)");
    }
    found
}

/// Whether a text has another once.
fn has_once(text: &str, part: &str) -> bool {
    text.matches(part).count() == 1
}

#[test]
fn a_refused_image_is_named_once() {
    let folder = Folder::new();
    folder.raw("a.raw");
    let output = folder.serve("path=a.raw,format=qcow2");
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let line = "disk image a.raw: not a qcow2 image";
    assert!(has_once(&text, line) && has_once(&text, "a.raw"), "{text}");
}

#[test]
fn advice_carried_out_serves_the_image() {
    if !has_qemu() {
        return;
    }
    let folder = Folder::new();
    folder.raw("base.raw");
    folder.succeeds(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "compat=0.10",
            "-b",
            "base.raw",
            "-F",
            "raw",
            "top.qcow2",
        ],
    );
    // What to write instead stands in the refusal, and the command is repeated with it.
    for (block, advice) in [
        ("path=top.qcow2,format=qcow2", "backing=on"),
        ("path=top.qcow2,backing=on", "format=qcow2"),
        ("path=top.qcow2,barriers=on,backing=on", "format=qcow2"),
    ] {
        let refused = folder.serve(block);
        let text = said(&refused);
        assert!(
            !refused.status.success() && text.contains(advice),
            "{block}: {text}"
        );
        let served = folder.serve(&format!("{block},{advice}"));
        assert!(
            served.status.success(),
            "{block},{advice}: {}",
            said(&served)
        );
    }
    // Without a format at all: both that are advised.
    folder.succeeds(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "b.qcow2", "1M"],
    );
    // As a raw disk it needs whole sectors.
    let image = File::options()
        .write(true)
        .open(folder.0.path().join("b.qcow2"))
        .unwrap();
    image.set_len(1 << 20).unwrap();
    let text = said(&folder.serve("path=b.qcow2"));
    for advice in ["format=qcow2", "format=raw"] {
        assert!(text.contains(advice), "{text}");
        let served = folder.serve(&format!("path=b.qcow2,{advice}"));
        assert!(served.status.success(), "{advice}: {}", said(&served));
    }
    // A command.
    let mut image = fs::read(folder.0.path().join("top.qcow2")).unwrap();
    image[72..76].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(folder.0.path().join("top.qcow2"), image).unwrap();
    let block = "path=top.qcow2,format=qcow2,backing=on";
    let text = said(&folder.serve(block));
    let command = text.split('`').nth(1).unwrap_or_default();
    folder.succeeds("sh", &["-c", command]);
    let served = folder.serve(block);
    assert!(
        served.status.success(),
        "after {command}: {}",
        said(&served)
    );
}

#[test]
fn an_image_that_may_only_be_read_is_refused_for_writing_by_the_check_as_well() {
    if !has_qemu() {
        return;
    }
    let folder = Folder::new();
    folder.succeeds(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "a.qcow2", "1M"],
    );
    let mut image = fs::read(folder.0.path().join("a.qcow2")).unwrap();
    // Incompatible feature 0: the counts are out of date.
    image[79] |= 1;
    fs::write(folder.0.path().join("a.qcow2"), image).unwrap();
    let text = said(&folder.serve("path=a.qcow2,format=qcow2"));
    assert!(
        text.contains("disk image a.qcow2: marked dirty (`qemu-img check"),
        "{text}"
    );
    assert!(
        folder
            .serve("path=a.qcow2,format=qcow2,readonly=on")
            .status
            .success()
    );
    let command = text.split('`').nth(1).unwrap_or_default();
    folder.succeeds("sh", &["-c", command]);
    let served = folder.serve("path=a.qcow2,format=qcow2");
    assert!(
        served.status.success(),
        "after {command}: {}",
        said(&served)
    );
}

#[test]
fn a_backing_file_at_fault_is_named_beside_the_image() {
    if !has_qemu() {
        return;
    }
    let folder = Folder::new();
    folder.succeeds(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"],
    );
    folder.succeeds(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            "base.qcow2",
            "-F",
            "qcow2",
            "top.qcow2",
        ],
    );
    folder.raw("base.qcow2");
    let text = said(&folder.serve("path=top.qcow2,format=qcow2,backing=on"));
    let line = "disk image top.qcow2: backing file base.qcow2: not a qcow2 image";
    assert!(has_once(&text, line), "{text}");
}
