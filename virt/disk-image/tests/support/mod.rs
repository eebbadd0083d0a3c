//! Support shared by the tests: QEMU's tools, and a driver that sleeps as the device's thread does.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod forge;

use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use disk_image::{Backing, ImageDisk, ImageError, ImageFormat, ImageOptions};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;
use vio::blk::{BlockIo, Completion, Op, Outcome};

/// Whether QEMU's tools are here; says so if not.
pub fn has_qemu() -> bool {
    let found = ["qemu-img", "qemu-io"]
        .iter()
        .all(|tool| Command::new(tool).arg("--version").output().is_ok());
    if !found {
        println!("skipped: no qemu-img and qemu-io on the PATH (Debian: qemu-utils)");
    }
    found
}

/// Runs a command line (words separated by spaces) and returns what it did.
pub fn try_run(line: &str) -> Output {
    let mut words = line.split_whitespace();
    let program = words.next().expect("a program");
    Command::new(program).args(words).output().expect("it runs")
}

/// Likewise; it must succeed.
pub fn run(line: &str) -> String {
    let output = try_run(line);
    assert!(
        output.status.success(),
        "{line}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A folder, and the path of an image in it that is not there yet.
pub fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    (folder, path)
}

/// The argument of qemu-img for these options of the format, or none.
fn argument(options: &str) -> String {
    match options {
        "" => String::new(),
        options => format!("-o {options}"),
    }
}

/// A qcow2 image of `size` bytes without data.
pub fn create(path: &Path, options: &str, size: u64) {
    let argument = argument(options);
    run(&format!(
        "qemu-img create -q -f qcow2 {argument} {} {size}",
        path.display()
    ));
}

/// The contents of a raw image as a qcow2 image of compressed clusters.
pub fn compress(raw: &Path, options: &str, path: &Path) {
    let argument = argument(options);
    run(&format!(
        "qemu-img convert -q -c -f raw -O qcow2 {argument} {} {}",
        raw.display(),
        path.display()
    ));
}

/// `qemu-img check`: no corruption, and no leak unless allowed.
pub fn check(path: &Path, leaks_allowed: bool) {
    let output = try_run(&format!("qemu-img check {}", path.display()));
    let code = output.status.code();
    assert!(
        code == Some(0) || (leaks_allowed && code == Some(3)),
        "qemu-img check says {code:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The disk's contents as QEMU reads them.
pub fn contents(path: &Path) -> Vec<u8> {
    let raw = path.with_extension("contents");
    run(&format!(
        "qemu-img convert -O raw {} {}",
        path.display(),
        raw.display()
    ));
    std::fs::read(&raw).expect("qemu-img wrote it")
}

pub fn options() -> ImageOptions {
    ImageOptions {
        depth: 32,
        ..ImageOptions::default()
    }
}

/// As [`options`], with what is behind the image.
pub fn follow() -> ImageOptions {
    ImageOptions {
        backing: Backing::Follow,
        ..options()
    }
}

pub fn raw() -> ImageOptions {
    ImageOptions {
        format: ImageFormat::Raw,
        ..options()
    }
}

/// Uses a disk as the device's thread does.
pub struct Driver {
    pub disk: ImageDisk,
    wake: RawFd,
    free: Vec<u32>,
    done: Vec<Completion>,
    /// Slots whose operation is a read.
    reads: Vec<bool>,
}

impl Driver {
    pub fn open(path: &Path, options: ImageOptions) -> Result<Self, ImageError> {
        Ok(Self::new(ImageDisk::open(path, options)?))
    }

    pub fn new(disk: ImageDisk) -> Self {
        let mut fds = Vec::new();
        disk.wake_fds(&mut fds);
        Self {
            free: (0..disk.depth()).collect(),
            wake: fds[0],
            reads: vec![false; disk.depth() as usize],
            disk,
            done: Vec::new(),
        }
    }

    /// Starts an operation; the slot that has it. `data`: what to write.
    pub fn start(&mut self, op: Op, data: &[u8]) -> u32 {
        let slot = self.free.pop().expect("a free slot");
        if let Op::Read { len, .. } | Op::Write { len, .. } = op {
            assert!(self.disk.reserve(slot, len), "room for a buffer");
        }
        self.reads[slot as usize] = matches!(op, Op::Read { .. });
        let mut offset = 0;
        while offset < data.len() {
            let buffer = self.disk.buffer(slot, offset as u32);
            let len = buffer.len().min(data.len() - offset);
            buffer[..len].copy_from_slice(&data[offset..offset + len]);
            offset += len;
        }
        self.disk.submit(slot, op, &[]);
        slot
    }

    pub fn can_start(&self) -> bool {
        !self.free.is_empty()
    }

    /// Sleeps until something ends; at most ten seconds.
    pub fn wait(&mut self) -> Vec<(Completion, Vec<u8>)> {
        self.disk.flush();
        loop {
            self.disk.poll(&mut self.done);
            if !self.done.is_empty() {
                break;
            }
            self.disk.arm();
            if !self.disk.has_completions() {
                // SAFETY: the disk owns the descriptor and lives as long as the driver.
                let fd = unsafe { BorrowedFd::borrow_raw(self.wake) };
                let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
                let ready = poll(&mut fds, PollTimeout::from(10_000_u16)).expect("poll");
                assert_ne!(ready, 0, "nothing has ended in ten seconds: a lost wake-up");
                assert!(self.disk.has_completions(), "woken for nothing");
            }
            self.disk.disarm();
        }
        let done: Vec<_> = self.done.drain(..).collect();
        done.into_iter()
            .map(|completion| (completion, self.collect(completion)))
            .collect()
    }

    fn collect(&mut self, completion: Completion) -> Vec<u8> {
        let slot = completion.slot;
        if completion.outcome == Outcome::NotCancellable {
            return Vec::new();
        }
        self.free.push(slot);
        let data = if self.reads[slot as usize] {
            self.disk.buffer(slot, 0).to_vec()
        } else {
            Vec::new()
        };
        self.disk.unreserve(slot);
        data
    }

    /// One operation, from its start to its end.
    pub fn act(&mut self, op: Op, data: &[u8]) -> Result<Vec<u8>, i32> {
        let slot = self.start(op, data);
        loop {
            for (completion, data) in self.wait() {
                assert_eq!(completion.slot, slot, "somebody else's completion");
                match completion.outcome {
                    Outcome::Done => return Ok(data),
                    Outcome::Failed(errno) | Outcome::NotBegun(errno) => return Err(errno),
                    Outcome::NotCancellable => {}
                }
            }
        }
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, i32> {
        self.act(Op::Read { offset, len }, &[])
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), i32> {
        let op = Op::Write {
            offset,
            len: data.len() as u32,
            durable: false,
        };
        self.act(op, data).map(drop)
    }

    pub fn flush(&mut self) -> Result<(), i32> {
        self.act(Op::Flush, &[]).map(drop)
    }
}

/// A block device, by two nodes; given back when dropped.
pub struct Loop {
    pub nodes: [PathBuf; 2],
    _folder: TempDir,
}

impl Loop {
    /// One of 1 MiB in blocks of so many bytes. Nothing, with the reason printed, where this user
    /// may not make one.
    pub fn attach(block: u32) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("disk");
        std::fs::File::create(&file)
            .and_then(|file| file.set_len(1 << 20))
            .expect("a file");
        let losetup = Command::new("losetup")
            .args(["--find", "--show", "--sector-size"])
            .arg(block.to_string())
            .arg(&file)
            .output();
        let Some(first) = losetup.ok().filter(|output| output.status.success()) else {
            println!("skipped: no loop device to be had (losetup, root)");
            return None;
        };
        let first = String::from_utf8(first.stdout).expect("a path");
        let this = Self {
            nodes: [first.trim().into(), folder.path().join("node")],
            _folder: folder,
        };
        let number = std::fs::metadata(&this.nodes[0])
            .expect("it is there")
            .rdev();
        let made = Command::new("mknod")
            .arg(&this.nodes[1])
            .arg("b")
            .args([libc::major(number), libc::minor(number)].map(|number| number.to_string()))
            .status();
        assert!(made.expect("mknod runs").success());
        Some(this)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let done = Command::new("losetup")
            .arg("--detach")
            .arg(&self.nodes[0])
            .status();
        assert!(done.is_ok_and(|status| status.success()), "losetup -d");
    }
}
