//! The cases: four disks over each of two back ends, each with its guest.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;

use anyhow::{Context, Result, bail};
use disk_worker::{Confined, LOOKS, Report, WorkerConfig, WorkerDisk};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use vio::blk::{Blk, BlkConfig, BlockIo, RawDisk, RawDiskOptions, Transfer};

use crate::guest::{CAPACITY, Guest, Subject};
use crate::null::Null;
use crate::process::{Kicked, Watched};

/// Place of the device model, and its way to move data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// In this process, in place.
    Direct,
    /// In this process, through private buffers.
    Bounce,
    /// In a process of its own, which polls.
    Worker,
    /// The same, asleep after each empty poll.
    Asleep,
}

/// All of them, in the order of the table.
pub const CASES: [Case; 4] = [Case::Direct, Case::Bounce, Case::Worker, Case::Asleep];

impl Case {
    /// Its name in keys and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Bounce => "bounce",
            Self::Worker => "worker",
            Self::Asleep => "asleep",
        }
    }

    /// Whether there is a second process.
    pub fn has_worker(self) -> bool {
        matches!(self, Self::Worker | Self::Asleep)
    }
}

/// Back end: carries requests out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackEnd {
    /// It does nothing.
    Null,
    /// A memory file.
    Tmpfs,
}

impl BackEnd {
    /// Its name in keys and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Tmpfs => "tmpfs",
        }
    }
}

/// A memory file of [`CAPACITY`] bytes, none of whose pages is absent.
///
/// # Errors
/// The kernel's.
pub fn image() -> Result<File> {
    let file = File::from(memfd_create("disk", MemfdFlags::CLOEXEC)?);
    let piece = vec![0xa5; 1 << 20];
    for at in (0..CAPACITY).step_by(piece.len()) {
        file.write_all_at(&piece, at)?;
    }
    Ok(file)
}

/// The guests of one back end, in the order of [`CASES`].
pub struct Guests {
    /// Their back end.
    pub back_end: BackEnd,
    /// The guests.
    pub subjects: Vec<Box<dyn Subject>>,
    /// Confinement of the last worker: of all of them.
    pub confined: Confined,
}

impl Guests {
    /// Starts them; their workers on CPU `cpu`, if there is one for them.
    ///
    /// # Errors
    /// No disk, no guest, or no worker.
    pub fn start(back_end: BackEnd, image: &File, cpu: Option<usize>) -> Result<Self> {
        let mut guests = Self {
            back_end,
            subjects: Vec::new(),
            confined: Confined {
                namespaces: 0,
                calls: 0,
            },
        };
        for case in CASES {
            let subject = guests.start_one(case, image, cpu);
            guests.subjects.push(subject.with_context(|| case.name())?);
        }
        Ok(guests)
    }

    fn start_one(
        &mut self,
        case: Case,
        image: &File,
        cpu: Option<usize>,
    ) -> Result<Box<dyn Subject>> {
        let transfer = match case {
            Case::Direct => Transfer::Direct,
            Case::Bounce => Transfer::Bounce,
            Case::Worker => return self.start_worker(LOOKS, image, cpu),
            Case::Asleep => return self.start_worker(0, image, cpu),
        };
        let io: Box<dyn BlockIo> = match self.back_end {
            BackEnd::Null => Box::new(Null::new(CAPACITY, transfer)),
            BackEnd::Tmpfs => {
                let options = RawDiskOptions {
                    transfer,
                    ..RawDiskOptions::default()
                };
                Box::new(RawDisk::from_file(image.try_clone()?, options)?)
            }
        };
        let device = Blk::new(BlkConfig::default(), io)?;
        Ok(Box::new(Guest::new(device, None)?))
    }

    /// One whose disk is a process, which sleeps after `looks` empty polls.
    fn start_worker(
        &mut self,
        looks: u32,
        image: &File,
        cpu: Option<usize>,
    ) -> Result<Box<dyn Subject>> {
        let mut arguments = vec![format!("--looks={looks}").into()];
        if self.back_end == BackEnd::Null {
            arguments.push("--null".into());
        }
        let disk = WorkerDisk {
            program: "/proc/self/exe".into(),
            arguments,
            file: image.try_clone()?,
            read_only: false,
            direct: false,
            id: String::new(),
            device: BlkConfig::default(),
        };
        let config = WorkerConfig {
            is_unconfined: false,
            restarts: false,
        };
        let (sender, reports) = channel();
        let mut running = disk_worker::start(disk, config, move |report| {
            // An end after the start is seen by the device.
            let _ = sender.send(report);
        })?;
        let first = reports.recv().context("the worker's thread")?;
        let Report::Started { pid, confined } = first else {
            bail!("the worker has ended: {first:?}");
        };
        if let Some(cpu) = cpu {
            pin(pid, cpu).context("pinning the worker")?;
        }
        self.confined = confined;
        let kicks = Arc::new(AtomicU64::new(0));
        running.process = Box::new(Kicked {
            below: running.process,
            kicks: kicks.clone(),
        });
        let watched = Watched::new(pid, kicks, looks != 0)?;
        Ok(Box::new(Guest::new(running.into_device()?, Some(watched))?))
    }
}

/// Runs the first thread of process `pid` on one CPU: that of its loop.
fn pin(pid: u32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok(sched_setaffinity(pid, &set)?)
}
