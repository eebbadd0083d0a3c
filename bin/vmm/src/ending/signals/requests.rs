//! Sequence of requests by signals: decisions alone, without a signal or a clock.

use std::time::{Duration, Instant};

use super::{ONE_REQUEST, SignalRequest};

/// Step that follows a signal or a timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// This.
    Do(SignalRequest),
    /// End the process where it is.
    AtOnce(i32),
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// No signal has asked for an end.
    Running,
    /// The guest has been asked to power off, by this signal.
    Pressed { signal: i32, at: Instant },
    /// The end is under way.
    Ending { at: Instant },
}

/// The signals so far.
#[derive(Debug)]
pub struct Requests {
    grace: Duration,
    state: State,
}

impl Requests {
    /// Creates the state without a request. A guest has `grace` to power off; zero: it is not
    /// asked.
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            state: State::Running,
        }
    }

    /// Takes a signal that ends. `is_last`: the user has been notified that this signal ends the
    /// process at once.
    pub fn signal(&mut self, signal: i32, now: Instant, is_last: bool) -> Step {
        let before = match self.state {
            State::Running => None,
            State::Pressed { at, .. } | State::Ending { at } => Some(at),
        };
        if before.is_some_and(|at| now.saturating_duration_since(at) < ONE_REQUEST) {
            return Step::Nothing;
        }
        if is_last {
            return Step::AtOnce(signal);
        }
        match self.state {
            State::Ending { .. } => Step::AtOnce(signal),
            State::Running if !self.grace.is_zero() && signal != libc::SIGQUIT => {
                self.state = State::Pressed { signal, at: now };
                Step::Do(SignalRequest::Press(signal))
            }
            State::Running | State::Pressed { .. } => self.end(signal, now),
        }
    }

    /// Returns the time at which [`time_out`](Self::time_out) is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Pressed { at, .. } => at.checked_add(self.grace),
            _ => None,
        }
    }

    /// Returns the step after some time has passed: the grace may be over.
    pub fn time_out(&mut self, now: Instant) -> Step {
        match (self.state, self.deadline()) {
            (State::Pressed { signal, .. }, Some(deadline)) if now >= deadline => {
                self.end(signal, now)
            }
            _ => Step::Nothing,
        }
    }

    fn end(&mut self, signal: i32, now: Instant) -> Step {
        self.state = State::Ending { at: now };
        Step::Do(SignalRequest::End(signal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(90);
    const SECOND: Duration = Duration::from_secs(1);
    const TERM: i32 = libc::SIGTERM;

    #[test]
    fn a_signal_presses_the_next_ends_and_another_ends_at_once() {
        let now = Instant::now();
        let mut requests = Requests::new(GRACE);
        let mut signal = |signal, after| requests.signal(signal, now + after, false);
        assert_eq!(
            signal(TERM, Duration::ZERO),
            Step::Do(SignalRequest::Press(TERM))
        );
        // timeout(1), which signals twice.
        assert_eq!(signal(TERM, ONE_REQUEST / 2), Step::Nothing);
        assert_eq!(
            signal(libc::SIGINT, SECOND),
            Step::Do(SignalRequest::End(libc::SIGINT))
        );
        assert_eq!(signal(TERM, SECOND + ONE_REQUEST / 2), Step::Nothing);
        assert_eq!(signal(TERM, 2 * SECOND), Step::AtOnce(TERM));
    }

    #[test]
    fn the_end_of_the_grace_ends_by_the_signal_that_pressed() {
        let now = Instant::now();
        let mut requests = Requests::new(GRACE);
        assert_eq!(requests.deadline(), None);
        requests.signal(libc::SIGHUP, now, false);
        assert_eq!(requests.deadline(), Some(now + GRACE));
        assert_eq!(requests.time_out(now + GRACE - SECOND), Step::Nothing);
        let end = Step::Do(SignalRequest::End(libc::SIGHUP));
        assert_eq!(requests.time_out(now + GRACE), end);
        assert_eq!(requests.deadline(), None);
        assert_eq!(requests.time_out(now + 2 * GRACE), Step::Nothing);
    }

    #[test]
    fn without_a_grace_and_by_sigquit_the_first_signal_ends() {
        let now = Instant::now();
        for (grace, signal) in [(Duration::ZERO, TERM), (GRACE, libc::SIGQUIT)] {
            let mut requests = Requests::new(grace);
            let end = Step::Do(SignalRequest::End(signal));
            assert_eq!(requests.signal(signal, now, false), end);
            let again = requests.signal(signal, now + SECOND, false);
            assert_eq!(again, Step::AtOnce(signal));
        }
    }

    #[test]
    fn a_signal_that_was_announced_as_the_last_ends_at_once_also_as_the_first() {
        let now = Instant::now();
        let mut requests = Requests::new(GRACE);
        assert_eq!(requests.signal(TERM, now, true), Step::AtOnce(TERM));
        requests.signal(TERM, now, false);
        assert_eq!(requests.signal(TERM, now, true), Step::Nothing);
        assert_eq!(
            requests.signal(TERM, now + SECOND, true),
            Step::AtOnce(TERM)
        );
    }
}
