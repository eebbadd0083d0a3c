//! Transmit and receive queues of a virtio-net driver. The hot paths make no system call unless the
//! device wants a kick.

use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;
use vhost_client::notifiers::Notifiers;

use crate::frame::{self, HEADER_LEN, Mac, NUM_BUFFERS};
use crate::layout::Layout;
use crate::memory::Memory;
use crate::ring::{Ring, RingError, Segment};

/// Greatest number of frames handled at a time.
pub const BURST: usize = 32;

/// A ring with one entry for each buffer; the token of an entry is the buffer's number.
#[derive(Debug)]
struct Queue {
    index: u16,
    ring: Ring,
    notifiers: Notifiers,
}

impl Queue {
    fn new(index: u16, layout: &Layout, features: u64) -> Result<Self, Errno> {
        let areas = layout.areas();
        Ok(Self {
            index,
            ring: Ring::new(areas.ring_size, areas.places(index), features),
            notifiers: Notifiers::new()?,
        })
    }

    #[inline]
    fn publish(&mut self, memory: &Memory) {
        if self.ring.publish(memory) {
            self.notifiers.kick();
        }
    }
}

/// A transmit queue.
#[derive(Debug)]
pub struct Transmit {
    queue: Queue,
    free: Vec<u16>,
    /// Length of every frame in bytes.
    frame_len: u32,
}

impl Transmit {
    /// Creates the transmit queue of this ring index, with calls disabled.
    ///
    /// # Errors
    /// No eventfds are left.
    pub fn new(index: u16, layout: &Layout, features: u64) -> Result<Self, Errno> {
        Ok(Self {
            queue: Queue::new(index, layout, features)?,
            free: (0..layout.areas().ring_size).rev().collect(),
            frame_len: frame::MIN_FRAME,
        })
    }

    /// Writes the common part of all frames into every buffer. No frame is outstanding yet.
    pub fn prepare(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        frame_len: u32,
        (to, from): (Mac, Mac),
        number: u16,
    ) {
        self.frame_len = frame_len;
        for &buffer in &self.free {
            frame::prepare(
                memory,
                layout.frame(self.queue.index, buffer),
                to,
                from,
                number,
            );
        }
    }

    /// Writes header and frame into every buffer, to be sent unchanged.
    pub fn prepare_fixed(&mut self, memory: &Memory, layout: &Layout, header: &[u8], frame: &[u8]) {
        self.frame_len = frame.len() as u32;
        for &buffer in &self.free {
            memory.write(layout.header(self.queue.index, buffer), header);
            memory.write(layout.frame(self.queue.index, buffer), frame);
        }
    }

    /// Takes back at most `most` of the buffers that the device has returned. Returns their number.
    ///
    /// # Errors
    /// The device has broken the ring's protocol.
    #[inline]
    pub fn reclaim(&mut self, memory: &Memory, most: usize) -> Result<usize, RingError> {
        for count in 0..most {
            let Some(used) = self.queue.ring.pop(memory)? else {
                return Ok(count);
            };
            self.free.push(used.token);
        }
        Ok(most)
    }

    /// Sends at most `count` frames. `stamp` is called for each with its offset in memory, before
    /// it is made available. Returns the number of frames sent.
    #[inline]
    pub fn send(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        count: usize,
        mut stamp: impl FnMut(usize),
    ) -> usize {
        let next = self.free.len().saturating_sub(count.min(BURST));
        for &buffer in &self.free[next..] {
            // The device has read this line: fetching it for writing is the most expensive part.
            memory.prefetch_to_write(layout.frame(self.queue.index, buffer));
        }
        let mut sent = 0;
        while sent < count {
            let Some(buffer) = self.free.pop() else { break };
            stamp(layout.frame(self.queue.index, buffer));
            let segment = Segment {
                addr: Layout::gpa(layout.header(self.queue.index, buffer)),
                len: HEADER_LEN + self.frame_len,
                is_writable: false,
            };
            let has_room = self.queue.ring.add(memory, buffer, &[segment], None);
            assert!(has_room, "the ring has an entry for each buffer");
            sent += 1;
        }
        if sent > 0 {
            self.queue.publish(memory);
        }
        sent
    }

    /// Sends one frame, which fits into a buffer, with this header. Returns false if no buffer is
    /// free.
    pub fn send_one(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        header: &[u8; HEADER_LEN as usize],
        frame: &[u8],
    ) -> bool {
        self.frame_len = frame.len() as u32;
        let write = |at: usize| {
            memory.write(at - header.len(), header);
            memory.write(at, frame);
        };
        self.send(memory, layout, 1, write) == 1
    }

    /// Returns the number of free buffers.
    pub const fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the length of every frame in bytes.
    pub const fn frame_len(&self) -> u32 {
        self.frame_len
    }

    /// Returns the number of frames that the device has.
    pub fn outstanding(&self) -> u16 {
        self.queue.ring.outstanding()
    }
}

/// A received frame, still in its buffers.
#[derive(Clone, Copy, Debug)]
pub struct Arrived {
    /// Offset of its first byte in memory.
    pub at: usize,
    /// Its length in bytes.
    pub len: u32,
    /// Number of its bytes in the first buffer.
    pub first_len: u32,
}

/// Violation of the specification in a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Fewer bytes than a header, or more than the buffer has room for.
    Length,
    /// A number of buffers that is 0 or more than the ring has.
    Buffers,
}

/// A receive queue.
#[derive(Debug)]
pub struct Receive {
    queue: Queue,
    /// Length of a buffer in bytes, with the header.
    buffer_len: u32,
    is_mergeable: bool,
    /// Buffers and bytes of the incomplete frame, and the number of buffers that are missing.
    pieces: Vec<(u16, u32)>,
    awaited: u16,
    batch: Vec<(u16, u32)>,
    /// Buffers that are returned to the device once there are `post_at` of them. With fewer at a
    /// time, both sides would alternately write the same cache lines.
    spare: Vec<u16>,
    post_at: usize,
}

impl Receive {
    /// Creates the receive queue of this ring index.
    ///
    /// # Errors
    /// No eventfds are left.
    pub fn new(
        index: u16,
        layout: &Layout,
        features: u64,
        buffer_len: u32,
        is_mergeable: bool,
    ) -> Result<Self, Errno> {
        Ok(Self {
            queue: Queue::new(index, layout, features)?,
            buffer_len,
            is_mergeable,
            pieces: Vec::new(),
            awaited: 0,
            batch: Vec::with_capacity(BURST),
            spare: Vec::with_capacity(2 * BURST),
            post_at: usize::from(layout.areas().ring_size / 8).clamp(1, BURST),
        })
    }

    /// Gives all buffers to the device.
    pub fn post_all(&mut self, memory: &Memory, layout: &Layout) {
        for buffer in 0..layout.areas().ring_size {
            self.post(memory, layout, buffer);
        }
        self.queue.publish(memory);
    }

    #[inline]
    fn post_spare(&mut self, memory: &Memory, layout: &Layout) {
        let mut spare = std::mem::take(&mut self.spare);
        for &buffer in &spare {
            self.post(memory, layout, buffer);
        }
        self.queue.publish(memory);
        spare.clear();
        self.spare = spare;
    }

    #[inline]
    fn post(&mut self, memory: &Memory, layout: &Layout, buffer: u16) {
        let segment = Segment {
            addr: Layout::gpa(layout.header(self.queue.index, buffer)),
            len: self.buffer_len,
            is_writable: true,
        };
        let has_room = self.queue.ring.add(memory, buffer, &[segment], None);
        assert!(has_room, "the ring has an entry for each buffer");
    }

    /// Takes at most `most` returned buffers, but no more than a burst. Passes each complete frame
    /// to `take`, and returns the buffers to the device. Returns the number of buffers.
    ///
    /// # Errors
    /// The device has broken the ring's protocol.
    #[inline]
    pub fn receive(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        most: usize,
        mut take: impl FnMut(Result<Arrived, Malformed>, &Pieces<'_>),
    ) -> Result<usize, RingError> {
        let mut batch = std::mem::take(&mut self.batch);
        while batch.len() < most.min(BURST) {
            let Some(used) = self.queue.ring.pop(memory)? else {
                break;
            };
            let header = layout.header(self.queue.index, used.token);
            memory.prefetch(header);
            memory.prefetch(header + HEADER_LEN as usize);
            batch.push((used.token, used.len));
        }
        let count = batch.len();
        for &(buffer, len) in &batch {
            self.take_buffer(memory, layout, buffer, len, &mut take);
        }
        if self.spare.len() >= self.post_at.min(most) {
            self.post_spare(memory, layout);
        }
        batch.clear();
        self.batch = batch;
        Ok(count)
    }

    #[inline]
    fn take_buffer(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        buffer: u16,
        len: u32,
        take: &mut impl FnMut(Result<Arrived, Malformed>, &Pieces<'_>),
    ) {
        let header = layout.header(self.queue.index, buffer);
        let num_buffers = match self.is_mergeable && self.awaited == 0 {
            true => u16::from_le(memory.load_u16(header + NUM_BUFFERS, Relaxed)),
            false => 1,
        };
        if self.awaited == 0 && num_buffers == 1 && (HEADER_LEN..=self.buffer_len).contains(&len) {
            let arrived = Arrived {
                at: header + HEADER_LEN as usize,
                len: len - HEADER_LEN,
                first_len: len - HEADER_LEN,
            };
            let pieces = Pieces {
                memory,
                layout,
                queue: self.queue.index,
                pieces: &[(buffer, len)],
            };
            take(Ok(arrived), &pieces);
            self.spare.push(buffer);
            return;
        }
        self.take_piece(memory, layout, (buffer, len), num_buffers, take);
    }

    /// Handles a buffer of a frame that has several, or one that is malformed.
    #[cold]
    fn take_piece(
        &mut self,
        memory: &Memory,
        layout: &Layout,
        (buffer, len): (u16, u32),
        num_buffers: u16,
        take: &mut impl FnMut(Result<Arrived, Malformed>, &Pieces<'_>),
    ) {
        let is_first = self.awaited == 0;
        let least = if is_first { HEADER_LEN } else { 1 };
        let fault = if !(least..=self.buffer_len).contains(&len) {
            Some(Malformed::Length)
        } else if is_first && !(1..=layout.areas().ring_size).contains(&num_buffers) {
            Some(Malformed::Buffers)
        } else {
            None
        };
        if is_first {
            self.awaited = num_buffers;
        }
        self.pieces.push((buffer, len));
        self.awaited = if fault.is_some() { 0 } else { self.awaited - 1 };
        if self.awaited > 0 {
            return;
        }
        let pieces = std::mem::take(&mut self.pieces);
        let outcome = fault.map_or_else(
            || {
                let (first, first_len) = pieces[0];
                let all: u32 = pieces.iter().map(|piece| piece.1).sum();
                Ok(Arrived {
                    at: layout.frame(self.queue.index, first),
                    len: all - HEADER_LEN,
                    first_len: first_len - HEADER_LEN,
                })
            },
            Err,
        );
        let view = Pieces {
            memory,
            layout,
            queue: self.queue.index,
            pieces: &pieces,
        };
        take(outcome, &view);
        self.spare.extend(pieces.iter().map(|piece| piece.0));
        self.pieces = pieces;
        self.pieces.clear();
    }
}

/// Buffers of a received frame.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    memory: &'a Memory,
    layout: &'a Layout,
    queue: u16,
    pieces: &'a [(u16, u32)],
}

impl Pieces<'_> {
    /// Returns the virtio-net header of the frame.
    pub fn header(&self) -> [u8; HEADER_LEN as usize] {
        let mut header = [0; HEADER_LEN as usize];
        if let Some((buffer, _)) = self.pieces.first() {
            let at = self.layout.header(self.queue, *buffer);
            self.memory.read(at, &mut header);
        }
        header
    }

    /// Copies the whole frame into `into`.
    pub fn copy(&self, into: &mut Vec<u8>) {
        into.clear();
        let mut skipped = HEADER_LEN as usize;
        for &(buffer, len) in self.pieces {
            let start = into.len();
            into.resize(start + len as usize - skipped, 0);
            let at = self.layout.header(self.queue, buffer) + skipped;
            self.memory.read(at, &mut into[start..]);
            skipped = 0;
        }
    }
}

/// The two queues of a queue pair; virtio numbers the receive queue first.
#[derive(Debug)]
pub struct Pair {
    /// Ring 2n.
    pub receive: Receive,
    /// Ring 2n + 1.
    pub transmit: Transmit,
}

impl Pair {
    /// Returns the kicks written and the calls read, of both rings, since the last such call.
    pub fn take_events(&mut self) -> (u64, u64) {
        let (mut kicks, mut calls) = (0, 0);
        for queue in [&mut self.receive.queue, &mut self.transmit.queue] {
            queue.notifiers.take_calls();
            kicks += queue.notifiers.kicks;
            calls += queue.notifiers.calls;
            queue.notifiers.start_counting();
        }
        (kicks, calls)
    }

    /// Disables calls. To be called once the rings run.
    pub fn disarm(&mut self, memory: &Memory) {
        self.receive.queue.ring.disarm(memory);
        self.transmit.queue.ring.disarm(memory);
    }

    /// Returns the rings with their notifiers, as the back end receives them: receive, then
    /// transmit.
    pub fn rings(&self) -> [(u8, &Notifiers); 2] {
        [&self.receive.queue, &self.transmit.queue]
            .map(|queue| (queue.index as u8, &queue.notifiers))
    }
}
