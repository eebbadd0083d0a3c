//! A paravirtual IOMMU that answers nothing for a time: `--fault iommu:mute=MS@N`.
//!
//! The closed set of functions is wrapped. Everything of the one function but its poll is as it
//! was: its ring is not polled, so that requests lie there unanswered, as under a device whose
//! thread hangs. Requests that it has taken are answered before: they were taken by a poll, and
//! each poll publishes the unit's answers. The query for pending work is answered truthfully, so
//! that the sidecore does not go to sleep over requests that only time will let it take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_mem::{Iommu, Pages, PhysMem};
use machine::{Function, FunctionContext, Progress, ResolveFunction};
use pv_iommu::{IommuFunction, Request};
use vio::balloon::Balloon;
use vio::net::Net;
use vio::rng::Rng;
use vio::{Remote, blk::Blk, caged::Caged};
use virtio_pci::VirtioFunction;
use vmm::run::{AssignedDevice, Functions};

use super::grammar::Mute;

/// Progress of the silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Fewer requests have come.
    Before,
    /// It lasts until then, in ns.
    Until(u64),
    Over,
}

/// A silence that begins after a number of requests.
pub struct Silence {
    mute: Mute,
    state: State,
    /// Polls that were left out, for readers on other threads.
    polls: Arc<AtomicU64>,
}

impl Silence {
    /// Creates one of this length. The polls that it leaves out are counted in `polls`.
    pub fn new(mute: Mute, polls: Arc<AtomicU64>) -> Self {
        Self {
            mute,
            state: State::Before,
            polls,
        }
    }

    /// Returns whether it lasts at `now` (ns), of a function that has received `requests`.
    fn lasts(&mut self, now: u64, requests: u64) -> bool {
        if self.state == State::Before && requests >= self.mute.requests.get() {
            // At most an hour.
            let time = u64::try_from(self.mute.time.as_nanos()).unwrap_or(u64::MAX);
            self.state = State::Until(now.saturating_add(time));
        }
        match self.state {
            State::Until(end) if now < end => {
                self.polls.fetch_add(1, Ordering::Relaxed);
                true
            }
            State::Until(_) => {
                self.state = State::Over;
                false
            }
            State::Before | State::Over => false,
        }
    }
}

/// A closed set of functions, one of which may be silent for a time.
pub struct Muting<F> {
    inner: F,
    silence: Option<Silence>,
}

impl<F> Muting<F> {
    /// Wraps `inner`, which is silent for a time.
    pub fn new(inner: F, silence: Silence) -> Self {
        Self {
            inner,
            silence: Some(silence),
        }
    }
}

impl<F> Muting<F> {
    /// Wraps `inner`, which never is.
    pub fn never(inner: F) -> Self {
        Self {
            inner,
            silence: None,
        }
    }
}

impl<F: ResolveFunction<Request>> ResolveFunction<Request> for Muting<F> {
    fn get(&self) -> &dyn Function<Request> {
        self.inner.get()
    }

    fn get_mut(&mut self) -> &mut dyn Function<Request> {
        self.inner.get_mut()
    }

    fn poll<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
    ) -> Progress {
        if let Some(silence) = &mut self.silence
            && silence.lasts(cx.now(), self.inner.get().counts().requests)
        {
            return Progress::Idle;
        }
        self.inner.poll(cx)
    }

    fn arm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, Request>) {
        self.inner.arm(cx);
    }

    fn has_work<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
    ) -> bool {
        self.inner.has_work(cx)
    }

    fn disarm<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, Request>) {
        self.inner.disarm(cx);
    }

    fn in_use<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Request>,
        pages: &Pages,
    ) -> u32 {
        self.inner.in_use(cx, pages)
    }
}

impl<F: Functions> Functions for Muting<F> {
    fn balloon(&mut self) -> Option<&mut Balloon> {
        self.inner.balloon()
    }

    fn iommu(&mut self) -> Option<&mut IommuFunction> {
        self.inner.iommu()
    }

    fn assigned(&mut self) -> Option<&mut AssignedDevice> {
        self.inner.assigned()
    }
}

macro_rules! from {
    ($($function:ty),*) => {
        $(impl<F: From<$function>> From<$function> for Muting<F> {
            fn from(function: $function) -> Self {
                Self::never(function.into())
            }
        })*
    };
}

from!(
    VirtioFunction<Blk>,
    VirtioFunction<Net>,
    VirtioFunction<Rng>,
    VirtioFunction<Remote>,
    VirtioFunction<Caged>,
    VirtioFunction<Balloon>,
    IommuFunction,
    AssignedDevice
);

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use super::*;

    #[test]
    fn silence_begins_at_the_request_and_ends_by_time_once() {
        let polls = Arc::new(AtomicU64::new(0));
        let mute = Mute {
            time: Duration::from_nanos(100),
            requests: NonZeroU64::new(5).expect("not zero"),
        };
        let mut silence = Silence::new(mute, polls.clone());
        let lasts = [(0, 4), (10, 5), (109, 5), (110, 5), (111, 900)]
            .map(|(now, requests)| silence.lasts(now, requests));
        assert_eq!(lasts, [false, true, true, false, false]);
        assert_eq!(polls.load(Ordering::Relaxed), 2);
    }
}
