//! A web-like server: a connection for each request, up to so many at a time, and a short response,
//! as under ApacheBench.
//!
//! The guest is the server. It asks the peer, by a header of [`crate::stream`], for clients: their
//! number, and the port and number of transactions, in sixteen bytes behind the header. Each client
//! connects to the requesting guest, sends [`REQUEST`] bytes of the pattern, compares the response
//! of [`RESPONSE`] bytes and the end of the connection that follows it, and begins again. When all
//! transactions are over the peer sends the number of right ones in eight bytes.
//!
//! The server accepts one connection at a time; the others wait in its listen queue. A window
//! counts responses.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::marker::RequestWindows;
use crate::pattern;
use crate::stream::{Direction, Header};

/// Bytes of a request.
pub const REQUEST: usize = 128;
/// Bytes of a response.
pub const RESPONSE: usize = 1024;
/// Largest number of connections at a time: the length of the listen queue in Rust's standard
/// library.
pub const CONNECTIONS_MAX: u64 = 128;
/// Seed of the content of requests and responses.
const SEED: u64 = 0x77_65_62;

/// Configuration of a server.
#[derive(Debug, Clone, Copy)]
pub struct WebConfig {
    /// Number of clients at a time, 1 to [`CONNECTIONS_MAX`].
    pub connections: u64,
    /// Windows of responses.
    pub windows: RequestWindows,
    /// Longest time for which nothing may move.
    pub wait: Duration,
}

/// Serves clients that it asks the peer at `peer` for; `mark` is called with the windows' markers.
///
/// # Errors
/// The number of connections is out of range (`InvalidInput`); a wrong request, or a response that
/// a client found wrong (`InvalidData`); nothing moved for too long; a socket's error.
pub fn serve(peer: SocketAddr, config: &WebConfig, mark: &dyn Fn(u8)) -> io::Result<()> {
    let WebConfig {
        connections,
        windows,
        wait,
    } = *config;
    if !(1..=CONNECTIONS_MAX).contains(&connections) {
        let text = format!("{connections} connections: 1 to {CONNECTIONS_MAX}");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    let listener = listen(wait)?;
    let mut control = TcpStream::connect_timeout(&peer, wait)?;
    control.set_read_timeout(Some(wait))?;
    let order = ConnectRequest {
        port: listener.local_addr()?.port(),
        connections,
    };
    let header = Header {
        direction: Direction::Web,
        seed: SEED,
        total: windows.total(),
    };
    control.write_all(&[&header.bytes()[..], &order.bytes()].concat())?;
    let mut response = vec![0; RESPONSE];
    pattern::fill(SEED, 0, &mut response);
    let mut request = vec![0; REQUEST];
    for number in 1..=windows.total() {
        let (mut client, _) = listener.accept()?;
        client.set_read_timeout(Some(wait))?;
        client.set_write_timeout(Some(wait))?;
        client.read_exact(&mut request)?;
        pattern::check(SEED, 0, &request).map_err(invalid)?;
        client.write_all(&response)?;
        client.shutdown(Shutdown::Write)?;
        drop(client);
        if let Some(value) = windows.marker_after(number) {
            mark(value);
        }
    }
    let mut answer = [0; 8];
    control.read_exact(&mut answer)?;
    match u64::from_le_bytes(answer) {
        right if right == windows.total() => Ok(()),
        right => Err(invalid(format!(
            "{right} responses of {} arrived",
            windows.total()
        ))),
    }
}

/// Listens at a free port; accepting times out after `wait`.
fn listen(wait: Duration) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // Linux applies a socket's read timeout to accept too; the library offers it for streams alone.
    let socket = TcpStream::from(OwnedFd::from(listener));
    socket.set_read_timeout(Some(wait))?;
    Ok(OwnedFd::from(socket).into())
}

/// Request behind the header: the port to connect to, and the number of connections at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ConnectRequest {
    port: u16,
    connections: u64,
}

impl ConnectRequest {
    const LEN: usize = 16;

    fn bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&u64::from(self.port).to_le_bytes());
        bytes[8..].copy_from_slice(&self.connections.to_le_bytes());
        bytes
    }

    /// Decodes an order; `None` if it is out of range.
    fn of(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let [port, connections] = [0, 1].map(|at| u64::from_le_bytes(words[at]));
        let port = u16::try_from(port).ok().filter(|port| *port > 0)?;
        let is_right = (1..=CONNECTIONS_MAX).contains(&connections);
        is_right.then_some(Self { port, connections })
    }
}

/// Executes the peer's side, behind the header: `transactions` with the server at `server` and the
/// port that the order names. Returns the number of right ones.
///
/// # Errors
/// An order out of range (`InvalidData`); a socket's error.
pub fn answer(
    mut control: impl Read + Write,
    server: IpAddr,
    transactions: u64,
    wait: Duration,
) -> io::Result<u64> {
    let mut bytes = [0; ConnectRequest::LEN];
    control.read_exact(&mut bytes)?;
    let order =
        ConnectRequest::of(&bytes).ok_or_else(|| invalid("an order out of range".into()))?;
    let to = SocketAddr::from((server, order.port));
    // Relaxed: joining the threads orders everything else.
    let (left, right) = (AtomicU64::new(transactions), AtomicU64::new(0));
    let take = || {
        let next = |left: u64| left.checked_sub(1);
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .is_ok()
    };
    thread::scope(|scope| {
        for _ in 0..order.connections {
            let client = thread::Builder::new().name("web-client".into());
            client.spawn_scoped(scope, || {
                // A client ends at its first error; the sum shows it.
                while take() && transaction(to, wait).is_ok() {
                    right.fetch_add(1, Ordering::Relaxed);
                }
            })?;
        }
        io::Result::Ok(())
    })?;
    let right = right.into_inner();
    control.write_all(&right.to_le_bytes())?;
    Ok(right)
}

/// Executes one transaction: connection, request and response.
fn transaction(to: SocketAddr, wait: Duration) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, wait)?;
    stream.set_read_timeout(Some(wait))?;
    stream.set_write_timeout(Some(wait))?;
    let mut request = [0; REQUEST];
    pattern::fill(SEED, 0, &mut request);
    stream.write_all(&request)?;
    let mut response = Vec::with_capacity(RESPONSE);
    stream
        .take(RESPONSE as u64 + 1)
        .read_to_end(&mut response)?;
    if response.len() != RESPONSE {
        return Err(invalid(format!("a response of {} bytes", response.len())));
    }
    pattern::check(SEED, 0, &response).map_err(invalid)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::stream;

    const WAIT: Duration = Duration::from_secs(5);

    fn config(connections: u64) -> WebConfig {
        WebConfig {
            connections,
            windows: RequestWindows::new(20, 30, 2).unwrap(),
            wait: WAIT,
        }
    }

    /// Starts a peer of one order, which `serve` handles.
    fn peer(serve: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(listener.accept().unwrap().0));
        address
    }

    /// Receives header and order, and returns the server's address.
    fn order(stream: &mut TcpStream) -> SocketAddr {
        let mut bytes = [0; Header::LEN + ConnectRequest::LEN];
        stream.read_exact(&mut bytes).unwrap();
        let (_, order) = bytes.split_last_chunk().unwrap();
        let order = ConnectRequest::of(order).unwrap();
        (Ipv4Addr::LOCALHOST, order.port).into()
    }

    #[test]
    fn windows_count_responses_of_all_connections() {
        for connections in [1, 100] {
            let to = peer(|mut stream| {
                let header = stream::read_header(&mut stream).unwrap();
                let server = Ipv4Addr::LOCALHOST.into();
                let right = answer(stream, server, header.total, WAIT).unwrap();
                assert_eq!(right, 100);
            });
            let marks = RefCell::new(Vec::new());
            let mark = |value| marks.borrow_mut().push(value);
            serve(to, &config(connections), &mark).unwrap();
            assert_eq!(*marks.borrow(), [1, 2, 1, 2]);
        }
    }

    #[test]
    fn wrong_requests_and_responses_are_errors() {
        let to = peer(|mut stream| {
            let server = order(&mut stream);
            let mut client = TcpStream::connect(server).unwrap();
            client.write_all(&[1; REQUEST]).unwrap();
            let _ = client.read(&mut [0]);
        });
        let error = serve(to, &config(1), &|_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        // The peer reports one less.
        let to = peer(|mut stream| {
            let server = order(&mut stream);
            for _ in 0..100 {
                transaction(server, WAIT).unwrap();
            }
            stream.write_all(&99_u64.to_le_bytes()).unwrap();
        });
        let error = serve(to, &config(1), &|_| {}).unwrap_err();
        assert!(error.to_string().contains("99 responses of 100"), "{error}");
        // A server whose responses are short, or too long.
        for len in [RESPONSE - 1, RESPONSE + 1] {
            let server = peer(move |mut stream| {
                stream.read_exact(&mut [0; REQUEST]).unwrap();
                let mut response = vec![0; len];
                pattern::fill(SEED, 0, &mut response);
                stream.write_all(&response).unwrap();
            });
            let error = transaction(server, WAIT).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_client_that_does_not_come_ends_the_run() {
        let to = peer(|mut stream| {
            order(&mut stream);
            // Open until the server stops waiting.
            let _ = stream.read(&mut [0]);
        });
        let config = WebConfig {
            wait: Duration::from_millis(100),
            ..config(1)
        };
        let error = serve(to, &config, &|_| {}).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    }

    #[test]
    fn orders_out_of_range_are_refused() {
        let right = ConnectRequest {
            port: 80,
            connections: 100,
        };
        assert_eq!(ConnectRequest::of(&right.bytes()), Some(right));
        let words = |port: u64, connections: u64| {
            let mut bytes = [0; ConnectRequest::LEN];
            bytes[..8].copy_from_slice(&port.to_le_bytes());
            bytes[8..].copy_from_slice(&connections.to_le_bytes());
            bytes
        };
        for (port, connections) in [(0, 1), (1 << 16, 1), (80, 0), (80, CONNECTIONS_MAX + 1)] {
            assert_eq!(ConnectRequest::of(&words(port, connections)), None);
        }
        for connections in [0, CONNECTIONS_MAX + 1] {
            let to = SocketAddr::from(([127, 0, 0, 1], 9));
            let error = serve(to, &config(connections), &|_| {}).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }
}
