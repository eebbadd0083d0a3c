//! Discards and write-zeroes of a file or block device, as a sequence of steps of one system call
//! each. A pure state machine: the back end makes the calls, in whatever way it has (io_uring, a
//! thread of its own), and reports each result. Only [`probe`] asks the kernel, when a file is
//! opened.
//!
//! | request | calls, each where the one before it was refused | last resort |
//! |---|---|---|
//! | discard | punch a hole | nothing is done, and that is success |
//! | zeroes, blocks may be given back | punch a hole; zero the range | zeroes written as data |
//! | zeroes, blocks stay | zero the range; punch a hole and reserve it again | zeroes written as data |
//!
//! **Alignment.** Block devices refuse ranges that are not whole sectors of theirs. A call is given
//! the whole blocks inside the range ([`RangeSupport::call_block`]). What is left at the ends is
//! written as zeroes, and not discarded at all.
//!
//! **Refusals.** A call is *refused* if nothing was done and another way may do it: it is not
//! implemented, or not for this range. Every other error ends the request. A call that is not
//! implemented is not tried again ([`RangeSupport`] remembers that). No request ends with
//! EOPNOTSUPP, since to a driver that means that nothing was done.
//!
//! **Reserved blocks.** Zeroes written as data keep the blocks that the range has, and get those it
//! has not, on every file system that does not detect zeroes by itself. Where a range is punched
//! and reserved again, a power cut in between leaves zeroes without blocks, as QEMU's file-posix
//! does.
//!
//! Bounds: each step of data is at most [`ZERO_PIECE`] bytes, so that a request of 2 GiB is 2,048
//! steps, between which others have their turn and a cancelled request ends.

mod probe;

use super::SECTOR;
use super::backend::Op;
pub use probe::probe;
pub(crate) use probe::{queue_limit, try_punch};

/// Most bytes of zeroes that one step writes as data.
pub const ZERO_PIECE: u32 = 1 << 20;

/// A mode of fallocate, with KEEP_SIZE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallocateStep {
    /// FALLOC_FL_PUNCH_HOLE: the range becomes zero, its blocks are given back.
    Punch,
    /// FALLOC_FL_ZERO_RANGE: the range becomes zero, its blocks stay or are reserved.
    ZeroRange,
    /// Mode 0: blocks are reserved for the holes in the range.
    Reserve,
}

impl FallocateStep {
    /// The mode.
    pub fn mode(self) -> i32 {
        let mode = match self {
            Self::Punch => libc::FALLOC_FL_PUNCH_HOLE,
            Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
            Self::Reserve => 0,
        };
        mode | libc::FALLOC_FL_KEEP_SIZE
    }
}

/// One system call of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeStep {
    /// fallocate.
    Fallocate {
        /// Its mode.
        step: FallocateStep,
        /// First byte.
        offset: u64,
        /// Bytes, at least 1.
        len: u64,
    },
    /// A write of zeroes. It may write fewer bytes, as any write.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes, 1 to [`ZERO_PIECE`].
        len: u32,
    },
}

/// Progress of a request after one of its steps has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeProgress {
    /// [`RangePlan::step`] says how it goes on.
    Next,
    /// All is done.
    Done,
    /// It has failed with this errno, which is not EOPNOTSUPP.
    Failed(i32),
}

/// Calls that a file has, as far as is known: each is taken for possible until it is refused as not
/// implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeSupport {
    /// Bytes of which ranges given to fallocate are multiples, a power of two.
    pub call_block: u32,
    /// Bytes of which writes are multiples, a power of two: pieces of data end at one where the
    /// range does not end before.
    pub data_block: u32,
    /// Whether holes can be punched.
    pub punches: bool,
    /// Whether ranges can be zeroed.
    pub zeroes_ranges: bool,
    /// Whether blocks can be reserved.
    pub reserves: bool,
}

impl RangeSupport {
    /// Everything, for ranges and writes in multiples of so many bytes.
    pub fn new(call_block: u32, data_block: u32) -> Self {
        assert!(call_block.is_power_of_two() && data_block.is_power_of_two());
        assert!(
            data_block <= ZERO_PIECE,
            "a piece of data has a whole block"
        );
        Self {
            call_block,
            data_block,
            punches: true,
            zeroes_ranges: true,
            reserves: true,
        }
    }

    fn has(&self, step: FallocateStep) -> bool {
        match step {
            FallocateStep::Punch => self.punches,
            FallocateStep::ZeroRange => self.zeroes_ranges,
            FallocateStep::Reserve => self.reserves,
        }
    }

    fn forget(&mut self, step: FallocateStep) {
        match step {
            FallocateStep::Punch => self.punches = false,
            FallocateStep::ZeroRange => self.zeroes_ranges = false,
            FallocateStep::Reserve => self.reserves = false,
        }
    }
}

impl Default for RangeSupport {
    /// Of a regular file in the page cache, of which nothing is known yet.
    fn default() -> Self {
        Self::new(SECTOR as u32, SECTOR as u32)
    }
}

/// Bytes from `at` up to `end`; empty if they are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    at: u64,
    end: u64,
}

impl Span {
    const EMPTY: Self = Self { at: 0, end: 0 };

    fn new(at: u64, end: u64) -> Self {
        if at < end {
            Self { at, end }
        } else {
            Self::EMPTY
        }
    }

    fn is_empty(self) -> bool {
        self.at == self.end
    }

    /// The whole blocks inside.
    fn whole_blocks(self, block: u32) -> Self {
        let block = u64::from(block);
        // The end of a disk is an offset of a file, so rounding up does not overflow.
        Self::new(self.at.next_multiple_of(block), self.end / block * block)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    Discard,
    Zero { unmap: bool },
}

impl Goal {
    /// Calls that reach it, the best first.
    fn calls(self) -> &'static [FallocateStep] {
        match self {
            Self::Discard => &[FallocateStep::Punch],
            Self::Zero { unmap: true } => &[FallocateStep::Punch, FallocateStep::ZeroRange],
            Self::Zero { unmap: false } => &[FallocateStep::ZeroRange, FallocateStep::Punch],
        }
    }

    /// Whether blocks that were given back on the way are to be reserved again.
    fn reserves(self) -> bool {
        self == Self::Zero { unmap: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The whole blocks of the range are given to this call.
    Call(FallocateStep),
    /// Zeroes are written to the first span, then to the second.
    Data(Span, Span),
    Done,
}

/// A discard or write-zeroes request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangePlan {
    goal: Goal,
    range: Span,
    state: State,
}

impl RangePlan {
    /// The plan of a discard or write-zeroes request; `None` for other operations.
    pub fn of(op: Op, support: &RangeSupport) -> Option<Self> {
        let (goal, offset, len) = match op {
            Op::Discard { offset, len } => (Goal::Discard, offset, len),
            Op::WriteZeroes { offset, len, unmap } => (Goal::Zero { unmap }, offset, len),
            Op::Read { .. } | Op::Write { .. } | Op::Flush => return None,
        };
        let mut plan = Self {
            goal,
            range: Span::new(offset, offset + len),
            state: State::Done,
        };
        plan.state = match plan.range.whole_blocks(support.call_block).is_empty() {
            true => plan.without_calls(),
            false => plan.first_call(goal.calls(), support),
        };
        Some(plan)
    }

    /// The call to be made now; `None`: the request is done.
    pub fn step(&self, support: &RangeSupport) -> Option<RangeStep> {
        match self.state {
            State::Call(step) => {
                let Span { at, end } = self.range.whole_blocks(support.call_block);
                Some(RangeStep::Fallocate {
                    step,
                    offset: at,
                    len: end - at,
                })
            }
            State::Data(span, _) => Some(RangeStep::WriteZeroes {
                offset: span.at,
                len: piece(span, support.data_block),
            }),
            State::Done => None,
        }
    }

    /// Takes the result of the step: 0, or the bytes that were written, or a negative errno.
    pub fn ended(&mut self, result: i32, support: &mut RangeSupport) -> RangeProgress {
        let next = match (self.state, result) {
            (State::Call(step), 0..) => Ok(self.after_call(step, support)),
            (State::Call(step), _) => self.after_failed_call(step, -result, support),
            (State::Data(..), 0) => Err(libc::EIO),
            (State::Data(span, rest), 1..) => {
                let left = Span::new(span.at + u64::from(result.unsigned_abs()), span.end);
                Ok(data(left, rest))
            }
            (State::Data(..), _) => Err(-result),
            (State::Done, _) => Ok(State::Done),
        };
        match next {
            Ok(state) => {
                self.state = state;
                match state {
                    State::Done => RangeProgress::Done,
                    State::Call(_) | State::Data(..) => RangeProgress::Next,
                }
            }
            // A part of the request may have been done.
            Err(libc::EOPNOTSUPP) => RangeProgress::Failed(libc::EIO),
            Err(errno) => RangeProgress::Failed(errno),
        }
    }

    fn after_call(&self, step: FallocateStep, support: &RangeSupport) -> State {
        match self.goal {
            Goal::Discard => State::Done,
            goal if step == FallocateStep::Punch && goal.reserves() => {
                State::Call(FallocateStep::Reserve)
            }
            Goal::Zero { .. } => {
                let whole = self.range.whole_blocks(support.call_block);
                let head = Span::new(self.range.at, whole.at);
                let tail = Span::new(whole.end, self.range.end);
                data(head, tail)
            }
        }
    }

    fn after_failed_call(
        &self,
        step: FallocateStep,
        errno: i32,
        support: &mut RangeSupport,
    ) -> Result<State, i32> {
        if !is_refusal(errno) {
            return Err(errno);
        }
        if is_unimplemented(errno) {
            support.forget(step);
        }
        let calls = self.goal.calls();
        // One that is not among them came behind one of them, and there is none behind it.
        let tried = calls.iter().position(|call| *call == step);
        let left = tried.map_or(&[][..], |at| &calls[at + 1..]);
        Ok(self.first_call(left, support))
    }

    /// The first of these calls that the file has, or the last resort.
    fn first_call(&self, calls: &[FallocateStep], support: &RangeSupport) -> State {
        let can = |step: &&FallocateStep| {
            let leads_to_reserve = **step == FallocateStep::Punch && self.goal.reserves();
            support.has(**step) && (!leads_to_reserve || support.reserves)
        };
        match calls.iter().find(can) {
            Some(step) => State::Call(*step),
            None => self.without_calls(),
        }
    }

    /// The last resort, for the whole range.
    fn without_calls(&self) -> State {
        match self.goal {
            Goal::Discard => State::Done,
            Goal::Zero { .. } => data(self.range, Span::EMPTY),
        }
    }
}

/// Makes a request's calls one after the other in the calling thread. `call` answers as
/// [`RangePlan::ended`] takes it, and is not interrupted.
///
/// # Errors
/// The errno with which a step has failed, which is not EOPNOTSUPP.
pub fn run(
    mut plan: RangePlan,
    support: &mut RangeSupport,
    mut call: impl FnMut(RangeStep) -> i32,
) -> Result<(), i32> {
    while let Some(step) = plan.step(support) {
        if let RangeProgress::Failed(errno) = plan.ended(call(step), support) {
            return Err(errno);
        }
    }
    Ok(())
}

/// Writes zeroes to two spans, of which either may be empty.
fn data(first: Span, second: Span) -> State {
    match (first.is_empty(), second.is_empty()) {
        (true, true) => State::Done,
        (true, false) => State::Data(second, Span::EMPTY),
        (false, _) => State::Data(first, second),
    }
}

/// Bytes of the next piece: up to the next block where the span begins inside one, else whole
/// blocks where there are any.
fn piece(span: Span, block: u32) -> u32 {
    let left = u32::try_from(span.end - span.at).map_or(ZERO_PIECE, |left| left.min(ZERO_PIECE));
    let within = (span.at % u64::from(block)) as u32;
    if within != 0 {
        return left.min(block - within);
    }
    match left - left % block {
        0 => left,
        whole => whole,
    }
}

/// Whether a call that answers this has done nothing, and another one may do it: not implemented,
/// not for such a range, not for this file, or not while the device is in use.
fn is_refusal(errno: i32) -> bool {
    is_unimplemented(errno)
        || matches!(
            errno,
            libc::EINVAL | libc::EBUSY | libc::EPERM | libc::ENODEV | libc::ENOTTY
        )
}

/// Whether a call that answers this will answer it again, whatever the range.
fn is_unimplemented(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS)
}

#[cfg(test)]
mod tests;
