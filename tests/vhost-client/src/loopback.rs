//! A vhost-user server inside this process: the protocol's session on a thread of its own, and a
//! [`Service`] for the rings. Only for measuring the limit of this client, and for its tests.
//!
//! It serves one connection at a time. The thread alternates between the control socket and the
//! service. It sleeps only if the service reports that it has nothing to do and waits for kicks.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost_user::backend::{
    Answer, Config, Event, Kick, Refusal, Region, RingBase, RingConfig, Session, Step,
};
use vhost_user::channel::{Receiver, Sender};
use vhost_user::wire::{Inflight, MemRegion, Message};

use crate::memory::Memory;

/// Number of polls of the service between two polls of the control socket.
const POLLS_PER_LOOK: u32 = 1 << 16;
/// Longest sleep of the thread in nanoseconds, so that it notices a request to end.
const NAP_NS: i64 = 20_000_000;

/// The front end's memory regions, mapped.
#[derive(Debug, Default)]
pub struct Guest {
    regions: Vec<(MemRegion, Memory)>,
}

impl Guest {
    fn find(
        &self,
        start: impl Fn(&MemRegion) -> u64,
        addr: u64,
        len: u64,
    ) -> Option<(&Memory, usize)> {
        self.regions.iter().find_map(|(place, memory)| {
            let offset = addr.checked_sub(start(place))?;
            let fits = offset.checked_add(len)? <= place.size;
            fits.then_some((memory, offset as usize))
        })
    }

    /// Returns the memory and offset of a guest-physical range, if it is in one region.
    pub fn gpa(&self, addr: u64, len: u64) -> Option<(&Memory, usize)> {
        self.find(|place| place.guest_addr, addr, len)
    }

    /// Returns the memory and offset of a range of user addresses, if it is in one region.
    pub fn user(&self, addr: u64, len: u64) -> Option<(&Memory, usize)> {
        self.find(|place| place.user_addr, addr, len)
    }

    fn map(regions: &[Region]) -> io::Result<Self> {
        let map = |region: &Region| {
            let file = region.fd.try_clone()?;
            let place = region.place;
            // The client's layout places regions at page boundaries of the file.
            let memory = Memory::map(file, place.mmap_offset, place.size as usize)?;
            Ok((place, memory))
        };
        let regions = regions.iter().map(map).collect::<io::Result<_>>()?;
        Ok(Self { regions })
    }
}

/// Implementation of the rings of a device.
pub trait Service: Send {
    /// Returns the configuration space.
    fn config(&self) -> [u8; 60] {
        [0; 60]
    }
    /// Handles acknowledged features.
    fn features(&mut self, _features: u64) {}
    /// Starts a ring.
    fn start(&mut self, guest: &Guest, ring: &RingConfig);
    /// Stops a ring, of which no request is in flight. Returns its position.
    fn stop(&mut self, guest: &Guest, index: u8) -> RingBase;
    /// Handles a replaced call descriptor.
    fn set_call(&mut self, _index: u8, _call: Option<OwnedFd>) {}
    /// Creates an inflight region for these queues. Returns its size and its file.
    fn make_inflight(&mut self, _wanted: Inflight) -> Option<(u64, OwnedFd)> {
        None
    }
    /// Handles an inflight region from the front end.
    fn set_inflight(&mut self, _inflight: Inflight, _region: OwnedFd) {}
    /// Serves the available requests.
    fn poll(&mut self, guest: &Guest) -> Next;
    /// Returns the descriptors to sleep on.
    fn kicks(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
    /// Handles the end of the connection or a device reset: no ring runs any more.
    fn reset(&mut self) {}
}

/// Next action of the thread after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Poll again.
    Again,
    /// Sleep until a kick or a message.
    Sleep,
    /// Close the connection, as if the server was killed.
    Die,
}

/// A running server; ends when dropped.
#[derive(Debug)]
pub struct Loopback {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Loopback {
    /// Listens on `path`. Connections are offered the features of `config`. `prepare` runs first on
    /// the new thread.
    ///
    /// # Errors
    /// The path exists already, or cannot be created.
    pub fn start(
        path: &Path,
        config: Config,
        service: impl Service + 'static,
        prepare: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, mut service) = (Arc::clone(&stop), service);
        let thread = thread::Builder::new()
            .name("loopback".into())
            .spawn(move || {
                prepare();
                while !stopped.load(Ordering::Relaxed) {
                    wait(&[listener.as_fd()]);
                    let Ok((socket, _)) = listener.accept() else {
                        continue;
                    };
                    if let Err(error) = serve(socket, &config, &mut service, &stopped) {
                        eprintln!("loopback: {error}");
                    }
                    service.reset();
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // An error means that it has panicked, which is on standard error already.
            let _ = thread.join();
        }
    }
}

fn wait(fds: &[BorrowedFd<'_>]) {
    let nap = Timespec {
        tv_sec: 0,
        tv_nsec: NAP_NS,
    };
    let mut fds: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    // Whether poll(2) succeeds or not, the caller polls everything again.
    let _ = poll(&mut fds, Some(&nap));
}

/// Serves one connection, until it ends.
fn serve(
    socket: UnixStream,
    config: &Config,
    service: &mut impl Service,
    stop: &AtomicBool,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut session = Session::new(config.clone())?;
    let (mut receiver, mut sender) = (Receiver::default(), Sender::default());
    let mut guest = Guest::default();
    while !stop.load(Ordering::Relaxed) {
        match receiver.receive(&socket) {
            Ok(Some(message)) => {
                if let Some(reply) = handle(&mut session, message, service, &mut guest)? {
                    sender.push(reply)?;
                    sender.flush(&socket)?;
                }
                continue;
            }
            Ok(None) => {}
            Err(vhost_user::channel::ReceiveError::Closed { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        for _ in 0..POLLS_PER_LOOK {
            match service.poll(&guest) {
                // No PAUSE instruction: by pause-loop exiting a hypervisor under this machine would
                // deschedule a loop that consists of little else.
                Next::Again => {}
                Next::Sleep => {
                    let mut fds = service.kicks();
                    fds.push(socket.as_fd());
                    wait(&fds);
                    break;
                }
                Next::Die => return Ok(()),
            }
        }
    }
    Ok(())
}

fn handle(
    session: &mut Session,
    message: Message,
    service: &mut impl Service,
    guest: &mut Guest,
) -> Result<Option<Message>, Box<dyn std::error::Error>> {
    let event = match session.handle(message)? {
        Step::Done(reply) => return Ok(reply),
        Step::Refused(error, reply) => {
            eprintln!("loopback: {error}");
            return Ok(Some(reply));
        }
        Step::Event(event) => event,
    };
    let refuse = |why: &str| Err(Refusal(why.to_owned()));
    let outcome = match event {
        Event::Memory(regions) => match Guest::map(&regions) {
            Ok(new) => {
                *guest = new;
                Ok(Answer::Done)
            }
            Err(error) => refuse(&error.to_string()),
        },
        Event::Features(features) => {
            service.features(features);
            Ok(Answer::Done)
        }
        Event::RingStarted(ring) => {
            service.start(guest, &ring);
            Ok(Answer::Done)
        }
        Event::RingStopped(index) => Ok(Answer::RingStopped(service.stop(guest, index))),
        Event::Reset => {
            service.reset();
            Ok(Answer::Done)
        }
        Event::CallReplaced(index, call) => {
            service.set_call(index, call.map(|fd| fd.try_clone()).transpose()?);
            Ok(Answer::Done)
        }
        Event::ConfigRead(access) => {
            let config = service.config();
            let range = access.offset as usize..(access.offset + access.size) as usize;
            match config.get(range) {
                Some(bytes) => Ok(Answer::Config(bytes.to_vec())),
                None => refuse("behind the configuration"),
            }
        }
        Event::InflightWanted(wanted) => match service.make_inflight(wanted) {
            Some((mmap_size, fd)) => Ok(Answer::Inflight {
                fd,
                mmap_size,
                mmap_offset: 0,
            }),
            None => refuse("no inflight regions"),
        },
        Event::InflightGiven(inflight, fd) => {
            service.set_inflight(inflight, fd.try_clone()?);
            Ok(Answer::Done)
        }
        _ => Ok(Answer::Done),
    };
    Ok(session.finish(outcome)?)
}

/// Returns the kick eventfd of a ring, if there is one.
pub fn kick_fd(ring: &RingConfig) -> Option<OwnedFd> {
    match &ring.kick {
        Kick::Fd(fd) => fd.try_clone().ok(),
        Kick::Poll => None,
    }
}
