//! The block function's ring: data over the hypervisor's memory (ring_memory), and every ring that
//! is none (ring_bounds), behind each of which the function must want a reset, and serve behind
//! that.

use crate::block::{Block, NEXT, Places, SECTOR, SIZE, WRITE};
use crate::delivery::HIDDEN;
use crate::interrupts::{self, OWN};
use crate::tables::Page;
use crate::{Run, WINDOW_MS, end, time};

/// The hypervisor's last page, of which it says whether it is as it was.
const CANARY: u64 = 0x3400_0000 - 0x1000;
/// Requests in a window.
const REQUESTS: u64 = 10;
/// Longest wait for an answer, milliseconds.
const ANSWER: u64 = 500;
/// Types of requests.
const READ: u32 = 0;
const STORE: u32 = 1;

static DATA: Page = Page::new();

fn find(run: &Run) -> Block {
    match Block::find(OWN) {
        Ok(block) => block,
        Err(why) => {
            run.result(format_args!("error={why}"));
            end()
        }
    }
}

/// Reads whose data are the hypervisor's memory.
pub fn ring_memory(run: &Run) {
    let mut block = find(run);
    let address = if run.is_calm { DATA.address() } else { CANARY };
    let answered = run.measured(|| {
        (0..REQUESTS).fold(0, |answered, sector| {
            block.start(Places::own());
            block.request(READ, sector, address);
            let is_good = block.is_answered(WINDOW_MS / REQUESTS / 2);
            time::wait(WINDOW_MS / REQUESTS);
            answered + u32::from(is_good)
        })
    });
    run.result(format_args!("answered={answered}"));
}

/// A ring that is none, made of one that is.
type Hostile = fn(&mut Block);

const HOSTILE: [(&str, Hostile); 12] = [
    ("a loop", |block| {
        block.desc(0, (Block::header(READ, 0), 16, NEXT, 0));
        block.offer(0);
    }),
    ("a head outside", |block| block.offer(SIZE)),
    ("a link outside", |block| {
        block.desc(0, (Block::header(READ, 0), 16, NEXT, 0xffff));
        block.offer(0);
    }),
    ("an index ahead", |block| block.jump(SIZE + 1)),
    ("an index back", |block| block.jump(0xffff)),
    ("an address that wraps", |block| {
        chain(block, (u64::MAX - 1, 4))
    }),
    ("lengths that overflow", |block| {
        block.desc(0, (0, u32::MAX, NEXT, 1));
        block.desc(1, (Block::state(), 1, WRITE, 0));
        block.offer(0);
    }),
    ("a table of descriptors", |block| {
        block.desc(0, (DATA.address(), 32, 4, 0));
        block.offer(0);
    }),
    ("no bytes", |block| chain(block, (DATA.address(), 0))),
    ("no status", |block| {
        block.desc(0, (Block::header(READ, 0), 16, 0, 0));
        block.offer(0);
    }),
    ("data that end in hidden memory", |block| {
        chain(block, (HIDDEN - 256, SECTOR));
    }),
    ("a header in hidden memory", |block| {
        block.desc(0, (HIDDEN, 16, NEXT, 1));
        block.desc(1, (Block::state(), 1, WRITE, 0));
        block.offer(0);
    }),
];

/// A read with this for its data.
fn chain(block: &mut Block, (address, len): (u64, u32)) {
    block.desc(0, (Block::header(READ, 0), 16, NEXT, 1));
    block.desc(1, (address, len, WRITE | NEXT, 2));
    block.desc(2, (Block::state(), 1, WRITE, 0));
    block.offer(0);
}

/// Each of them, and rings in hidden memory.
pub fn ring_bounds(run: &Run) {
    let mut block = find(run);
    let own = Places::own();
    let hidden = [
        Places {
            desc: HIDDEN,
            ..own
        },
        Places {
            avail: HIDDEN,
            ..own
        },
        Places {
            used: HIDDEN,
            ..own
        },
    ];
    let (mut stopped, mut served) = (0, 0);
    let before = interrupts::count(OWN);
    run.measured(|| {
        for (what, hostile) in HOSTILE {
            block.start(own);
            hostile(&mut block);
            tell(run, what, block.wants_reset(ANSWER), &mut stopped);
            served += u32::from(serves(&mut block, served));
        }
        for places in hidden {
            block.start(places);
            block.offer(0);
            tell(
                run,
                "a ring in hidden memory",
                block.wants_reset(ANSWER),
                &mut stopped,
            );
            served += u32::from(serves(&mut block, served));
        }
    });
    let of = HOSTILE.len() + hidden.len();
    let ran = interrupts::count(OWN) - before;
    run.result(format_args!(
        "stopped={stopped} of={of} served={served} ran={ran}"
    ));
}

fn tell(run: &Run, what: &str, is_stopped: bool, stopped: &mut u32) {
    *stopped += u32::from(is_stopped);
    if !is_stopped {
        run.result(format_args!("not stopped: {what}"));
    }
}

/// Writes a sector of its own, and reads it back, behind a reset.
fn serves(block: &mut Block, seed: u32) -> bool {
    let word = |at: usize| (0x0101_0101_0101_0101 * u64::from(seed + 1)) ^ at as u64;
    let words = SECTOR as usize / 8;
    block.start(Places::own());
    (0..words).for_each(|at| DATA.set(at, word(at)));
    block.request(STORE, 7, DATA.address());
    let is_stored = block.is_answered(ANSWER);
    (0..words).for_each(|at| DATA.set(at, 0));
    block.request(READ, 7, DATA.address());
    is_stored && block.is_answered(ANSWER) && (0..words).all(|at| DATA.get(at) == word(at))
}
