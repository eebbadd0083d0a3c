//! Requests and their answers, one at a time, as netperf's TCP_RR and UDP_RR: the peer sends each
//! request back.
//!
//! Over one TCP connection, without Nagle's algorithm, or as datagrams. A request has at least one
//! byte; its bytes are those of the pattern at its position, so that a repeated answer of the
//! request before is detected. Nothing is sent again: a lost message ends the run, since a window
//! would count it twice.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::echo;
use crate::marker::RequestWindows;
use crate::pattern;
use crate::stream::{Direction, Header};

/// Largest request, bytes.
pub const BYTES_MAX: usize = 1400;

/// Transport of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// One TCP connection.
    Tcp,
    /// Datagrams.
    Udp,
}

/// Requests of a run.
#[derive(Debug, Clone, Copy)]
pub struct RrConfig {
    /// Their transport.
    pub carrier: Transport,
    /// Bytes of each request, and of its answer: 1 to [`BYTES_MAX`].
    pub bytes: usize,
    /// Windows of answers.
    pub windows: RequestWindows,
    /// Longest time for an answer.
    pub wait: Duration,
}

/// Sends requests to the peer at `to` and checks its answers; `mark` is called with the windows'
/// markers.
///
/// # Errors
/// The size is out of range (`InvalidInput`); an answer with wrong content (`InvalidData`); none in
/// time; a socket's error.
pub fn run(to: SocketAddr, config: &RrConfig, mark: &dyn Fn(u8)) -> io::Result<()> {
    let RrConfig {
        carrier,
        bytes,
        windows,
        wait,
    } = *config;
    if !(1..=BYTES_MAX).contains(&bytes) {
        let text = format!("requests of {bytes} bytes: 1 to {BYTES_MAX}");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    match carrier {
        Transport::Tcp => {
            let mut stream = TcpStream::connect_timeout(&to, wait)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(wait))?;
            stream.set_write_timeout(Some(wait))?;
            let header = Header {
                direction: Direction::Echo,
                seed: 0,
                total: windows.total() * bytes as u64,
            };
            stream.write_all(&header.bytes())?;
            exchange(bytes, &windows, mark, |request, answer| {
                stream.write_all(request)?;
                stream.read_exact(answer).map(|()| bytes)
            })
        }
        Transport::Udp => {
            let socket = echo::connected(to, wait)?;
            exchange(bytes, &windows, mark, |request, answer| {
                socket.send(request)?;
                socket.recv(answer)
            })
        }
    }
}

/// Makes all requests; `ask` sends one and receives its answer, whose length it returns.
fn exchange(
    bytes: usize,
    windows: &RequestWindows,
    mark: &dyn Fn(u8),
    mut ask: impl FnMut(&[u8], &mut [u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let (mut request, mut answer) = (vec![0; bytes], vec![0; bytes]);
    for number in 1..=windows.total() {
        pattern::fill(number, 0, &mut request);
        // One byte of a pattern may be the same as that before.
        request[0] = number.to_le_bytes()[0];
        let len = ask(&request, &mut answer)?;
        if answer[..len] != request {
            let text = format!("answer {number}, of {len} bytes, is not its request");
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        if let Some(value) = windows.marker_after(number) {
            mark(value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::net::{TcpListener, UdpSocket};
    use std::thread;

    use super::*;
    use crate::stream;

    const WAIT: Duration = Duration::from_secs(5);

    fn config(carrier: Transport, bytes: usize) -> RrConfig {
        RrConfig {
            carrier,
            bytes,
            windows: RequestWindows::new(3, 5, 2).unwrap(),
            wait: WAIT,
        }
    }

    /// Starts a peer of one connection or of 16 datagrams; `change` receives each datagram and its
    /// number, from 1.
    fn peer(carrier: Transport, change: fn(usize, &mut Vec<u8>)) -> SocketAddr {
        match carrier {
            Transport::Tcp => {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = listener.local_addr().unwrap();
                thread::spawn(move || {
                    let (mut stream, _) = listener.accept().unwrap();
                    let header = stream::read_header(&mut stream).unwrap();
                    stream::answer(&header, stream)
                });
                address
            }
            Transport::Udp => {
                echo::tests::server(16, move |before, answer| change(before + 1, answer))
            }
        }
    }

    #[test]
    fn windows_count_answers_of_either_carrier() {
        for carrier in [Transport::Tcp, Transport::Udp] {
            for bytes in [1, 64, BYTES_MAX] {
                let marks = RefCell::new(Vec::new());
                let to = peer(carrier, |_, _| {});
                let mark = |value| marks.borrow_mut().push(value);
                run(to, &config(carrier, bytes), &mark).unwrap();
                assert_eq!(*marks.borrow(), [1, 2, 1, 2]);
            }
        }
    }

    #[test]
    fn an_answer_that_is_not_its_request_is_an_error() {
        let changes: [fn(usize, &mut Vec<u8>); 2] = [
            |number, answer| answer[0] ^= u8::from(number == 4),
            |number, answer| answer.truncate(usize::from(number != 4)),
        ];
        for change in changes {
            let to = peer(Transport::Udp, change);
            let error = run(to, &config(Transport::Udp, 1), &|_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn a_request_has_its_size_and_its_time() {
        let to = SocketAddr::from(([127, 0, 0, 1], 9));
        for bytes in [0, BYTES_MAX + 1] {
            let error = run(to, &config(Transport::Udp, bytes), &|_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let config = RrConfig {
            wait: Duration::from_millis(100),
            ..config(Transport::Udp, 1)
        };
        let error = run(silent.local_addr().unwrap(), &config, &|_| {}).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            "{error}"
        );
    }
}
