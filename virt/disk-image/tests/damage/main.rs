//! Images with one thing wrong: kinds of damage, each opened for writing, for reading, and behind
//! one and two others.
//!
//! Either the image is refused, by a message that names the file and the fault, or what cannot be
//! read fails with EIO and everything else reads right. `qemu-img check` says of each whether it
//! finds something; where it does not, the table says why.

mod headers;
mod in_use;
mod kinds;
mod mappings;
mod random;
#[path = "../support/mod.rs"]
mod support;
mod tables;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use disk_image::{Backing, ImageDisk, ImageError, ImageOptions};
use kinds::{Damage, Image, Qemu, damage};
use kinds::{Fails, Fine, Nothing, Refused, Something};
use support::forge::{CLUSTERS, DATA, Forged, PACKED, SIZE, Tail, ZEROES};
use support::{Driver, has_qemu, options, try_run};

/// Role of the damaged image among those that are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Written,
    ReadOnly,
    Behind,
    BehindTwo,
}

fn open(folder: &Path, role: Role) -> Result<ImageDisk, ImageError> {
    let name = match role {
        Role::Written | Role::ReadOnly => "damaged.qcow2",
        Role::Behind => "one.qcow2",
        Role::BehindTwo => "two.qcow2",
    };
    let options = ImageOptions {
        read_only: role == Role::ReadOnly,
        backing: Backing::Follow,
        ..options()
    };
    ImageDisk::open(&folder.join(name), options)
}

fn judge_refusal(error: &ImageError, damaged: &Path, word: &str) -> Result<(), String> {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        said += &format!(": {error}");
        source = error.source();
    }
    match error.path == damaged && said.contains("damaged.qcow2") && said.contains(word) {
        true => Ok(()),
        false => Err(format!("{said:?} does not name the file and say {word:?}")),
    }
}

/// Result of a read, in a word.
fn outcome(read: &Result<Vec<u8>, i32>, right: &[u8]) -> &'static str {
    match read {
        Ok(read) if read == right => "right",
        Ok(read) if read.iter().all(|byte| *byte == 0) => "zeroes",
        Ok(_) => "something else",
        Err(libc::EIO) => "EIO",
        Err(_) => "another error",
    }
}

fn judge_reads(disk: ImageDisk, forged: &Forged, fails: &[u64], role: Role) -> Result<(), String> {
    let mut driver = Driver::new(disk);
    for guest in 0..CLUSTERS {
        let range = Forged::range(guest);
        let right = &forged.disk[range.clone()];
        let (at, len) = (range.start as u64, range.len() as u32);
        let found = outcome(&driver.read(at, len), right);
        let wanted = if fails.contains(&guest) {
            "EIO"
        } else {
            "right"
        };
        if found != wanted {
            return Err(format!("cluster {guest} reads {found}, not {wanted}"));
        }
        if wanted == "EIO" && matches!(role, Role::Behind | Role::BehindTwo) {
            // A part of it is written, so the rest would be copied.
            if driver.write(at, &[1; 256]) != Err(libc::EIO) {
                return Err(format!("a write to cluster {guest} did not fail"));
            }
            let found = outcome(&driver.read(at, len), right);
            if found != "EIO" {
                return Err(format!("cluster {guest} reads {found} after a write"));
            }
        }
    }
    let found = outcome(&driver.read(0, SIZE as u32), &forged.disk);
    let wanted = if fails.is_empty() { "right" } else { "EIO" };
    match found == wanted {
        true => Ok(()),
        false => Err(format!("in one piece it reads {found}, not {wanted}")),
    }
}

fn forged(image: Image) -> Forged {
    match image {
        Image::V2 => Forged::new(2, Tail::Data),
        Image::V3 => Forged::new(3, Tail::Data),
        Image::Packed => Forged::new(3, Tail::Compressed),
    }
}

fn put(folder: &Path, forged: &Forged) -> PathBuf {
    let damaged = folder.join("damaged.qcow2");
    fs::write(&damaged, &forged.bytes).expect("written");
    for (name, behind) in [("one.qcow2", "damaged.qcow2"), ("two.qcow2", "one.qcow2")] {
        let overlay = Forged::empty(3, Some((behind, Some("qcow2"))));
        fs::write(folder.join(name), &overlay.bytes).expect("written");
    }
    damaged
}

fn judge_qemu(qemu: Qemu, damaged: &Path) -> Result<(), String> {
    let said = try_run(&format!("qemu-img check -f qcow2 {}", damaged.display()));
    let found = !matches!(said.status.code(), Some(0 | 3));
    match qemu {
        Something if !found => Err("qemu-img check finds nothing".into()),
        Nothing(why) if found => {
            let said = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
            Err(format!("not so: {why}: {said:?}"))
        }
        _ => Ok(()),
    }
}

fn judge(damage: &Damage, role: Role, ask_qemu: bool) -> Result<(), String> {
    let mut forged = forged(damage.image);
    (damage.make)(&mut forged);
    let folder = tempfile::tempdir().expect("a folder");
    let damaged = put(folder.path(), &forged);
    if ask_qemu && role == Role::ReadOnly {
        judge_qemu(damage.qemu, &damaged)?;
    }
    let effect = match role {
        Role::Written => damage.writing,
        _ => damage.reading,
    };
    match (effect, open(folder.path(), role)) {
        (Refused(word), Err(error)) => judge_refusal(&error, &damaged, word)?,
        (Refused(_), Ok(_)) => return Err("it was opened".into()),
        (_, Err(error)) => return Err(format!("it was refused: {error:?}")),
        (Fails(clusters), Ok(disk)) => judge_reads(disk, &forged, clusters, role)?,
        (Fine, Ok(disk)) => judge_reads(disk, &forged, &[], role)?,
    }
    match role == Role::Written || fs::read(&damaged).expect("read") == forged.bytes {
        true => Ok(()),
        false => Err("it was written to".into()),
    }
}

fn walk(damages: impl IntoIterator<Item = Damage>) {
    let ask_qemu = has_qemu();
    let mut faults = Vec::new();
    for damage in damages {
        for role in [Role::ReadOnly, Role::Behind, Role::BehindTwo, Role::Written] {
            if let Err(fault) = judge(&damage, role, ask_qemu) {
                faults.push(format!("{}, {role:?}: {fault}", damage.what));
            }
        }
    }
    assert!(
        faults.is_empty(),
        "{} cells:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn good_images_read_right_however_they_are_opened() {
    let good = |image| damage(image, "good", |_| {}).unseen("it is good");
    walk([good(Image::V2), good(Image::V3), good(Image::Packed)]);
    assert!(DATA.len() + PACKED.len() + ZEROES.len() < CLUSTERS as usize);
}

#[test]
fn damaged_headers_are_refused_or_hinder_writing_alone() {
    walk(headers::fields());
    walk(headers::features());
    walk(headers::backing_names());
}

#[test]
fn damaged_tables_are_refused_or_hinder_writing_alone() {
    walk(tables::l1());
    walk(tables::counts());
    walk(tables::snapshots());
}

#[test]
fn damaged_mappings_are_refused_or_fail_alone() {
    walk(mappings::data());
    walk(mappings::zeroes());
    walk(mappings::cut_files());
    walk(mappings::compressed());
}
