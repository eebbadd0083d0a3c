//! A model that keeps a flag for each cause, and what follows from them, beside a function: after
//! any events both say the same.

use seeded::Random;

use super::*;

/// Sequences of events, and the length of each.
const SEQUENCES: u64 = 5_000;
const EVENTS_EACH: usize = 40;

/// The flags of a function whose device has one queue.
#[derive(Default)]
struct Flags {
    /// DRIVER_OK, or any other bit of the status: it is written zero only after that.
    has_status: bool,
    resetting: bool,
    bus_master: bool,
    /// `activate` has succeeded and no reset has followed.
    active: bool,
    /// The device was stopped, and nothing has been in flight since.
    quiet: bool,
    /// The device was stopped, and what is in flight does not touch guest memory.
    silent: bool,
    /// The machine has ended.
    over: bool,
    service: Service,
    in_flight: bool,
}

impl Flags {
    fn is_stopping(&self) -> bool {
        self.resetting || !self.bus_master || self.over
    }

    fn is_stopped(&self) -> bool {
        let waits_for_all = self.resetting || self.over;
        !self.is_stopping() || !self.active || self.quiet || (self.silent && !waits_for_all)
    }

    fn is_live(&self) -> bool {
        self.active && !self.is_stopping()
    }

    /// The calls that a device receives because of `event`.
    fn event(&mut self, event: Event) -> Vec<Call> {
        match event {
            Event::Start | Event::Refused => self.start(event == Event::Refused),
            Event::MasterOn => self.set_bus_master(true),
            Event::MasterOff => self.set_bus_master(false),
            Event::Reset => {
                if self.has_status && !self.resetting {
                    self.resetting = true;
                    self.quiet = !self.active;
                }
                Vec::new()
            }
            Event::End => {
                self.over = true;
                self.quiet = !self.active;
                Vec::new()
            }
            Event::Poll(flight) => self.poll(flight),
            Event::Overdue if self.is_stopped() => Vec::new(),
            Event::Overdue if self.over => vec![Call::Cancel(CancelReason::End)],
            Event::Overdue if self.resetting => vec![Call::Cancel(CancelReason::Reset)],
            Event::Overdue => Vec::new(),
            Event::Ring if self.is_live() => vec![Call::Kick],
            Event::Arm if self.is_live() => vec![Call::Arm, Call::Disarm],
            Event::Ring | Event::Arm => Vec::new(),
        }
    }

    fn start(&mut self, refused: bool) -> Vec<Call> {
        if self.has_status {
            return Vec::new();
        }
        self.has_status = true;
        if self.over {
            return Vec::new();
        }
        let mut calls = vec![Call::Activate];
        if !refused {
            (self.active, self.quiet, self.silent) = (true, false, false);
            self.service = Service::Full;
            calls.extend(self.is_live().then_some(Call::Kick));
        }
        calls
    }

    fn set_bus_master(&mut self, on: bool) -> Vec<Call> {
        if on == self.bus_master {
            return Vec::new();
        }
        self.bus_master = on;
        self.quiet = !self.active;
        self.silent = false;
        if on && self.active && !self.resetting && !self.over {
            self.service = Service::Full;
            return vec![Call::Serve(Service::Full)];
        }
        Vec::new()
    }

    fn poll(&mut self, flight: Flight) -> Vec<Call> {
        let mut calls = Vec::new();
        if self.active {
            let is_stopping = !self.is_stopped();
            if is_stopping {
                self.service = Service::Stopped;
                calls.push(Call::Serve(self.service));
            }
            calls.push(Call::Poll(self.service));
            self.in_flight = flight != Flight::None;
            if is_stopping {
                self.quiet = !self.in_flight;
                self.silent = flight != Flight::Direct;
            }
        }
        if self.resetting && (!self.active || self.quiet) {
            calls.extend(self.active.then_some(Call::Reset));
            (self.active, self.resetting, self.has_status) = (false, false, false);
        }
        calls
    }

    fn observe(&self) -> Observed {
        Observed {
            is_active: self.active,
            is_live: self.is_live(),
            is_drained: self.is_stopped(),
            is_silent: self.is_stopped() || self.silent,
            has_ended: self.over && self.is_stopped(),
            is_resetting: self.resetting,
            has_work: self.active && !self.is_stopped(),
            has_deadline: self.is_live() || self.in_flight,
        }
    }
}

#[test]
fn any_sequence_of_events_does_what_the_flags_say() {
    for seed in 0..SEQUENCES {
        let mut random = Random::new(seed);
        let mut world = World::new();
        let mut flags = Flags::default();
        let mut past = Vec::new();
        for _ in 0..EVENTS_EACH {
            let event = EVENTS[random.below(EVENTS.len() as u64) as usize];
            // The end is for good: one sequence in four has it.
            if event == Event::End && !random.chance(0.1) {
                continue;
            }
            past.push(event);
            let expected = flags.event(event);
            assert_eq!(world.event(event).0, expected, "seed {seed}: {past:?}");
            assert_eq!(world.observe(), flags.observe(), "seed {seed}: {past:?}");
        }
    }
}
