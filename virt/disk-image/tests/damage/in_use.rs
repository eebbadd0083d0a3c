//! Files that are cut, or lose a table, while they are open; the messages about it; and advice that
//! is carried out.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use disk_image::{Backing, ImageDisk, ImageError, ImageErrorKind, ImageOptions};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::support::forge::{CLUSTER, COPIED, DATA, Forged, SIZE, SPAN, Tail};
use super::support::{Driver, follow, has_qemu, options, raw, run};
use super::{Role, open, put};

fn cut(path: &Path, len: usize) {
    let file = OpenOptions::new().write(true).open(path).expect("open");
    file.set_len(len as u64).expect("cut");
}

#[test]
fn an_image_cut_while_in_use_fails_where_it_was_cut() {
    let forged = Forged::new(3, Tail::Data);
    for role in [Role::ReadOnly, Role::Behind, Role::BehindTwo, Role::Written] {
        let folder = tempfile::tempdir().expect("a folder");
        let damaged = put(folder.path(), &forged);
        let mut driver = Driver::new(open(folder.path(), role).expect("it opens"));
        // Not every table has been read when it happens.
        assert!(driver.read(0, 512).is_ok());
        cut(&damaged, forged.host(3));
        for guest in DATA {
            let range = Forged::range(guest);
            let read = driver.read(range.start as u64, range.len() as u32);
            match guest < 3 {
                true => assert!(
                    read.as_deref() == Ok(&forged.disk[range]),
                    "{role:?}: {guest}"
                ),
                false => assert_eq!(read, Err(libc::EIO), "{role:?}: {guest}"),
            }
        }
        if role == Role::Written {
            // A write would count its cluster in a table that may be gone.
            cut(&damaged, CLUSTER);
            let at = 30 * CLUSTER as u64;
            assert_eq!(driver.write(at, &[1; 512]), Err(libc::EIO));
        }
    }
}

#[test]
fn a_raw_file_cut_while_in_use_fails_where_it_was_cut() {
    let folder = tempfile::tempdir().expect("a folder");
    let base = folder.path().join("base.raw");
    let top = folder.path().join("top.qcow2");
    fs::write(
        &top,
        Forged::empty(3, Some(("base.raw", Some("raw")))).bytes,
    )
    .expect("written");
    let half = SIZE / 2 / 512 * 512;
    for (path, options) in [(&top, follow()), (&base, raw())] {
        fs::write(&base, vec![5; SIZE as usize]).expect("written");
        let mut driver = Driver::open(path, options).expect("it opens");
        cut(&base, half as usize);
        assert_eq!(driver.read(half - 512, 512), Ok(vec![5; 512]));
        assert_eq!(driver.read(half - 512, 1024), Err(libc::EIO));
        assert_eq!(driver.read(SIZE - 512, 512), Err(libc::EIO));
    }
}

/// Lines of the log.
struct Log;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        LINES.lock().expect("no panic").push(text.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_cluster_that_cannot_be_read_is_said_with_file_and_fault_and_not_without_end() {
    // The first of all tests that asks has it; the others say nothing about this folder.
    let _ = tracing::subscriber::set_global_default(Log);
    let mut forged = Forged::new(3, Tail::Data);
    forged.set_entry(SPAN, COPIED | 1 << 40);
    let folder = tempfile::tempdir().expect("a folder");
    let damaged = put(folder.path(), &forged);
    let mut driver = Driver::new(open(folder.path(), Role::BehindTwo).expect("it opens"));
    for _ in 0..200 {
        assert_eq!(driver.read(SPAN * CLUSTER as u64, 512), Err(libc::EIO));
    }
    let lines = LINES.lock().expect("no panic").clone();
    let name = damaged.display().to_string();
    let ours: Vec<_> = lines.iter().filter(|line| line.contains(&name)).collect();
    assert!((1..=30).contains(&ours.len()), "{} lines", ours.len());
    assert!(
        ours.iter().all(|line| line.contains("outside the file")),
        "{ours:?}"
    );
}

/// Carries the advice of an error out.
fn obey(error: &ImageError) {
    let advice = error.advice().expect("there is one");
    let command = advice.split('`').nth(1).expect("a command");
    let done = Command::new("sh")
        .args(["-c", command])
        .output()
        .expect("a shell");
    assert!(
        done.status.success(),
        "{command}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

#[test]
fn advice_carried_out_makes_the_image_open() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let top = folder.path().join("it's a top.qcow2");
    for (version, name) in [
        (2, "base.raw"),
        (3, "base.raw"),
        (2, "a base's.raw"),
        (3, "-b.raw"),
    ] {
        fs::write(folder.path().join(name), vec![5; SIZE as usize]).expect("written");
        fs::write(&top, Forged::empty(version, Some((name, None))).bytes).expect("written");
        let error = ImageDisk::open(&top, follow())
            .err()
            .expect("no format is said");
        assert!(
            matches!(error.kind, ImageErrorKind::BackingFormat(_)),
            "{error:?}"
        );
        obey(&error);
        let mut driver = Driver::open(&top, follow()).expect("it opens");
        assert_eq!(
            driver.read(SIZE - 512, 512),
            Ok(vec![5; 512]),
            "version {version}, {name}"
        );
    }
    for (bit, mark) in [(1, "dirty"), (2, "corrupt")] {
        let mut forged = Forged::new(3, Tail::Data);
        forged.put64(72, bit);
        fs::write(&top, &forged.bytes).expect("written");
        let error = ImageDisk::open(&top, options())
            .err()
            .expect("it is marked");
        assert!(
            matches!(error.kind, ImageErrorKind::Marked(said) if said == mark),
            "{error:?}"
        );
        obey(&error);
        let mut driver = Driver::open(&top, options()).expect("it opens");
        assert!(driver.read(0, SIZE as u32) == Ok(forged.disk), "{mark}");
    }
}

#[test]
fn an_overlay_of_version_2_that_says_its_backing_format_opens() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (base, top) = (
        folder.path().join("base.raw"),
        folder.path().join("v2.qcow2"),
    );
    fs::write(&base, vec![5; SIZE as usize]).expect("written");
    run(&format!(
        "qemu-img create -q -f qcow2 -o compat=0.10 -b base.raw -F raw {}",
        top.display()
    ));
    let mut driver = Driver::open(&top, follow()).expect("it opens");
    assert_eq!(driver.read(0, 512), Ok(vec![5; 512]));
    driver.write(512, &[6; 512]).expect("written");
    drop(driver);
    // What the header says stays there.
    let mut driver = Driver::open(&top, follow()).expect("it opens again");
    assert_eq!(driver.read(0, 1024), Ok([[5; 512], [6; 512]].concat()));
    drop(driver);
    super::support::check(&top, false);
}

#[test]
fn a_trial_finds_what_opening_refuses_and_leaves_the_file() {
    let low: fn(&mut Forged) = |f| f.bytes[2 * CLUSTER..2 * CLUSTER + 20].fill(0);
    let dirty: fn(&mut Forged) = |f| f.put64(72, 1);
    for (make, is_good) in [(low, true), (dirty, false)] {
        let mut forged = Forged::new(3, Tail::Data);
        make(&mut forged);
        let folder = tempfile::tempdir().expect("a folder");
        let damaged = put(folder.path(), &forged);
        let options = ImageOptions {
            backing: Backing::Follow,
            ..options()
        };
        assert_eq!(ImageDisk::open_in_trial(&damaged, options).is_ok(), is_good);
        assert!(
            fs::read(&damaged).expect("read") == forged.bytes,
            "it was written to"
        );
        assert_eq!(ImageDisk::open(&damaged, options).is_ok(), is_good);
    }
}
