//! The other end of a test's network: TCP connections ([`crate::stream`], [`crate::rr`], and
//! clients for [`crate::web`]) and datagrams, which are sent back unchanged, at one port.
//!
//! For a test's own network: any host that can reach the port is served. Each connection has its
//! thread; there are [`CONNECTIONS`] of them at most.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::stream::{self, Direction};
use crate::web;

/// Largest number of connections at a time; further ones are closed.
pub const CONNECTIONS: usize = 64;

/// Longest time for which a connection may move nothing.
const QUIET: Duration = Duration::from_secs(120);

/// Peer that is bound to its port.
#[derive(Debug)]
pub struct Peer {
    connections: TcpListener,
    datagrams: UdpSocket,
}

impl Peer {
    /// Binds `port` at every address; 0 is any free port.
    ///
    /// # Errors
    /// The port is taken.
    pub fn bind(port: u16) -> io::Result<Self> {
        let connections = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))?;
        let port = connections.local_addr()?.port();
        Ok(Self {
            connections,
            datagrams: UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?,
        })
    }

    /// Its address.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.connections.local_addr()
    }

    /// Serves for ever; `say` receives a description of each connection's error.
    ///
    /// # Errors
    /// Neither connections nor datagrams can be received any more.
    pub fn serve(self, say: impl Fn(&str) + Send + Sync + 'static) -> io::Result<()> {
        let datagrams = self.datagrams;
        let echo = thread::Builder::new().name("echo".into());
        echo.spawn(move || echo_all(&datagrams))?;
        let say = Arc::new(say);
        let open = Arc::new(AtomicUsize::new(0));
        loop {
            let (stream, from) = self.connections.accept()?;
            // Relaxed: the count orders nothing else.
            if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                say(&format!("{from}: {CONNECTIONS} connections are open"));
                continue;
            }
            let (say, open) = (say.clone(), open.clone());
            let thread = thread::Builder::new().name("stream".into());
            thread.spawn(move || {
                if let Err(error) = serve_one(&stream, from) {
                    say(&format!("{from}: {error}"));
                }
                open.fetch_sub(1, Ordering::Relaxed);
            })?;
        }
    }
}

fn serve_one(mut stream: &TcpStream, from: SocketAddr) -> io::Result<u64> {
    stream.set_read_timeout(Some(QUIET))?;
    stream.set_write_timeout(Some(QUIET))?;
    let header = stream::read_header(&mut stream)?;
    match header.direction {
        // Connections go to the requesting host only: this is no proxy.
        Direction::Web => web::answer(stream, from.ip(), header.total, QUIET),
        direction => {
            stream.set_nodelay(direction == Direction::Echo)?;
            stream::answer(&header, stream)
        }
    }
}

/// Sends every datagram back. If one is lost, its sender notices.
fn echo_all(socket: &UdpSocket) {
    let mut buffer = [0; 1 << 16];
    loop {
        // If the receiver has gone, the error is returned by the next call on this socket; it is
        // ignored.
        if let Ok((len, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..len], from);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::Mutex;

    use super::*;
    use crate::echo;
    use crate::marker::RequestWindows;
    use crate::stream::{Direction, Header, StreamConfig};

    #[test]
    fn streams_and_datagrams_are_served_at_one_port_and_nonsense_disturbs_nobody() {
        let peer = Peer::bind(0).unwrap();
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, peer.address().unwrap().port()));
        let said = Arc::new(Mutex::new(Vec::new()));
        let all = said.clone();
        thread::spawn(move || peer.serve(move |text| all.lock().unwrap().push(text.to_owned())));
        let mut broken = TcpStream::connect(to).unwrap();
        broken.write_all(&[0xff; Header::LEN]).unwrap();
        // The connection is closed, once its thread has reported the error.
        assert!(matches!(broken.read(&mut [0; 1]), Ok(0) | Err(_)));
        let config = |direction| StreamConfig {
            direction,
            piece: 4096,
            windows: RequestWindows::new(1, 20, 1).unwrap(),
            seed: 4,
            wait: Duration::from_secs(10),
        };
        thread::scope(|scope| {
            for direction in [Direction::Send, Direction::Receive] {
                scope.spawn(move || stream::run(to, &config(direction), &|_| {}).unwrap());
            }
            let report = echo::run(to, 20, Duration::from_secs(5)).unwrap();
            assert_eq!(report.ok, 20);
        });
        assert!(said.lock().unwrap()[0].contains("no header"), "{said:?}");
    }
}
