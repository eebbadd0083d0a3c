//! Device-mapper devices of the lab's emulated host: created, changed, suspended, resumed, removed;
//! and the sector size of a loop device below them, which busybox's losetup cannot set.
//!
//! Runs inside the lab, as `/bin/lab-dm`. It is the part of dmsetup(8) that the self-test needs;
//! the package would bring five libraries into the image. A device that is suspended accepts
//! requests and keeps them until it is resumed; the kernel holds them, so they cannot be cancelled.
//!
//! Interface: `linux/dm-ioctl.h`, version 4. Every request is one `struct dm_ioctl` with the tables
//! behind it, written here byte by byte; the answer overwrites it.
//!
//! UNSAFETY: the interfaces are ioctl(2), which the standard library does not have: one call at
//! [`Control::request`], one at [`set_sector`].
//!
//! Left out: more than one target in a device, messages, events, all of dmsetup that no test needs.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::ExitCode;

const HELP: &str = "\
lab-dm: device-mapper devices of the lab

  lab-dm create NAME SECTORS TARGET [PARAMETERS]
      Makes and starts a device with one target; prints its path.
      lab-dm create plain 16384 linear '7:0 0'
      lab-dm create slow 16384 delay '7:0 0 50'
  lab-dm load NAME SECTORS TARGET [PARAMETERS]
      Another target for it, from the next resume on.
      lab-dm load slow 16384 flakey '7:0 0 0 3600 1 error_writes' && lab-dm suspend slow && lab-dm resume slow
  lab-dm suspend NAME
      Waits for what is in flight; what comes then is held.
  lab-dm resume NAME
  lab-dm remove NAME
  lab-dm sector LOOP-DEVICE BYTES
      The size of its sectors.";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match *words {
        ["create", name, sectors, target, ref parameters @ ..] => {
            number(sectors).and_then(|sectors| create(name, sectors, target, &parameters.join(" ")))
        }
        ["load", name, sectors, target, ref parameters @ ..] => Control::open()
            .and_then(|dm| dm.load(name, number(sectors)?, target, &parameters.join(" "))),
        ["suspend", name] => Control::open().and_then(|dm| dm.suspend(name)),
        ["resume", name] => Control::open().and_then(|dm| dm.resume(name)),
        ["remove", name] => Control::open().and_then(|dm| dm.remove(name)),
        ["sector", device, bytes] => number(bytes).and_then(|bytes| set_sector(device, bytes)),
        _ => {
            eprintln!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-dm {}: {error}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn create(name: &str, sectors: u64, target: &str, parameters: &str) -> io::Result<()> {
    let dm = Control::open()?;
    let minor = dm.create(name)?;
    let started = dm
        .load(name, sectors, target, parameters)
        .and_then(|()| dm.resume(name));
    if started.is_err() {
        // The first error is reported; a device without a table is of no use.
        let _ = dm.remove(name);
        return started;
    }
    println!("/dev/dm-{minor}");
    Ok(())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse()
        .map_err(|_| invalid(format!("{text:?} is no number")))
}

/// Sets the sector size of a loop device, which must not be open.
fn set_sector(device: &str, bytes: u64) -> io::Result<()> {
    /// `LOOP_SET_BLOCK_SIZE` of `linux/loop.h`; its argument is the size itself.
    const SET_BLOCK_SIZE: libc::c_ulong = 0x4c09;
    let file = File::options().read(true).write(true).open(device)?;
    // SAFETY: the descriptor is open; the command takes a number, and no memory of ours.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), SET_BLOCK_SIZE, bytes) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.into())
}

/// Bytes of `struct dm_ioctl`.
const HEADER: usize = 312;
/// Offsets of its fields.
const DATA_SIZE: usize = 12;
const DATA_START: usize = 16;
const TARGET_COUNT: usize = 20;
const FLAGS: usize = 28;
const DEV: usize = 40;
const NAME: usize = 48;
/// Bytes of a name, its closing zero included.
const NAME_LEN: usize = 128;

/// Bytes of `struct dm_target_spec`, and of the type's name in it.
const TARGET: usize = 40;
const TARGET_TYPE: usize = 16;

/// `DM_SUSPEND_FLAG`: suspend, where resume is the same command without it.
const SUSPEND: u32 = 1 << 1;
/// `DM_SKIP_LOCKFS_FLAG`: there is no file system on the device that would have to be frozen.
const SKIP_LOCKFS: u32 = 1 << 10;

/// The commands, by their numbers in the interface.
#[derive(Clone, Copy)]
enum Command {
    Create = 3,
    Remove = 4,
    Suspend = 6,
    Load = 9,
}

impl Command {
    /// `_IOWR(0xfd, number, struct dm_ioctl)`.
    fn ioctl(self) -> libc::c_ulong {
        0xc000_0000 | (HEADER as libc::c_ulong) << 16 | 0xfd00 | self as libc::c_ulong
    }
}

/// Returns a request for the device `name`: the header alone.
fn request(name: &str, flags: u32) -> io::Result<Vec<u8>> {
    if name.is_empty() || name.len() >= NAME_LEN || name.contains('/') {
        return Err(invalid(format!("{name:?} is no name of a device")));
    }
    let mut bytes = vec![0; HEADER];
    let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    // Version 4.0.0: accepted by every kernel with this interface.
    put(0, 4);
    put(DATA_SIZE, HEADER as u32);
    put(DATA_START, HEADER as u32);
    put(FLAGS, flags);
    bytes[NAME..NAME + name.len()].copy_from_slice(name.as_bytes());
    Ok(bytes)
}

/// Returns the same, followed by a table of one target.
fn table(name: &str, sectors: u64, target: &str, parameters: &str) -> io::Result<Vec<u8>> {
    if target.is_empty() || target.len() >= TARGET_TYPE {
        return Err(invalid(format!("{target:?} is no type of a target")));
    }
    let mut bytes = request(name, 0)?;
    // The first sector stays 0, and so does the link to a next target.
    let mut spec = [0; TARGET];
    spec[8..16].copy_from_slice(&sectors.to_le_bytes());
    spec[24..24 + target.len()].copy_from_slice(target.as_bytes());
    bytes.extend(spec);
    bytes.extend(parameters.as_bytes());
    // The text ends with a zero, and the whole at a multiple of eight.
    bytes.resize((bytes.len() + 1).next_multiple_of(8), 0);
    let len = u32::try_from(bytes.len()).map_err(|_| invalid("a table beyond 4 GiB"))?;
    bytes[DATA_SIZE..DATA_SIZE + 4].copy_from_slice(&len.to_le_bytes());
    bytes[TARGET_COUNT..TARGET_COUNT + 4].copy_from_slice(&1_u32.to_le_bytes());
    Ok(bytes)
}

/// Returns the minor number in an answer's device number (`new_encode_dev` of the kernel).
fn minor(answer: &[u8]) -> u64 {
    let bytes = answer[DEV..DEV + 8].try_into().expect("eight bytes");
    let dev = u64::from_le_bytes(bytes);
    dev & 0xff | dev >> 12 & 0xfff00
}

/// The control device.
struct Control(File);

impl Control {
    fn open() -> io::Result<Self> {
        let path = "/dev/mapper/control";
        let file = File::options().read(true).write(true).open(path);
        file.map(Self)
            .map_err(|e| io::Error::new(e.kind(), format!("{path}: {e}")))
    }

    fn create(&self, name: &str) -> io::Result<u64> {
        let mut bytes = request(name, 0)?;
        self.request(Command::Create, &mut bytes)?;
        Ok(minor(&bytes))
    }

    fn load(&self, name: &str, sectors: u64, target: &str, parameters: &str) -> io::Result<()> {
        let mut bytes = table(name, sectors, target, parameters)?;
        self.request(Command::Load, &mut bytes)
    }

    fn suspend(&self, name: &str) -> io::Result<()> {
        self.request(Command::Suspend, &mut request(name, SUSPEND | SKIP_LOCKFS)?)
    }

    fn resume(&self, name: &str) -> io::Result<()> {
        self.request(Command::Suspend, &mut request(name, 0)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.request(Command::Remove, &mut request(name, 0)?)
    }

    /// Executes a request; the answer is in `bytes` afterwards.
    fn request(&self, command: Command, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: the descriptor is open. The command reads as many bytes as the header's data_size
        // says, which `request` and `table` set to the length of what they built, and writes no
        // more than those.
        let result =
            unsafe { libc::ioctl(self.0.as_raw_fd(), command.ioctl(), bytes.as_mut_ptr()) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_the_kernels_header() {
        // DM_DEV_CREATE, DM_DEV_REMOVE, DM_DEV_SUSPEND and DM_TABLE_LOAD, as a C compiler prints
        // them.
        let commands = [
            Command::Create,
            Command::Remove,
            Command::Suspend,
            Command::Load,
        ];
        assert_eq!(
            commands.map(Command::ioctl),
            [0xc138_fd03, 0xc138_fd04, 0xc138_fd06, 0xc138_fd09]
        );
    }

    #[test]
    fn a_table_lies_behind_the_header_and_ends_with_a_zero() {
        let bytes = table("slow", 16384, "linear", "7:0 0").unwrap();
        // 312 + 40 + "7:0 0" and its zero, rounded up.
        assert_eq!(bytes.len(), 360);
        assert_eq!(bytes[..4], [4, 0, 0, 0]);
        assert_eq!(bytes[12..24], [104, 1, 0, 0, 56, 1, 0, 0, 1, 0, 0, 0]);
        assert_eq!(bytes[48..53], *b"slow\0");
        assert_eq!(bytes[320..328], [0, 64, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[336..343], *b"linear\0");
        assert_eq!(bytes[352..], *b"7:0 0\0\0\0");
    }

    #[test]
    fn a_suspend_is_told_from_a_resume_by_its_flags() {
        assert_eq!(request("a", 0).unwrap()[28..32], [0; 4]);
        let suspend = request("a", SUSPEND | SKIP_LOCKFS).unwrap();
        assert_eq!(suspend[28..32], [2, 4, 0, 0]);
    }

    #[test]
    fn a_device_number_gives_its_minor() {
        let mut answer = [0; HEADER];
        // 254:3, and 254:300 whose minor does not fit into a byte.
        answer[DEV..DEV + 4].copy_from_slice(&0xfe03_u32.to_le_bytes());
        assert_eq!(minor(&answer), 3);
        answer[DEV..DEV + 4].copy_from_slice(&0x10_fe2c_u32.to_le_bytes());
        assert_eq!(minor(&answer), 300);
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        assert!(request("", 0).is_err());
        assert!(request(&"n".repeat(NAME_LEN), 0).is_err());
        assert!(table("a", 1, "sixteen-byte-typ", "").is_err());
    }
}
