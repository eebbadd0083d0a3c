//! The PCI function of a virtio disk, accessed from user space through sysfs.
//!
//! Specification: Virtio 1.2, §4.1. Registers are accessed through the configuration access
//! capability (§4.1.4.9), a window onto the BAR in configuration space. It needs no mapping, and
//! works while a kernel driver is bound. The price is four configuration accesses for a register,
//! which a test can afford.
//!
//! Left out: functions whose structures are not all in BAR 0; the tested devices have them all
//! there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::device;

/// The command register of PCI, and its bits for memory and for Bus Master.
const COMMAND: u64 = 0x04;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Offset of the pointer to the list of capabilities.
const CAPABILITY_POINTER: u64 = 0x34;
const CAPABILITY_VENDOR: u8 = 0x09;

/// `cfg_type` values (§4.1.4).
const COMMON_CFG: u8 = 1;
const NOTIFY_CFG: u8 = 2;
const PCI_CFG: u8 = 5;

/// Offsets in the configuration access capability.
const ACCESS_BAR: u64 = 4;
const ACCESS_OFFSET: u64 = 8;
const ACCESS_LENGTH: u64 = 12;
const ACCESS_DATA: u64 = 16;

/// Time limit for the kernel to create a disk's node.
const NODE_LIMIT: Duration = Duration::from_secs(30);

/// A virtio function.
#[derive(Debug)]
pub struct Function {
    dir: PathBuf,
    config: File,
    /// Offset of the configuration access capability.
    access: u64,
    /// Offset of the common configuration in the BAR.
    common: u32,
    /// Offset of the doorbells, and their stride in bytes.
    doorbells: u32,
    doorbell_stride: u32,
    /// Translation type of the group while the kernel's driver was bound.
    translation: Option<String>,
}

impl Function {
    /// Opens the function behind `disk`, for instance `/dev/vda`.
    ///
    /// # Errors
    /// The system's own; `InvalidInput` if there is no virtio function with a configuration access
    /// capability.
    pub fn of_disk(disk: &Path) -> io::Result<Self> {
        let name = disk.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let device = Path::new("/sys/block").join(name).join("device");
        // …/0000:00:01.0/virtio0: the function is above the device on virtio's own bus.
        let device = fs::canonicalize(device)?;
        Self::at(device.parent().ok_or(io::ErrorKind::InvalidInput)?)
    }

    /// Opens the function whose directory in sysfs is `dir`.
    fn at(dir: &Path) -> io::Result<Self> {
        let config = File::options()
            .read(true)
            .write(true)
            .open(dir.join("config"))?;
        let mut function = Self {
            dir: dir.to_owned(),
            config,
            access: 0,
            common: 0,
            doorbells: 0,
            doorbell_stride: 0,
            translation: None,
        };
        function.find_structures()?;
        Ok(function)
    }

    fn find_structures(&mut self) -> io::Result<()> {
        let mut at = u64::from(self.byte(CAPABILITY_POINTER)?);
        // 48 capabilities of four bytes fill conventional space: a longer list is circular.
        for _ in 0..48 {
            if at == 0 {
                break;
            }
            if self.byte(at)? == CAPABILITY_VENDOR {
                match self.byte(at + 3)? {
                    COMMON_CFG => self.common = self.dword(at + 8)?,
                    NOTIFY_CFG => {
                        self.doorbells = self.dword(at + 8)?;
                        self.doorbell_stride = self.dword(at + 16)?;
                    }
                    PCI_CFG => self.access = at,
                    _ => {}
                }
            }
            at = u64::from(self.byte(at + 1)?);
        }
        if self.access == 0 {
            let what = format!("{}: no access to its registers", self.dir.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(())
    }

    fn byte(&self, at: u64) -> io::Result<u8> {
        let mut byte = [0];
        self.config.read_exact_at(&mut byte, at).map(|()| byte[0])
    }

    fn dword(&self, at: u64) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.config.read_exact_at(&mut bytes, at)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Sets or clears Bus Master. The write that clears it returns when no request is in flight any
    /// more.
    ///
    /// # Errors
    /// The system's own.
    pub fn set_bus_master(&self, on: bool) -> io::Result<()> {
        let mut bytes = [0; 2];
        self.config.read_exact_at(&mut bytes, COMMAND)?;
        let mut command = u16::from_le_bytes(bytes) | COMMAND_MEMORY;
        if on {
            command |= COMMAND_BUS_MASTER;
        } else {
            command &= !COMMAND_BUS_MASTER;
        }
        self.config.write_all_at(&command.to_le_bytes(), COMMAND)
    }

    /// Points the window at `len` bytes of the BAR.
    fn aim(&self, offset: u32, len: u32) -> io::Result<()> {
        let at = self.access;
        self.config.write_all_at(&[0], at + ACCESS_BAR)?;
        self.config
            .write_all_at(&offset.to_le_bytes(), at + ACCESS_OFFSET)?;
        self.config
            .write_all_at(&len.to_le_bytes(), at + ACCESS_LENGTH)
    }

    /// Reads a register of the common configuration, `N` being 1, 2 or 4.
    ///
    /// # Errors
    /// The system's own.
    pub fn read<const N: usize>(&self, register: u32) -> io::Result<[u8; N]> {
        let mut value = [0; N];
        self.aim(self.common + register, N as u32)?;
        self.config
            .read_exact_at(&mut value, self.access + ACCESS_DATA)?;
        Ok(value)
    }

    /// Writes a register of the common configuration, `N` being 1, 2 or 4.
    ///
    /// # Errors
    /// The system's own.
    pub fn write<const N: usize>(&self, register: u32, value: [u8; N]) -> io::Result<()> {
        self.write_bar(self.common + register, value)
    }

    /// Rings the doorbell with index `number` for queue 0.
    ///
    /// # Errors
    /// The system's own.
    pub fn ring(&self, number: u16) -> io::Result<()> {
        let offset = self.doorbells + u32::from(number) * self.doorbell_stride;
        self.write_bar(offset, 0_u16.to_le_bytes())
    }

    fn write_bar<const N: usize>(&self, offset: u32, value: [u8; N]) -> io::Result<()> {
        self.aim(offset, N as u32)?;
        self.config.write_all_at(&value, self.access + ACCESS_DATA)
    }

    /// Unbinds the kernel's driver. If the function is behind an IOMMU, sets its group to identity
    /// mapping, so that it reaches all memory by guest-physical address.
    ///
    /// # Errors
    /// The system's own.
    pub fn take(&mut self) -> io::Result<()> {
        self.write_driver("unbind")?;
        let path = self.translation_file();
        if path.exists() {
            let before = fs::read_to_string(&path)?;
            write(&path, b"identity")?;
            self.translation = Some(before);
        }
        Ok(())
    }

    /// Binds the kernel's driver again, and waits for the node of `disk`.
    ///
    /// # Errors
    /// The system's own; `TimedOut` if the driver creates no disk.
    pub fn give_back(&mut self, disk: &Path) -> io::Result<()> {
        if let Some(before) = self.translation.take() {
            write(&self.translation_file(), before.trim().as_bytes())?;
        }
        self.write_driver("bind")?;
        let what = format!("{} did not come back", disk.display());
        device::wait_until(NODE_LIMIT, &what, || Ok(File::open(disk).is_ok()))
    }

    fn write_driver(&self, file: &str) -> io::Result<()> {
        let name = self.dir.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let path = Path::new("/sys/bus/pci/drivers/virtio-pci").join(file);
        write(&path, name.as_encoded_bytes())
    }

    /// The group contains this function only, as that of a root complex integrated endpoint does.
    fn translation_file(&self) -> PathBuf {
        self.dir.join("iommu_group/type")
    }
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    fs::write(path, text).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}
