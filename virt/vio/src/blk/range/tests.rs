//! Plans against a file of bytes whose calls refuse what a table says.

use proptest::prelude::*;

use super::FallocateStep::{Punch, Reserve, ZeroRange};
use super::*;

/// Bytes of the file, a whole number of no block but the smallest.
const LEN: usize = (3 << 20) + 512;
/// Blocks of a kind: what a byte of the file holds, and whether it has a block.
const FULL: (u8, bool) = (7, true);

/// A file, by sectors of 512 bytes, and what it refuses.
struct File {
    sectors: Vec<(u8, bool)>,
    /// Answers of punch, zero range and reserve; 0: it is done.
    answers: [i32; 3],
    /// Multiples of which fallocate takes ranges.
    block: u64,
    /// Most bytes that a write takes at a time.
    most: u32,
    calls: Vec<RangeStep>,
}

impl File {
    fn new(answers: [i32; 3], block: u32) -> Self {
        Self {
            sectors: vec![FULL; LEN / 512],
            answers,
            block: u64::from(block),
            most: u32::MAX,
            calls: Vec::new(),
        }
    }

    fn fill(&mut self, offset: u64, len: u64, value: (Option<u8>, bool)) {
        for (byte, has_block) in &mut self.sectors[offset as usize / 512..][..len as usize / 512] {
            *byte = value.0.unwrap_or(*byte);
            *has_block = value.1;
        }
    }

    fn call(&mut self, step: RangeStep) -> i32 {
        self.calls.push(step);
        match step {
            RangeStep::Fallocate { step, offset, len } => {
                assert!(len > 0 && offset + len <= LEN as u64);
                if !offset.is_multiple_of(self.block) || !len.is_multiple_of(self.block) {
                    return -libc::EINVAL;
                }
                let answer = self.answers[step as usize];
                if answer == 0 {
                    let value = match step {
                        Punch => (Some(0), false),
                        ZeroRange => (Some(0), true),
                        Reserve => (None, true),
                    };
                    self.fill(offset, len, value);
                }
                -answer
            }
            RangeStep::WriteZeroes { offset, len } => {
                assert!((1..=ZERO_PIECE).contains(&len));
                let len = len.min(self.most);
                self.fill(offset, len.into(), (Some(0), true));
                len as i32
            }
        }
    }
}

fn zero(offset: u64, len: u64, unmap: bool) -> Op {
    Op::WriteZeroes { offset, len, unmap }
}

/// Runs a request; its result.
fn run_on(file: &mut File, op: Op, support: &mut RangeSupport) -> Result<(), i32> {
    run(RangePlan::of(op, support).unwrap(), support, |step| {
        file.call(step)
    })
}

/// The calls of fallocate that a file with these answers is asked for, and whether data are
/// written.
fn asked(op: Op, answers: [i32; 3]) -> (Vec<FallocateStep>, bool) {
    let mut file = File::new(answers, 512);
    run_on(&mut file, op, &mut RangeSupport::default()).unwrap();
    let calls = file.calls.iter().filter_map(|call| match call {
        RangeStep::Fallocate { step, .. } => Some(*step),
        RangeStep::WriteZeroes { .. } => None,
    });
    let calls: Vec<_> = calls.collect();
    let has_data = calls.len() != file.calls.len();
    (calls, has_data)
}

#[test]
fn each_refused_call_leads_to_the_next_and_the_last_to_data() {
    const NO: i32 = libc::EOPNOTSUPP;
    let discard = Op::Discard {
        offset: 0,
        len: 4096,
    };
    let (unmap, keep) = (zero(0, 4096, true), zero(0, 4096, false));
    let table = [
        (discard, [0, 0, 0], vec![Punch], false),
        (discard, [NO, 0, 0], vec![Punch], false),
        (unmap, [0, NO, NO], vec![Punch], false),
        (unmap, [NO, 0, NO], vec![Punch, ZeroRange], false),
        (unmap, [NO, NO, 0], vec![Punch, ZeroRange], true),
        (keep, [NO, 0, NO], vec![ZeroRange], false),
        (keep, [0, NO, 0], vec![ZeroRange, Punch, Reserve], false),
        // ext2: what was punched cannot be reserved, so it is written.
        (keep, [0, NO, NO], vec![ZeroRange, Punch, Reserve], true),
        (keep, [NO, NO, 0], vec![ZeroRange, Punch], true),
    ];
    for (op, answers, calls, has_data) in table {
        assert_eq!(asked(op, answers), (calls, has_data), "{op:?}, {answers:?}");
    }
}

#[test]
fn an_unimplemented_call_is_made_once() {
    let no = libc::EOPNOTSUPP;
    let mut support = RangeSupport::default();
    let mut file = File::new([0, no, no], 512);
    run_on(&mut file, zero(0, 4096, false), &mut support).unwrap();
    file.calls.clear();
    run_on(&mut file, zero(0, 4096, false), &mut support).unwrap();
    // It could be punched; but it could not be reserved again.
    let data = RangeStep::WriteZeroes {
        offset: 0,
        len: 4096,
    };
    assert_eq!(file.calls, [data]);
    // A range that was refused for its own sake says nothing of others.
    let mut support = RangeSupport::default();
    let mut file = File::new([libc::EINVAL, libc::EBUSY, 0], 512);
    run_on(&mut file, zero(0, 4096, true), &mut support).unwrap();
    assert_eq!(support, RangeSupport::default());
}

#[test]
fn errors_that_are_no_refusals_end_the_request() {
    for errno in [libc::EIO, libc::ENOSPC, libc::EFBIG, libc::ECANCELED] {
        let mut file = File::new([errno; 3], 512);
        let ended = run_on(&mut file, zero(0, 4096, true), &mut RangeSupport::default());
        assert_eq!(ended, Err(errno));
        assert_eq!(file.calls.len(), 1);
    }
}

/// To the driver EOPNOTSUPP would mean that nothing was done.
#[test]
fn a_request_of_which_a_part_may_be_done_never_ends_as_unsupported() {
    let mut support = RangeSupport::default();
    let mut plan = RangePlan::of(zero(0, 4096, true), &support).unwrap();
    for _ in 0..2 {
        assert_eq!(
            plan.ended(-libc::EOPNOTSUPP, &mut support),
            RangeProgress::Next
        );
    }
    let ended = plan.ended(-libc::EOPNOTSUPP, &mut support);
    assert_eq!(ended, RangeProgress::Failed(libc::EIO));
}

#[test]
fn a_write_that_makes_no_progress_is_an_error() {
    let mut support = RangeSupport::new(4096, 512);
    let mut plan = RangePlan::of(zero(512, 512, true), &support).unwrap();
    assert_eq!(
        plan.ended(0, &mut support),
        RangeProgress::Failed(libc::EIO)
    );
}

#[test]
fn a_discard_is_cut_to_what_can_be_given_back() {
    let mut support = RangeSupport::new(4096, 512);
    for (offset, len, given) in [
        (4608, 1536, None),
        (4608, 8192, Some((8192, 4096))),
        (4096, 4096, Some((4096, 4096))),
        (7680, 1024, None),
    ] {
        let mut file = File::new([0; 3], 4096);
        run_on(&mut file, Op::Discard { offset, len }, &mut support).unwrap();
        let call = given.map(|(offset, len)| RangeStep::Fallocate {
            step: Punch,
            offset,
            len,
        });
        assert_eq!(file.calls, Vec::from_iter(call));
    }
}

#[test]
fn pieces_of_data_end_at_blocks() {
    let span = |at, end| Span { at, end };
    let table = [
        (span(0, 512), 512, 512),
        (span(512, 1 << 30), 512, ZERO_PIECE),
        (span(512, 1 << 30), 4096, 3584),
        (span(4096, 4608), 4096, 512),
        (span(4096, 4096 + 8704), 4096, 8192),
        (
            span(8192, u64::from(u32::MAX) + 8192 + 512),
            4096,
            ZERO_PIECE,
        ),
    ];
    for (span, block, expected) in table {
        assert_eq!(piece(span, block), expected, "{span:?}, {block}");
    }
}

proptest! {
    /// Whatever a file refuses: the range is zero afterwards, nothing else has changed, and blocks
    /// that are to stay have stayed.
    #[test]
    fn every_plan_does_what_was_asked(
        (first, last) in (0..LEN / 512, 0..LEN / 512),
        unmap: bool,
        answers in prop::array::uniform3(prop::sample::select(
            vec![0, libc::EOPNOTSUPP, libc::EINVAL, libc::ENOSYS, libc::EBUSY])),
        block in prop::sample::select(vec![512, 4096, 65536]),
        most in prop::sample::select(vec![512, 4096, u32::MAX]),
        twice: bool,
    ) {
        let (first, last) = (first.min(last), first.max(last));
        let mut file = File::new(answers, block);
        file.most = most;
        let mut support = RangeSupport::new(block, block.min(4096));
        let op = zero(first as u64 * 512, (last - first + 1) as u64 * 512, unmap);
        for _ in 0..=usize::from(twice) {
            prop_assert_eq!(run_on(&mut file, op, &mut support), Ok(()));
        }
        for (at, sector) in file.sectors.iter().enumerate() {
            if (first..=last).contains(&at) {
                prop_assert_eq!(sector.0, 0);
                prop_assert!(unmap || sector.1, "sector {} has lost its block", at);
            } else {
                prop_assert_eq!(*sector, FULL);
            }
        }
    }
}
