//! The life of a device: what its visits may do, and what its driver is to be notified of.
//!
//! ```text
//!             begin              set_service
//! inactive ──────────▶ full ◀──────────────────▶ finishing, stopped
//!    ▲                  └───────────┬──────────────────┘
//!    │                              │ abandon: touches no ring and no buffer
//!    │                              │ fail: takes and shows nothing, but for a queue that stops
//!    └───────────── end ◀───────────┘
//! ```
//! A device may be abandoned and have failed, in either order. What parks a single queue is its
//! ring's.

use crate::device::Service;
use crate::ring::Violation;

/// State of a device between [`begin`](Self::begin) and [`end`](Self::end).
#[derive(Default)]
pub(super) struct Life {
    /// Features the driver accepted; 0 while there is none.
    features: u64,
    service: Service,
    /// Everything in flight was cancelled, and its ends are not reported.
    is_abandoned: bool,
    /// Reason why it needs a reset, if it does.
    violation: Option<Violation>,
    /// The driver is to be notified of a change of configuration.
    announce: bool,
}

impl Life {
    /// The driver has accepted `features`. `announce`: it is to be notified at once.
    pub(super) fn begin(&mut self, features: u64, announce: bool) {
        self.features = features;
        self.announce = announce;
    }

    /// There is no driver any more.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    pub(super) fn set_service(&mut self, service: Service) {
        self.service = service;
    }

    /// Everything in flight is cancelled, and its ends are not reported.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// It needs a reset, which the driver is notified of. The first reason counts.
    pub(super) fn fail(&mut self, violation: Violation) {
        if self.violation.is_none() {
            self.violation = Some(violation);
            self.announce = true;
        }
    }

    /// The configuration has changed.
    pub(super) fn announce(&mut self) {
        self.announce |= self.is_live();
    }

    /// Whether the driver is to be notified now; then it counts as notified.
    #[inline]
    pub(super) fn take_announcement(&mut self) -> bool {
        std::mem::take(&mut self.announce)
    }

    #[inline]
    pub(super) fn has_announcement(&self) -> bool {
        self.announce
    }

    pub(super) fn features(&self) -> u64 {
        self.features
    }

    /// Whether there is a driver.
    pub(super) fn is_live(&self) -> bool {
        self.features != 0
    }

    #[inline]
    pub(super) fn is_stopped(&self) -> bool {
        self.service == Service::Stopped
    }

    pub(super) fn violation(&self) -> Option<Violation> {
        self.violation
    }

    /// Whether rings and buffers may be touched, were they whole.
    #[inline]
    pub(super) fn may_touch(&self) -> bool {
        !self.is_stopped() && !self.is_abandoned
    }

    /// Whether what was taken may go on, and be shown.
    #[inline]
    pub(super) fn may_run(&self) -> bool {
        self.may_touch() && self.violation.is_none()
    }

    /// Whether chains may be taken.
    #[inline]
    pub(super) fn may_take(&self) -> bool {
        self.may_run() && self.service == Service::Full
    }
}
