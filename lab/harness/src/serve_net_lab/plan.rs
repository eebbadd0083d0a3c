//! Cases that are counted: the mover of a guest's frames, and the guest's work.

/// Server that moves frames between a guest's rings and its TAP interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mover {
    /// `exitless serve`, whose core sleeps as soon as it is idle, and is notified.
    Notify,
    /// The same, whose core polls.
    Poll,
    /// The same, whose core polls for as long as it expects work.
    Adaptive,
    /// The kernel's vhost-net.
    Vhost,
}

impl Mover {
    /// All, in the order in which they are measured: guests are booted with the first one.
    pub const ALL: [Self; 4] = [Self::Notify, Self::Poll, Self::Adaptive, Self::Vhost];
    /// Movers that are `exitless serve`.
    pub const SERVE: [Self; 3] = [Self::Notify, Self::Poll, Self::Adaptive];

    /// Returns its name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Notify => "notify",
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Vhost => "vhost",
        }
    }

    /// Returns the daemon's `--idle`; `None` without a daemon.
    pub fn idle(self) -> Option<&'static str> {
        match self {
            Self::Notify => Some("sleep"),
            Self::Poll => Some("poll"),
            Self::Adaptive => Some("adaptive"),
            Self::Vhost => None,
        }
    }

    /// Returns the number of the guest's interface behind it.
    pub fn card(self) -> u32 {
        match self {
            Self::Vhost => 1,
            _ => 0,
        }
    }
}

/// Work of a guest in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// A TCP connection, written to in pieces of 64 bytes.
    Stream,
    /// A datagram of 8 bytes and its answer, one at a time.
    Rr,
    /// A TCP connection, read from: nearly all frames come from the host.
    Receive,
}

/// Factor between the pieces of `Receive` and `Stream`: they are larger, and fewer, by it.
const RECEIVED: u32 = 64;
/// Bytes of a piece of `Stream`.
const PIECE: u32 = 64;

/// Amounts of work.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Pieces of 64 bytes in a window.
    pub writes: u32,
    /// Datagrams in a window.
    pub datagrams: u32,
    /// Windows of each guest.
    pub windows: u32,
}

impl Work {
    /// All.
    pub const ALL: [Self; 3] = [Self::Stream, Self::Rr, Self::Receive];

    /// Returns its name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Rr => "rr",
            Self::Receive => "receive",
        }
    }

    /// Returns the guest's step: its windows with the peer at `to`, over interface `card`.
    pub fn step(self, amount: &Amount, to: &str, card: u32) -> String {
        let stream = |count: u32, bytes: u32, receive: &str| {
            let warmup = (count / 8).max(1);
            format!("tcp-stream {to} --bytes {bytes} --count {count} --warmup {warmup}{receive}")
        };
        let command = match self {
            Self::Stream => stream(amount.writes, PIECE, ""),
            Self::Rr => {
                let count = amount.datagrams;
                format!("udp-echo {to} --depth 1 --bytes 8 --count {count} --warmup 50")
            }
            Self::Receive => stream(
                (amount.writes / RECEIVED).max(1),
                PIECE * RECEIVED,
                " --receive",
            ),
        };
        let windows = amount.windows;
        format!("workload {command} --windows {windows} --wait-ms {WAIT_MS} --nic {card}")
    }
}

/// Longest time for which nothing may move, ms: long, since guests in the lab are slow.
const WAIT_MS: u32 = 60_000;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn movers_and_works_differ_in_name_and_one_has_no_daemon() {
        let names: BTreeSet<_> = Mover::ALL.map(Mover::name).into();
        assert_eq!(names.len(), Mover::ALL.len());
        let names: BTreeSet<_> = Work::ALL.map(Work::name).into();
        assert_eq!(names.len(), Work::ALL.len());
        for mover in Mover::ALL {
            assert_eq!(mover.idle().is_some(), Mover::SERVE.contains(&mover));
        }
    }

    #[test]
    fn a_step_says_how_much_over_which_interface() {
        let amount = Amount {
            writes: 640,
            datagrams: 30,
            windows: 2,
        };
        let tail = "--windows 2 --wait-ms 60000 --nic 1";
        assert_eq!(
            Work::Stream.step(&amount, "1.2.3.4:5", 1),
            format!("workload tcp-stream 1.2.3.4:5 --bytes 64 --count 640 --warmup 80 {tail}")
        );
        assert_eq!(
            Work::Rr.step(&amount, "1.2.3.4:5", 1),
            format!(
                "workload udp-echo 1.2.3.4:5 --depth 1 --bytes 8 --count 30 --warmup 50 {tail}"
            )
        );
        assert_eq!(
            Work::Receive.step(&amount, "1.2.3.4:5", 1),
            format!(
                "workload tcp-stream 1.2.3.4:5 --bytes 4096 --count 10 --warmup 1 --receive {tail}"
            )
        );
    }
}
