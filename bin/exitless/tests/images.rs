//! Messages of `exitless serve` about disk images that it refuses: the file once, the fault, and an
//! advice that works when it is carried out. (`run` opens an image after its virtual machine: see
//! the unit tests of its disks.)

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};

use spawned::files::{has_qemu_img, make_qcow2, patch};
use tempfile::TempDir;

const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");

/// A folder in which programs run.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn raw(&self, name: &str) {
        let file = File::create(self.path().join(name)).unwrap();
        file.set_len(1 << 20).unwrap();
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.path());
        command.output().unwrap()
    }

    /// `exitless serve --check` with this device.
    fn check(&self, block: &str) -> Output {
        let block = format!("id=a,socket=a.sock,{block}");
        self.run(EXITLESS, &["serve", "--check", "--block", &block])
    }

    fn serves(&self, block: &str) {
        let output = self.check(block);
        assert!(output.status.success(), "{block}: {}", said(&output));
    }

    /// The words of the refusal of this device.
    fn refuses(&self, block: &str) -> String {
        let output = self.check(block);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(2), "{block}: {text}");
        text
    }

    /// Runs the first command in the text.
    fn carries_out_advice(&self, text: &str) {
        let command = text.split('`').nth(1).unwrap_or_default();
        let output = self.run("sh", &["-c", command]);
        assert!(output.status.success(), "{command}: {}", said(&output));
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns whether a text has another once.
fn has_once(text: &str, part: &str) -> bool {
    text.matches(part).count() == 1
}

#[test]
fn a_refused_image_is_named_once() {
    let folder = Folder::new();
    folder.raw("a.raw");
    let text = folder.refuses("path=a.raw,format=qcow2");
    let line = "disk image a.raw: not a qcow2 image";
    assert!(has_once(&text, line) && has_once(&text, "a.raw"), "{text}");
}

#[test]
fn advice_carried_out_serves_the_image() {
    if !has_qemu_img() {
        return;
    }
    let folder = Folder::new();
    folder.raw("base.raw");
    let old = ["-o", "compat=0.10", "-b", "base.raw", "-F", "raw"];
    make_qcow2(folder.path(), &[&old[..], &["top.qcow2"]].concat());
    // The refusal gives the right form, and the command is repeated with it.
    for (block, advice) in [
        ("path=top.qcow2,format=qcow2", "backing=on"),
        ("path=top.qcow2,backing=on", "format=qcow2"),
        ("path=top.qcow2,barriers=on,backing=on", "format=qcow2"),
    ] {
        let text = folder.refuses(block);
        assert!(text.contains(advice), "{block}: {text}");
        folder.serves(&format!("{block},{advice}"));
    }
    // Without a format at all: both that are advised.
    make_qcow2(folder.path(), &["b.qcow2", "1M"]);
    // As a raw disk it needs whole sectors.
    patch(&folder.path().join("b.qcow2"), |image| {
        image.resize(1 << 20, 0);
    });
    let text = folder.refuses("path=b.qcow2");
    for advice in ["format=qcow2", "format=raw"] {
        assert!(text.contains(advice), "{text}");
        folder.serves(&format!("path=b.qcow2,{advice}"));
    }
    // A command.
    patch(&folder.path().join("top.qcow2"), |image| {
        image[72..76].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    });
    let block = "path=top.qcow2,format=qcow2,backing=on";
    folder.carries_out_advice(&folder.refuses(block));
    folder.serves(block);
}

#[test]
fn an_image_that_may_only_be_read_is_refused_for_writing_by_the_check_as_well() {
    if !has_qemu_img() {
        return;
    }
    let folder = Folder::new();
    make_qcow2(folder.path(), &["a.qcow2", "1M"]);
    // Incompatible feature 0: the counts are out of date.
    patch(&folder.path().join("a.qcow2"), |image| image[79] |= 1);
    let block = "path=a.qcow2,format=qcow2";
    let text = folder.refuses(block);
    assert!(
        text.contains("disk image a.qcow2: marked dirty (`qemu-img check"),
        "{text}"
    );
    folder.serves(&format!("{block},readonly=on"));
    folder.carries_out_advice(&text);
    folder.serves(block);
}

#[test]
fn a_backing_file_at_fault_is_named_beside_the_image() {
    if !has_qemu_img() {
        return;
    }
    let folder = Folder::new();
    make_qcow2(folder.path(), &["base.qcow2", "1M"]);
    let above = ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    make_qcow2(folder.path(), &above);
    folder.raw("base.qcow2");
    let text = folder.refuses("path=top.qcow2,format=qcow2,backing=on");
    let line = "disk image top.qcow2: backing file base.qcow2: not a qcow2 image";
    assert!(has_once(&text, line), "{text}");
}
