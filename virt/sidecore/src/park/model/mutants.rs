//! The protocol without one step: the model must notice that a wake-up is lost.

use super::*;

/// One mutant: the protocol without one step.
macro_rules! mutant {
    ($name:ident { $($step:ident),* }) => {
        struct $name;
        impl Steps for $name {
            $(const $step: bool = false;)*
        }
    };
}

mutant!(NoFence { FENCE });
mutant!(NoSenderFence { SENDER_FENCE });
mutant!(RecheckBeforeArm { RECHECK_AFTER_ARM });
mutant!(SkipMailbox { RECHECK_MAILBOX });
mutant!(SkipLastPoller {
    RECHECK_LAST_POLLER
});
mutant!(LeaveUnarmed { ARM_LAST_POLLER });
mutant!(ForgetUnlooked { KEEP_UNLOOKED });

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_event_idx() {
    EVENT_IDX.explore::<NoFence>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_the_flag() {
    FLAG.explore::<NoFence>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_missing_fence_with_the_mailbox() {
    MAIL.explore::<NoFence>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_sender_without_fence() {
    MAIL.explore::<NoSenderFence>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_driver_without_barrier() {
    World {
        has_barrier: false,
        ..EVENT_IDX
    }
    .explore::<Sound>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_event_idx() {
    EVENT_IDX.explore::<RecheckBeforeArm>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_the_flag() {
    FLAG.explore::<RecheckBeforeArm>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_recheck_before_arming_the_mailbox() {
    MAIL.explore::<RecheckBeforeArm>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_skipped_mailbox() {
    MAIL.explore::<SkipMailbox>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_skipped_queue() {
    BOTH_QUEUES.explore::<SkipLastPoller>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_a_queue_left_unarmed() {
    STAYS_ARMED.explore::<LeaveUnarmed>();
}

#[test]
#[should_panic(expected = "lost wake-up")]
fn model_notices_that_a_failure_to_arm_hides_what_was_armed() {
    FAILS_ONCE.explore::<ForgetUnlooked>();
}
