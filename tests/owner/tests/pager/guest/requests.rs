//! Requests: made, handed to devices, and checked when they end.

use fake_driver::AnyDriver;
use guest_mem::Gpa;
use vio::blk::request::{STATUS_IOERR, STATUS_OK, kind};

use super::{
    BUFFER, BUFFER_PAGES, Flying, Guest, IOVA, PAGE, RX, SECTOR, SLOTS, Slot, TX, WINDOW_PAGES,
    What,
};
use crate::world::{DATA, NET, REQUESTS, SECTORS, UNMAPPED};

impl Guest {
    pub(super) fn slot_page(function: usize, slot: usize) -> u64 {
        DATA / PAGE + (function * SLOTS + slot) as u64 * BUFFER_PAGES
    }

    pub(super) fn submit(&mut self) {
        let function = self.random.below(NET as u64 + 1) as usize;
        let at = self.random.below(SLOTS as u64) as usize;
        self.submit_to(function, at);
    }

    pub(super) fn submit_to(&mut self, function: usize, at: usize) {
        let slot = &self.functions[function].slots[at];
        if slot.flying.is_some() || slot.wait.is_some() {
            return;
        }
        let what = match function {
            NET => self.frame(at),
            _ => self.disk_request(function),
        };
        let Some((what, len)) = what else {
            return;
        };
        let parts = self.parts(len);
        let gpa = Self::slot_page(function, at) * PAGE;
        // Its buffer somewhere in the slot's window; behind the other unit everything lies where it
        // lies.
        let iova = match function {
            UNMAPPED => gpa,
            _ => {
                let window = (function * SLOTS + at) as u64 * WINDOW_PAGES;
                let page = window + self.random.below(WINDOW_PAGES - BUFFER_PAGES);
                for nth in 0..BUFFER_PAGES {
                    self.machine
                        .map(IOVA + (page + nth) * PAGE, gpa + nth * PAGE);
                }
                IOVA + page * PAGE
            }
        };
        self.fill(function, at, &what, &parts, gpa);
        let is_indirect = self.random.below(2) == 0;
        let queue = match what {
            What::Send { .. } => TX,
            _ => RX,
        };
        let head = self.make_available((function, queue, at), &what, &parts, iova, is_indirect);
        let slot = &mut self.functions[function].slots[at];
        slot.iova = (function != UNMAPPED).then_some(iova);
        slot.flying = Some(Flying {
            queue,
            head,
            what,
            parts,
            epoch: self.heals_in.is_none().then_some(self.epoch),
            is_surprised: false,
            is_revoked: false,
        });
    }

    /// A disk request, and how many bytes of data it has.
    fn disk_request(&mut self, function: usize) -> Option<(What, u64)> {
        let sectors = 1 + self.random.below(36);
        let sector = self.random.below(SECTORS - sectors);
        let range = sector..sector + sectors;
        let overlaps = |slot: &Slot| {
            let other = slot.flying.as_ref().map_or(0..0, Flying::sectors);
            other.start < range.end && range.start < other.end
        };
        if self.functions[function].slots.iter().any(overlaps) {
            return None;
        }
        Some(match self.random.percent() {
            0..45 => (What::Read { sector }, sectors * SECTOR),
            45..85 => {
                let mut data = vec![0; (sectors * SECTOR) as usize];
                self.random.fill(&mut data);
                (What::Write { sector, data }, sectors * SECTOR)
            }
            85..90 => (What::WriteZeroes { sector, sectors }, 16),
            90..95 => (What::Flush, 0),
            _ => (What::Id, 20),
        })
    }

    /// Slots below the half receive.
    fn frame(&mut self, slot: usize) -> Option<(What, u64)> {
        if slot < SLOTS / 2 {
            return Some((What::Receive, 1600));
        }
        let len = 60 + self.random.below(1400);
        let mut frame = vec![0; len as usize];
        self.random.fill(&mut frame);
        Some((What::Send { frame }, 12 + len))
    }

    /// Returns the parts of its buffer in which `len` bytes lie.
    fn parts(&mut self, len: u64) -> Vec<(u64, u32)> {
        let mut parts = Vec::new();
        let mut left = len;
        let mut at = self.random.below(1500);
        // So many bytes may be left out.
        let mut gaps = BUFFER - len - at;
        while left > 0 {
            let part = match self.random.below(3) {
                0 => left,
                _ => 1 + self.random.below(left.min(6000)),
            };
            let part = if parts.len() == 12 { left } else { part };
            parts.push((at, part as u32));
            left -= part;
            let gap = self.random.below(gaps.min(1200) + 1);
            gaps -= gap;
            at += part + gap;
        }
        parts
    }

    /// The guest writes what the request is to carry.
    fn fill(&mut self, function: usize, at: usize, what: &What, parts: &[(u64, u32)], gpa: u64) {
        let bytes = match what {
            What::Write { data, .. } => data.clone(),
            What::WriteZeroes { sector, sectors } => {
                let mut range = vec![0; 16];
                range[..8].copy_from_slice(&sector.to_le_bytes());
                range[8..12].copy_from_slice(&(*sectors as u32).to_le_bytes());
                range
            }
            What::Send { frame } => [&[0; 12], &frame[..]].concat(),
            _ => return,
        };
        let mut done = 0;
        for &(offset, len) in parts {
            let part = &bytes[done..done + len as usize];
            self.machine.cpu.put(gpa + offset, part);
            let own = &mut self.functions[function].slots[at].bytes;
            own[offset as usize..][..part.len()].copy_from_slice(part);
            done += part.len();
        }
    }

    fn make_available(
        &mut self,
        (function, queue, at): (usize, u16, usize),
        what: &What,
        parts: &[(u64, u32)],
        iova: u64,
        is_indirect: bool,
    ) -> u16 {
        let base = REQUESTS + function as u64 * 6 * PAGE;
        let header_at = base + 16 * at as u64;
        let status_at = base + PAGE + at as u64;
        let table_at = base + 2 * PAGE + 512 * at as u64;
        let data = parts.iter().map(|&(offset, len)| (iova + offset, len));
        let data: Vec<_> = data.collect();
        let (op, sector) = match what {
            What::Read { sector } => (Some(kind::IN), *sector),
            What::Write { sector, .. } => (Some(kind::OUT), *sector),
            What::WriteZeroes { .. } => (Some(kind::WRITE_ZEROES), 0),
            What::Flush => (Some(kind::FLUSH), 0),
            What::Id => (Some(kind::GET_ID), 0),
            What::Send { .. } | What::Receive => (None, 0),
        };
        let is_written = matches!(what, What::Read { .. } | What::Id | What::Receive);
        let (mut readable, mut writable) = match is_written {
            true => (Vec::new(), data),
            false => (data, Vec::new()),
        };
        if let Some(op) = op {
            let mut header = [0; 16];
            header[..4].copy_from_slice(&op.to_le_bytes());
            header[8..].copy_from_slice(&sector.to_le_bytes());
            self.machine.cpu.put(header_at, &header);
            self.machine.cpu.put(status_at, &[0xff]);
            readable.insert(0, (header_at, 16));
            writable.push((status_at, 1));
        }
        let driver = &mut self.functions[function].drivers[usize::from(queue)];
        let head = match is_indirect {
            true => driver.stage_indirect(Gpa::new(table_at), &readable, &writable),
            false => driver.stage(&readable, &writable),
        };
        if driver.publish() {
            self.machine.ring(function, queue);
        }
        head
    }

    // What comes of them.

    /// Takes what a function has completed, if it says so.
    pub(super) fn reap(&mut self, function: usize) {
        let looks = std::mem::take(&mut self.looks);
        for function in 0..=NET {
            if looks && self.machine.status(function) & 64 != 0 {
                self.reset(function);
            }
        }
        let all = 0..=NET;
        for function in all.filter(|other| looks || *other == function) {
            for queue in 0..self.functions[function].drivers.len() {
                let interrupts = self.machine.take_interrupts(function, queue as u16 + 1);
                if interrupts > 0 || looks {
                    self.take_used(function, queue as u16);
                }
            }
        }
    }

    fn take_used(&mut self, function: usize, queue: u16) {
        loop {
            let driver = &mut self.functions[function].drivers[usize::from(queue)];
            if let Some((head, len)) = driver.used() {
                self.complete(function, queue, head, len);
                continue;
            }
            // Asks for the next interrupt, and looks once more: one may have come before that.
            match driver {
                AnyDriver::Split(driver) => driver.put_used_event(driver.used_idx()),
                AnyDriver::Packed(driver) => driver.put_event_ahead(0),
            }
            match self.functions[function].drivers[usize::from(queue)].used() {
                Some((head, len)) => self.complete(function, queue, head, len),
                None => return,
            }
        }
    }

    fn complete(&mut self, function: usize, queue: u16, head: u16, len: u32) {
        let own = &mut self.functions[function];
        let is_it = |slot: &Slot| {
            let flying = slot.flying.as_ref();
            flying.is_some_and(|flying| (flying.queue, flying.head) == (queue, head))
        };
        let at = own.slots.iter().position(is_it);
        let at = at.expect("a completion of a request that is not in flight");
        let flying = own.slots[at].flying.take().unwrap();
        match function {
            NET => self.complete_frame(at, &flying, len),
            _ => self.complete_disk(function, at, &flying, len),
        }
        if self.functions[function].slots[at].wait.is_none() {
            self.unmap(function, at);
        }
    }

    /// Whether memory has failed since, or was unmapped under it.
    fn may_fail(&self, flying: &Flying) -> bool {
        flying.epoch != Some(self.epoch) || flying.is_surprised
    }

    fn complete_disk(&mut self, function: usize, at: usize, flying: &Flying, len: u32) {
        self.done.requests += 1;
        let mut status = [0];
        let base = REQUESTS + function as u64 * 6 * PAGE;
        self.machine
            .pager
            .peek(base + PAGE + at as u64, &mut status);
        let is_ok = status[0] == STATUS_OK;
        if !is_ok {
            assert_eq!(status[0], STATUS_IOERR, "{flying:?}");
            assert!(self.may_fail(flying), "it failed: {flying:?}");
            self.done.errors += 1;
        }
        let own = &mut self.functions[function];
        let range = flying.sectors();
        let (from, to) = (
            (range.start * SECTOR) as usize,
            (range.end * SECTOR) as usize,
        );
        let known = &mut own.known[range.start as usize..range.end as usize];
        match &flying.what {
            What::Write { data, .. } => {
                known.fill(is_ok);
                own.contents[from..to].copy_from_slice(data);
            }
            What::WriteZeroes { .. } => {
                known.fill(is_ok);
                own.contents[from..to].fill(0);
            }
            What::Read { .. } if is_ok => {
                assert_eq!(u64::from(len), flying.len() + 1, "{flying:?}");
                let mut data = own.contents[from..to].to_vec();
                // For sectors of unknown content any data is right: what was read is taken for it.
                if !known.iter().all(|known| *known) {
                    let seen = self.seen(function, at, flying);
                    let known = &self.functions[function].known[range.start as usize..];
                    for (nth, known) in known[..data.len() / SECTOR as usize].iter().enumerate() {
                        let part = nth * SECTOR as usize..(nth + 1) * SECTOR as usize;
                        if !known {
                            data[part.clone()].copy_from_slice(&seen[part]);
                        }
                    }
                }
                self.expect(function, at, flying, &data);
            }
            What::Id if is_ok => {
                self.expect(function, at, flying, b"exitless\0\0\0\0\0\0\0\0\0\0\0\0");
            }
            What::Read { .. } | What::Id => {
                let seen = self.seen(function, at, flying);
                self.expect(function, at, flying, &seen);
            }
            _ => {}
        }
        self.check(function, at, &flying.what);
    }

    fn complete_frame(&mut self, at: usize, flying: &Flying, len: u32) {
        let sent = self.machine.cable.take_sent();
        self.expected.extend(sent);
        match &flying.what {
            What::Send { frame } => {
                // It may have been received already.
                assert!(len == 0, "bytes written into what is to be sent");
                let _ = frame;
            }
            _ if (len as usize) < 12 => {
                assert!(self.may_fail(flying), "no frame in {flying:?}");
                self.expected.pop_front();
                self.done.errors += 1;
                let seen = self.seen(NET, at, flying);
                self.expect(NET, at, flying, &seen);
            }
            _ => {
                self.done.frames += 1;
                let frame = self
                    .expected
                    .pop_front()
                    .expect("a frame that nobody has sent");
                assert_eq!(len as usize, 12 + frame.len());
                let mut wanted = [&[0; 10], &[1, 0][..], &frame].concat();
                let seen = self.seen(NET, at, flying);
                wanted.extend_from_slice(&self.before(NET, at, flying)[wanted.len()..]);
                assert!(seen.len() == wanted.len());
                self.expect(NET, at, flying, &wanted);
            }
        }
        self.check(NET, at, &flying.what);
    }

    /// Returns the bytes that lie in a request's parts now.
    fn seen(&self, function: usize, at: usize, flying: &Flying) -> Vec<u8> {
        let mut bytes = vec![0; BUFFER as usize];
        let gpa = Self::slot_page(function, at) * PAGE;
        self.machine.pager.peek(gpa, &mut bytes);
        parts_of(&bytes, flying)
    }

    /// Returns the bytes that were known to lie there before the request.
    fn before(&self, function: usize, at: usize, flying: &Flying) -> Vec<u8> {
        parts_of(&self.functions[function].slots[at].bytes, flying)
    }

    /// This is what has to lie in a request's parts, unless the device may not reach them any more.
    fn expect(&mut self, function: usize, at: usize, flying: &Flying, data: &[u8]) {
        if flying.is_revoked {
            return;
        }
        let bytes = &mut self.functions[function].slots[at].bytes;
        let mut done = 0;
        for &(offset, len) in &flying.parts {
            let part = &data[done..done + len as usize];
            bytes[offset as usize..][..part.len()].copy_from_slice(part);
            done += part.len();
        }
    }

    /// Every byte of a slot's buffer.
    pub(super) fn check(&mut self, function: usize, at: usize, what: &What) {
        let gpa = Self::slot_page(function, at) * PAGE;
        // As the guest reads it, or as it lies wherever it lies.
        let seen = match self.random.below(2) {
            0 => self.machine.cpu.get(gpa, BUFFER as usize),
            _ => {
                let mut bytes = vec![0; BUFFER as usize];
                self.machine.pager.peek(gpa, &mut bytes);
                bytes
            }
        };
        let bytes = &self.functions[function].slots[at].bytes;
        if let Some(wrong) = (0..seen.len()).find(|at| seen[*at] != bytes[*at]) {
            let all = (0..seen.len()).filter(|at| seen[*at] != bytes[*at]).count();
            panic!(
                "function {function}, slot {at}: {:#x} for {:#x} at {wrong:#x} of the buffer, \
                 {all} wrong bytes: {what:?}",
                seen[wrong], bytes[wrong]
            );
        }
    }
}

fn parts_of(bytes: &[u8], flying: &Flying) -> Vec<u8> {
    let parts = flying.parts.iter();
    parts
        .flat_map(|&(offset, len)| &bytes[offset as usize..][..len as usize])
        .copied()
        .collect()
}
