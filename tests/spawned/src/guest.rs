//! A guest of twenty instructions: an interpreter of steps that the test writes down, entered by
//! PVH.
//!
//! It runs in 32-bit protected mode without paging and touches nothing but ports, RAM and device
//! registers, so software KVM, which boots no kernel, runs it too.
//!
//! UNSAFETY: the interpreter's bytes are taken from this binary by the two symbols around them.

use std::arch::global_asm;

/// COM1: data, and line status with "data ready".
const COM1: u32 = 0x3f8;
const COM1_LINE_STATUS: u32 = 0x3fd;
const DATA_READY: u32 = 1;

/// ACPI sleep control: S5 of our DSDT, with sleep enable.
const SLEEP_CONTROL: u32 = 0x600;
const POWER_OFF: u32 = 1 << 5 | 5 << 2;

/// The ledger's marker port.
const MARKER: u32 = 0xe0;
/// ACPI reset register, and what resets.
const RESET: u32 = 0x602;
const RESET_VALUE: u32 = 0x0f;

/// pvpanic.
const PANIC_NOTICE: u32 = 0x505;

/// Configuration space of 00:01.0, and where its BAR is put.
const CONFIG: u32 = 0xe000_8000;
const BAR: u32 = 0xc000_0000;
const NOTIFY: u32 = BAR + 0x3000;
const COMMAND: u32 = CONFIG + 4;
const MEMORY: u32 = 2;
const BUS_MASTER: u32 = 4;

/// Guest-physical addresses.
const CODE: u32 = 0x10_0000;
const STEPS: u32 = 0x10_1000;
const DESCRIPTORS: u32 = 0x20_0000;
const AVAILABLE: u32 = 0x20_1000;
const USED: u32 = 0x20_2000;
const HEADER: u32 = 0x20_3000;
const STATUS: u32 = 0x20_4000;
const DATA: u32 = 0x20_5000;
const SECTOR: u32 = 512;
/// Memory that nothing else is in.
const GIVEN: u32 = 0x30_0000;
const PAGE: u32 = 4096;
/// A root table without entries: zeroes.
const ROOT: u32 = 0x38_0000;

/// The I/O APIC: its index and its window, the entry of the power button's pin, "level, vector 41h"
/// and "not acknowledged".
const IOAPIC_INDEX: u32 = 0xfec0_0000;
const IOAPIC_WINDOW: u32 = 0xfec0_0010;
const BUTTON_ENTRY: u32 = 0x10 + 2 * 9;
const LEVEL: u32 = 1 << 15 | 0x41;
const REMOTE_IRR: u32 = 1 << 14;

/// VT-d's registers, and the highest byte of its global command and status.
const IOMMU: u32 = 0xfed9_0000;
const SET_ROOT: u32 = 0x40;
const TRANSLATE: u32 = 0x80;

// esi: next step of four words (operation, address or port, value, unused).
global_asm!(
    ".pushsection .rodata.exitless_ends, \"a\", @progbits",
    ".globl exitless_ends_start",
    ".globl exitless_ends_end",
    "exitless_ends_start:",
    ".code32",
    "mov esi, {steps}",
    "2:",
    "mov eax, [esi]",
    "mov edi, [esi + 4]",
    "mov ecx, [esi + 8]",
    "mov edx, edi",
    "add esi, 16",
    "cmp eax, 1",
    "je 11f",
    "cmp eax, 2",
    "je 12f",
    "cmp eax, 3",
    "je 13f",
    "cmp eax, 4",
    "je 14f",
    "cmp eax, 5",
    "je 15f",
    "cmp eax, 6",
    "je 16f",
    "cmp eax, 7",
    "je 17f",
    "cmp eax, 8",
    "je 18f",
    "10:",
    "hlt",
    "jmp 10b",
    "11:",
    "mov [edi], cl",
    "jmp 2b",
    "12:",
    "mov [edi], cx",
    "jmp 2b",
    "13:",
    "mov [edi], ecx",
    "jmp 2b",
    "14:",
    "mov eax, ecx",
    "out dx, al",
    "jmp 2b",
    "15:",
    "mov eax, ecx",
    "25:",
    "out dx, al",
    "jmp 25b",
    "16:",
    "mov al, [edi]",
    "cmp al, cl",
    "jne 16b",
    "jmp 2b",
    "17:",
    "in al, dx",
    "test al, cl",
    "jz 17b",
    "jmp 2b",
    "18:",
    "test [edi], ecx",
    "jz 18b",
    "jmp 2b",
    ".code64",
    "exitless_ends_end:",
    ".popsection",
    steps = const STEPS,
);

unsafe extern "C" {
    #[link_name = "exitless_ends_start"]
    static START: u8;
    #[link_name = "exitless_ends_end"]
    static END: u8;
}

fn interpreter() -> &'static [u8] {
    let (start, end) = (&raw const START, &raw const END);
    // SAFETY: both symbols are in one read-only section of this binary, START first, with nothing
    // between them but the interpreter; only the addresses of the statics are used.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// Kind of a request of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Reads a sector.
    Read,
    /// Writes a sector.
    Write,
    /// Flushes.
    Flush,
}

/// Script of the guest, step by step. After the last step it halts with interrupts off.
#[derive(Default)]
pub struct Steps(Vec<[u32; 4]>);

impl Steps {
    fn step(mut self, operation: u32, at: u32, value: u32) -> Self {
        self.0.push([operation, at, value, 0]);
        self
    }

    fn store8(self, at: u32, value: u32) -> Self {
        self.step(1, at, value)
    }

    fn store16(self, at: u32, value: u32) -> Self {
        self.step(2, at, value)
    }

    fn store32(self, at: u32, value: u32) -> Self {
        self.step(3, at, value)
    }

    /// Writes one byte to the console.
    pub fn say(self, byte: u8) -> Self {
        self.step(4, COM1, byte.into())
    }

    /// Writes one byte to the console, again and again.
    pub fn say_for_ever(self, byte: u8) -> Self {
        self.step(5, COM1, byte.into())
    }

    /// Waits until something was typed, and leaves it there.
    pub fn wait_for_typing(self) -> Self {
        self.step(7, COM1_LINE_STATUS, DATA_READY)
    }

    /// Marks the ledger.
    pub fn mark(self, value: u8) -> Self {
        self.step(4, MARKER, value.into())
    }

    /// Powers off.
    pub fn power_off(self) -> Self {
        self.step(4, SLEEP_CONTROL, POWER_OFF)
    }

    /// Asks for a reset.
    pub fn reset(self) -> Self {
        self.step(4, RESET, RESET_VALUE)
    }

    /// Tells that it has panicked, or, with a crash kernel, that this goes on.
    pub fn panic(self, has_crash_kernel: bool) -> Self {
        self.step(4, PANIC_NOTICE, if has_crash_kernel { 2 } else { 1 })
    }

    /// Listens to the power button. Interrupts are off here: the pin is made a level-triggered one,
    /// whose entry then shows that it has fired.
    pub fn listen_to_button(self) -> Self {
        self.store32(IOAPIC_INDEX, BUTTON_ENTRY)
            .store32(IOAPIC_WINDOW, LEVEL)
    }

    /// Waits until the button it listens to was pressed.
    pub fn wait_for_button(self) -> Self {
        self.step(8, IOAPIC_WINDOW, REMOTE_IRR)
    }

    /// Stores a word.
    pub fn store(self, at: u32, value: u32) -> Self {
        self.store32(at, value)
    }

    /// Waits until a byte is this.
    pub fn wait_for_byte(self, at: u32, value: u8) -> Self {
        self.step(6, at, value.into())
    }

    /// Starts the function at 00:01.0 so many times with a queue whose descriptors lie at no
    /// multiple of 16.
    pub fn start_badly(self, times: u32) -> Self {
        let device_status = BAR + 0x14;
        let decoded = self
            .store32(CONFIG + 0x10, BAR)
            .store32(CONFIG + 0x14, 0)
            .store16(COMMAND, MEMORY | BUS_MASTER);
        (0..times).fold(decoded, |steps, _| {
            steps
                .store8(device_status, 0)
                .step(6, device_status, 0)
                .store8(device_status, 1 | 2)
                .store32(BAR + 8, 1)
                .store32(BAR + 12, 1)
                .store8(device_status, 1 | 2 | 8)
                .store32(BAR + 0x20, DESCRIPTORS + 1)
                .store16(BAR + 0x1c, 1)
                .store8(device_status, 1 | 2 | 4 | 8)
        })
    }

    /// Starts the function at 00:01.0 with its first queue, under these features beside VERSION_1.
    fn start(mut self, features: u32) -> Self {
        let device_status = BAR + 0x14;
        self = self
            .store32(CONFIG + 0x10, BAR)
            .store32(CONFIG + 0x14, 0)
            .store16(COMMAND, MEMORY | BUS_MASTER)
            .store8(device_status, 0)
            .step(6, device_status, 0)
            .store8(device_status, 1 | 2);
        for (half, features) in [(0, features), (1, 1)] {
            self = self.store32(BAR + 8, half).store32(BAR + 12, features);
        }
        self = self
            .store8(device_status, 1 | 2 | 8)
            .store16(BAR + 0x16, 0)
            .store16(BAR + 0x18, 16);
        for (at, area) in [(0x20, DESCRIPTORS), (0x28, AVAILABLE), (0x30, USED)] {
            self = self.store32(BAR + at, area).store32(BAR + at + 4, 0);
        }
        self.store16(BAR + 0x1c, 1)
            .store8(device_status, 1 | 2 | 4 | 8)
    }

    /// Starts the disk at 00:01.0 and gives it one request, of one sector.
    pub fn ask(self, ask: Ask) -> Self {
        let (kind, data_flags) = match ask {
            Ask::Read => (0, NEXT | DEVICE_WRITES),
            Ask::Write => (1, NEXT),
            Ask::Flush => (4, 0),
        };
        let after_header = if ask == Ask::Flush { 2 } else { 1 };
        // FLUSH.
        self.start(1 << 9)
            .store32(HEADER, kind)
            .descriptor(0, HEADER, 16, NEXT, after_header)
            .descriptor(1, DATA, SECTOR, data_flags, 2)
            .descriptor(2, STATUS, 1, DEVICE_WRITES, 0)
            .store32(DATA, 0x6c6c_6548)
            .store32(AVAILABLE, 1 << 16)
            .store16(NOTIFY, 0)
    }

    /// Waits until the request of [`ask`](Self::ask) is answered.
    pub fn wait_for_answer(self) -> Self {
        self.step(6, USED + 2, 1)
    }

    /// Turns the IOMMU on with a table by which no function reaches any memory.
    pub fn confine_all(self) -> Self {
        let (root, command, status) = (IOMMU + 0x20, IOMMU + 0x18, IOMMU + 0x1f);
        self.store32(root, ROOT)
            .store32(root + 4, 0)
            .store32(command, SET_ROOT << 24)
            .step(6, status, SET_ROOT)
            .store32(command, TRANSLATE << 24)
            .step(6, status, SET_ROOT | TRANSLATE)
    }

    /// Starts the balloon at 00:01.0, waits until it is to have `target` pages, and gives it two of
    /// three pages that were stored to. Goes on once they are taken, hold zeroes, and the third one
    /// what was stored.
    pub fn inflate(self, target: u32) -> Self {
        let page = |nth| GIVEN + nth * PAGE;
        let stored = (0..3).fold(self, |steps, nth| steps.store8(page(nth), 7));
        let device = BAR + 0x2000;
        stored
            .start(0)
            .step(6, device, target & 0xff)
            .step(6, device + 1, target >> 8 & 0xff)
            .store32(DATA, page(0) / PAGE)
            .store32(DATA + 4, page(2) / PAGE)
            // One that is far outside.
            .store32(DATA + 8, u32::MAX)
            .descriptor(0, DATA, 12, 0, 0)
            .store32(AVAILABLE, 1 << 16)
            .store16(NOTIFY, 0)
            .step(6, USED + 2, 1)
            .step(6, page(0), 0)
            .step(6, page(1), 7)
            .step(6, page(2), 0)
            // Two pages, as its driver says, and what is stored from now on stays.
            .store32(device + 4, 2)
            .store8(page(0), 9)
            .step(6, page(0), 9)
    }

    fn descriptor(self, index: u32, at: u32, len: u32, flags: u32, next: u32) -> Self {
        let slot = DESCRIPTORS + 16 * index;
        self.store32(slot, at)
            .store32(slot + 8, len)
            .store32(slot + 12, flags | next << 16)
    }

    /// Takes Bus Master away, which is over when the disk is quiet.
    pub fn stop_disk(self) -> Self {
        self.store16(COMMAND, MEMORY)
    }

    /// A kernel file that does this.
    pub fn kernel(&self) -> Vec<u8> {
        /// Offsets in the file.
        const NOTE: usize = 0x200;
        const IMAGE: usize = 0x1000;
        let mut image = interpreter().to_vec();
        assert!(image.len() < (STEPS - CODE) as usize);
        image.resize((STEPS - CODE) as usize, 0);
        image.extend(self.0.iter().flatten().flat_map(|word| word.to_le_bytes()));
        // The end: no operation.
        image.extend([0; 16]);

        let mut file = vec![0; IMAGE];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        // ELF64, little endian, an executable for x86-64, two program headers of 56 bytes behind
        // this one's 64.
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &2_u16.to_le_bytes());
        put(18, &62_u16.to_le_bytes());
        put(20, &1_u32.to_le_bytes());
        put(24, &u64::from(CODE).to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(52, &64_u16.to_le_bytes());
        put(54, &56_u16.to_le_bytes());
        put(56, &2_u16.to_le_bytes());
        // PT_LOAD: type, flags; offset, address twice, size in file and memory, alignment.
        let load = [
            IMAGE as u64,
            CODE.into(),
            CODE.into(),
            image.len() as u64,
            image.len() as u64,
            0x1000,
        ];
        put(64, &1_u32.to_le_bytes());
        put(68, &7_u32.to_le_bytes());
        for (at, word) in (72..).step_by(8).zip(load) {
            put(at, &word.to_le_bytes());
        }
        // PT_NOTE: XEN_ELFNOTE_PHYS32_ENTRY (18).
        let note = [NOTE as u64, 0, 0, 20, 20, 4];
        put(120, &4_u32.to_le_bytes());
        put(124, &4_u32.to_le_bytes());
        for (at, word) in (128..).step_by(8).zip(note) {
            put(at, &word.to_le_bytes());
        }
        for (at, word) in [(NOTE, 4), (NOTE + 4, 4), (NOTE + 8, 18)] {
            put(at, &u32::to_le_bytes(word));
        }
        put(NOTE + 12, b"Xen\0");
        put(NOTE + 16, &CODE.to_le_bytes());
        file.extend(image);
        file
    }
}

/// Flags of a descriptor.
const NEXT: u32 = 1;
const DEVICE_WRITES: u32 = 2;
