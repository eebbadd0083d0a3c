//! The protocol without one step: the model must notice that a wake-up is lost.

use super::*;
use crate::steps::{Step, without};

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_event_idx() {
    without(Step::Fence, || EVENT_IDX.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_the_flag() {
    without(Step::Fence, || FLAG.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_the_mailbox() {
    without(Step::Fence, || MAIL.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_sender_without_fence() {
    without(Step::SenderFence, || MAIL.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_driver_without_barrier() {
    World {
        has_barrier: false,
        ..EVENT_IDX
    }
    .explore();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_event_idx() {
    without(Step::LookAfterArming, || EVENT_IDX.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_the_flag() {
    without(Step::LookAfterArming, || FLAG.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_the_mailbox() {
    without(Step::LookAfterArming, || MAIL.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_skipped_mailbox() {
    without(Step::LookAtMailbox, || MAIL.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_skipped_queue() {
    without(Step::LookAtLastPoller, || BOTH_QUEUES.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_queue_left_unarmed() {
    without(Step::ArmLastPoller, || STAYS_ARMED.explore());
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_that_a_failure_to_arm_hides_what_was_armed() {
    without(Step::KeepUnlooked, || FAILS_ONCE.explore());
}
