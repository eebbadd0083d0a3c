//! The guest's start: a Linux kernel by the 32-bit boot protocol (Documentation/arch/x86/boot.rst),
//! or a multiboot image whose header gives addresses.

use bare::multiboot::{MAGIC, Module};

use crate::memory::{self, Guest, OWN};

/// Addresses of the boot parameters, the command line and the descriptor of a multiboot image: low
/// memory, which no kernel is in.
const PARAMETERS: u64 = 0x9_0000;
const COMMAND_LINE: u64 = 0x9_1000;
const COMMAND_LINE_MAX: usize = 4095;
/// Address of the initrd: below the hypervisor, at most 128 MiB.
const INITRD: u64 = 0x2800_0000;
const KERNEL: u64 = 0x10_0000;

/// State in which the guest begins.
pub struct Start {
    /// The first instruction.
    pub entry: u64,
    /// eax, ebx and esi.
    pub registers: [u64; 3],
}

/// Reason why it does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Neither a bzImage of protocol 2.06 or later nor a multiboot image with addresses.
    Unknown,
    /// There is no memory for the file, or for the kernel as it unpacks itself.
    Kernel,
    /// There is none for the initrd: at most 128 MiB.
    Initrd,
    /// Its command line is too long.
    CommandLine,
}

impl core::fmt::Display for Unfit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Unknown => {
                "the kernel is neither a bzImage of boot protocol 2.06 or later nor a \
                 multiboot image with addresses"
            }
            Self::Kernel => "the kernel does not fit into the memory below the hypervisor",
            Self::Initrd => "the initrd does not fit into the 128 MiB below the hypervisor",
            Self::CommandLine => "the kernel's command line is longer than the kernel takes",
        })
    }
}

/// Puts the guest into its memory.
///
/// # Safety
/// The modules are where the loader says, and no other code uses their memory.
pub unsafe fn load(guest: &Guest, kernel: Module, initrd: Option<Module>) -> Result<Start, Unfit> {
    let len = kernel.end.saturating_sub(kernel.start);
    // SAFETY: the caller's.
    let file = unsafe { memory::bytes(kernel.start, len) };
    let arguments = kernel.text.split_once(' ').map_or("", |(_, rest)| rest);
    if let Some(header) = multiboot_header(file) {
        return image(guest, file, header, arguments);
    }
    let put = |address, bytes: &[u8], why| guest.write(address, bytes).ok_or(why);
    let half = |at: usize| u16::from_le_bytes([file[at], file[at + 1]]);
    let word = |at: usize| u32::from_le_bytes([file[at], file[at + 1], file[at + 2], file[at + 3]]);
    if file.len() < 0x1000 || &file[0x202..0x206] != b"HdrS" || half(0x206) < 0x206 {
        return Err(Unfit::Unknown);
    }
    let setup = (match file[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    } + 1)
        * 512;
    let code = file.get(setup..).ok_or(Unfit::Unknown)?;
    // As it unpacks itself it takes `init_size` bytes from where it prefers to be (protocol 2.10).
    if half(0x206) >= 0x20a {
        let start = u64::from(word(0x258)).max(KERNEL);
        if !guest.contains(start, u64::from(word(0x260))) || start + u64::from(word(0x260)) > INITRD
        {
            return Err(Unfit::Kernel);
        }
    }
    if arguments.len() > COMMAND_LINE_MAX.min(word(0x238) as usize) {
        return Err(Unfit::CommandLine);
    }
    let mut parameters = [0; 4096];
    let header = 0x1f1..(0x202 + usize::from(file[0x201])).min(0x290);
    parameters[header.clone()].copy_from_slice(&file[header]);
    let mut set =
        |at: usize, value: u32| parameters[at..at + 4].copy_from_slice(&value.to_le_bytes());
    set(0x228, COMMAND_LINE as u32);
    if let Some(initrd) = initrd {
        let len = initrd.end.saturating_sub(initrd.start);
        if INITRD + len > OWN.start {
            return Err(Unfit::Initrd);
        }
        // SAFETY: the caller's.
        let bytes = unsafe { memory::bytes(initrd.start, len) };
        put(INITRD, bytes, Unfit::Initrd)?;
        set(0x218, INITRD as u32);
        set(0x21c, len as u32);
    }
    let mut count = 0;
    let mut range = |start: u64, end: u64, kind: u32| {
        let at = 0x2d0 + usize::from(count) * 20;
        parameters[at..at + 8].copy_from_slice(&start.to_le_bytes());
        parameters[at + 8..at + 16].copy_from_slice(&(end - start).to_le_bytes());
        parameters[at + 16..at + 20].copy_from_slice(&kind.to_le_bytes());
        count += 1;
    };
    guest.ranges().for_each(|(start, end)| range(start, end, 1));
    range(OWN.start, OWN.end, 2);
    parameters[0x1e8] = count;
    // A loader without a number, and the kernel is at 1 MiB.
    parameters[0x210] = 0xff;
    parameters[0x211] |= 1;
    put(KERNEL, code, Unfit::Kernel)?;
    put(PARAMETERS, &parameters, Unfit::Kernel)?;
    put(COMMAND_LINE, arguments.as_bytes(), Unfit::CommandLine)?;
    put(
        COMMAND_LINE + arguments.len() as u64,
        &[0],
        Unfit::CommandLine,
    )?;
    Ok(Start {
        entry: KERNEL,
        registers: [0, 0, PARAMETERS],
    })
}

/// Returns the offset of a multiboot header with addresses: in the first 8 KiB, at a multiple of 4.
fn multiboot_header(file: &[u8]) -> Option<usize> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(file.get(at..at + 4)?.try_into().ok()?))
    };
    (0..8192).step_by(4).find(|at| {
        word(*at) == Some(0x1bad_b002) && word(at + 4).is_some_and(|flags| flags & 1 << 16 != 0)
    })
}

fn image(guest: &Guest, file: &[u8], header: usize, arguments: &str) -> Result<Start, Unfit> {
    let word = |index: usize| -> Option<u64> {
        let at = header + index * 4;
        Some(u64::from(u32::from_le_bytes(
            file.get(at..at + 4)?.try_into().ok()?,
        )))
    };
    let words = [3, 4, 5, 6, 7].map(word);
    let [Some(at), Some(start), Some(end), Some(_), Some(entry)] = words else {
        return Err(Unfit::Unknown);
    };
    let skipped = at
        .checked_sub(start)
        .and_then(|before| (header as u64).checked_sub(before));
    let first = skipped.ok_or(Unfit::Unknown)? as usize;
    let len = end.checked_sub(start).ok_or(Unfit::Unknown)? as usize;
    let bytes = file
        .get(first..first.saturating_add(len))
        .ok_or(Unfit::Unknown)?;
    guest.write(start, bytes).ok_or(Unfit::Kernel)?;
    if arguments.len() > COMMAND_LINE_MAX {
        return Err(Unfit::CommandLine);
    }
    // Flags: there is a command line. The kernel's name comes first in it, as a loader has it.
    let mut information = [0; 128];
    information[0] = 1 << 2;
    information[16..20].copy_from_slice(&(COMMAND_LINE as u32).to_le_bytes());
    guest.write(PARAMETERS, &information).ok_or(Unfit::Kernel)?;
    for (offset, text) in [(0, "guest "), (6, arguments)] {
        guest
            .write(COMMAND_LINE + offset, text.as_bytes())
            .ok_or(Unfit::CommandLine)?;
    }
    guest
        .write(COMMAND_LINE + 6 + arguments.len() as u64, &[0])
        .ok_or(Unfit::CommandLine)?;
    Ok(Start {
        entry,
        registers: [u64::from(MAGIC), PARAMETERS, 0],
    })
}
