//! Loading a kernel, its initial RAM disk and command line into guest RAM.
//!
//! bzImages use Linux's 64-bit boot protocol, ELF kernels their PVH entry; `linux-loader` reads
//! both formats. Runs once, on the main thread, before any vCPU exists. The files are the user's
//! and are not trusted to be well-formed.
//!
//! ```text
//! boot_params / PVH start info ── command line ── kernel at 1 MiB … ── initrd, ending at the top of low RAM
//! ```

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::BorrowedFd;

use guest_mem::{GuestRam, Region};
use linux_loader::cmdline::Cmdline;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{BzImage, KernelLoader, KernelLoaderResult, load_cmdline};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::layout;

mod entry;
mod pvh;
mod scratch;

pub use entry::{Entry, gdt};

/// The whole firmware, at [`layout::RESET_VECTOR`]. Linux on a hardware-reduced platform without
/// EFI does not try ACPI's reset register: it enters real mode and jumps here, and this code asks
/// for the reset.
const FIRMWARE: [u8; 9] = [
    0xba,
    layout::RESET as u8,
    (layout::RESET >> 8) as u8, // mov dx, RESET
    0xb0,
    layout::RESET_VALUE, // mov al, RESET_VALUE
    0xee,                // out dx, al
    0xf4,                // hlt
    0xeb,
    0xfd, // jmp to the hlt
];

/// Format of a kernel file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelKind {
    /// Linux/x86 boot executable, protocol 2.12 or later, with a 64-bit entry.
    BzImage,
    /// 64-bit ELF.
    Elf,
}

/// Files and parameters to load.
pub struct Payload<'a> {
    /// The kernel's file and kind.
    pub kernel: (&'a File, KernelKind),
    /// The initial RAM disk.
    pub initrd: Option<&'a File>,
    /// The kernel command line.
    pub cmdline: &'a str,
    /// Size of RAM, bytes.
    pub memory: u64,
    /// ACPI tables for [`layout::ACPI_RSDP`].
    pub acpi: &'a [u8],
}

/// Reason why loading failed.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The kernel's file is not acceptable.
    #[error("the kernel cannot be loaded: {0}")]
    Kernel(#[from] linux_loader::loader::Error),
    /// The bzImage's file is shorter than its header says.
    #[error(
        "the bzImage has {has} bytes of the {needs} that its header speaks of: it is cut short; \
         copy it again"
    )]
    Truncated {
        /// Bytes of the file.
        has: u64,
        /// Bytes of setup sectors and kernel.
        needs: u64,
    },
    /// The kernel's file cannot be read.
    #[error("the kernel cannot be read")]
    Read(#[source] std::io::Error),
    /// The ELF has no PVH note.
    #[error("the ELF kernel has no PVH entry point (build it with CONFIG_PVH)")]
    NoPvhEntry,
    /// The initial RAM disk is too big.
    #[error(
        "the initrd ({initrd} bytes) does not fit between kernel and top of low RAM: raise --memory"
    )]
    NoRoom {
        /// Size of the initial RAM disk, bytes.
        initrd: u64,
    },
    /// The initial RAM disk cannot be read.
    #[error("the initrd cannot be read")]
    Initrd(#[source] std::io::Error),
    /// The command line is too long, or not printable ASCII.
    #[error("the kernel command line is not acceptable: {0}")]
    Cmdline(#[from] linux_loader::cmdline::Error),
    /// Guest RAM cannot be written.
    #[error("guest RAM cannot be written")]
    Ram(#[from] GuestMemoryError),
    /// The loaded image cannot be read, to copy it into guest RAM.
    #[error("what was loaded cannot be read: {0}")]
    Scratch(std::io::Error),
    /// Guest RAM cannot be mapped a second time for loading.
    #[error("guest RAM cannot be mapped: {0}")]
    Map(String),
}

/// Returns the kind of `file` by its magic numbers; `None` for neither.
///
/// # Errors
/// [`BootError::Read`]; [`BootError::Truncated`].
pub fn kernel_kind(file: &mut File) -> Result<Option<KernelKind>, BootError> {
    let mut head = [0u8; 0x240];
    let mut len = 0;
    file.seek(SeekFrom::Start(0)).map_err(BootError::Read)?;
    while len < head.len() {
        match file.read(&mut head[len..]).map_err(BootError::Read)? {
            0 => break,
            n => len += n,
        }
    }
    let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    if head[..5] == *b"\x7fELF\x02" {
        return Ok(Some(KernelKind::Elf));
    }
    // Protocol 2.12 brought xloadflags; bit 0 says that there is a 64-bit entry at 0x200.
    if head[0x202..0x206] != *b"HdrS" || half(0x206) < 0x20c || half(0x236) & 1 == 0 {
        return Ok(None);
    }
    let has = file.seek(SeekFrom::End(0)).map_err(BootError::Read)?;
    let needs = bzimage_len(&head);
    if has < needs {
        return Err(BootError::Truncated { has, needs });
    }
    Ok(Some(KernelKind::BzImage))
}

/// Returns the bytes of a bzImage whose first sectors are `head`: the boot sector and `setup_sects`
/// (0x1f1, 8-bit, 0 means 4) more, and `syssize` (0x1f4, 32-bit) times 16 bytes. Appended data, a
/// signature for instance, is not counted.
fn bzimage_len(head: &[u8; 0x240]) -> u64 {
    let setup_sects = match head[0x1f1] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let syssize = u32::from_le_bytes([head[0x1f4], head[0x1f5], head[0x1f6], head[0x1f7]]);
    (setup_sects + 1) * 512 + u64::from(syssize) * 16
}

/// Maps guest RAM's memory file for loading; the mapping lasts until it is dropped.
fn map(file: BorrowedFd<'_>, regions: &[Region]) -> Result<GuestMemoryMmap, BootError> {
    let fail = |error: &dyn std::fmt::Display| BootError::Map(error.to_string());
    let mut ranges = Vec::new();
    for region in regions {
        let file = file.try_clone_to_owned().map_err(|e| fail(&e))?;
        ranges.push((
            GuestAddress(region.gpa.raw()),
            region.len as usize,
            Some(FileOffset::new(File::from(file), region.fd_offset)),
        ));
    }
    GuestMemoryMmap::from_ranges_with_files(ranges).map_err(|e| fail(&e))
}

/// Loads everything and returns the boot processor's entry point. RAM without a memory file is
/// loaded through a temporary copy that has one.
pub fn load(ram: &GuestRam, payload: &Payload<'_>) -> Result<Entry, BootError> {
    let Some(file) = ram.memfd() else {
        let copy = scratch::Copy::new(ram)?;
        let entry = load(copy.ram(), payload)?;
        copy.move_into(ram)?;
        return Ok(entry);
    };
    let ram = map(file, ram.regions())?;
    let (kernel, kind) = payload.kernel;
    let mut kernel = kernel;
    let base = GuestAddress(layout::KERNEL);
    let loaded = match kind {
        KernelKind::BzImage => BzImage::load(&ram, Some(base), &mut kernel, Some(base))?,
        KernelKind::Elf => Elf::load(&ram, None, &mut kernel, Some(base))?,
    };
    let entry = entry(kind, &loaded)?;
    let cmdline = load_command_line(&ram, payload.cmdline)?;
    let initrd = load_initrd(&ram, payload, &loaded)?;
    ram.write_slice(payload.acpi, GuestAddress(layout::ACPI_RSDP))?;
    ram.write_slice(&FIRMWARE, GuestAddress(layout::RESET_VECTOR))?;
    match (entry, loaded.setup_header) {
        (Entry::Linux64(_), Some(header)) => {
            write_boot_params(&ram, header, payload.memory, cmdline, initrd)?;
        }
        _ => pvh::write_start_info(&ram, payload.memory, initrd)?,
    }
    entry::write_tables(&ram, entry)?;
    Ok(entry)
}

fn entry(kind: KernelKind, loaded: &KernelLoaderResult) -> Result<Entry, BootError> {
    match (kind, loaded.pvh_boot_cap) {
        (KernelKind::BzImage, _) => Ok(Entry::Linux64(loaded.kernel_load.0 + 0x200)),
        (KernelKind::Elf, PvhBootCapability::PvhEntryPresent(entry)) => Ok(Entry::Pvh(entry.0)),
        (KernelKind::Elf, _) => Err(BootError::NoPvhEntry),
    }
}

/// Writes the command line, which the loader checks, to [`layout::BOOT_CMDLINE`]; returns its
/// length with terminator.
fn load_command_line(ram: &GuestMemoryMmap, text: &str) -> Result<u32, BootError> {
    let mut cmdline = Cmdline::new(layout::BOOT_CMDLINE_SIZE as usize)?;
    if !text.is_empty() {
        cmdline.insert_str(text)?;
    }
    load_cmdline(ram, GuestAddress(layout::BOOT_CMDLINE), &cmdline)?;
    Ok(text.len() as u32 + 1)
}

/// Loads the initrd as high in low RAM as the kernel allows; returns `(address, bytes)`.
fn load_initrd(
    ram: &GuestMemoryMmap,
    payload: &Payload<'_>,
    loaded: &KernelLoaderResult,
) -> Result<Option<(u64, u64)>, BootError> {
    let Some(mut file) = payload.initrd else {
        return Ok(None);
    };
    let len = file.seek(SeekFrom::End(0)).map_err(BootError::Initrd)?;
    file.seek(SeekFrom::Start(0)).map_err(BootError::Initrd)?;
    let mut end = payload.memory.min(layout::LOW_RAM_END);
    let mut kernel_end = loaded.kernel_end;
    if let Some(header) = loaded.setup_header {
        let (highest, runtime) = (header.initrd_addr_max, header.init_size);
        end = end.min(u64::from(highest) + 1);
        // The kernel unpacks itself from its preferred address, over `init_size` bytes.
        let preferred = header.pref_address;
        kernel_end = kernel_end.max(preferred.saturating_add(u64::from(runtime)));
    }
    let at = end
        .checked_sub(len)
        .map(|at| at & !0xfff)
        .filter(|at| *at >= kernel_end)
        .ok_or(BootError::NoRoom { initrd: len })?;
    ram.read_exact_volatile_from(GuestAddress(at), &mut file, len as usize)?;
    Ok(Some((at, len)))
}

fn write_boot_params(
    ram: &GuestMemoryMmap,
    header: setup_header,
    memory: u64,
    cmdline_len: u32,
    initrd: Option<(u64, u64)>,
) -> Result<(), BootError> {
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: layout::ACPI_RSDP,
        ..Default::default()
    };
    // 0xFF: a loader without a number of its own.
    params.hdr.type_of_loader = 0xff;
    params.hdr.cmd_line_ptr = layout::BOOT_CMDLINE as u32;
    params.hdr.cmdline_size = cmdline_len;
    if let Some((at, len)) = initrd {
        // Both below 3 GiB.
        params.hdr.ramdisk_image = at as u32;
        params.hdr.ramdisk_size = len as u32;
    }
    let map = layout::e820(memory);
    params.e820_entries = map.len() as u8;
    for (slot, (addr, size, kind)) in params.e820_table.iter_mut().zip(map) {
        let r#type = kind as u32;
        *slot = boot_e820_entry { addr, size, r#type };
    }
    ram.write_obj(params, GuestAddress(layout::BOOT_PARAMS))?;
    Ok(())
}

#[cfg(test)]
mod tests;
