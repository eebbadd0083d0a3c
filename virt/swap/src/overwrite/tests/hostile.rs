//! Malicious or random code, tables and registers of a guest: nothing panics, and everything ends.

use seeded::Random;

use super::*;

/// Bytes that these instructions begin with, so that random bytes pass the first checks.
const LIKELY: [u8; 16] = [
    0xf3, 0xf3, 0xf3, 0xf2, 0x66, 0x26, 0x2e, 0x36, 0x3e, 0x48, 0x40, 0x4f, 0xaa, 0xab, 0xa4, 0xa5,
];

fn code(random: &mut Random) -> [u8; 20] {
    let mut bytes = [0; 20];
    random.fill(&mut bytes);
    for byte in &mut bytes {
        if random.below(4) != 0 {
            *byte = LIKELY[random.below(16) as usize];
        }
    }
    bytes
}

#[test]
fn any_bytes_are_some_instruction() {
    let mut random = Random::new(2);
    let mut known = 0;
    for _ in 0..100_000 {
        let bytes = code(&mut random);
        let len = random.below(21) as usize;
        let decoded = decode(&bytes[..len]);
        if let Decoded::Repeated(Repeated { size, len, .. }) = decoded {
            known += 1;
            assert!([1, 2, 4, 8].contains(&size));
            let len = len as usize;
            assert!((2..=15).contains(&len));
            // Later bytes have no effect, and all of these are needed.
            assert_eq!(decode(&bytes[..len]), decoded);
            assert_eq!(decode(&bytes[..len - 1]), Decoded::Truncated);
        }
        let mut random_bytes = [0; 15];
        random.fill(&mut random_bytes);
        decode(&random_bytes);
    }
    assert!(known > 5_000, "{known}");
}

/// Memory with random content; the same for as long as the seed is not changed.
struct Noise {
    seed: u64,
    code: [u8; 20],
    /// Bits that every word has.
    always: u64,
    /// Bits that no word has.
    never: u64,
    asked: usize,
}

impl Noise {
    fn at(&self, gpa: u64) -> Random {
        Random::new(self.seed ^ gpa.rotate_left(17))
    }
}

impl Memory for Noise {
    fn word(&mut self, at: Gpa) -> Option<u64> {
        assert_eq!(at.raw() % 8, 0);
        assert!(at.raw() < 1 << 52);
        self.asked += 1;
        let mut random = self.at(at.raw());
        let is_present = random.below(64) != 0;
        is_present.then(|| random.bits() & !self.never | self.always)
    }

    fn bytes(&mut self, at: Gpa, into: &mut [u8]) -> Option<()> {
        assert!(into.len() as u64 <= at.left_in_page());
        assert!(at.raw() < 1 << 52);
        self.asked += 1;
        let mut random = self.at(at.raw());
        if into.len() > self.code.len() {
            random.fill(into);
        } else {
            into.copy_from_slice(&self.code[..into.len()]);
        }
        (random.below(64) != 0).then_some(())
    }
}

/// Returns the bits of a register to flip: none in most cases, one in some, all in a few.
fn noise(random: &mut Random) -> u64 {
    match random.below(64) {
        0 => random.bits(),
        1 => 1 << random.below(64),
        _ => 0,
    }
}

/// Returns an address: the start of a page that may be mapped, or any other: canonical or not,
/// aligned or not, at the end of a range or not.
fn address(random: &mut Random) -> u64 {
    if random.below(3) != 0 {
        return ((random.bits() as i64 >> 16) & !0xfff) as u64;
    }
    let edge = [0, 1 << 47, !0 << 47, !0 << 56, 1 << 56, 0][random.below(6) as usize];
    let page = match random.below(3) {
        0 => 0,
        1 => random.below(1 << 47) & !0xfff,
        _ => random.bits() & !0xfff,
    };
    let offset = [0, 0, 0xff8, 0xffe, 1, random.below(4096)][random.below(6) as usize];
    page.wrapping_add(edge)
        .wrapping_add(offset)
        .wrapping_sub(random.below(2) << 12)
}

#[test]
fn any_tables_and_registers_end_in_a_bounded_number_of_reads() {
    let mut random = Random::new(3);
    let mut decisions = 0;
    for _ in 0..200_000 {
        // Most tables are present, writable, accessed, dirty, for a kernel or a user. Some have no
        // large pages, whose reserved bits are hardly ever clear at random, or allow all execution.
        let mut memory = Noise {
            seed: random.bits(),
            code: code(&mut random),
            always: [0x63, 0x67, 0][random.below(3) as usize],
            never: [1 << 63 | 0x80, 1 << 63, 0x80, 0][random.below(4) as usize],
            asked: 0,
        };
        if random.below(2) == 0 {
            let choice = random.below(encodings::REPEATED.len() as u64);
            let (code, ..) = encodings::REPEATED[choice as usize];
            memory.code[..code.len()].copy_from_slice(code);
        }
        let registers = Registers {
            rip: address(&mut random),
            rax: random.bits(),
            rcx: random.bits() >> random.below(64),
            rsi: address(&mut random),
            rdi: address(&mut random),
            rflags: kernel().rflags ^ noise(&mut random),
            cr0: kernel().cr0 ^ noise(&mut random),
            cr3: random.bits(),
            cr4: kernel().cr4 ^ noise(&mut random) ^ random.below(2) << 12,
            efer: kernel().efer ^ noise(&mut random),
            dr7: noise(&mut random),
            pkru: (random.below(2) == 0).then(|| random.bits() as u32),
            cpl: [0, 3, random.bits() as u8][random.below(3) as usize],
            cs_l: random.below(32) != 0,
            cs_d: random.below(32) == 0,
            is_at_instruction: random.below(32) != 0,
        };
        // The page that it is about to store to, so that the decision passes that check.
        let page = Paging::of(&registers)
            .and_then(|paging| paging.translate(&mut memory, registers.rdi, Access::Write))
            .unwrap_or(Gpa::new(random.bits()));
        assert!(memory.asked <= 5);
        memory.asked = 0;
        let overwrite = decide(&registers, &mut memory, page);
        // Five walks of five entries, the instruction's two parts, the source's two pages.
        assert!(memory.asked <= 5 * 5 + 2 + 2);
        if let Some(overwrite) = overwrite {
            decisions += 1;
            overwrite.content(&mut memory, &mut [0; PAGE_LEN]);
            let after = overwrite.after();
            assert!(after.rcx < registers.rcx);
            assert_eq!(after.rdi, registers.rdi.wrapping_add(4096));
        }
    }
    assert!(decisions > 1_000, "{decisions}");
}
