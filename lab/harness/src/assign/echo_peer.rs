//! The other end of an assigned network card's cable: a UDP socket on this machine's loopback
//! address that sends each datagram back.
//!
//! QEMU's own network passes datagrams for its gateway on to that address.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};

/// Longest time between the request to stop and its effect.
const STEP: Duration = Duration::from_millis(50);

/// A peer that echoes each datagram, until it is dropped.
#[derive(Debug)]
pub struct EchoPeer {
    port: u16,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Set by the owner, once. It orders nothing: the join does.
    stop: AtomicBool,
    /// Datagrams sent back, counted by the thread alone.
    answered: AtomicU64,
}

impl EchoPeer {
    /// Starts its thread.
    ///
    /// # Errors
    /// The system's own.
    pub fn start() -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("a socket")?;
        socket.set_read_timeout(Some(STEP)).context("a limit")?;
        let port = socket.local_addr().context("a socket's address")?.port();
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("echo-peer".into())
            .spawn(move || answer(&socket, &own))
            .context("a thread")?;
        Ok(Self {
            port,
            shared,
            thread: Some(thread),
        })
    }

    /// Returns its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the number of datagrams sent back.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }
}

impl Drop for EchoPeer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread's only error is a panic, which has been printed.
            let _ = thread.join();
        }
    }
}

fn answer(socket: &UdpSocket, shared: &Shared) {
    // A datagram over IPv4 has 65,507 bytes at most.
    let mut buffer = vec![0; 1 << 16];
    while !shared.stop.load(Ordering::Relaxed) {
        match socket.recv_from(&mut buffer) {
            Ok((len, from)) => {
                // Counted before it is sent: the client may ask for the count as soon as it has the
                // answer. If one is lost, the client sees that and sends again.
                shared.answered.fetch_add(1, Ordering::Relaxed);
                if socket.send_to(&buffer[..len], from).is_err() {
                    shared.answered.fetch_sub(1, Ordering::Relaxed);
                }
            }
            // A timeout; or an answer's receiver has gone, which is reported to this socket's next
            // call.
            Err(error) => debug_assert!(
                matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::Interrupted
                ),
                "{error}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn datagrams_come_back_and_are_counted_and_the_port_is_free_afterwards() {
        let peer = EchoPeer::start().expect("it starts");
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, peer.port()));
        let report = workload::echo::run(to, 50, Duration::from_secs(5)).expect("echoes");
        assert_eq!(report.ok, 50);
        assert_eq!(peer.answered(), 50 + report.resent);
        drop(peer);
        UdpSocket::bind(to).expect("its socket is closed");
    }
}
