//! The disks of a machine together: which they are, and which exclude each other.

use std::path::PathBuf;

use anyhow::{Context, bail};

use super::disk::DiskConfig;
use super::remote_disk::RemoteDiskConfig;
use super::worker::WorkerDisk;
use crate::values::keys::Keys;

/// A disk, by its server.
#[derive(Debug)]
pub enum Disk {
    /// We do, from a file.
    File(DiskConfig),
    /// Another process.
    Remote(RemoteDiskConfig),
}

impl From<DiskConfig> for WorkerDisk {
    fn from(disk: DiskConfig) -> Self {
        Self {
            device: disk.device(),
            // This program, also if its file is gone.
            program: "/proc/self/exe".into(),
            arguments: Vec::new(),
            file: disk.file,
            read_only: disk.read_only,
            direct: disk.direct,
            id: disk.id,
        }
    }
}

/// Checks all `--disk`.
///
/// # Errors
/// One is wrong, or two exclude each other.
pub fn check(texts: &[String]) -> anyhow::Result<Vec<Disk>> {
    let mut disks: Vec<Disk> = Vec::new();
    let mut files: Vec<(PathBuf, (u64, u64), bool)> = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let mut keys = Keys::parse("--disk", text)?;
        if let Some(socket) = keys.take("socket") {
            let disk = RemoteDiskConfig::check(socket, keys, index)?;
            check_remote(&disk, &disks)?;
            disks.push(Disk::Remote(disk));
            continue;
        }
        let disk = DiskConfig::check(text, index)?;
        let identity = disk
            .identity()
            .with_context(|| format!("disk {}", disk.path.display()))?;
        let other = files.iter().find(|(_, other, other_read_only)| {
            *other == identity && !(disk.read_only && *other_read_only)
        });
        if let Some((other, ..)) = other {
            bail!(
                "disks {} and {} are one file, which at least one of them may write to",
                other.display(),
                disk.path.display()
            );
        }
        files.push((disk.path.clone(), identity, disk.read_only));
        disks.push(Disk::File(disk));
    }
    Ok(disks)
}

/// Locks what the disks are on, in order. Until the last one is locked the others are already.
///
/// # Errors
/// Another process has one; says which, and what to do.
pub fn lock(disks: Vec<Disk>) -> anyhow::Result<Vec<Disk>> {
    disks
        .into_iter()
        .map(|disk| match disk {
            Disk::File(disk) => disk.lock().map(Disk::File),
            remote => Ok(remote),
        })
        .collect()
}

fn check_remote(disk: &RemoteDiskConfig, before: &[Disk]) -> anyhow::Result<()> {
    let socket = disk.socket.display();
    let is_taken =
        |other: &Disk| matches!(other, Disk::Remote(other) if other.socket == disk.socket);
    if before.iter().any(is_taken) {
        bail!("--disk socket={socket} is given twice: a socket serves one disk");
    }
    Ok(())
}

/// Returns for each disk whether it is in a file that this process reads and writes.
pub fn in_files(disks: &[Disk]) -> Vec<bool> {
    let is_in_file = |disk: &Disk| matches!(disk, Disk::File(file) if file.worker.is_none());
    disks.iter().map(is_in_file).collect()
}
