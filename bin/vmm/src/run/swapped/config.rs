//! Check of `--resident` and its companions.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use guest_mem::PAGE_SIZE;
use swap::pager;
use swap::store::Store;

use super::STORE_FILE;
use crate::messages::say;
use crate::moved;
use crate::resident::Host;
use crate::run::args::{DmaArg, IdleArg, MapperArg, PreventerArg, RunArgs};
use crate::run::disk::Format;
use crate::run::disks::Disk;
use crate::values::keys::Keys;
use crate::values::{counted, size};

/// Bytes that every guest needs: its kernel, and the pages in use at a time.
const LEAST: u64 = 16 << 20;
/// Bytes that each disk needs: its largest request, and its rings with what their descriptors point
/// to.
const LEAST_OF_A_DISK: u64 = (4 << 20) + (1 << 20);

/// A checked request.
#[derive(Debug)]
pub struct SwapConfig {
    /// Bytes that may be in memory.
    pub(super) limit: Limit,
    pub(super) store: Store,
    pub(super) path: PathBuf,
    /// Where a larger size of the store is read from.
    pub(super) store_file: Option<PathBuf>,
    /// Blocks behind slots that no page needs any more are given back.
    pub(super) discards: bool,
    /// Whether pages may be backed by blocks of disks.
    pub(super) mapper: MapperArg,
    /// Stores that overwrite a page are looked for: in so many vCPUs, for so long.
    pub(super) preventer: Option<(usize, Duration)>,
    /// Where a new limit is read from.
    pub(super) file: Option<PathBuf>,
    pub(super) idle: IdleArg,
    /// Warning about the host, for the user.
    pub(super) warning: Option<String>,
    /// Lines about disks whose settings cost what is to be saved.
    disk_warnings: Vec<String>,
}

impl SwapConfig {
    /// Checks what `--resident` and its companions ask for, of a machine with these disks.
    ///
    /// # Errors
    /// Options that do not go together, are too small, or name what cannot be opened; a feature
    /// that the host lacks.
    pub fn check(args: &RunArgs, memory: u64, disks: &[Disk]) -> Result<Option<Self>> {
        let Some(resident) = &args.resident else {
            for (is_given, option) in [
                (args.swap.is_some(), "--swap"),
                (args.resident_file.is_some(), "--resident-file"),
            ] {
                if is_given {
                    bail!(
                        "{option} goes with --resident: say how much of --memory may be in memory"
                    );
                }
            }
            return Ok(None);
        };
        let Some(swap) = &args.swap else {
            bail!("--resident {resident} needs a place for the rest: --swap path=FILE,size=SIZE");
        };
        if args.dma == DmaArg::Bounce {
            bail!("--resident does not go with --dma bounce: disks read straight into pages");
        }
        if let Some(Disk::Remote(disk)) = disks.iter().find(|d| matches!(d, Disk::Remote(_))) {
            bail!(
                "--disk socket={}: whoever serves it reaches guest memory past the pager, so it \
                 does not go with --resident",
                disk.socket.display()
            );
        }
        let limit = size::bytes(resident).context("--resident")?;
        let limit = Limit::check(limit, memory, disks.len()).context("--resident")?;
        let mut keys = Keys::parse("--swap", swap)?;
        moved::refuse_misbehave(&keys, "swap")?;
        let path = keys.take("path").filter(|path| !path.is_empty());
        let bytes = match keys.take("size") {
            Some(text) => size::bytes(text).context("--swap: size")?,
            None => memory,
        };
        let store_file = match keys.take("file") {
            Some("") => {
                bail!("{STORE_FILE} is empty: name the file that a larger size is read from")
            }
            file => file.map(PathBuf::from),
        };
        let discards = keys.take_switch("discard", false)?;
        keys.finish()?;
        let Some(path) = path.map(PathBuf::from) else {
            bail!("--swap {swap:?} names no file: write path=FILE,size=SIZE");
        };
        // Before there is a store.
        let host = Host::probe();
        if let Some(why) = host.refusal() {
            bail!("--resident: {why}");
        }
        let store = Store::open(&path, bytes).context("--swap")?;
        Ok(Some(Self {
            limit,
            discards,
            store,
            path,
            store_file,
            mapper: args.mapper,
            preventer: (args.preventer != PreventerArg::Off)
                .then(|| (args.cpus, Duration::from_micros(args.preventer_limit))),
            file: args.resident_file.clone(),
            idle: args.idle,
            warning: host.warning(),
            disk_warnings: warnings(disks, args.mapper),
        }))
    }

    /// Returns the bytes that may be in memory, and the store of the rest, as text.
    pub fn extent(&self) -> String {
        format!(
            "swap: {} KiB may be in memory, the rest goes to {} ({} pages)",
            self.limit.bytes >> 10,
            self.path.display(),
            self.store.slots()
        )
    }

    /// Says what may make it slower than it has to be.
    pub fn warn(&self) {
        if let Some(warning) = &self.warning {
            say!("warning: {warning}");
        }
        for warning in &self.disk_warnings {
            say!("warning: {warning}");
        }
    }
}

/// Returns one line for each disk whose settings cost what `--resident` is to save.
fn warnings(disks: &[Disk], mapper: MapperArg) -> Vec<String> {
    let files = disks.iter().filter_map(|disk| match disk {
        Disk::File(disk) => Some(disk),
        _ => None,
    });
    files
        .filter_map(|disk| warning(&disk.path, disk.format, disk.direct, mapper))
        .collect()
}

/// Returns a warning about one disk, if there is cause for one.
fn warning(path: &Path, format: Format, direct: bool, mapper: MapperArg) -> Option<String> {
    let path = path.display();
    match format {
        Format::Raw if !direct => Some(format!(
            "--disk path={path} is buffered: what leaves the guest's memory for it stays in the \
             host's page cache; \
             add direct=on"
        )),
        Format::Qcow2 { .. } if mapper != MapperArg::Off => Some(format!(
            "--disk path={path} is a qcow2 image: it works, but pages that it holds as well go to \
             --swap (a raw disk's do not)"
        )),
        _ => None,
    }
}

/// Limit of the guest's memory that is resident.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    bytes: u64,
    /// Smallest limit, in bytes.
    least: u64,
    disks: usize,
}

impl Limit {
    /// Checks `bytes` for a machine with so much memory and so many disks.
    fn check(bytes: u64, memory: u64, disks: usize) -> Result<Self> {
        let least = LEAST + LEAST_OF_A_DISK * disks as u64 + pager::BATCH_BYTES;
        let any = Self {
            bytes: 0,
            least: least.min(memory),
            disks,
        };
        any.changed(bytes)
    }

    /// Returns the same machine's limit with another number of bytes.
    pub fn changed(self, bytes: u64) -> Result<Self> {
        if bytes < self.least {
            bail!(
                "{bytes} bytes: a guest with {} does not get on with less than {} KiB \
                 (16 MiB, a batch of pages, and 5 MiB for each disk's largest request and rings)",
                counted(self.disks, "disk"),
                self.least.div_ceil(1024)
            );
        }
        Ok(Self { bytes, ..self })
    }

    pub fn pages(self) -> usize {
        // Fewer than the machine has memory.
        (self.bytes / PAGE_SIZE) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_limit_keeps_to_the_machines_least() {
        let limit = Limit::check(64 << 20, 256 << 20, 2).expect("enough");
        assert_eq!(limit.pages(), 16384);
        let least = (16 + 2 * 5) * (1 << 20) + pager::BATCH_BYTES;
        assert!(limit.changed(least).is_ok());
        limit.changed(least - 1).expect_err("too little");
        // A machine without that much memory may have all of it.
        assert!(Limit::check(16 << 20, 16 << 20, 2).is_ok());
    }

    #[test]
    fn a_disk_that_wastes_what_is_saved_is_named_with_the_cure() {
        let qcow2 = Format::Qcow2 {
            backing: false,
            barriers: true,
        };
        let of = |format, direct, mapper| warning(Path::new("a.img"), format, direct, mapper);
        let buffered = of(Format::Raw, false, MapperArg::On).expect("the page cache holds it too");
        assert!(buffered.contains("path=a.img") && buffered.contains("direct=on"));
        assert!(of(Format::Raw, false, MapperArg::Off).is_some());
        assert_eq!(of(Format::Raw, true, MapperArg::On), None);
        let image = of(qcow2, false, MapperArg::On).expect("its blocks back no page");
        assert!(image.contains("qcow2") && !image.contains("direct=on"));
        assert_eq!(of(qcow2, false, MapperArg::Off), None);
    }
}
