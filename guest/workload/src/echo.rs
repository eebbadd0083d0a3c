//! Verified UDP echoes: one datagram at a time, sent again if it is lost, or many in flight, of
//! which none may be lost.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use crate::marker::RequestWindows;
use crate::pattern;

/// Tries per datagram: UDP may lose any of them.
const TRIES: u32 = 5;

/// Counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EchoReport {
    /// Datagrams answered with the right content.
    pub ok: u64,
    /// Datagrams sent again because no answer came in time.
    pub resent: u64,
}

/// Sends `count` datagrams of 8 to 1,400 bytes one after the other and checks every answer.
///
/// # Errors
/// An answer with wrong content (`InvalidData`), none after five tries (`TimedOut`), or a socket's
/// error.
pub fn run(to: SocketAddr, count: u64, wait: Duration) -> io::Result<EchoReport> {
    let socket = connected(to, wait)?;
    let mut report = EchoReport::default();
    for number in 0..count {
        report.resent += exchange(&socket, &datagram(number, None))?;
        report.ok += 1;
    }
    Ok(report)
}

/// Creates a socket for this peer alone, with a receive timeout of `wait`.
pub(crate) fn connected(to: SocketAddr, wait: Duration) -> io::Result<UdpSocket> {
    let any: SocketAddr = if to.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0_u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(wait))?;
    Ok(socket)
}

/// Length of a datagram in bytes: its number at least, and at most what fits a frame.
pub const BYTES: std::ops::RangeInclusive<usize> = 8..=1400;

/// Returns the datagram of this number, which it begins with: `bytes` long, or of a length that
/// goes through all of [`BYTES`].
fn datagram(number: u64, bytes: Option<usize>) -> Vec<u8> {
    let varied = || 8 + usize::try_from(number * 97 % 1393).expect("below 1393");
    let mut datagram = vec![0; bytes.unwrap_or_else(varied)];
    pattern::fill(number, 0, &mut datagram[8..]);
    datagram[..8].copy_from_slice(&number.to_le_bytes());
    datagram
}

/// Number of datagrams in flight, their length, and the windows that count their answers.
#[derive(Debug, Clone, Copy)]
pub struct EchoConfig {
    /// Datagrams in flight, 1 to 64.
    pub depth: u64,
    /// Length of each in bytes, in [`BYTES`]; all lengths in turn if `None`.
    pub bytes: Option<usize>,
    /// Windows of answers.
    pub windows: RequestWindows,
    /// Longest time between two answers.
    pub wait: Duration,
}

/// Keeps `depth` datagrams in flight: as many go out at first, and one for each answer. Answers may
/// come in any order; each is checked. A window counts answers, and `mark` is called with its
/// markers.
///
/// # Errors
/// Depth or length are out of range; an answer with wrong content (`InvalidData`); no answer in
/// time, for instance because one was lost; a socket's error.
pub fn pipelined(to: SocketAddr, config: &EchoConfig, mark: &dyn Fn(u8)) -> io::Result<()> {
    let EchoConfig {
        depth,
        bytes,
        windows,
        wait,
    } = *config;
    let refused = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    if !(1..=64).contains(&depth) {
        return Err(refused(format!("a depth of {depth} is outside 1 to 64")));
    }
    if let Some(bytes) = bytes.filter(|bytes| !BYTES.contains(bytes)) {
        return Err(refused(format!(
            "datagrams of {bytes} bytes are outside 8 to 1400"
        )));
    }
    let datagram = |number| datagram(number, bytes);
    let socket = connected(to, wait)?;
    let mut in_flight = BTreeSet::new();
    for number in 0..depth {
        socket.send(&datagram(number))?;
        in_flight.insert(number);
    }
    let mut answer = [0; 2048];
    for answered in 1..=windows.total() {
        let len = socket.recv(&mut answer)?;
        let number = answer.first_chunk().copied().map(u64::from_le_bytes);
        let number = number.filter(|_| len >= 8);
        let is_right = |number| in_flight.remove(&number) && answer[..len] == datagram(number);
        if !number.is_some_and(is_right) {
            let text = format!("answer {answered}, of {len} bytes, is none of what was sent");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if let Some(value) = windows.marker_after(answered) {
            mark(value);
        }
        // Also beyond the last answer: its window ends with as many in flight.
        let next = answered + depth - 1;
        socket.send(&datagram(next))?;
        in_flight.insert(next);
    }
    Ok(())
}

/// Sends until the answer comes. Returns the number of repetitions.
fn exchange(socket: &UdpSocket, datagram: &[u8]) -> io::Result<u64> {
    let mut answer = [0; 2048];
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for again in 0..u64::from(TRIES) {
        if let Err(error) = socket.send(datagram) {
            last = error;
            continue;
        }
        loop {
            match socket.recv(&mut answer) {
                // A late answer to an earlier datagram: it bears another number.
                Ok(len) if len >= 8 && answer[..8] != datagram[..8] => {}
                Ok(len) if &answer[..len] == datagram => return Ok(again),
                Ok(len) => {
                    let text = format!(
                        "echo of {} bytes came back as {len}, or changed",
                        datagram.len()
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                Err(error) => {
                    last = error;
                    break;
                }
            }
        }
    }
    Err(last)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::thread;

    use super::*;

    /// Answers `count` datagrams, each changed by `change`, which receives its number, from 0.
    pub(crate) fn server(
        count: usize,
        change: impl Fn(usize, &mut Vec<u8>) + Send + 'static,
    ) -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            for number in 0..count {
                let (len, from) = socket.recv_from(&mut buffer).unwrap();
                let mut answer = buffer[..len].to_vec();
                change(number, &mut answer);
                socket.send_to(&answer, from).unwrap();
            }
        });
        address
    }

    #[test]
    fn echoes_are_counted() {
        let report = run(server(20, |_, _| {}), 20, Duration::from_secs(5)).unwrap();
        assert_eq!(report, EchoReport { ok: 20, resent: 0 });
    }

    #[test]
    fn a_changed_or_shortened_echo_is_an_error() {
        let flip = |number, answer: &mut Vec<u8>| {
            if number == 2 {
                answer[100] ^= 1;
            }
        };
        let error = run(server(9, flip), 9, Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let cut = |_, answer: &mut Vec<u8>| answer.truncate(4);
        assert!(run(server(1, cut), 1, Duration::from_secs(5)).is_err());
    }

    #[test]
    fn a_lost_datagram_is_sent_again() {
        let lose_first = |number, answer: &mut Vec<u8>| {
            if number == 0 {
                // An answer to a datagram never sent: ignored, so the wait runs out.
                answer[..8].copy_from_slice(&u64::MAX.to_le_bytes());
            }
        };
        let report = run(server(2, lose_first), 1, Duration::from_millis(300)).unwrap();
        assert_eq!(report, EchoReport { ok: 1, resent: 1 });
    }

    const WAIT: Duration = Duration::from_secs(5);

    /// Four in flight.
    fn four() -> EchoConfig {
        EchoConfig {
            depth: 4,
            bytes: None,
            windows: RequestWindows::new(2, 6, 2).unwrap(),
            wait: WAIT,
        }
    }

    #[test]
    fn windows_of_pipelined_echoes_are_marked_by_their_answers() {
        for bytes in [None, Some(8), Some(1400)] {
            let marks = std::cell::RefCell::new(Vec::new());
            // Four more than are counted: the client does not wait for their answers.
            let to = server(20, move |_, answer| {
                if let Some(bytes) = bytes {
                    assert_eq!(answer.len(), bytes);
                }
            });
            let config = EchoConfig { bytes, ..four() };
            pipelined(to, &config, &|value| marks.borrow_mut().push(value)).unwrap();
            assert_eq!(*marks.borrow(), [1, 2, 1, 2]);
        }
    }

    #[test]
    fn a_depth_or_a_length_out_of_range_is_refused() {
        let refused = |config: EchoConfig| {
            let to = server(0, |_, _| {});
            let error = pipelined(to, &config, &|_| {}).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        };
        for depth in [0, 65] {
            refused(EchoConfig { depth, ..four() });
        }
        for bytes in [0, 7, 1401].map(Some) {
            refused(EchoConfig { bytes, ..four() });
        }
    }

    #[test]
    fn a_pipelined_echo_that_changed_or_is_lost_is_an_error() {
        let echo = |change: fn(usize, &mut Vec<u8>)| {
            let error = pipelined(server(16, change), &four(), &|_| {}).unwrap_err();
            error.kind()
        };
        let flip = |number, answer: &mut Vec<u8>| {
            if number == 3 {
                *answer.last_mut().unwrap() ^= 1;
            }
        };
        assert_eq!(echo(flip), io::ErrorKind::InvalidData);
        let twice = |number, answer: &mut Vec<u8>| {
            if number == 3 {
                *answer = datagram(0, None);
            }
        };
        assert_eq!(echo(twice), io::ErrorKind::InvalidData);
        let shorten = |_, answer: &mut Vec<u8>| answer.truncate(4);
        assert_eq!(echo(shorten), io::ErrorKind::InvalidData);
        let wait = Duration::from_millis(300);
        let one_is_lost = server(3, |_, _| {});
        let short = EchoConfig { wait, ..four() };
        let error = pipelined(one_is_lost, &short, &|_| {}).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused
            ),
            "{error}"
        );
    }
}
