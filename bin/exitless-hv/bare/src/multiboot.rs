//! Information from a multiboot loader (Multiboot 0.6.96, §3.3): command line, modules, memory map.

/// The word in the loader's register that says so.
pub const MAGIC: u32 = 0x2bad_b002;

const HAS_COMMAND_LINE: u32 = 1 << 2;
const HAS_MODULES: u32 = 1 << 3;
const HAS_MEMORY_MAP: u32 = 1 << 6;

/// The longest command line that is read, bytes.
const TEXT_MAX: usize = 4096;
/// The most modules, and the most ranges, that are read.
const ITEMS_MAX: u32 = 64;

/// The loader's information.
#[derive(Clone, Copy, Debug)]
pub struct Information(u32);

/// A file that the loader has put somewhere.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// Its first byte.
    pub start: u64,
    /// The byte behind its last.
    pub end: u64,
    /// Its command line.
    pub text: &'static str,
}

/// A range of physical memory.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Its first byte.
    pub start: u64,
    /// Its length, bytes.
    pub len: u64,
    /// 1: memory; others are reserved.
    pub kind: u32,
}

impl Information {
    /// # Safety
    /// `address` is the one that the loader left; that and all it points to is mapped, and nothing
    /// changes it any more.
    #[must_use]
    pub unsafe fn new(address: u32) -> Self {
        Self(address)
    }

    fn word(self, offset: u32) -> u32 {
        peek32(u64::from(self.0 + offset))
    }

    /// Returns the image's own command line, the image's name first.
    #[must_use]
    pub fn command_line(self) -> &'static str {
        if self.word(0) & HAS_COMMAND_LINE == 0 {
            return "";
        }
        text(self.word(16))
    }

    /// Returns the modules.
    pub fn modules(self) -> impl Iterator<Item = Module> {
        let is_there = self.word(0) & HAS_MODULES != 0;
        let count = if is_there {
            self.word(20).min(ITEMS_MAX)
        } else {
            0
        };
        let first = u64::from(self.word(24));
        (0..u64::from(count)).map(move |index| {
            let at = first + index * 16;
            Module {
                start: u64::from(peek32(at)),
                end: u64::from(peek32(at + 4)),
                text: text(peek32(at + 8)),
            }
        })
    }

    /// Returns the memory map.
    pub fn memory(self) -> impl Iterator<Item = Range> {
        let is_there = self.word(0) & HAS_MEMORY_MAP != 0;
        let len = if is_there {
            u64::from(self.word(44))
        } else {
            0
        };
        let first = u64::from(self.word(48));
        let mut offset = 0;
        (0..ITEMS_MAX).map_while(move |_| {
            if offset + 24 > len {
                return None;
            }
            let at = first + offset;
            offset += u64::from(peek32(at)) + 4;
            let pair = |at| u64::from(peek32(at)) | u64::from(peek32(at + 4)) << 32;
            Some(Range {
                start: pair(at + 4),
                len: pair(at + 12),
                kind: peek32(at + 20),
            })
        })
    }
}

fn peek32(address: u64) -> u32 {
    // SAFETY: [`Information::new`]'s caller: the loader's information, and what it points to, is
    // mapped and unchanging.
    unsafe { (address as *const u32).read_unaligned() }
}

fn text(address: u32) -> &'static str {
    if address == 0 {
        return "";
    }
    let start = address as usize as *const u8;
    // SAFETY: as in `peek32`; a text ends with 0, or is cut off.
    let bytes = unsafe {
        let len = (0..TEXT_MAX).take_while(|at| *start.add(*at) != 0).count();
        core::slice::from_raw_parts(start, len)
    };
    core::str::from_utf8(bytes).unwrap_or("")
}
