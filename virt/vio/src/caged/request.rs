//! One request, from its chain to its used element.

use guest_mem::{Access, Dma, Intent, KeepAlive, Stop, Wanted};
use worker_area::{Answer, Totals, Window};

use super::Area;
use super::copy::{copy_in, copy_out};
use crate::DeviceStats;
use crate::blk::request::{STATUS_IOERR, STATUS_OK};
use crate::ring::{Chain, Segment, Token, slice};

/// Where a request stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Free,
    /// Its window at [`Request::at`] is to be given to the worker.
    ToSubmit,
    /// The worker has it.
    Out,
    /// The worker has answered.
    Answered(Answer),
    /// Its data cannot be accessed: only the status is to be written.
    Refused,
}

/// One request. Its list keeps its capacity from request to request.
#[derive(Debug, Default)]
pub(super) struct Request {
    pub(super) state: State,
    /// Number of its queue.
    pub(super) queue: u16,
    pub(super) token: Option<Token>,
    /// Segments that the chain gives the device to read, and behind them those to write.
    segments: Vec<Segment>,
    /// Number of the former.
    read_count: usize,
    totals: Totals,
    /// Position of the window.
    at: u64,
    /// Bytes of the windows before that the device wrote.
    written: u32,
}

impl Request {
    /// Takes over what `chain` says, whose ends have been checked.
    pub(super) fn begin(&mut self, queue: u16, chain: &Chain, area: &Area) {
        let (readable, writable) = (chain.readable(), chain.writable());
        self.queue = queue;
        self.token = None;
        self.segments.clear();
        let count = readable.segments().len() + writable.segments().len();
        // No more than that: capacity is kept from request to request, and bounded by a chain's.
        self.segments.reserve_exact(count);
        self.segments.extend_from_slice(readable.segments());
        self.segments.extend_from_slice(writable.segments());
        self.read_count = readable.segments().len();
        self.totals = Totals {
            readable: readable.len() - area.shape().head(),
            writable: writable.len() - area.shape().foot(),
        };
        self.restart();
    }

    /// Goes back to its first window.
    pub(super) fn restart(&mut self) {
        self.state = State::ToSubmit;
        (self.at, self.written) = (0, 0);
    }

    fn readable(&self) -> &[Segment] {
        &self.segments[..self.read_count]
    }

    fn writable(&self) -> &[Segment] {
        &self.segments[self.read_count..]
    }

    fn window(&self, area: &Area) -> Window {
        area.shape().window(self.totals, self.at)
    }

    /// Bytes of the window.
    pub(super) fn window_bytes(&self, area: &Area) -> u64 {
        let window = self.window(area);
        window.end() - window.at
    }

    /// Segments of the window that the device writes, of which it wrote `written` bytes.
    fn written_segments(
        &self,
        window: Window,
        written: u32,
    ) -> impl Iterator<Item = Segment> + use<'_> {
        // Behind the bytes that are read, of which a window that has written ones has the last.
        let skip = (window.at + u64::from(window.readable))
            .saturating_sub(u64::from(self.totals.readable));
        slice(self.writable(), skip as u32, written)
    }

    fn foot(&self, area: &Area) -> impl Iterator<Item = Segment> + use<'_> {
        slice(self.writable(), self.totals.writable, area.shape().foot())
    }

    /// Copies the window's bytes into the slot. Its state is the caller's to change.
    pub(super) fn fill<D: Dma>(
        &self,
        slot: u32,
        area: &Area,
        dma: &mut D,
        keep: Option<&KeepAlive>,
    ) -> Access<()> {
        let (window, head) = (self.window(area), area.shape().head());
        if window.is_first() {
            copy_in(dma, keep, slice(self.readable(), 0, head), area.head(slot))?;
        }
        if window.readable == 0 {
            return Ok(());
        }
        // Inside the bytes that are read, which are fewer than 2^32.
        let from = head + window.at as u32;
        let segments = slice(self.readable(), from, window.readable);
        copy_in(dma, keep, segments, area.data(slot))
    }

    /// Gives the window, which is [filled](Self::fill), to the worker.
    pub(super) fn submit(&mut self, slot: u32, area: &mut Area) {
        let window = self.window(area);
        area.submit(slot, self.totals, window);
        self.state = State::Out;
    }

    /// Copies what the device wrote of its window into the chain. A fault of it refuses the
    /// request.
    pub(super) fn copy_back<D: Dma>(
        &mut self,
        slot: u32,
        area: &Area,
        answer: Answer,
        dma: &mut D,
        keep: Option<&KeepAlive>,
    ) -> Access<()> {
        let window = self.window(area);
        if answer.written == 0 {
            return Ok(());
        }
        let from = area.data(slot);
        let from = from.slice(window.writable_at(), answer.written);
        let segments = self.written_segments(window, answer.written);
        match copy_out(dma, keep, segments, from) {
            Err(Stop::Fault(_)) => {
                self.state = State::Refused;
                Ok(())
            }
            done => done,
        }
    }

    /// The window is done, and another one comes.
    pub(super) fn advance(&mut self, area: &Area, written: u32) {
        self.at = self.window(area).end();
        self.written += written;
        self.state = State::ToSubmit;
    }

    /// Writes the status of a request that is over, whose data are there; the status, and the
    /// number of bytes that the device wrote in all.
    pub(super) fn finish<D: Dma>(
        &self,
        slot: u32,
        area: Option<&Area>,
        dma: &mut D,
    ) -> Access<(u8, u32)> {
        let foot = match (self.state, area) {
            (State::Answered(_), Some(area)) => {
                let mut foot = [0];
                area.foot(slot).read(0, &mut foot);
                foot[0]
            }
            _ => STATUS_IOERR,
        };
        let last = slice(self.writable(), self.totals.writable, 1);
        for segment in last {
            dma.write(segment.iova, &[foot])?;
        }
        let data = match self.state {
            State::Answered(answer) if foot == STATUS_OK => self.written + answer.written,
            _ => 0,
        };
        Ok((foot, data + 1))
    }

    /// Counts the request as over.
    pub(super) fn count(&self, status: u8, written: u32, stats: &mut DeviceStats) {
        if status != STATUS_OK {
            stats.errors += 1;
            return;
        }
        stats.read_bytes += u64::from(written - 1);
        stats.written_bytes += u64::from(self.totals.readable);
    }

    /// Returns the guest memory that its next step accesses.
    pub(super) fn wanted(&self, area: &Area) -> impl Iterator<Item = Wanted> + use<'_> {
        let (window, head) = (self.window(area), area.shape().head());
        let is_back = matches!(self.state, State::Answered(_));
        let (read, written) = match is_back {
            true => (0, window.writable),
            false if window.is_first() => (head + window.readable, 0),
            false => (window.readable, 0),
        };
        let from = match window.is_first() {
            true => 0,
            false => head.saturating_add(window.at.min(u64::from(u32::MAX)) as u32),
        };
        let read = slice(self.readable(), from, read);
        let read = read.map(|segment| (segment.iova, segment.len, Intent::Read));
        let written = self
            .written_segments(window, written)
            .chain(self.foot(area))
            .map(|segment| (segment.iova, segment.len, Intent::Write));
        read.chain(written)
    }
}
