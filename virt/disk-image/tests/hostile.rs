//! Images made to harm a program that opens them, locks, and whatever else is refused.

mod support;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use disk_image::{ImageDisk, ImageErrorKind, ImageOptions};
use seeded::Random;
use support::{
    Driver, check, compress, create, folder, follow, has_qemu, options, raw, run, try_run,
};
use tempfile::TempDir;
use vio::blk::{BlockIo, Op, Outcome};

const SIZE: u64 = 8 << 20;
const CLUSTER: u64 = 64 << 10;

/// A folder with an image of 64 KiB clusters whose first MiB has data.
fn image() -> Option<(TempDir, PathBuf)> {
    if !has_qemu() {
        return None;
    }
    let (folder, path) = folder();
    create(&path, "", SIZE);
    qemu_io(&path, "write -P 1 0 1M");
    Some((folder, path))
}

fn qemu_io(path: &Path, command: &str) {
    let output = Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", command])
        .arg(path)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
}

fn patch(path: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).expect("open");
    file.write_all_at(bytes, offset).expect("written");
}

fn word(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    let file = fs::File::open(path).expect("open");
    file.read_exact_at(&mut bytes, offset).expect("read");
    u64::from_be_bytes(bytes)
}

fn refusal(path: &Path, options: ImageOptions) -> ImageErrorKind {
    match ImageDisk::open(path, options) {
        Ok(_) => panic!("it was opened"),
        Err(error) => {
            assert!(error.to_string().contains(".qcow2"), "{error}");
            error.kind
        }
    }
}

fn read_only() -> ImageOptions {
    ImageOptions {
        read_only: true,
        ..options()
    }
}

/// Offsets of the tables, from the header.
fn l1(path: &Path) -> u64 {
    word(path, 40)
}

fn reftable(path: &Path) -> u64 {
    word(path, 48)
}

fn l2(path: &Path) -> u64 {
    word(path, l1(path)) & 0x00ff_ffff_ffff_fe00
}

/// Opens with the word at `offset` replaced, and says what is wrong.
fn corrupted(offset: impl Fn(&Path) -> u64, value: impl Fn(&Path) -> u64) -> Option<String> {
    let (_folder, path) = image()?;
    let (offset, value) = (offset(&path), value(&path));
    patch(&path, offset, &value.to_be_bytes());
    let kind = refusal(&path, options());
    assert!(
        matches!(kind, ImageErrorKind::Corrupt(_)),
        "{kind:?} is no corruption"
    );
    // Readers get an error too, or data, but nothing worse.
    if let Ok(mut driver) = Driver::open(&path, read_only()) {
        let _ = driver.read(0, 1 << 20);
    }
    Some(kind.to_string())
}

fn assert_says(said: Option<String>, what: &str) {
    if let Some(said) = said {
        assert!(said.contains(what), "{said:?} does not say {what:?}");
    }
}

#[test]
fn l1_table_outside_the_file_is_refused() {
    assert_says(corrupted(|_| 40, |_| 1 << 40), "L1 table");
    assert_says(corrupted(|_| 40, |_| u64::MAX << 16), "L1 table");
    assert_says(corrupted(|_| 40, |_| 12345), "L1 table");
}

#[test]
fn refcount_table_outside_the_file_is_refused() {
    assert_says(corrupted(|_| 48, |_| 1 << 50), "refcount table");
    // As many clusters as a u32 holds.
    assert_says(corrupted(|_| 56, |_| 0xffff_ffff << 32), "refcount table");
}

#[test]
fn l1_table_too_small_or_too_large_is_refused() {
    assert_says(
        corrupted(|_| 36, |path| word(path, 36) & 0xffff_ffff),
        "0 entries",
    );
    assert_says(
        corrupted(|_| 36, |path| word(path, 36) | 0xffff_ffff << 32),
        "L1 table",
    );
}

#[test]
fn l2_table_outside_the_file_is_refused() {
    assert_says(corrupted(l1, |_| 1 << 63 | 1 << 40), "outside the file");
    assert_says(corrupted(l1, |_| 1 << 63 | 512), "beginning of a cluster");
}

#[test]
fn l2_table_on_the_header_or_on_another_table_is_refused() {
    assert_says(corrupted(l1, |path| 1 << 63 | l1(path)), "something else");
    assert_says(
        corrupted(l1, |path| 1 << 63 | reftable(path)),
        "something else",
    );
}

#[test]
fn two_guest_clusters_in_one_place_are_refused() {
    assert_says(
        corrupted(l2, |path| word(path, l2(path) + 8)),
        "something else",
    );
}

#[test]
fn data_outside_the_file_are_refused() {
    assert_says(corrupted(l2, |_| 1 << 63 | 1 << 50), "outside the file");
}

#[test]
fn compressed_data_outside_the_file_are_refused() {
    assert_says(corrupted(l2, |_| 1 << 62 | 1 << 50), "outside the file");
}

#[test]
fn counts_that_are_too_low_are_mended() {
    let Some((_folder, path)) = image() else {
        return;
    };
    // The counts of the header, the tables, and some data.
    let block = word(&path, reftable(&path));
    patch(&path, block, &[0; 20]);
    assert_eq!(qemu_check(&path), Some(2));
    let mut driver = Driver::open(&path, options()).expect("it opens");
    driver.write(4 << 20, &[5; 512]).expect("written");
    assert_eq!(driver.read(0, 1 << 20), Ok(vec![1; 1 << 20]));
    drop(driver);
    check(&path, false);
    // There is nothing to count in.
    assert_says(corrupted(reftable, |_| 0), "cannot be counted");
}

#[test]
fn counts_of_shared_compressed_clusters_are_mended() {
    let Some((folder, path)) = image() else {
        return;
    };
    let raw = folder.path().join("raw");
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at >> 12) as u8).collect();
    fs::write(&raw, &bytes).expect("written");
    compress(&raw, "", &path);
    let block = word(&path, reftable(&path));
    let mut counts = [0; 64];
    let file = fs::File::open(&path).expect("open");
    file.read_exact_at(&mut counts, block).expect("read");
    let shared = counts
        .chunks(2)
        .position(|count| count[0] != 0 || count[1] > 2)
        .expect("a cluster with several compressed ones");
    patch(&path, block + 2 * shared as u64, &[0, 1]);
    assert_eq!(qemu_check(&path), Some(2));
    drop(ImageDisk::open(&path, options()).expect("it opens"));
    check(&path, false);
    let mut mended = [0; 64];
    file.read_exact_at(&mut mended, block).expect("read");
    assert_eq!(mended, counts);
}

fn qemu_check(path: &Path) -> Option<i32> {
    try_run(&format!("qemu-img check {}", path.display()))
        .status
        .code()
}

#[test]
fn refcount_block_outside_the_file_is_refused() {
    assert_says(corrupted(reftable, |_| 1 << 44), "outside the file");
    assert_says(corrupted(reftable, l1), "something else");
}

/// Changes made at random, mostly where they matter. `DISK_IMAGE_ROUNDS=10000` makes more of them.
#[test]
fn garbage_is_refused_or_answered() {
    let Some((_folder, path)) = image() else {
        return;
    };
    let rounds = std::env::var("DISK_IMAGE_ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok())
        .unwrap_or(100);
    let pristine = fs::read(&path).expect("read");
    let mut random = Random::new(5);
    for round in 0..rounds {
        let mut bytes = pristine.clone();
        for _ in 0..1 + random.below(3) {
            match round % 3 {
                // The header, after magic and version, and its extensions.
                0 => bytes[8 + random.below(112) as usize] = random.bits() as u8,
                1 => bytes[random.below(pristine.len() as u64) as usize] = random.bits() as u8,
                // An entry of a table: refcount table, its block, L1, L2.
                _ => {
                    let at = (1 + random.below(4)) * CLUSTER + 8 * random.below(20);
                    let flags = [0, 1, 1 << 63, 1 << 62, 3 << 62][random.below(5) as usize];
                    let target = match random.below(3) {
                        0 => random.below(24) * CLUSTER,
                        1 => random.below(24) * 512,
                        _ => random.bits() << random.below(40),
                    };
                    let entry: u64 = flags | target;
                    bytes[at as usize..at as usize + 8].copy_from_slice(&entry.to_be_bytes());
                }
            }
        }
        if random.below(8) == 0 {
            bytes.truncate(random.below(pristine.len() as u64) as usize);
        }
        fs::write(&path, &bytes).expect("written");
        for options in [read_only(), options()] {
            let Ok(mut driver) = Driver::open(&path, options) else {
                continue;
            };
            // It may be right, wrong, or an error: but an answer.
            let len = driver.disk.capacity().min(SIZE) as u32;
            for offset in (0..u64::from(len)).step_by(1 << 20) {
                let len = (len - offset as u32).min(1 << 20);
                let _ = driver.read(offset, len);
                if !options.read_only && random.below(4) == 0 {
                    let _ = driver.write(offset, &[1; 512]);
                    let len = u64::from(len);
                    let _ = driver.act(Op::Discard { offset, len }, &[]);
                }
            }
            drop(driver);
            if !options.read_only {
                // What was thought good enough to be written to is good enough for QEMU. (Leaks,
                // and flags that say less than the counts, are the garbage's.)
                let said = try_run(&format!("qemu-img check {}", path.display()));
                let said = String::from_utf8_lossy(&said.stdout).into_owned();
                let worse = said
                    .lines()
                    .find(|line| line.starts_with("ERROR") && !line.contains("OFLAG_COPIED"));
                assert_eq!(worse, None, "round {round}");
            }
        }
    }
}

#[test]
fn truncated_images_are_refused_or_fail() {
    let Some((_folder, path)) = image() else {
        return;
    };
    let pristine = fs::read(&path).expect("read");
    for len in (0..pristine.len()).step_by(CLUSTER as usize / 4) {
        fs::write(&path, &pristine[..len]).expect("written");
        let refused = ImageDisk::open(&path, options()).is_err();
        assert!(
            refused || len + (CLUSTER as usize) > pristine.len(),
            "{len}"
        );
        if let Ok(mut driver) = Driver::open(&path, read_only()) {
            let _ = driver.read(0, 1 << 20);
        }
    }
}

#[test]
fn features_that_are_missing_are_refused_by_name() {
    for (bit, what) in [(2, "external data file"), (4, "extended L2")] {
        let Some((_folder, path)) = image() else {
            return;
        };
        patch(&path, 72, &(1_u64 << bit).to_be_bytes());
        let before = fs::read(&path).expect("read");
        for options in [read_only(), options()] {
            let kind = refusal(&path, options);
            assert!(matches!(kind, ImageErrorKind::Unsupported(_)), "{kind:?}");
            assert!(kind.to_string().contains(what), "{kind}");
        }
        assert!(fs::read(&path).expect("read") == before, "it was touched");
    }
    let Some((_folder, path)) = image() else {
        return;
    };
    patch(&path, 32, &2_u32.to_be_bytes());
    assert!(refusal(&path, options()).to_string().contains("encryption"));
}

#[test]
fn sparse_image_of_enormous_size_opens_or_is_refused_without_much_memory() {
    let Some((_folder, path)) = image() else {
        return;
    };
    run(&format!(
        "qemu-img create -q -f qcow2 -o cluster_size=2M {} 1P",
        path.display()
    ));
    let mut driver = Driver::open(&path, options()).expect("it opens");
    assert_eq!(driver.disk.capacity(), 1 << 50);
    driver.write((1 << 50) - 512, &[9; 512]).expect("written");
    let op = Op::Discard {
        offset: 0,
        len: 1 << 50,
    };
    driver.act(op, &[]).expect("discarded");
    drop(driver);
    check(&path, false);
    let file = OpenOptions::new().write(true).open(&path).expect("open");
    file.set_len(1 << 43).expect("a sparse file");
    drop(file);
    drop(Driver::open(&path, options()));
}

#[test]
fn wrong_format_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("raw.qcow2");
    fs::write(&path, vec![7; 4096]).expect("written");
    assert!(matches!(
        refusal(&path, options()),
        ImageErrorKind::NotQcow2
    ));
    fs::write(&path, vec![7; 4097]).expect("written");
    assert!(matches!(refusal(&path, raw()), ImageErrorKind::Size(4097)));
    fs::write(&path, []).expect("written");
    assert!(matches!(
        refusal(&path, options()),
        ImageErrorKind::NotQcow2
    ));
    assert!(matches!(refusal(&path, raw()), ImageErrorKind::Size(0)));
    assert!(matches!(
        refusal(&folder.path().join("no.qcow2"), raw()),
        ImageErrorKind::Io(_)
    ));
    let folder = folder.path().join("folder.qcow2");
    fs::create_dir(&folder).expect("made");
    assert!(matches!(
        refusal(&folder, read_only()),
        ImageErrorKind::Kind
    ));
}

fn backed(path: &Path, arguments: &str) {
    run(&format!(
        "qemu-img create -q -u -f qcow2 {arguments} {} {SIZE}",
        path.display()
    ));
}

#[test]
fn backing_file_is_refused_unless_allowed() {
    let Some((folder, base)) = image() else {
        return;
    };
    let path = folder.path().join("top.qcow2");
    backed(&path, "-b disk.qcow2 -F qcow2");
    for options in [options(), read_only()] {
        match refusal(&path, options) {
            ImageErrorKind::BackingRefused(name) => assert_eq!(name, "disk.qcow2"),
            other => panic!("{other:?}"),
        }
    }
    let mut driver = Driver::open(&path, follow()).expect("it opens");
    assert_eq!(driver.read(0, 512), Ok(vec![1; 512]));
    drop(driver);

    // Absolute names, and two levels.
    let third = folder.path().join("third.qcow2");
    backed(&third, &format!("-b {} -F qcow2", path.display()));
    let mut driver = Driver::open(&third, follow()).expect("it opens");
    assert_eq!(driver.read(0, 512), Ok(vec![1; 512]));
    drop(driver);
    fs::remove_file(&base).expect("removed");
    let error = ImageDisk::open(&third, follow()).err().expect("no base");
    assert_eq!(error.path, base);
    assert!(matches!(error.kind, ImageErrorKind::Io(_)));
}

#[test]
fn backing_file_without_a_format_is_refused() {
    let Some((folder, base)) = image() else {
        return;
    };
    let path = folder.path().join("top.qcow2");
    backed(&path, &format!("-b {} -F qcow2", base.display()));
    // The extension that says the format, after the header; type 0 would end them all.
    let mut bytes = fs::read(&path).expect("read");
    let at = u32::from_be_bytes(bytes[100..104].try_into().expect("four")) as usize;
    assert_eq!(bytes[at..at + 4], 0xe279_2aca_u32.to_be_bytes());
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(&path, bytes).expect("written");
    assert!(matches!(
        refusal(&path, follow()),
        ImageErrorKind::BackingFormat(_)
    ));
}

#[test]
fn image_behind_itself_is_refused() {
    let Some((folder, path)) = image() else {
        return;
    };
    backed(&path, "-b disk.qcow2 -F qcow2");
    assert!(matches!(refusal(&path, follow()), ImageErrorKind::Chain(_)));
    // Around a corner.
    let other = folder.path().join("other.qcow2");
    backed(&path, "-b other.qcow2 -F qcow2");
    backed(&other, "-b disk.qcow2 -F qcow2");
    assert!(matches!(refusal(&path, follow()), ImageErrorKind::Chain(_)));
}

#[test]
fn chain_too_long_is_refused() {
    let Some((folder, mut path)) = image() else {
        return;
    };
    for level in 0..40 {
        let next = folder.path().join(format!("{level}.qcow2"));
        backed(&next, &format!("-b {} -F qcow2", path.display()));
        path = next;
    }
    assert!(matches!(
        refusal(&path, follow()),
        ImageErrorKind::Chain(32)
    ));
}

#[test]
fn protocols_and_odd_formats_behind_an_image_are_refused() {
    let Some((folder, _)) = image() else {
        return;
    };
    let path = folder.path().join("top.qcow2");
    for arguments in [
        "-b nbd://localhost/x -F raw",
        "-b json:{\"driver\":\"null-co\"} -F raw",
        "-b disk.qcow2 -F vmdk",
    ] {
        backed(&path, arguments);
        let kind = refusal(&path, follow());
        assert!(matches!(kind, ImageErrorKind::Unsupported(_)), "{kind:?}");
    }
}

#[test]
fn backing_file_shorter_or_longer_than_the_disk_is_cut_or_padded() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("top.qcow2");
    let base = folder.path().join("base.raw");
    for len in [SIZE / 2 + 300, SIZE * 2] {
        fs::write(&base, vec![5; len as usize]).expect("written");
        backed(&path, "-b base.raw -F raw");
        let mut driver = Driver::open(&path, follow()).expect("it opens");
        let mut expected = vec![5; SIZE as usize];
        if len < SIZE {
            expected[len as usize..].fill(0);
        }
        // A write to a cluster that the base ends in.
        let at = SIZE / 2 + 4096;
        driver.write(at, &[6; 512]).expect("written");
        expected[at as usize..at as usize + 512].fill(6);
        for half in 0..2 {
            let half = half * SIZE / 2;
            let read = driver.read(half, SIZE as u32 / 2).expect("read");
            assert!(read == expected[half as usize..][..SIZE as usize / 2]);
        }
        drop(driver);
        check(&path, false);
    }
}

#[test]
fn two_writers_or_a_writer_and_a_reader_exclude_each_other() {
    let Some((_folder, path)) = image() else {
        return;
    };
    let writer = ImageDisk::open(&path, options()).expect("it opens");
    for options in [options(), read_only()] {
        assert!(matches!(refusal(&path, options), ImageErrorKind::Locked(_)));
    }
    // QEMU's tools see it as well.
    let other = try_run(&format!("qemu-img check {}", path.display()));
    assert!(
        !other.status.success(),
        "qemu-img took no notice of the lock"
    );
    assert!(String::from_utf8_lossy(&other.stderr).contains("lock"));
    drop(writer);
    let readers: Vec<_> = (0..3)
        .map(|_| ImageDisk::open(&path, read_only()).expect("readers share"))
        .collect();
    check(&path, false);
    assert!(matches!(
        refusal(&path, options()),
        ImageErrorKind::Locked(_)
    ));
    drop(readers);
    drop(ImageDisk::open(&path, options()).expect("free again"));
}

#[test]
fn backing_file_cannot_be_written_while_it_is_in_use() {
    let Some((folder, base)) = image() else {
        return;
    };
    let tops: Vec<_> = (0..2)
        .map(|number| {
            let path = folder.path().join(format!("{number}.qcow2"));
            backed(&path, "-b disk.qcow2 -F qcow2");
            ImageDisk::open(&path, follow()).expect("both share the base")
        })
        .collect();
    assert!(matches!(
        refusal(&base, options()),
        ImageErrorKind::Locked(_)
    ));
    drop(tops);
}

#[test]
fn cancelled_operations_end() {
    let Some((_folder, path)) = image() else {
        return;
    };
    let one_thread = ImageOptions {
        threads: 1,
        ..options()
    };
    let mut driver = Driver::open(&path, one_thread).expect("it opens");
    for _ in 0..20 {
        let slots: Vec<_> = (0..8)
            .map(|at| {
                let op = Op::Write {
                    offset: at << 19,
                    len: 1 << 19,
                    durable: false,
                };
                driver.start(op, &vec![at as u8; 1 << 19])
            })
            .collect();
        driver.disk.flush();
        for &slot in &slots {
            driver.disk.cancel(slot);
        }
        let (mut ended, mut running) = (0, 0);
        while ended < slots.len() {
            for (completion, _) in driver.wait() {
                match completion.outcome {
                    Outcome::Done | Outcome::Failed(libc::ECANCELED) => ended += 1,
                    Outcome::NotCancellable => running += 1,
                    Outcome::Failed(errno) | Outcome::NotBegun(errno) => panic!("{errno}"),
                }
            }
        }
        assert!(running <= slots.len());
    }
    drop(driver);
    check(&path, false);
}
