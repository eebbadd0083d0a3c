//! A driver, a device that does nothing but hold on to chains, and an account of every request
//! between them.

use std::collections::VecDeque;

use fake_mem::PendingDma;
use guest_mem::{Dma, Stop};

use super::*;
use crate::fake_driver::{AnyDriver, Buffer};
use crate::ring::{Ring, RingStart, Single, Token};

pub(super) const PACKED: u64 = ALL | feature::RING_PACKED;

/// Request of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) readable: Vec<Buffer>,
    pub(super) writable: Vec<Buffer>,
    pub(super) id: u16,
}

impl Request {
    pub(super) fn writable_len(&self) -> u32 {
        self.writable.iter().map(|(_, len)| len).sum()
    }
}

pub(super) struct World {
    pub(super) driver: AnyDriver<ArrayMem>,
    pub(super) ring: Ring,
    pub(super) dma: PendingDma<FlatDma>,
    pub(super) chain: Chain,
    pub(super) in_order: bool,
    /// Offered and not taken.
    pub(super) offered: VecDeque<Request>,
    /// Taken and not ended.
    pub(super) held: Vec<(Token, Request)>,
    /// In the order of taking: those not returned, and with what length they ended.
    pub(super) account: VecDeque<(Request, Option<u32>)>,
    /// Number of further chains that the driver may find.
    pub(super) published: usize,
    pub(super) returned: usize,
    number: u64,
}

pub(super) const TABLES: u64 = 0x8_0000;

impl World {
    pub(super) fn new(size: u16, features: u64) -> Self {
        let memory = ArrayMem::new(1 << 20);
        let dma = PendingDma::never(FlatDma::new(memory.clone()));
        let driver = AnyDriver::new(memory, Gpa::new(RINGS), 0, size, features);
        Self::with(driver, dma, features)
    }

    pub(super) fn with(
        driver: AnyDriver<ArrayMem>,
        dma: PendingDma<FlatDma>,
        features: u64,
    ) -> Self {
        let ring = Ring::new(&driver.config(), 32768, features).unwrap();
        Self {
            driver,
            ring,
            dma,
            chain: Chain::new(),
            in_order: features & feature::IN_ORDER != 0,
            offered: VecDeque::new(),
            held: Vec::new(),
            account: VecDeque::new(),
            published: 0,
            returned: 0,
            number: 0,
        }
    }

    /// Both sides begin at this position.
    pub(super) fn start_at(&mut self, position: u16) -> RingStart {
        let start = RingStart::from(self.driver.start_at(position));
        self.ring.start(start.clone()).unwrap();
        start
    }

    /// Repeats a step that may wait until it does not.
    pub(super) fn again<T>(
        &mut self,
        mut step: impl FnMut(&mut Ring, &mut PendingDma<FlatDma>, &mut Chain) -> Result<T, RingStop>,
    ) -> T {
        for _ in 0..1000 {
            match step(&mut self.ring, &mut self.dma, &mut self.chain) {
                Ok(done) => return done,
                Err(RingStop::Access(Stop::Pending(ticket))) => {
                    assert_eq!(self.ring.parked(), Some(Parked::Ticket(ticket)));
                    self.ring.ticket_done(ticket);
                    assert_eq!(self.ring.parked(), None);
                }
                Err(stop) => panic!("{stop:?}"),
            }
        }
        panic!("waits for ever");
    }

    /// Stages a request of buffers of these lengths, if there is room.
    pub(super) fn offer(&mut self, read: &[u32], write: &[u32], indirect: bool) -> bool {
        let count = if indirect {
            1
        } else {
            read.len() + write.len()
        };
        if self.driver.free() < count {
            return false;
        }
        // Addresses that no other request of the test has.
        self.number += 1;
        let base = self.number << 24;
        let buffers = |lens: &[u32], base: u64| -> Vec<Buffer> {
            (0..)
                .zip(lens)
                .map(|(at, &len)| (base + 0x1_0000 * at, len))
                .collect()
        };
        let (readable, writable) = (buffers(read, base), buffers(write, base + 0x80_0000));
        let id = if indirect {
            let table = TABLES + 0x100 * (self.number % 0x400);
            self.driver
                .stage_indirect(Gpa::new(table), &readable, &writable)
        } else {
            self.driver.stage(&readable, &writable)
        };
        let request = Request {
            readable,
            writable,
            id,
        };
        self.offered.push_back(request);
        true
    }

    /// Takes one chain and checks that it is the next one offered. Returns whether there was one.
    pub(super) fn take(&mut self) -> bool {
        if !self.again(|ring, dma, chain| ring.peek(dma, chain)) {
            return false;
        }
        let request = self.offered.pop_front().expect("nothing was offered");
        assert_eq!(segments(self.chain.readable()), request.readable);
        assert_eq!(segments(self.chain.writable()), request.writable);
        assert_eq!(self.chain.head(), request.id);
        let token = self.ring.advance(&self.chain);
        self.account.push_back((request.clone(), None));
        self.held.push((token, request));
        true
    }

    /// Takes, and ends, as many of the next chains as are one descriptor each, at most `most`.
    /// Returns their number. `written` maps the writable length of each to the length written.
    pub(super) fn answer_row(&mut self, most: usize, written: impl Fn(u32) -> u32) -> usize {
        let mut row = [Single::EMPTY; 40];
        let row = &mut row[..most];
        let count = self.again(|ring, dma, _| ring.peek_singles(dma, row));
        self.answer(&row[..count], written);
        count
    }

    /// Takes and ends these, which are the next ones offered.
    pub(super) fn answer(&mut self, row: &[Single], written: impl Fn(u32) -> u32) {
        let mut lens = Vec::new();
        for single in row {
            let request = self.offered.pop_front().expect("nothing was offered");
            let buffers: Vec<_> = request.readable.iter().chain(&request.writable).collect();
            assert_eq!(buffers, [&(single.iova().raw(), single.len())]);
            assert_eq!(single.is_writable(), request.readable.is_empty());
            let len = written(request.writable_len());
            lens.push(len);
            self.account.push_back((request, Some(len)));
        }
        let mut left = Vec::new();
        let lens = lens.iter().copied();
        self.ring
            .answer_singles(&mut self.dma, row, lens, |token, len| {
                left.push((token, len));
            });
        for (token, len) in left {
            self.again(|ring, dma, _| ring.stage(dma, token, len));
        }
    }

    /// Ends a request that is held.
    pub(super) fn end(&mut self, which: usize, len: u32) {
        let (token, request) = self.held.remove(which);
        self.again(|ring, dma, _| ring.stage(dma, token, len));
        let entry = self.account.iter_mut().find(|(own, _)| *own == request);
        entry.expect("taken").1 = Some(len);
    }

    /// Publishes, and returns the number of chains published.
    pub(super) fn publish(&mut self) -> usize {
        let staged = usize::from(self.ring.staged());
        let ended = self.account.iter().filter(|(_, len)| len.is_some()).count();
        let in_order = self
            .account
            .iter()
            .take_while(|(_, len)| len.is_some())
            .count();
        let want = if self.in_order { in_order } else { ended };
        assert_eq!(staged + self.published, want);
        self.again(|ring, dma, _| ring.publish(dma));
        assert_eq!(self.ring.staged(), 0);
        self.published += staged;
        staged
    }

    /// The driver takes back all chains that were published, and nothing else.
    pub(super) fn reap(&mut self) {
        let mut found = 0;
        while let Some((id, len)) = self.driver.used() {
            let at = self
                .account
                .iter()
                .position(|(own, ended)| own.id == id && ended.is_some());
            let at = at.expect("returned before it ended");
            assert!(!self.in_order || at == 0, "out of order");
            let (_, ended) = self.account.remove(at).expect("found");
            assert_eq!(ended, Some(len));
            found += 1;
        }
        assert_eq!(found, self.published);
        self.published = 0;
        self.returned += found;
    }

    /// Everything offered is served and returned.
    pub(super) fn drain(&mut self) {
        self.driver.publish();
        while self.take() {}
        assert!(self.offered.is_empty());
        while !self.held.is_empty() {
            let len = self.held[0].1.writable_len();
            self.end(0, len);
        }
        self.publish();
        self.reap();
        assert!(self.account.is_empty());
        assert_eq!(self.ring.in_flight(), 0);
        assert_eq!(self.driver.free(), usize::from(self.driver.size()));
    }

    /// All windows go stale.
    pub(super) fn flush(&mut self) {
        self.dma.inner_mut().iommu.flush();
        self.dma.forget();
    }

    pub(super) fn has_available(&mut self) -> bool {
        self.again(|ring, dma, _| ring.has_available(dma))
    }
}

pub(super) fn segments(buffers: Buffers<'_>) -> Vec<Buffer> {
    let segments = buffers.segments().iter();
    segments
        .map(|piece| (piece.iova.raw(), piece.len))
        .collect()
}

/// A step that a stop may interrupt.
pub(super) fn violation<T: std::fmt::Debug>(result: Result<T, RingStop>) -> Violation {
    match result {
        Err(RingStop::Violation(violation)) => violation,
        other => panic!("{other:?}"),
    }
}

/// One chain through a ring, start to end, on any memory.
pub(super) fn serve_one<D: Dma>(ring: &mut Ring, dma: &mut D, chain: &mut Chain, len: u32) -> bool {
    assert!(ring.peek(dma, chain).unwrap());
    let token = ring.advance(chain);
    ring.stage(dma, token, len).unwrap();
    ring.publish(dma).unwrap()
}
