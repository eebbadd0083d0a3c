//! The table of transitions: for each state those events that change it or reach the device. All
//! other events do neither.

use super::*;

use Call::{Activate, Arm, Cancel, Disarm, Kick, Poll, Reset, Serve};
use Service::{Full, Stopped};

/// Each state, by the events that lead to it. "Silent" is one whose requests in flight do not
/// touch guest memory, "due" one with a reset of the registers still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not activated, without Bus Master.
    Masterless,
    Inactive,
    /// DRIVER_OK is set, and the device has refused to start.
    Refused,
    InactiveDue,
    Live,
    Pausing,
    Paused,
    Resetting,
    ResettingSilent,
    Ending,
    EndingSilent,
    EndingMasterless,
    EndingDue,
    EndingDueSilent,
    EndDrained,
    Ended,
    EndedDue,
}

impl State {
    fn path(self) -> &'static [Event] {
        use Event::*;
        const BOUNCED: Event = Poll(Flight::Bounced);
        match self {
            Self::Masterless => &[],
            Self::Inactive => &[MasterOn],
            Self::Refused => &[MasterOn, Refused],
            Self::InactiveDue => &[MasterOn, Refused, Reset],
            Self::Live => &[MasterOn, Start],
            Self::Pausing => &[MasterOn, Start, MasterOff],
            Self::Paused => &[MasterOn, Start, MasterOff, BOUNCED],
            Self::Resetting => &[MasterOn, Start, Reset],
            Self::ResettingSilent => &[MasterOn, Start, Reset, BOUNCED],
            Self::Ending => &[MasterOn, Start, End],
            Self::EndingSilent => &[MasterOn, Start, End, BOUNCED],
            Self::EndingMasterless => &[MasterOn, Start, MasterOff, End],
            Self::EndingDue => &[MasterOn, Start, End, Reset],
            Self::EndingDueSilent => &[MasterOn, Start, End, Reset, BOUNCED],
            Self::EndDrained => &[MasterOn, Start, End, Poll(Flight::None)],
            Self::Ended => &[MasterOn, End],
            Self::EndedDue => &[MasterOn, Refused, Reset, End],
        }
    }

    /// The state as it is observed, and the cancellation that a stop which takes too long asks for.
    fn fingerprint(self) -> (Observed, Vec<Call>) {
        fingerprint(self.path())
    }
}

fn fingerprint(path: &[Event]) -> (Observed, Vec<Call>) {
    let mut world = World::after(path);
    let observed = Observed {
        // Depends on the flight alone, of which one state has several.
        has_deadline: false,
        ..world.observe()
    };
    (observed, world.event(Event::Overdue).0)
}

type Row = (Event, State, &'static [Call]);

const NONE: Event = Event::Poll(Flight::None);
const BOUNCED: Event = Event::Poll(Flight::Bounced);
const DIRECT: Event = Event::Poll(Flight::Direct);
/// The device's calls when a function that drains is polled, and when one that has drained is.
const DRAIN: &[Call] = &[Serve(Stopped), Poll(Stopped)];
const DRAINED: &[Call] = &[Poll(Stopped)];
const DRAIN_AND_RESET: &[Call] = &[Serve(Stopped), Poll(Stopped), Reset];

const TABLE: &[(State, &[Row])] = &[
    (
        State::Masterless,
        &[
            (Event::Start, State::Pausing, &[Activate]),
            (Event::Refused, State::Refused, &[Activate]),
            (Event::MasterOn, State::Inactive, &[]),
            (Event::End, State::Ended, &[]),
        ],
    ),
    (
        State::Inactive,
        &[
            // What was made available before DRIVER_OK rang no doorbell that counts.
            (Event::Start, State::Live, &[Activate, Kick]),
            (Event::Refused, State::Refused, &[Activate]),
            (Event::MasterOff, State::Masterless, &[]),
            (Event::End, State::Ended, &[]),
        ],
    ),
    (
        State::Refused,
        &[
            (Event::Reset, State::InactiveDue, &[]),
            (Event::End, State::Ended, &[]),
        ],
    ),
    (
        State::InactiveDue,
        &[
            (NONE, State::Inactive, &[]),
            (BOUNCED, State::Inactive, &[]),
            (DIRECT, State::Inactive, &[]),
            (Event::End, State::EndedDue, &[]),
        ],
    ),
    (
        State::Live,
        &[
            (Event::MasterOff, State::Pausing, &[]),
            (Event::Reset, State::Resetting, &[]),
            (Event::End, State::Ending, &[]),
            (NONE, State::Live, &[Poll(Full)]),
            (BOUNCED, State::Live, &[Poll(Full)]),
            (DIRECT, State::Live, &[Poll(Full)]),
            (Event::Ring, State::Live, &[Kick]),
            (Event::Arm, State::Live, &[Arm, Disarm]),
        ],
    ),
    (
        State::Pausing,
        &[
            (Event::MasterOn, State::Live, &[Serve(Full)]),
            (Event::Reset, State::Resetting, &[]),
            (Event::End, State::Ending, &[]),
            (NONE, State::Paused, DRAIN),
            (BOUNCED, State::Paused, DRAIN),
            (DIRECT, State::Pausing, DRAIN),
        ],
    ),
    (
        State::Paused,
        &[
            (Event::MasterOn, State::Live, &[Serve(Full)]),
            (Event::Reset, State::ResettingSilent, &[]),
            (Event::End, State::EndingSilent, &[]),
            (NONE, State::Paused, DRAINED),
            (BOUNCED, State::Paused, DRAINED),
            (DIRECT, State::Paused, DRAINED),
        ],
    ),
    (
        State::Resetting,
        &[
            (Event::End, State::EndingDue, &[]),
            (NONE, State::Inactive, DRAIN_AND_RESET),
            (BOUNCED, State::ResettingSilent, DRAIN),
            (DIRECT, State::Resetting, DRAIN),
            (
                Event::Overdue,
                State::Resetting,
                &[Cancel(CancelReason::Reset)],
            ),
        ],
    ),
    (
        State::ResettingSilent,
        &[
            // A write that changes Bus Master is answered once a poll has looked.
            (Event::MasterOff, State::Resetting, &[]),
            (Event::End, State::EndingDueSilent, &[]),
            (NONE, State::Inactive, DRAIN_AND_RESET),
            (BOUNCED, State::ResettingSilent, DRAIN),
            (DIRECT, State::Resetting, DRAIN),
            (
                Event::Overdue,
                State::ResettingSilent,
                &[Cancel(CancelReason::Reset)],
            ),
        ],
    ),
    (
        State::Ending,
        &[
            (Event::Reset, State::EndingDue, &[]),
            (NONE, State::EndDrained, DRAIN),
            (BOUNCED, State::EndingSilent, DRAIN),
            (DIRECT, State::Ending, DRAIN),
            (Event::Overdue, State::Ending, &[Cancel(CancelReason::End)]),
        ],
    ),
    (
        State::EndingSilent,
        &[
            (Event::MasterOff, State::Ending, &[]),
            (Event::Reset, State::EndingDueSilent, &[]),
            (NONE, State::EndDrained, DRAIN),
            (BOUNCED, State::EndingSilent, DRAIN),
            (DIRECT, State::Ending, DRAIN),
            (
                Event::Overdue,
                State::EndingSilent,
                &[Cancel(CancelReason::End)],
            ),
        ],
    ),
    (
        State::EndingMasterless,
        &[
            (Event::Reset, State::EndingDue, &[]),
            (NONE, State::EndDrained, DRAIN),
            (BOUNCED, State::EndingSilent, DRAIN),
            (DIRECT, State::Ending, DRAIN),
            (Event::Overdue, State::Ending, &[Cancel(CancelReason::End)]),
        ],
    ),
    (
        State::EndingDue,
        &[
            (NONE, State::Ended, DRAIN_AND_RESET),
            (BOUNCED, State::EndingDueSilent, DRAIN),
            (DIRECT, State::EndingDue, DRAIN),
            (
                Event::Overdue,
                State::EndingDue,
                &[Cancel(CancelReason::End)],
            ),
        ],
    ),
    (
        State::EndingDueSilent,
        &[
            (Event::MasterOff, State::EndingDue, &[]),
            (NONE, State::Ended, DRAIN_AND_RESET),
            (BOUNCED, State::EndingDueSilent, DRAIN),
            (DIRECT, State::EndingDue, DRAIN),
            (
                Event::Overdue,
                State::EndingDueSilent,
                &[Cancel(CancelReason::End)],
            ),
        ],
    ),
    (
        State::EndDrained,
        &[
            // A stop that is asked for in a drained state is over when the next poll has looked.
            (Event::MasterOff, State::Ending, &[]),
            (Event::Reset, State::EndingDueSilent, &[]),
            (Event::End, State::EndingSilent, &[]),
            (NONE, State::EndDrained, DRAINED),
            (BOUNCED, State::EndDrained, DRAINED),
            (DIRECT, State::EndDrained, DRAINED),
        ],
    ),
    // For good: DRIVER_OK activates nothing.
    (State::Ended, &[]),
    (
        State::EndedDue,
        &[
            (NONE, State::Ended, &[]),
            (BOUNCED, State::Ended, &[]),
            (DIRECT, State::Ended, &[]),
        ],
    ),
];

/// How a poll ends that leaves the function as it is observed. The device itself is idle.
fn progress(before: &Observed, after: &Observed) -> Progress {
    match (before.is_drained, after.is_drained) {
        (_, false) => Progress::Stopping,
        (false, true) => Progress::Busy,
        (true, true) => Progress::Idle,
    }
}

#[test]
fn each_event_has_in_each_state_the_outcome_of_the_table() {
    for &(state, rows) in TABLE {
        for event in EVENTS {
            let row = rows.iter().find(|row| row.0 == event);
            let (next, calls) = row.map_or((state, &[][..]), |&(_, next, calls)| (next, calls));
            let mut world = World::after(state.path());
            let before = world.observe();
            let (called, polled) = world.event(event);
            let path = [state.path(), &[event]].concat();
            assert_eq!(called, calls, "{state:?} and {event:?}");
            assert_eq!(
                fingerprint(&path),
                next.fingerprint(),
                "{state:?} and {event:?}: not {next:?}"
            );
            if let Some(polled) = polled {
                let expected = progress(&before, &world.observe());
                assert_eq!(polled, expected, "{state:?} and {event:?}");
            }
        }
    }
}

/// Another process that serves the queues would go on, in the memory of a machine that has ended.
#[test]
fn after_the_end_neither_bus_master_nor_driver_ok_sets_the_device_going() {
    use Event::{End, MasterOff, MasterOn, Start};
    let ended: [&[Event]; 4] = [
        &[MasterOn, Start, MasterOff, End, MasterOn],
        &[MasterOn, Start, MasterOff, End, NONE, MasterOn],
        &[MasterOn, End, Start],
        &[MasterOn, Start, End, Event::Reset, NONE, Start],
    ];
    for path in ended {
        let (last, before) = path.split_last().expect("events");
        let (calls, _) = World::after(before).event(*last);
        assert_eq!(calls, [], "{path:?}");
    }
}

/// Two states that looked alike would hide a wrong transition from the table.
#[test]
fn states_of_the_table_can_be_told_apart() {
    // Alike but for what a start or Bus Master makes of them, which the table has.
    let alike = [
        [State::Masterless, State::Inactive],
        [State::Masterless, State::Refused],
        [State::Inactive, State::Refused],
        [State::Ending, State::EndingMasterless],
    ];
    for (at, &(one, _)) in TABLE.iter().enumerate() {
        for &(other, _) in &TABLE[at + 1..] {
            let same = one.fingerprint() == other.fingerprint();
            assert_eq!(same, alike.contains(&[one, other]), "{one:?} and {other:?}");
        }
    }
}
