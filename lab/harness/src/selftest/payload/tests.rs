//! Short soaks, and soaks with a defect that must be detected. They are skipped with a reason where
//! KVM is missing.

use std::time::Duration;

use sidecore::{Activity, AlwaysPoll, ArmError, Nanos, PollContext, Poller, Wakes};

use super::RegisterMode;
use super::machine::soak;
use super::unit::{Owner, Request};
use super::{PayloadReport, run, supported};

const SLEEPS: u64 = 2000;
/// Few: removing the log waits for a grace period of the host's kernel, 7 to 12 ms each, measured
/// on software KVM.
const LOGGED_SLEEPS: u64 = 300;

fn can(mode: RegisterMode) -> bool {
    match supported(mode) {
        Ok(()) => true,
        Err(why) => {
            eprintln!("skipped: {why}");
            false
        }
    }
}

fn short_soak(mode: RegisterMode, sleeps: u64) -> Option<PayloadReport> {
    if !can(mode) {
        return None;
    }
    let report = run(mode, sleeps).unwrap();
    assert_eq!(report.lost, 0, "{report}");
    assert!(report.sleeps >= sleeps, "{report}");
    Some(report)
}

#[test]
fn no_wake_up_is_lost_in_trap_mode() {
    if let Some(report) = short_soak(RegisterMode::Trap, SLEEPS) {
        assert_eq!(report.traps, report.iterations, "{report}");
        assert_eq!((report.gate_faults, report.logged), (0, 0), "{report}");
    }
}

#[test]
fn no_wake_up_is_lost_in_logged_mode() {
    if let Some(report) = short_soak(RegisterMode::Logged, LOGGED_SLEEPS) {
        let stores = report.traps + report.logged;
        assert_eq!(stores, report.iterations, "{report}");
        assert!(report.wakes_mailbox > 0, "{report}");
        assert_eq!(report.gate_faults, 0, "{report}");
    }
}

#[test]
fn no_wake_up_is_lost_in_shared_mode() {
    if let Some(report) = short_soak(RegisterMode::Shared, SLEEPS) {
        assert_eq!((report.traps, report.logged), (0, 0), "{report}");
        assert!(report.wakes_fd > 0, "{report}");
        assert!(report.gate_faults >= report.wakes_fd, "{report}");
        // A store that had to wait completes: the next sleeps do not stop it again.
        assert!(report.gate_faults < 4 * report.iterations, "{report}");
    }
}

/// An owner that goes to sleep without arming the register page.
struct Unarmed(Owner);

impl Poller for Unarmed {
    type Message = Request;
    type Probe = AlwaysPoll;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        self.0.poll(turn)
    }

    fn message(&mut self, request: Request, turn: &mut PollContext<'_>) {
        self.0.message(request, turn);
    }

    fn arm(&mut self, _wakes: &mut Wakes) -> Result<(), ArmError> {
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.0.has_work()
    }

    fn disarm(&mut self) {
        self.0.disarm();
    }

    fn deadline(&self) -> Option<Nanos> {
        self.0.deadline()
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

#[test]
fn an_owner_that_does_not_arm_the_page_is_found_out() {
    for mode in [RegisterMode::Logged, RegisterMode::Shared] {
        if can(mode) {
            let report = soak(mode, SLEEPS, Duration::from_millis(500), Unarmed).unwrap();
            assert_eq!(report.lost, 1, "{report}");
            let dump = report.dump.unwrap();
            assert!(dump.contains("a wake-up was lost"), "{dump}");
        }
    }
}
