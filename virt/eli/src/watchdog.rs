//! Findings about a guest that keeps the processor in direct mode, and their consequences (§3.7.2
//! of Amit's thesis).
//!
//! A guest in direct mode can keep the processor without a single exit: with interrupts masked, or
//! with an assigned vector in service forever, which blocks all vectors of its priority class and
//! below. Only a non-maskable interrupt still exits, the watchdog's. It handles the pending
//! interrupts of the host, so these are never later than the watchdog's period; and it checks the
//! vectors in service ([`Service`]).
//!
//! No finding has a permanent consequence. [`Masking`] counts the findings that a tick of the host
//! ([`Ticks`]) waits behind the guest's mask, at times that the guest cannot avoid ([`Samples`]).

/// Counter of consecutive watchdog ticks each of which finds a vector of the guest's in service.
///
/// A guest that does end its interrupts is found as well if it spends most of its time in handlers.
/// The consequence is only some exits, until it has ended the interrupts in service.
#[derive(Clone, Debug)]
pub struct Service {
    limit: u32,
    ticks: u32,
}

impl Default for Service {
    /// Ten ticks: with a period of 20 ms, 0.2 s.
    fn default() -> Self {
        Self::new(10)
    }
}

impl Service {
    /// Creates a counter with a limit of this many ticks.
    #[must_use]
    pub const fn new(limit: u32) -> Self {
        Self { limit, ticks: 0 }
    }

    /// Counts a tick. `is_held`: it finds a vector of the guest's in service. Returns whether the
    /// vectors in service must be ended now at the real local APIC and kept virtual from here on
    /// ([`Core::fall_back`](crate::Core::fall_back)).
    pub fn tick(&mut self, is_held: bool) -> bool {
        self.ticks = if is_held { self.ticks + 1 } else { 0 };
        let is_due = self.ticks >= self.limit;
        if is_due {
            self.ticks = 0;
        }
        is_due
    }
}

/// Schedule of the host's periodic tick, by a clock.
#[derive(Clone, Copy, Debug)]
pub struct Ticks {
    start_us: u64,
    period_us: u64,
    /// Number of the latest tick that was due at the last call of [`take`](Self::take).
    taken: u64,
}

impl Ticks {
    /// Creates the schedule of a timer that was started at `start_us`: the first tick is due a
    /// period later.
    #[must_use]
    pub const fn new(start_us: u64, period_us: u64) -> Self {
        Self {
            start_us,
            period_us: if period_us == 0 { 1 } else { period_us },
            taken: 0,
        }
    }

    /// Takes a tick, and those that have merged into it. Returns the time since the first of them
    /// was due, in µs.
    pub fn take(&mut self, now_us: u64) -> u64 {
        let due_us = self.start_us + (self.taken + 1) * self.period_us;
        // `start_us` is read shortly after the timer was started, so a tick may seem early.
        let ahead_us = self.period_us / 64;
        let since_us = now_us.saturating_sub(self.start_us);
        self.taken = self.taken.max((since_us + ahead_us) / self.period_us);
        now_us.saturating_sub(due_us)
    }
}

/// Findings that a guest in direct mode masks interrupts while a tick of the host's waits, over a
/// sliding time.
///
/// Only a non-maskable tick detects that; a late interrupt of the host alone may have another
/// cause. Such ticks come from the watchdog, which a guest can predict, and at random times between
/// ([`Samples`]), which it cannot: so the fraction of ticks with a finding equals the fraction of
/// time, however a guest distributes its masking. Six findings within a second cause injection mode
/// for a second, in which physical interrupts exit regardless of the guest's masking. A tick that
/// is late by less than half its period is no finding. The resulting bound: each of the host's
/// ticks is late by at most one period of the watchdog, and ticks merge only because of the six
/// findings of a second.
#[derive(Clone, Debug)]
pub struct Masking {
    /// Least lateness of a finding, in µs.
    least_us: u64,
    /// Times of the last findings, in µs, the oldest first.
    findings_us: [Option<u64>; Self::FINDINGS],
    /// End of injection mode, in µs.
    until_us: u64,
}

const SECOND_US: u64 = 1_000_000;

impl Masking {
    const FINDINGS: usize = 6;

    /// Creates the detector for a host tick of this period.
    #[must_use]
    pub const fn new(tick_us: u64) -> Self {
        Self {
            least_us: tick_us / 2,
            findings_us: [None; Self::FINDINGS],
            until_us: 0,
        }
    }

    /// Records that a tick of the host, late by `late_us`, was found waiting behind the guest's
    /// mask. Returns whether injection mode is due from now on.
    pub fn found(&mut self, late_us: u64, now_us: u64) -> bool {
        if late_us < self.least_us {
            return false;
        }
        self.findings_us.rotate_left(1);
        self.findings_us[Self::FINDINGS - 1] = Some(now_us);
        let is_due =
            self.findings_us[0].is_some_and(|first| now_us.saturating_sub(first) < SECOND_US);
        if is_due {
            self.findings_us = [None; Self::FINDINGS];
            self.until_us = now_us + SECOND_US;
        }
        is_due
    }

    /// Returns whether injection mode has ended.
    #[must_use]
    pub const fn is_over(&self, now_us: u64) -> bool {
        now_us >= self.until_us
    }
}

/// Random times at which a guest in direct mode is checked, half a watchdog's period apart on the
/// average.
#[derive(Clone, Debug)]
pub struct Samples {
    mean_us: u64,
    state: u64,
    due_us: Option<u64>,
    /// Time of the watchdog's last tick, in µs.
    watchdog_us: u64,
}

/// Sources of a non-maskable tick. Two ticks may have merged into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Came {
    /// One of [`Samples`] was due.
    pub sample: bool,
    /// The watchdog's was due.
    pub watchdog: bool,
}

impl Samples {
    /// Creates samples for a watchdog of this period.
    #[must_use]
    pub const fn new(watchdog_us: u64) -> Self {
        Self {
            mean_us: watchdog_us / 2,
            state: 1,
            due_us: None,
            watchdog_us: 0,
        }
    }

    /// Whether no new sample is to be set: one is, or there are none (a period of 0).
    #[must_use]
    pub const fn is_set(&self) -> bool {
        self.due_us.is_some() || self.mean_us == 0
    }

    /// Chooses and returns the time of the next sample if none is set; `entropy` is a value that a
    /// guest does not know. A sample whose time passes before its timer is set is taken with the
    /// watchdog's next tick.
    pub fn next(&mut self, now_us: u64, entropy: u64) -> Option<u64> {
        if self.is_set() {
            return None;
        }
        // xorshift64, of Marsaglia: any state but 0 leads through all others.
        let mut state = (self.state ^ entropy) | 1;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.state = state;
        // At least a tenth of the mean ahead, so that the time does not pass before the timer is
        // set.
        let least_us = self.mean_us / 10;
        let due_us = now_us + least_us + (state >> 16) % (2 * (self.mean_us - least_us)).max(1);
        self.due_us = Some(due_us);
        self.due_us
    }

    /// Records a non-maskable tick. It is also the watchdog's if that is due as well.
    pub fn take(&mut self, now_us: u64) -> Came {
        let sample = self.due_us.is_some_and(|due_us| due_us <= now_us);
        if sample {
            self.due_us = None;
        }
        let since_us = now_us.saturating_sub(self.watchdog_us);
        // A period is twice the mean.
        let watchdog = !sample || since_us >= 2 * self.mean_us;
        if watchdog {
            self.watchdog_us = now_us;
        }
        Came { sample, watchdog }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whichever_vectors_are_held_what_every_tick_finds_is_ended() {
        let mut service = Service::new(3);
        // In a handler now and then: an honest guest.
        for _ in 0..100 {
            assert!(!service.tick(true) && !service.tick(true) && !service.tick(false));
        }
        assert!(!service.tick(true) && !service.tick(true) && service.tick(true));
        // From the start again.
        assert!(!service.tick(true) && !service.tick(true) && service.tick(true));
    }

    #[test]
    fn a_tick_is_late_by_the_first_that_merged_into_it() {
        let mut ticks = Ticks::new(1_000, 5_000);
        assert_eq!(ticks.take(6_010), 10);
        // A little early by this clock: it is the tick of 11 ms.
        assert_eq!(ticks.take(10_990), 0);
        assert_eq!(ticks.take(16_100), 100);
        // Those of 21, 26 and 31 ms.
        assert_eq!(ticks.take(34_000), 13_000);
        assert_eq!(ticks.take(36_000), 0);
        // Late by nearly a period: the tick of 46 ms is another one.
        assert_eq!(ticks.take(45_900), 4_900);
        assert_eq!(ticks.take(46_000), 0);
        assert_eq!(ticks.take(51_000), 0);
    }

    /// Simulates a guest that masks interrupts for `masked_us` and accepts them for `open_us` by
    /// turns, shifted by `phase_us` against the watchdog. Returns the number of host ticks taken,
    /// the longest time between two, and the number of times that injection mode began.
    fn host(masked_us: u64, open_us: u64, phase_us: u64, seconds: u64) -> (u64, u64, u64) {
        const STEP: u64 = 50;
        let (watchdog, period) = (20_000, 5_000);
        let mut ticks = Ticks::new(0, period);
        let mut masking = Masking::new(period);
        let mut samples = Samples::new(watchdog);
        let mut random = seeded::Random::new(masked_us ^ open_us << 20 ^ phase_us << 40);
        let mut sample = samples.next(0, random.bits());
        let (mut taken, mut last, mut gap, mut suspended) = (0, 0, 0, 0);
        let (mut is_direct, mut is_pending) = (true, false);
        for now in (STEP..seconds * SECOND_US).step_by(STEP as usize) {
            is_pending |= now % period == 0;
            is_direct |= masking.is_over(now);
            let is_masked = (now + phase_us) % (masked_us + open_us) < masked_us;
            let is_sample = sample.is_some_and(|due| due <= now);
            let is_nmi = now % watchdog == 0 || is_sample;
            if is_sample {
                assert!(samples.take(now).sample);
                sample = samples.next(now, random.bits());
            }
            if is_pending && (!is_direct || !is_masked || is_nmi) {
                is_pending = false;
                taken += 1;
                gap = gap.max(now - last);
                last = now;
                let late = ticks.take(now);
                if is_nmi && is_masked && is_direct && masking.found(late, now) {
                    is_direct = false;
                    suspended += 1;
                }
            }
        }
        (taken, gap, suspended)
    }

    #[test]
    fn however_masking_is_distributed_the_host_has_nine_ticks_of_ten_and_none_is_late_by_two_periods()
     {
        const SECONDS: u64 = 5;
        let made = SECONDS * 200 - 1;
        // A guest that never masks: all ticks are taken.
        assert_eq!(host(0, 1_000, 0, SECONDS), (made, 5_000, 0));
        let mut masked = vec![(u64::MAX / 2, 0)];
        for masked_us in (1_000..30_000)
            .step_by(700)
            .chain([39_000, 90_000, 99_000, 250_000])
        {
            masked.extend([50, 500, 2_000, 5_000].map(|open_us| (masked_us, open_us)));
        }
        for (masked_us, open_us) in masked {
            for phase_us in [0, 100, 4_900, 10_000] {
                let (taken, gap, _) = host(masked_us, open_us, phase_us, SECONDS);
                let what = format!("masked {masked_us}, open {open_us}, phase {phase_us}");
                assert!(taken * 10 >= made * 9, "{what}: {taken} of {made}");
                assert!(gap <= 40_000, "{what}: {gap} us");
            }
        }
    }

    #[test]
    fn a_guest_that_masks_shortly_or_rarely_stays_in_direct_mode() {
        // Less than half a tick at a time, nearly always; and 100 ms in each second, which are five
        // findings.
        assert_eq!(host(2_400, 50, 0, 20).2, 0);
        let mut masking = Masking::new(5_000);
        for second in 0..100 {
            for finding in 0..5 {
                assert!(!masking.found(20_000, second * SECOND_US + finding * 20_000));
            }
            assert!(!masking.found(2_499, second * SECOND_US + 110_000));
        }
        for finding in 0..5 {
            assert!(!masking.found(20_000, 200 * SECOND_US + finding));
        }
        assert!(masking.found(20_000, 200 * SECOND_US + 5));
        assert!(!masking.is_over(201 * SECOND_US) && masking.is_over(201 * SECOND_US + 5));
    }

    #[test]
    fn samples_come_at_moments_that_no_phase_keeps_clear_of() {
        let (mut samples, mut now, mut phases) = (Samples::new(20_000), 0, [0_u32; 20]);
        for entropy in 0..2_000 {
            let due = samples.next(now, entropy * 7).unwrap();
            assert!((now + 1_000..now + 20_000).contains(&due));
            assert_eq!(samples.next(now, 0), None);
            let is_sample = [due - 1, due, due].map(|at| samples.take(at).sample);
            assert_eq!(is_sample, [false, true, false]);
            phases[(due % 20_000 / 1_000) as usize] += 1;
            now = due;
        }
        assert!(now / 2_000 > 9_000 && now / 2_000 < 11_500, "{now}");
        assert!(phases.iter().all(|count| *count > 50), "{phases:?}");
        // One that has been missed is taken with the watchdog's, and the next can be set.
        let due = samples.next(now, 1).unwrap();
        assert_eq!(samples.next(due + 50_000, 1), None);
        assert!(samples.take(due + 50_000).sample);
        assert!(samples.next(due + 50_000, 1).is_some());
        assert_eq!(Samples::new(0).next(0, 0), None);
    }

    #[test]
    fn the_watchdogs_tick_is_counted_where_it_merged_into_a_sample() {
        let mut samples = Samples::new(20_000);
        let came = |sample, watchdog| Came { sample, watchdog };
        assert_eq!(samples.take(20_000), came(false, true));
        // Before the next of the watchdog's is due; and with it.
        let due = samples.next(20_000, 3).unwrap();
        assert_eq!(samples.take(due), came(true, false));
        let due = samples.next(due, 3).unwrap();
        assert_eq!(samples.take(due.max(45_000)), came(true, true));
        assert_eq!(samples.take(70_000), came(false, true));
    }
}
