//! A page at a time gives the same result as an element at a time: compared with an interpreter
//! without tables and pages.

use seeded::Random;

use super::*;

/// Linear pages that source and target lie in, and the frames behind them.
const PAGES: u64 = 12;
const FIRST: u64 = BASE + 0x40_000;
const FIRST_FRAME: u64 = 64;

/// State of the interpreter: the flat memory, the place of each linear page in it, and the
/// instruction.
struct Interpreter {
    bytes: Vec<u8>,
    frames: Vec<u64>,
    operation: Operation,
    size: u64,
    len: u64,
}

impl Interpreter {
    fn at(&self, linear: u64) -> usize {
        let page = (linear - FIRST) / 4096;
        (self.frames[page as usize] * 4096 + linear % 4096) as usize
    }

    /// Executes one iteration, after «REP», «STOS» and «MOVS» of the manual.
    fn iterate(&mut self, registers: &mut Registers) {
        assert_ne!(registers.rcx, 0);
        let mut element = registers.rax.to_le_bytes();
        if self.operation == Operation::Movs {
            for i in 0..self.size {
                element[i as usize] = self.bytes[self.at(registers.rsi + i)];
            }
            registers.rsi += self.size;
        }
        for i in 0..self.size {
            let at = self.at(registers.rdi + i);
            self.bytes[at] = element[i as usize];
        }
        registers.rdi += self.size;
        registers.rcx -= 1;
        if registers.rcx == 0 {
            registers.rip += self.len;
            registers.rflags &= !(1 << 16);
        } else {
            // RF is set, as in the saved flags after an interrupt between two iterations.
            registers.rflags |= 1 << 16;
        }
    }
}

/// Counts of the decisions.
#[derive(Default)]
struct Tally {
    fills: u64,
    copies: u64,
    undecided_starts: u64,
}

/// Returns the start of source or target: often at a page, else aligned to the element, else
/// anywhere.
fn place(random: &mut Random, size: u64) -> u64 {
    let offset = match random.below(4) {
        0 | 1 => 0,
        2 => random.below(4096 / size) * size,
        _ => random.below(4096),
    };
    FIRST + random.below(PAGES / 2) * 4096 + offset
}

fn replay(random: &mut Random, tally: &mut Tally) {
    let choice = random.below(encodings::REPEATED.len() as u64);
    let (code, operation, size) = encodings::REPEATED[choice as usize];
    let mut guest = Guest::new();
    let rip = CODE + 0x1000 - random.below(20);
    guest.code(rip, code);

    // Most pages lie in a frame of their own, some share one.
    let frames: Vec<u64> = (0..PAGES)
        .map(|page| match random.below(6) {
            0 => FIRST_FRAME + random.below(PAGES),
            _ => FIRST_FRAME + (page * 5 + 3) % PAGES,
        })
        .collect();
    for (linear, frame) in (FIRST..).step_by(4096).zip(&frames) {
        guest.map(linear, *frame, KERNEL);
    }
    for frame in FIRST_FRAME..FIRST_FRAME + PAGES {
        let mut page = [0; PAGE_LEN];
        random.fill(&mut page);
        guest.store(frame * 4096, &page);
    }
    let rdi = place(random, size);
    let rsi = place(random, size);
    let most = (FIRST + PAGES * 4096 - rdi.max(rsi)) / size;
    let before = Registers {
        rip,
        rax: random.bits(),
        rcx: 1 + random.below(most),
        rsi,
        rdi,
        rflags: 0x246 | random.below(2) << 16,
        ..kernel()
    };

    let mut flat = Interpreter {
        bytes: guest.bytes.clone(),
        frames: frames.clone(),
        operation,
        size,
        len: code.len() as u64,
    };
    let mut expected = before;
    let mut registers = before;
    while registers.rip == rip {
        assert_eq!(registers, expected);
        let frame_of = |linear: u64| frames[((linear - FIRST) / 4096) as usize];
        let frame = frame_of(registers.rdi);
        guest.forbidden = Some(frame);
        guest.absent.clear();
        if random.below(4) == 0 {
            guest.absent.insert(FIRST_FRAME + random.below(PAGES));
        }
        let overwrite = decide(&registers, &mut guest, Gpa::new(frame * 4096));

        let covers = registers.rdi.is_multiple_of(4096) && registers.rcx * size >= 4096;
        let is_readable = |linear| {
            let source = frame_of(linear);
            source != frame && !guest.absent.contains(&source)
        };
        let can_copy = || is_readable(registers.rsi) && is_readable(registers.rsi + 4095);
        let may = covers && (operation == Operation::Stos || can_copy());
        assert_eq!(
            overwrite.is_some(),
            may,
            "{code:02x?} {registers:x?} {frames:?}"
        );

        if let Some(overwrite) = overwrite {
            let mut page = [0; PAGE_LEN];
            overwrite
                .content(&mut guest, &mut page)
                .expect("nothing has left");
            guest.store(frame * 4096, &page);
            registers = *overwrite.after();
            for _ in 0..4096 / size {
                flat.iterate(&mut expected);
            }
            match operation {
                Operation::Stos => tally.fills += 1,
                Operation::Movs => tally.copies += 1,
            }
        } else {
            // The page is fetched, and the processor stores an element.
            tally.undecided_starts += u64::from(covers);
            flat.iterate(&mut expected);
            for i in 0..size {
                let at = flat.at(registers.rdi + i);
                guest.bytes[at] = flat.bytes[at];
            }
            registers = expected;
        }
    }
    assert_eq!(registers, expected);
    assert_eq!(registers.rcx, 0);
    assert!(
        guest.bytes == flat.bytes,
        "{code:02x?} {before:x?} {frames:?}"
    );
}

#[test]
fn page_by_page_is_element_by_element() {
    let mut random = Random::new(1);
    let mut tally = Tally::default();
    for _ in 0..2_000 {
        replay(&mut random, &mut tally);
    }
    // The test is void unless it decides often.
    let Tally {
        fills,
        copies,
        undecided_starts,
    } = tally;
    assert!(fills > 1_000, "{fills}");
    assert!(copies > 500, "{copies}");
    assert!(undecided_starts > 200, "{undecided_starts}");
}
