//! virtio-rng (virtio 1.2 §5.4): random bytes for the guest's own entropy pool.
//!
//! *Advertised*: INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM, RING_PACKED.
//! *Not implemented*: anything else, of which the specification has nothing for this type.
//!
//! A request is a chain of device-writable buffers, and gets between one byte and [`MAX_ANSWER`]
//! (§5.4.6.1 allows less than the buffer has), whatever its length: nothing is in flight, and no
//! request costs more than another. A source that has nothing at the moment, and the rate limit,
//! leave the request in the ring until a deadline. A chain without a writable buffer, or one that
//! faults, is given back with length 0. Random bytes that were drawn before a wait are drawn anew,
//! and count against the limit each time. A source that fails is asked again like one that has
//! nothing, and logged and counted apart.

use std::io;

use guest_mem::{Dma, Intent, Stop};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use crate::body::{Context, Device, DeviceClass, Environment, ServedQueue, Step};
use crate::device::{Activity, read_space};
use crate::log_rate_limit::LogRateLimit;
use crate::poll_budget::cost;
use crate::queue_config::feature;
use crate::ring::{Chain, RETRY_NS, RingStop};
use crate::saved::SavedState;
use crate::throttle::{Rate, RateLimits, Throttle};

/// Most bytes of one answer. Linux asks for 32 to 64 at a time.
pub const MAX_ANSWER: usize = 1024;
/// Entries of the one queue at most.
const QUEUE_SIZE: u16 = 64;
/// Nanoseconds to draw a byte, about.
const BYTE_COST: u64 = 3;

/// Limits for a device over [`HostEntropy`], of which each byte costs the device's thread time: far
/// more than a pool is seeded with.
pub const HOST_LIMITS: RateLimits = RateLimits {
    operations: None,
    bytes: Some(Rate {
        per_second: 1 << 20,
        burst: 64 << 10,
    }),
};

/// Source of random bytes. Never blocks.
pub trait EntropySource: Send {
    /// Fills `bytes` from the front on. Returns the number of bytes, 0 if there are none at the
    /// moment.
    ///
    /// # Errors
    /// The source fails, which it may do at any later call too, or not.
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize>;
}

/// The host's `getrandom`: nothing until its pool is initialized.
#[derive(Clone, Copy, Debug)]
pub struct HostEntropy {
    _tried: (),
}

impl HostEntropy {
    /// Tries the call once.
    ///
    /// # Errors
    /// The host forbids it, or does not have it.
    pub fn open() -> io::Result<Self> {
        let mut source = Self { _tried: () };
        source.fill(&mut [0])?;
        Ok(source)
    }
}

impl EntropySource for HostEntropy {
    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        given(getrandom(bytes, GetRandomFlags::NONBLOCK))
    }
}

/// Number of bytes in an answer of `getrandom`.
fn given(answer: Result<usize, Errno>) -> io::Result<usize> {
    match answer {
        Ok(len) => Ok(len),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(errno) => Err(errno.into()),
    }
}

/// A virtio entropy device.
pub type Rng = Device<RngClass>;

/// Class of entropy devices: the part of the device that is particular to them.
pub struct RngClass {
    source: Box<dyn EntropySource>,
    throttle: Throttle,
    /// Time at which a source that had nothing is asked again, in nanoseconds.
    retry_at_ns: Option<u64>,
    /// Calls that the source failed.
    failures: u64,
    lines: LogRateLimit,
    chain: Chain,
}

/// Part of the saved state that only entropy devices have: nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRng {}

impl SavedState for SavedRng {
    const TYPE: u16 = RngClass::TYPE;
    const VERSION: u32 = 1;
}

impl Rng {
    /// A device over `source`, at most as fast as `limits`.
    pub fn new(source: Box<dyn EntropySource>, limits: RateLimits) -> Self {
        Self::of(RngClass {
            source,
            throttle: Throttle::new(limits),
            retry_at_ns: None,
            failures: 0,
            lines: LogRateLimit::default(),
            chain: Chain::new(),
        })
    }
}

impl DeviceClass for RngClass {
    const TYPE: u16 = 4;
    type Queue = ();
    type Saved = SavedRng;

    fn features(&self) -> u64 {
        feature::COMMON | feature::RING_PACKED
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    /// There is none (§5.4.4).
    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&[], offset, out);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<()> {
        (index == 0).then_some(())
    }

    fn reset(&mut self) {
        self.retry_at_ns = None;
    }

    fn save(&self) -> SavedRng {
        SavedRng {}
    }

    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let now_ns = cx.visit.now_ns();
        if !queue.peek(cx.dma, &mut self.chain)? {
            return Ok(Activity::Idle);
        }
        if !self.is_open(now_ns) {
            cx.stats.throttled += u64::from(!self.throttle.is_open(now_ns));
            return Ok(Activity::Idle);
        }
        self.retry_at_ns = None;
        let mut bytes = [0; MAX_ANSWER];
        let most = bytes.len().min(self.chain.writable().len() as usize);
        let mut drawn = 0;
        if most != 0 {
            drawn = match self.source.fill(&mut bytes[..most]) {
                Ok(drawn) => drawn,
                Err(error) => self.fail(now_ns, &error),
            };
            if drawn == 0 {
                self.retry_at_ns = Some(now_ns.saturating_add(RETRY_NS));
                return Ok(Activity::Idle);
            }
            // Also if they cannot be written now, and are drawn anew.
            cx.visit.charge(drawn as u64 * BYTE_COST);
            self.throttle.charge(now_ns, drawn as u64);
        }
        let writable = self.chain.writable();
        let len = match writable.write(cx.dma, 0, &bytes[..drawn]) {
            Ok(()) => drawn as u32,
            Err(Stop::Fault(_)) => 0,
            Err(pending) => {
                let wanted = writable.wanted(0, drawn as u32, Intent::Write);
                return Err(queue.wait_for(cx.dma, pending, wanted));
            }
        };
        cx.visit.take_request(cost::REQUEST);
        cx.stats.requests += 1;
        cx.stats.errors += u64::from(len == 0);
        cx.stats.read_bytes += u64::from(len);
        queue.answer(&self.chain, len)?;
        Ok(Activity::Busy)
    }

    fn has_work<D: Dma>(
        &mut self,
        queue: &mut ServedQueue<()>,
        dma: &mut D,
        now_ns: u64,
    ) -> Result<bool, RingStop> {
        Ok(self.is_open(now_ns) && queue.has_available(dma)?)
    }

    fn deadline(&self, now_ns: u64) -> Option<u64> {
        let times = [Some(self.throttle.opens_at_ns()), self.retry_at_ns];
        times.into_iter().flatten().filter(|at| *at > now_ns).max()
    }
}

impl RngClass {
    /// Calls that the source has failed since the device was made.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// Counts and logs a failure of the source; the bytes that it gave.
    #[cold]
    fn fail(&mut self, now_ns: u64, error: &io::Error) -> usize {
        self.failures += 1;
        if let Some(suppressed) = self.lines.admits_at(now_ns) {
            let more = LogRateLimit::left_out(suppressed);
            tracing::warn!("no random bytes for the guest: {error}{more}");
        }
        0
    }

    /// Whether a request may be answered now.
    fn is_open(&self, now_ns: u64) -> bool {
        self.throttle.is_open(now_ns) && self.retry_at_ns.is_none_or(|at| at <= now_ns)
    }
}

#[cfg(test)]
mod tests;
