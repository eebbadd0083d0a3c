//! Verified UDP echoes.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use crate::pattern;

/// Tries per datagram: UDP may lose any of them.
const TRIES: u32 = 5;

/// What came back.
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
    let any: SocketAddr = if to.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0_u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(wait))?;
    let mut report = EchoReport::default();
    for number in 0..count {
        let len = 8 + usize::try_from(number * 97 % 1393).expect("below 1393");
        let mut datagram = vec![0; len];
        pattern::fill(number, 0, &mut datagram[8..]);
        datagram[..8].copy_from_slice(&number.to_le_bytes());
        report.resent += exchange(&socket, &datagram)?;
        report.ok += 1;
    }
    Ok(report)
}

/// Sends until the answer comes; the number of repetitions.
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
mod tests {
    use std::thread;

    use super::*;

    /// Answers `count` datagrams, each changed by `change`.
    fn server(count: usize, change: impl Fn(usize, &mut Vec<u8>) + Send + 'static) -> SocketAddr {
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
}
