//! State of a device from activation to reset: the accesses that it may make in a visit, and
//! pending notifications of its driver.
//!
//! ```text
//!             begin              set_service
//! inactive ──────────▶ full ◀──────────────────▶ finishing, stopped
//!    ▲                  └───────────┬──────────────────┘
//!    │                              │ abandon: touches no ring and no buffer
//!    │                              │ fail: takes nothing, and publishes what other queues have ended in this visit, or a queue that stops
//!    └───────────── end ◀───────────┘
//! ```
//! A device may both be abandoned and have failed, in either order. Parking of a single queue is
//! state of its ring.

use crate::device::Service;
use crate::ring::Violation;

/// State of a device between [`begin`](Self::begin) and [`end`](Self::end).
#[derive(Default)]
pub(super) struct ActivationState {
    /// Features that the driver accepted; 0 while the device is inactive.
    features: u64,
    service: Service,
    /// All requests in flight were cancelled, and their ends are not reported.
    is_abandoned: bool,
    /// Reason why the device needs a reset, if it does.
    violation: Option<Violation>,
    /// The driver is to be notified of a change of configuration.
    must_notify: bool,
}

impl ActivationState {
    /// Activates the device for a driver that has accepted `features`. `is_changed`: the driver is
    /// to be notified of the configuration at once.
    pub(super) fn begin(&mut self, features: u64, is_changed: bool) {
        self.features = features;
        self.must_notify = is_changed;
    }

    /// Ends the activation: there is no driver any more.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    pub(super) fn set_service(&mut self, service: Service) {
        self.service = service;
    }

    /// Records that all requests in flight are cancelled, and that their ends are not reported.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// Records that the device needs a reset, of which the driver is notified. The first reason
    /// counts.
    pub(super) fn fail(&mut self, violation: Violation) {
        if self.violation.is_none() {
            self.violation = Some(violation);
            self.must_notify = true;
        }
    }

    /// Records that the configuration has changed.
    pub(super) fn config_changed(&mut self) {
        self.must_notify |= self.is_live();
    }

    /// Returns whether the driver is to be notified now, and clears the notification.
    #[inline]
    pub(super) fn take_notification(&mut self) -> bool {
        std::mem::take(&mut self.must_notify)
    }

    #[inline]
    pub(super) fn has_notification(&self) -> bool {
        self.must_notify
    }

    /// Whether all requests in flight were cancelled, and their ends are not reported.
    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    pub(super) fn features(&self) -> u64 {
        self.features
    }

    /// Whether the device is active.
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

    /// Whether rings and buffers may be accessed, failures of the device aside.
    #[inline]
    pub(super) fn may_touch(&self) -> bool {
        !self.is_stopped() && !self.is_abandoned
    }

    /// Whether taken chains may be continued and published.
    #[inline]
    pub(super) fn may_run(&self) -> bool {
        self.may_touch() && self.violation.is_none()
    }

    /// Whether new chains may be taken.
    #[inline]
    pub(super) fn may_take(&self) -> bool {
        self.may_run() && self.service == Service::Full
    }
}
