//! Places where disk images lie: file systems and block devices that differ in what their kernel
//! calls accept.
//!
//! File systems and loop devices need root, FUSE needs `/dev/fuse`; a place that cannot be made is
//! skipped with its reason. Each place is taken down when it is dropped, so also when a test fails.
//! A mount is detached as soon as the files on it are open, and a loop device goes with its last
//! user, so a test that is killed leaves nothing once its daemon has ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use held_fs::{HeldFs, Kind};
use tempfile::TempDir;

/// Bytes of the image under a file system: a few disks, whole. `mkfs.xfs` makes none of less than
/// 300 MB.
const ROOM: u64 = 320 << 20;

/// One kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Has every mode of fallocate.
    Ext4,
    /// Punches holes; neither zeroes ranges nor reserves blocks.
    Ext2,
    /// Punches and reserves; does not zero ranges.
    Tmpfs,
    /// Has every mode of fallocate; keeps its metadata in blocks of its own.
    Xfs,
    /// Writes nothing in place, so what is reserved may move.
    Btrfs,
    /// Has no holes: neither punches nor zeroes, and a file that grows is written.
    Vfat,
    /// ext4 on sectors of 4096 bytes: past the page cache it takes blocks of 4096 bytes only.
    Ext4On4Kn,
    /// Has no fallocate at all.
    FuseWithoutFallocate,
    /// Block device with sectors of 512 bytes.
    Loop512,
    /// Block device with sectors of 4096 bytes.
    Loop4Kn,
}

impl Storage {
    /// Bytes of which transfers past its page cache must be multiples.
    pub fn direct_block(self) -> u32 {
        match self {
            Self::Ext4On4Kn | Self::Loop4Kn => 4096,
            _ => 512,
        }
    }

    /// Returns whether fallocate with these flags punches holes in a file here; a device below a
    /// loop device is not checked.
    pub fn punches(self) -> bool {
        matches!(
            self,
            Self::Ext4 | Self::Ext2 | Self::Tmpfs | Self::Xfs | Self::Btrfs | Self::Ext4On4Kn
        )
    }
}

/// Runs a program; what it printed, or what it complains of.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{program} {arguments:?}: {}", text(&output.stderr))),
    }
}

/// A loop device, detached when dropped: at once, or when its last user has gone.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path, sector: u32) -> Result<Self, String> {
        let (sector, file) = (sector.to_string(), file.display().to_string());
        run(
            "losetup",
            &["--find", "--show", "--sector-size", &sector, &file],
        )
        .map(Self)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = run("losetup", &["--detach", &self.0]);
    }
}

/// A mount, detached when dropped.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = run("umount", &["--lazy", &self.0.display().to_string()]);
    }
}

/// A place in which files can be made.
pub struct TestStorage {
    // In the order in which they go.
    mount: Option<Mount>,
    loops: Vec<LoopDevice>,
    fuse: Option<HeldFs>,
    folder: TempDir,
    storage: Storage,
}

impl TestStorage {
    /// Makes one; why there is none here otherwise.
    pub fn new(storage: Storage) -> Result<Self, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut place = Self {
            mount: None,
            loops: Vec::new(),
            fuse: None,
            folder,
            storage,
        };
        match storage {
            Storage::Ext4 => place.make("mkfs.ext4", &["-q", "-b", "4096"], 512)?,
            Storage::Ext2 => place.make("mkfs.ext2", &["-q", "-b", "4096"], 512)?,
            Storage::Ext4On4Kn => place.make("mkfs.ext4", &["-q", "-b", "4096"], 4096)?,
            Storage::Xfs => place.make("mkfs.xfs", &["-q"], 512)?,
            Storage::Btrfs => place.make("mkfs.btrfs", &["-q"], 512)?,
            Storage::Vfat => place.make("mkfs.vfat", &[], 512)?,
            Storage::Tmpfs => place.mount(&["-t", "tmpfs", "none"])?,
            Storage::FuseWithoutFallocate => {
                place.fuse = Some(HeldFs::mount().map_err(|error| error.to_string())?);
            }
            Storage::Loop512 | Storage::Loop4Kn => {}
        }
        Ok(place)
    }

    /// Makes a file system of this kind on sectors of this size, and mounts it.
    fn make(&mut self, program: &str, options: &[&str], sector: u32) -> Result<(), String> {
        let device = self.device("under", ROOM, sector)?.display().to_string();
        let arguments: Vec<_> = options.iter().copied().chain([&*device]).collect();
        run(program, &arguments)?;
        self.mount(&[&device])
    }

    fn mount(&mut self, what: &[&str]) -> Result<(), String> {
        let at = self.folder.path().join("mounted");
        fs::create_dir(&at).map_err(|error| error.to_string())?;
        let at_text = at.display().to_string();
        let arguments: Vec<_> = what.iter().copied().chain([&*at_text]).collect();
        run("mount", &arguments)?;
        self.mount = Some(Mount(at));
        Ok(())
    }

    /// A loop device over a new file.
    fn device(&mut self, name: &str, bytes: u64, sector: u32) -> Result<PathBuf, String> {
        let file = self.folder.path().join(name);
        let made = File::create(&file).and_then(|file| file.set_len(bytes));
        made.map_err(|error| error.to_string())?;
        let device = LoopDevice::new(&file, sector)?;
        let path = PathBuf::from(&device.0);
        self.loops.push(device);
        Ok(path)
    }

    /// A file, or a device, of so many bytes of zeroes.
    pub fn image(&mut self, name: &str, bytes: u64) -> Result<PathBuf, String> {
        match (self.storage, &self.fuse, &self.mount) {
            (Storage::Loop512, ..) => self.device(name, bytes, 512),
            (Storage::Loop4Kn, ..) => self.device(name, bytes, 4096),
            (_, Some(fuse), _) => {
                let gate = fuse.create(name, bytes);
                gate.refuse(Kind::Allocate, libc::EOPNOTSUPP);
                Ok(fuse.path(name))
            }
            (_, None, Some(Mount(at))) => {
                let path = at.join(name);
                let made = File::create(&path).and_then(|file| file.set_len(bytes));
                made.map_err(|error| error.to_string())?;
                Ok(path)
            }
            (_, None, None) => unreachable!("a place with files is mounted"),
        }
    }

    /// A folder that is not on it, and goes with it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Once all images are open: what lies here goes with its last user.
    pub fn detach(&mut self) {
        self.mount = None;
        self.loops.clear();
    }
}
