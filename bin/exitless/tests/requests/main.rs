//! Every request that a disk's front end may make by what was advertised, on storage whose kernel
//! calls refuse a part of them: for their alignment, their granularity, or altogether.
//!
//! One daemon for each kind of storage, with a disk for each format, block size and way past the
//! page cache. Status and contents of each request are compared with a model of the disk's bytes,
//! and the file at the end as well.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod disk;
#[expect(dead_code, reason = "shared with a test that needs more of it")]
mod storage;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use disk::{Disk, Kind, Request, SECTOR};
use storage::{Storage, TestStorage};
use tempfile::TempDir;

const EXITLESS: &str = env!("CARGO_BIN_EXE_exitless");
/// Bytes of a disk: room for a request of more than one part, and no whole number of its parts.
const BYTES: usize = (6 << 20) + 4096;
const SECTORS: usize = BYTES / SECTOR;
/// Far longer than a daemon takes to start.
const LONG: Duration = Duration::from_secs(60);

/// Ranges, in sectors: with blocks of eight sectors aligned, inside one block, across its ends,
/// long, at the disk's end.
const RANGES: [(usize, usize); 11] = [
    (8, 8),
    (9, 3),
    (9, 17),
    (15, 2),
    (16, 1),
    (63, 1985),
    (2048, 9216),
    (4099, 7001),
    (SECTORS - 8, 8),
    (SECTORS - 3, 3),
    (SECTORS - 19, 19),
];

/// Kind of a disk: one cell of the table.
#[derive(Clone, Debug)]
struct Cell {
    storage: Storage,
    is_qcow2: bool,
    block: u32,
    direct: bool,
}

impl Cell {
    /// All on this storage; images only where they can be made.
    fn all(storage: Storage) -> Vec<Self> {
        let has_qemu_img = Command::new("qemu-img").arg("--version").output().is_ok();
        if !has_qemu_img {
            println!("skipped: qcow2 on {storage:?}: no qemu-img on the PATH (Debian: qemu-utils)");
        }
        let mut cells = Vec::new();
        for block in [512, 4096] {
            for (is_qcow2, direct) in [(false, false), (false, true), (true, false)] {
                cells.push(Self {
                    storage,
                    is_qcow2,
                    block,
                    direct,
                });
            }
        }
        cells.retain(|cell| has_qemu_img || !cell.is_qcow2);
        cells
    }

    /// Refused at the start: past the page cache the storage takes larger blocks only.
    fn is_refused(&self) -> bool {
        self.direct && self.block < self.storage.direct_block()
    }

    /// As it is written after `--block`, without its socket.
    fn block_option(&self, path: &Path) -> String {
        let format = if self.is_qcow2 { "qcow2" } else { "raw" };
        let direct = if self.direct { ",direct=on" } else { "" };
        let (block, path) = (self.block, path.display());
        format!("path={path},format={format},block={block}{direct}")
    }
}

/// A daemon; killed with this.
struct Daemon(Child);

impl Daemon {
    fn start(blocks: &[String], log: &Path) -> Self {
        let mut serve = Command::new(EXITLESS);
        serve.args(["serve", "--idle", "sleep", "--cores", "1"]);
        for block in blocks {
            serve.args(["--block", block]);
        }
        let log = File::create(log).unwrap();
        serve.stdin(Stdio::null()).stdout(log.try_clone().unwrap());
        // SAFETY: between fork and exec one system call, of numbers.
        unsafe {
            serve.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        Self(serve.stderr(log).spawn().unwrap())
    }

    /// Ends it as an administrator does.
    fn end(mut self, log: &Path) {
        // SAFETY: a plain system call; the child has not been waited for, so the number is still
        // its own.
        unsafe { libc::kill(self.0.id() as i32, libc::SIGTERM) };
        let status = self.0.wait().unwrap();
        assert!(
            status.success(),
            "{status}: {}",
            fs::read_to_string(log).unwrap()
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A disk of the table: what it is, its file, and its socket.
struct Row {
    cell: Cell,
    file: File,
    socket: PathBuf,
}

/// Walks every disk on this storage.
fn walk(storage: Storage) {
    let mut place = match TestStorage::new(storage) {
        Ok(place) => place,
        Err(reason) => return println!("skipped: no {storage:?} here: {reason}"),
    };
    let folder = TempDir::new().unwrap();
    let log = folder.path().join("log");
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    for (at, cell) in Cell::all(storage).into_iter().enumerate() {
        let image = place.image(
            &format!("disk{at}"),
            BYTES as u64 + if cell.is_qcow2 { 2 << 20 } else { 0 },
        );
        let image = match image {
            Ok(image) => image,
            Err(reason) => return println!("skipped: no {storage:?} here: {reason}"),
        };
        let socket = folder.path().join(format!("{at}.sock"));
        let block = format!(
            "id=d{at},socket={},{}",
            socket.display(),
            cell.block_option(&image)
        );
        if cell.is_refused() {
            refuses(&block);
            continue;
        }
        if cell.is_qcow2 {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2"]).arg(&image);
            assert!(create.arg(BYTES.to_string()).status().unwrap().success());
        }
        blocks.push(block);
        let file = File::open(&image).unwrap();
        rows.push(Row { cell, file, socket });
    }
    let daemon = Daemon::start(&blocks, &log);
    let start = Instant::now();
    while !rows.iter().all(|row| row.socket.exists()) {
        let said = || fs::read_to_string(&log).unwrap();
        assert!(start.elapsed() < LONG, "no sockets: {}", said());
        thread::sleep(Duration::from_millis(5));
    }
    place.detach();
    let mut models = Vec::new();
    for Row { cell, file, socket } in &rows {
        let mut disk = Disk::connect(socket, format!("{cell:?}"), BYTES);
        reads_and_writes(&mut disk);
        ranges(&mut disk, cell);
        neighbours(&mut disk);
        if !cell.is_qcow2 && file.metadata().unwrap().is_file() {
            blocks_reserved(&mut disk, cell, file);
        }
        disk.read_back(0, SECTORS);
        disk.flush();
        models.push(disk.model().to_vec());
    }
    daemon.end(&log);
    for (Row { cell, file, .. }, model) in rows.iter().zip(models) {
        if !cell.is_qcow2 {
            let mut stored = vec![0; BYTES];
            file.read_exact_at(&mut stored, 0).unwrap();
            assert!(
                stored == model,
                "{cell:?}: the file holds other bytes than the disk"
            );
        }
    }
}

/// The daemon refuses it, and says what to do.
fn refuses(block: &str) {
    let output = Command::new(EXITLESS)
        .args(["serve", "--check", "--block", block])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{block}: {said}");
    assert!(said.contains("block=4096"), "{block}: {said}");
}

fn reads_and_writes(disk: &mut Disk) {
    for (sector, sectors) in RANGES {
        disk.fill(sector, sectors);
        let skews = if sectors < 2048 {
            &[0, 1, 512][..]
        } else {
            &[1]
        };
        for &skew in skews {
            for kind in [Kind::Write, Kind::Read] {
                disk.make(&[Request {
                    skew,
                    ..Request::new(kind, sector, sectors)
                }]);
            }
            disk.read_back(sector, sectors);
        }
    }
}

fn ranges(disk: &mut Disk, cell: &Cell) {
    assert!(disk.offers(Kind::Zero), "zeroes can always be written");
    // The whole disk once for each storage.
    let whole = (cell.block == 4096 && cell.direct).then_some((0, SECTORS));
    for (sector, sectors) in RANGES.into_iter().chain(whole) {
        for kind in [Kind::Zero, Kind::ZeroUnmap, Kind::Discard] {
            disk.fill(sector, sectors);
            disk.make(&[Request::new(kind, sector, sectors)]);
            match kind {
                Kind::Discard => disk.read_discarded(sector, sectors),
                _ => disk.read_back(sector, sectors),
            }
        }
        // Once more, of what is zero already.
        disk.make(&[Request::new(Kind::Zero, sector, sectors)]);
        disk.read_back(sector, sectors);
    }
}

/// Requests in flight beside each other that share blocks, and no sector.
fn neighbours(disk: &mut Disk) {
    const KINDS: [Kind; 5] = [
        Kind::Write,
        Kind::Zero,
        Kind::Write,
        Kind::ZeroUnmap,
        Kind::Read,
    ];
    for round in 0..8 {
        let first = 64 * round + round;
        disk.fill(first, 80);
        let mut sector = first;
        let mut requests = Vec::new();
        for at in 0..24 {
            let sectors = 1 + (at * 7 + round) % 5;
            requests.push(Request::new(KINDS[at % 5], sector, sectors));
            sector += sectors;
        }
        disk.make(&requests);
        disk.read_back(first, sector - first);
    }
}

/// With unmap=0 the file keeps its blocks; with unmap=1 it gives them back where holes can be
/// punched.
fn blocks_reserved(disk: &mut Disk, cell: &Cell, file: &File) {
    const LEN: usize = 2048;
    let blocks = |disk: &mut Disk| {
        disk.flush();
        file.sync_all().unwrap();
        file.metadata().unwrap().blocks()
    };
    disk.fill(4096, LEN);
    let before = blocks(disk);
    disk.make(&[Request::new(Kind::Zero, 4096, LEN)]);
    let reserved = blocks(disk);
    assert!(
        reserved >= before,
        "{cell:?}: {reserved} blocks of {before}"
    );
    disk.make(&[Request::new(Kind::ZeroUnmap, 4096, LEN)]);
    let left = blocks(disk);
    if cell.storage.punches() {
        assert!(
            left + LEN as u64 / 2 <= before,
            "{cell:?}: {left} blocks of {before}"
        );
    }
    disk.read_back(4096, LEN);
}

#[test]
fn every_advertised_request_ends_well_on_ext4() {
    walk(Storage::Ext4);
}

#[test]
fn every_advertised_request_ends_well_on_ext2() {
    walk(Storage::Ext2);
}

#[test]
fn every_advertised_request_ends_well_on_tmpfs() {
    walk(Storage::Tmpfs);
}

#[test]
fn every_advertised_request_ends_well_on_xfs() {
    walk(Storage::Xfs);
}

#[test]
fn every_advertised_request_ends_well_on_btrfs() {
    walk(Storage::Btrfs);
}

#[test]
fn every_advertised_request_ends_well_on_vfat() {
    walk(Storage::Vfat);
}

#[test]
fn every_advertised_request_ends_well_on_ext4_with_large_sectors() {
    walk(Storage::Ext4On4Kn);
}

#[test]
fn every_advertised_request_ends_well_on_fuse_without_fallocate() {
    walk(Storage::FuseWithoutFallocate);
}

#[test]
fn every_advertised_request_ends_well_on_a_block_device() {
    walk(Storage::Loop512);
}

#[test]
fn every_advertised_request_ends_well_on_a_block_device_with_large_sectors() {
    walk(Storage::Loop4Kn);
}
