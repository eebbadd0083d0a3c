//! The storage of a boot, and the image on it.

use anyhow::{Context, Result, ensure};
use workload::BLOCK;
use workload::acked::BLOCKS;

use super::plan::{Cache, Fault, Image, Plan};
use crate::system::file_system::{self, FileSystem};
use crate::system::host::Host;
use crate::system::storage::{Behaviour, Storage};
use crate::system::tools::{text, tool};

/// Bytes of the guest's disk: more than are used.
const BYTES: usize = 2 * BLOCKS as usize * BLOCK;
const RAW: &str = "disk.raw";
const QCOW2: &str = "disk.qcow2";

/// A disk of a boot.
pub struct Disk<'a> {
    image: Image,
    sector: u32,
    storage: Storage<'a>,
    file_system: Option<FileSystem<'a>>,
}

impl<'a> Disk<'a> {
    /// Creates a disk of zeroes; none natively.
    pub fn make(host: &'a Host, plan: &Plan) -> Result<Option<Self>> {
        let is_device = matches!(plan.image, Image::Device(_));
        let bytes = match is_device {
            true => BYTES,
            false => file_system::BYTES,
        };
        let Some(storage) = Storage::zeroes(host, "episodes", plan.make, bytes)? else {
            return Ok(None);
        };
        let mut file_system = None;
        if !is_device {
            let made = FileSystem::make(host, &storage)?.context("a lab has file systems")?;
            match plan.image {
                Image::Qcow2 => made.put(QCOW2, &new_qcow2()?)?,
                _ => made.put_hole(RAW, BYTES)?,
            }
            file_system = Some(made);
        }
        Ok(Some(Self {
            image: plan.image,
            sector: plan.make.sector,
            storage,
            file_system,
        }))
    }

    /// Returns its options of `--disk` and `--block`.
    pub fn option(&self) -> String {
        let on_file_system = |name| {
            let place = self.file_system.as_ref();
            place.map_or_else(String::new, |place| place.path(name))
        };
        let (path, cache) = match self.image {
            Image::Device(cache) => (self.storage.path().to_owned(), cache),
            Image::File(cache) => (on_file_system(RAW), cache),
            Image::Qcow2 => return format!("path={},format=qcow2", on_file_system(QCOW2)),
        };
        match cache {
            Cache::Buffered => format!("path={path}"),
            Cache::Direct => format!("path={path},direct=on,block={}", self.sector),
        }
    }

    /// Starts the fault.
    pub fn misbehave(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Nothing => Ok(()),
            Fault::Holds => self.storage.hold(),
            Fault::Slow(ms) => self.storage.behave(Behaviour::Slow(ms)),
            Fault::FailsWrites => self.storage.behave(Behaviour::FailsWrites),
            Fault::FailsAll => self.storage.behave(Behaviour::FailsAll),
            Fault::Full => self.on_file_system(FileSystem::fill_up),
        }
    }

    /// Ends the fault.
    pub fn mend(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Nothing => Ok(()),
            Fault::Holds => self.storage.release(),
            Fault::Slow(_) | Fault::FailsWrites | Fault::FailsAll => {
                self.storage.behave(Behaviour::Good)
            }
            Fault::Full => self.on_file_system(FileSystem::make_room),
        }
    }

    fn on_file_system(&self, what: impl Fn(&FileSystem<'a>) -> Result<()>) -> Result<()> {
        self.file_system.as_ref().map_or(Ok(()), what)
    }

    /// Returns the number of operations of the processes that the kernel has not finished, as far
    /// as io_uring tells.
    pub fn operations_in_kernel(&self) -> Result<u32> {
        self.storage.operations_in_kernel()
    }

    /// Returns the content that the guest would read, once no process has it open. Checks that a
    /// qcow2 image is whole, too.
    pub fn content(&self) -> Result<Vec<u8>> {
        let Some(place) = &self.file_system else {
            return self.storage.content();
        };
        if self.image != Image::Qcow2 {
            return place.get(RAW);
        }
        let dir = tempfile::tempdir().context("making a directory for an image")?;
        let (image, raw) = (dir.path().join(QCOW2), dir.path().join(RAW));
        std::fs::write(&image, place.get(QCOW2)?).context("writing an image")?;
        // Leaked clusters are no errors: a process that was killed may leave them.
        let checked = tool("qemu-img", &["check", text(&image)?]);
        if let Err(error) = checked {
            ensure!(
                is_only_leaks(&error.to_string()),
                "the image is damaged: {error}"
            );
        }
        tool(
            "qemu-img",
            &["convert", "-O", "raw", text(&image)?, text(&raw)?],
        )?;
        std::fs::read(raw).context("reading an image")
    }

    /// Removes it.
    pub fn remove(self) -> Result<()> {
        if let Some(place) = self.file_system {
            place.unmount()?;
        }
        self.storage.remove()
    }
}

/// Returns whether `qemu-img check` found nothing worse than clusters without a reference.
fn is_only_leaks(said: &str) -> bool {
    said.contains("leaked clusters were found") && !said.contains("errors were found")
}

/// Creates an empty image. Its clusters are small, so that many writes need a new one.
fn new_qcow2() -> Result<Vec<u8>> {
    let dir = tempfile::tempdir().context("making a directory for an image")?;
    let image = dir.path().join(QCOW2);
    let (image, size) = (text(&image)?, BYTES.to_string());
    let options = ["-q", "-f", "qcow2", "-o", "cluster_size=4096", image, &size];
    tool("qemu-img", &[&["create"][..], &options].concat())?;
    std::fs::read(image).context("reading an image")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaked_clusters_are_told_from_damage() {
        let leaks = "Leaked cluster 7 refcount=1 reference=0\n\n\
             1 leaked clusters were found on the image.\n";
        let damage =
            "ERROR cluster 4 refcount=0 reference=1\n\n1 errors were found on the image.\n";
        assert!(is_only_leaks(leaks));
        assert!(!is_only_leaks(damage) && !is_only_leaks(&[damage, leaks].concat()));
        assert!(!is_only_leaks("qemu-img: Could not open"));
    }
}
