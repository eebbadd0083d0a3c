//! One TCP connection, verified: bytes of the pattern in one direction, in pieces of one size, one
//! system call each.
//!
//! The client begins with a header of 24 bytes, three little-endian numbers: the sender (0: the
//! client, 1: the peer; 2: the client, and its bytes go back, see [`crate::rr`]; 3 is
//! [`crate::web`]'s), the pattern's seed, and the number of bytes that follow. The receiver
//! compares every byte. A peer that has received all of them sends their number in eight bytes; one
//! that has received a wrong byte closes the connection without an answer. Nagle's algorithm stays
//! on, as it is by default: the sender's kernel makes segments of small pieces, as it does for
//! netperf and iperf3.
//!
//! A window counts pieces: those that the sender has handed to its kernel, or those that the
//! receiver has taken from its kernel.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use crate::marker::RequestWindows;
use crate::pattern;

/// Largest piece, bytes.
pub const PIECE_MAX: usize = 1 << 18;

/// Direction of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the peer.
    Send,
    /// From the peer to the client.
    Receive,
    /// From the client to the peer, and back as they came.
    Echo,
    /// None: the peer is asked for clients of a server ([`crate::web`]).
    Web,
}

/// First bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Direction of the bytes behind it.
    pub direction: Direction,
    /// Seed of their pattern.
    pub seed: u64,
    /// Number of bytes behind it.
    pub total: u64,
}

impl Header {
    /// Length on the wire.
    pub const LEN: usize = 24;

    /// Encodes the header.
    #[must_use]
    pub fn bytes(&self) -> [u8; Self::LEN] {
        let direction = match self.direction {
            Direction::Send => 0_u64,
            Direction::Receive => 1,
            Direction::Echo => 2,
            Direction::Web => 3,
        };
        let mut bytes = [0; Self::LEN];
        let words = [direction, self.seed, self.total];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        bytes
    }

    /// Decodes a header; `None` if it has no valid direction.
    #[must_use]
    pub fn of(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [direction, seed, total] = [0, 1, 2].map(|at| u64::from_le_bytes(words[at]));
        let direction = match direction {
            0 => Direction::Send,
            1 => Direction::Receive,
            2 => Direction::Echo,
            3 => Direction::Web,
            _ => return None,
        };
        Some(Self {
            direction,
            seed,
            total,
        })
    }
}

/// Configuration of a client.
#[derive(Debug, Clone, Copy)]
pub struct StreamConfig {
    /// Direction of the bytes.
    pub direction: Direction,
    /// Bytes of a piece: a multiple of 8, up to [`PIECE_MAX`].
    pub piece: usize,
    /// Windows of pieces.
    pub windows: RequestWindows,
    /// Seed of the pattern.
    pub seed: u64,
    /// Longest time for which nothing may move.
    pub wait: Duration,
}

/// Sends to the peer at `to`, or receives from it; `mark` is called with the windows' markers.
/// Returns the number of bytes.
///
/// # Errors
/// The piece's size is not allowed (`InvalidInput`); wrong bytes were received, or the peer reports
/// that it received some (`InvalidData`); nothing moved for too long; a socket's error.
pub fn run(to: SocketAddr, config: &StreamConfig, mark: &dyn Fn(u8)) -> io::Result<u64> {
    let StreamConfig {
        direction,
        piece,
        windows,
        seed,
        wait,
    } = *config;
    if !matches!(direction, Direction::Send | Direction::Receive) {
        let text = format!("{direction:?} is no direction of a stream");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    if !(8..=PIECE_MAX).contains(&piece) || !piece.is_multiple_of(8) {
        let text = format!("pieces of {piece} bytes: a multiple of 8 up to {PIECE_MAX}");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    let mut stream = TcpStream::connect_timeout(&to, wait)?;
    stream.set_read_timeout(Some(wait))?;
    stream.set_write_timeout(Some(wait))?;
    let total = windows.total() * piece as u64;
    let header = Header {
        direction,
        seed,
        total,
    };
    stream.write_all(&header.bytes())?;
    let mut buffer = vec![0; piece];
    for number in 1..=windows.total() {
        let offset = (number - 1) * piece as u64;
        if direction == Direction::Send {
            pattern::fill(seed, offset, &mut buffer);
            stream.write_all(&buffer)?;
        } else {
            receive(&mut stream, seed, offset, &mut buffer)?;
        }
        if let Some(value) = windows.marker_after(number) {
            mark(value);
        }
    }
    if direction == Direction::Send {
        stream.shutdown(Shutdown::Write)?;
        let mut answer = [0; 8];
        stream
            .read_exact(&mut answer)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => invalid("the peer received something else".into()),
                _ => error,
            })?;
        let received = u64::from_le_bytes(answer);
        if received != total {
            return Err(invalid(format!(
                "the peer received {received} bytes of {total}"
            )));
        }
    }
    Ok(total)
}

/// Fills `buffer` from the stream, and compares it with the pattern at `offset`.
fn receive(stream: &mut impl Read, seed: u64, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    stream.read_exact(buffer)?;
    pattern::check(seed, offset, buffer).map_err(invalid)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

/// Bytes that a peer receives or sends at a time.
const PEER_PIECE: usize = 1 << 16;

/// Reads the first bytes of a connection.
///
/// # Errors
/// They are no header (`InvalidData`); a socket's error.
pub fn read_header(stream: &mut impl Read) -> io::Result<Header> {
    let mut header = [0; Header::LEN];
    stream.read_exact(&mut header)?;
    Header::of(&header).ok_or_else(|| invalid("no header".into()))
}

/// Executes the peer's side of one connection behind its header. Returns the number of bytes.
///
/// # Errors
/// Wrong bytes were received, or the header names none of a connection's directions
/// (`InvalidData`); a socket's error.
pub fn answer(header: &Header, mut stream: impl Read + Write) -> io::Result<u64> {
    let Header {
        direction,
        seed,
        total,
    } = *header;
    let mut buffer = vec![0; PEER_PIECE];
    let mut offset = 0;
    while offset < total {
        let left = usize::try_from(total - offset).unwrap_or(usize::MAX);
        let piece = &mut buffer[..left.min(PEER_PIECE)];
        offset += match direction {
            Direction::Send => {
                receive(&mut stream, seed, offset, piece)?;
                piece.len()
            }
            Direction::Receive => {
                pattern::fill(seed, offset, piece);
                stream.write_all(piece)?;
                piece.len()
            }
            Direction::Echo => match stream.read(piece)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                len => {
                    stream.write_all(&piece[..len])?;
                    len
                }
            },
            Direction::Web => return Err(invalid("no direction of a stream".into())),
        } as u64;
    }
    if direction == Direction::Send {
        stream.write_all(&total.to_le_bytes())?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    const WAIT: Duration = Duration::from_secs(5);

    fn config(direction: Direction, piece: usize) -> StreamConfig {
        StreamConfig {
            direction,
            piece,
            windows: RequestWindows::new(3, 5, 2).unwrap(),
            seed: 9,
            wait: WAIT,
        }
    }

    /// Starts a peer of one connection.
    fn peer(
        serve: impl FnOnce(TcpStream) -> io::Result<u64> + Send + 'static,
    ) -> (SocketAddr, JoinHandle<io::Result<u64>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = thread::spawn(move || serve(listener.accept().unwrap().0));
        (address, thread)
    }

    /// Executes the peer's side, with its header.
    fn serve(mut stream: TcpStream) -> io::Result<u64> {
        answer(&read_header(&mut stream)?, stream)
    }

    #[test]
    fn both_directions_are_verified_and_windows_count_pieces() {
        for direction in [Direction::Send, Direction::Receive] {
            // The largest piece is more than the peer receives at once.
            for piece in [8, 64, PIECE_MAX] {
                let (to, thread) = peer(serve);
                let marks = RefCell::new(Vec::new());
                let mark = |value| marks.borrow_mut().push(value);
                let sent = run(to, &config(direction, piece), &mark).unwrap();
                assert_eq!(sent, 16 * piece as u64);
                assert_eq!(thread.join().unwrap().unwrap(), sent);
                assert_eq!(*marks.borrow(), [1, 2, 1, 2]);
            }
        }
    }

    #[test]
    fn wrong_bytes_are_an_error_on_either_side() {
        // A proxy that changes one byte of what is sent.
        struct Changed<S>(S, u64);
        impl<S: Read> Read for Changed<S> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let len = self.0.read(buffer)?;
                let end = self.1 + len as u64;
                let at = Header::LEN as u64 + 100;
                if (self.1..end).contains(&at) {
                    buffer[(at - self.1) as usize] ^= 1;
                }
                self.1 = end;
                Ok(len)
            }
        }
        impl<S: Write> Write for Changed<S> {
            fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
                self.0.write(buffer)
            }
            fn flush(&mut self) -> io::Result<()> {
                self.0.flush()
            }
        }
        let (to, thread) = peer(|stream| {
            let mut stream = Changed(stream, 0);
            answer(&read_header(&mut stream)?, stream)
        });
        let error = run(to, &config(Direction::Send, 64), &|_| {}).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::InvalidData | ErrorKind::ConnectionReset
            ),
            "{error}"
        );
        let error = thread.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        let (to, _thread) = peer(|mut stream| {
            stream.read_exact(&mut [0; Header::LEN])?;
            stream.write_all(&[0; 1024]).map(|()| 0)
        });
        let error = run(to, &config(Direction::Receive, 64), &|_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_peer_that_says_less_than_all_is_an_error() {
        let (to, _thread) = peer(|mut stream| {
            let mut all = Vec::new();
            stream.read_to_end(&mut all)?;
            stream.write_all(&7_u64.to_le_bytes()).map(|()| 0)
        });
        let error = run(to, &config(Direction::Send, 64), &|_| {}).unwrap_err();
        assert!(error.to_string().contains("7 bytes of 1024"), "{error}");
    }

    #[test]
    fn bad_header_and_bad_piece_size_are_refused() {
        let (to, thread) = peer(serve);
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(&[4; Header::LEN]).unwrap();
        let error = thread.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        for piece in [0, 7, 12, PIECE_MAX + 8] {
            let error = run(to, &config(Direction::Send, piece), &|_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{piece}");
        }

        for direction in [
            Direction::Send,
            Direction::Receive,
            Direction::Echo,
            Direction::Web,
        ] {
            let header = Header {
                direction,
                seed: 3,
                total: 1 << 40,
            };
            assert_eq!(Header::of(&header.bytes()), Some(header));
        }
        for direction in [Direction::Echo, Direction::Web] {
            let error = run(to, &config(direction, 64), &|_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }
}
