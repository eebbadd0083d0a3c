//! The descriptors that may wake a core: one persistent epoll, and each poller's part of it.
//!
//! Registering is done when something changes and not at each sleep, so that sleeping costs the
//! same with 1 descriptor and with 1,000. Level-triggered: a descriptor that has not been emptied
//! fires again.
//!
//! Three problems, and their solutions:
//! - A descriptor that another process shares (a kick eventfd, a socket passed on) is **not**
//!   removed from an epoll by closing it: the file lives on, and its events with it, under a number
//!   that names no file any more, or another one. Descriptors are therefore removed before they are
//!   closed. If one was not, its events belong to no registered descriptor and cannot be removed,
//!   and the epoll is built anew.
//! - A descriptor that is always readable (a storm of kicks, a poller that does not empty it) would
//!   keep the core awake for ever. After it has fired [`STRIKES`] times in a row without work it is
//!   **muted**: taken out of the epoll until a deadline, 1 ms away at first and twice as far each
//!   time, up to 16 ms. A real kick is then late by as much; only its own queue waits.
//! - An event may be for a poller that has been removed meanwhile, or for a descriptor registered
//!   after the event was taken: the worst consequence is a `ready` without work.
//!
//! Touched by the core's thread only.

use std::{io, os::fd::RawFd};

use crate::{clock::Nanos, sync::Arc, sys::EpollFd};

/// Times in a row that a poller may become ready without work.
const STRIKES: u32 = 8;
/// Times for which a descriptor is muted, in nanoseconds: the first, and the longest.
const MUTE_FIRST_NS: u64 = 1_000_000;
const MUTE_LAST_NS: u64 = 16_000_000;

/// Data of the notifier's events: no poller has this number.
pub(crate) const NOTIFIER: u64 = u64::MAX;

/// One registered descriptor.
#[derive(Clone, Copy, Debug)]
struct Entry {
    fd: RawFd,
    token: u32,
    /// It is not in the epoll until this time.
    muted_until: Option<Nanos>,
}

/// The descriptors of one poller: readable ones end the core's sleep and make it call
/// [`ready`](crate::Poller::ready).
#[derive(Debug, Default)]
pub struct Wakes {
    /// `None` while not attached to a core.
    epoll: Option<Arc<EpollFd>>,
    slot: u32,
    list: Vec<Entry>,
    strikes: u32,
    mute_ns: u64,
    /// Number of muted descriptors.
    muted: usize,
    /// Descriptors of the pollers that this one is made of ([`Group`](crate::Group)); their own
    /// `parts` are empty.
    parts: Vec<Wakes>,
}

/// Receiver of the notification of a readable descriptor, and its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// The part of the poller that has registered it; `None`: the poller itself.
    pub(crate) part: Option<usize>,
    pub(crate) token: u32,
}

impl Wakes {
    /// Returns a list that no core waits on: for tests that call a poller directly. Its descriptors
    /// are not checked.
    pub fn by_hand() -> Wakes {
        Wakes::default()
    }

    /// Registers `fd`, or changes its token if it is registered. `token` is what `ready` gets;
    /// several descriptors may have the same.
    ///
    /// # Errors
    /// `fd` is not open, is not one that can be waited for (a regular file), or a limit of the
    /// kernel is reached (`fs.epoll.max_user_watches`). It is not registered then.
    pub fn add(&mut self, fd: RawFd, token: u32) -> io::Result<()> {
        if let Some(entry) = self.list.iter_mut().find(|entry| entry.fd == fd) {
            entry.token = token;
            if entry.muted_until.is_some() {
                return Ok(());
            }
            // It may have been closed, and its number may be that of another file now.
            let data = data(self.slot, fd);
            let Some(epoll) = &self.epoll else {
                return Ok(());
            };
            return match epoll.change(fd, data) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    epoll.add(fd, data).map_err(|error| not_open(fd, error))
                }
                changed => changed.map_err(|error| not_open(fd, error)),
            };
        }
        self.connect(fd)?;
        self.list.push(Entry {
            fd,
            token,
            muted_until: None,
        });
        Ok(())
    }

    /// Removes `fd`, **before** it is closed: see the first problem at the head of this module.
    /// Does nothing if it is not registered.
    pub fn remove(&mut self, fd: RawFd) {
        if let Some(at) = self.list.iter().position(|entry| entry.fd == fd) {
            let entry = self.list.swap_remove(at);
            self.muted -= usize::from(entry.muted_until.is_some());
            self.disconnect(fd);
        }
    }

    /// Replaces the whole list by `wanted` (descriptor, token). System calls for the differences
    /// only.
    ///
    /// # Errors
    /// As for [`add`](Self::add); those before the refused one are registered.
    pub fn replace(&mut self, wanted: &[(RawFd, u32)]) -> io::Result<()> {
        let surplus = |entry: &Entry| !wanted.iter().any(|&(fd, _)| fd == entry.fd);
        while let Some(entry) = self.list.iter().copied().find(surplus) {
            self.remove(entry.fd);
        }
        for &(fd, token) in wanted {
            match self.list.iter_mut().find(|entry| entry.fd == fd) {
                Some(entry) => entry.token = token,
                None => self.add(fd, token)?,
            }
        }
        Ok(())
    }

    /// Removes all descriptors, those of parts included.
    pub fn clear(&mut self) {
        while let Some(entry) = self.list.pop() {
            self.disconnect(entry.fd);
        }
        self.muted = 0;
        self.parts.iter_mut().for_each(Wakes::clear);
    }

    /// Returns the descriptors registered, muted ones and those of parts included.
    pub fn fds(&self) -> impl Iterator<Item = RawFd> + '_ {
        let parts = self.parts.iter().flat_map(|part| &part.list);
        self.list.iter().chain(parts).map(|entry| entry.fd)
    }

    // -- a group -------------------------------------------------------------------------------

    /// Returns the list of part `at` of this poller: its tokens are its own, and its descriptors
    /// are muted for it alone.
    pub(crate) fn part(&mut self, at: usize) -> &mut Wakes {
        while self.parts.len() <= at {
            let part = Wakes {
                epoll: self.epoll.clone(),
                slot: self.slot,
                ..Wakes::default()
            };
            self.parts.push(part);
        }
        &mut self.parts[at]
    }

    fn connect(&self, fd: RawFd) -> io::Result<()> {
        let Some(epoll) = &self.epoll else {
            return Ok(());
        };
        let data = data(self.slot, fd);
        match epoll.add(fd, data) {
            // A file of the same number cannot have been left in the epoll, so this descriptor has
            // been added twice. It is registered.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => epoll.change(fd, data),
            added => added,
        }
        .map_err(|error| not_open(fd, error))
    }

    fn disconnect(&self, fd: RawFd) {
        if let Some(epoll) = &self.epoll {
            // An error: it is closed, which has removed it or can no longer be helped here.
            let _ = epoll.remove(fd);
        }
    }

    // -- the core ------------------------------------------------------------------------------

    /// Creates the list of a poller in slot `slot` of the core whose epoll this is.
    pub(crate) fn attached_to(epoll: &Arc<EpollFd>, slot: u32) -> Wakes {
        Wakes {
            epoll: Some(Arc::clone(epoll)),
            slot,
            ..Wakes::default()
        }
    }

    /// Returns the part and token of `fd`, if it is registered and not muted.
    pub(crate) fn source(&self, fd: RawFd) -> Option<Source> {
        let of = |part, list: &[Entry]| {
            let is_it = |entry: &&Entry| entry.fd == fd && entry.muted_until.is_none();
            let token = list.iter().find(is_it)?.token;
            Some(Source { part, token })
        };
        let parts = self.parts.iter().enumerate();
        of(None, &self.list).or_else(|| {
            parts
                .map(|(at, part)| of(Some(at), &part.list))
                .find_map(|found| found)
        })
    }

    /// Returns the list of a poller, or of its part.
    pub(crate) fn of(&mut self, part: Option<usize>) -> &mut Wakes {
        match part {
            Some(at) => self.part(at),
            None => self,
        }
    }

    /// Counts that `fd` has fired without work. Returns true when that was so often that it is
    /// muted now.
    pub(crate) fn strike(&mut self, fd: RawFd, now: Nanos) -> bool {
        self.strikes += 1;
        if self.strikes <= STRIKES {
            return false;
        }
        self.mute_ns = (self.mute_ns * 2).clamp(MUTE_FIRST_NS, MUTE_LAST_NS);
        let until = now.after(self.mute_ns);
        for entry in &mut self.list {
            if entry.fd == fd && entry.muted_until.replace(until).is_none() {
                self.muted += 1;
            }
        }
        self.disconnect(fd);
        true
    }

    /// Resets the count: `fd` has fired with work.
    pub(crate) fn forgive(&mut self) {
        (self.strikes, self.mute_ns) = (0, 0);
    }

    /// Returns the earliest time at which a muted descriptor is to be registered again.
    pub(crate) fn muted_until(&self) -> Option<Nanos> {
        let parts = self.parts.iter().filter_map(Wakes::muted_until).min();
        if self.muted == 0 {
            return parts;
        }
        let own = self.list.iter().filter_map(|entry| entry.muted_until);
        own.chain(parts).min()
    }

    /// Registers the muted descriptors again whose time has come.
    pub(crate) fn unmute(&mut self, now: Nanos) {
        for at in 0..self.list.len() {
            let entry = self.list[at];
            if entry.muted_until.is_some_and(|until| until <= now) {
                self.list[at].muted_until = None;
                self.muted -= 1;
                // A refused descriptor has been closed, and fires no more.
                let _ = self.connect(entry.fd);
            }
        }
        self.parts.iter_mut().for_each(|part| part.unmute(now));
    }

    /// Moves all descriptors to another epoll.
    pub(crate) fn reconnect(&mut self, epoll: &Arc<EpollFd>) {
        self.epoll = Some(Arc::clone(epoll));
        for entry in &self.list {
            if entry.muted_until.is_none() {
                let _ = self.connect(entry.fd);
            }
        }
        self.parts.iter_mut().for_each(|part| part.reconnect(epoll));
    }
}

fn data(slot: u32, fd: RawFd) -> u64 {
    u64::from(slot) << 32 | u64::from(fd as u32)
}

/// Returns the slot and the descriptor that an event carries.
pub(crate) fn source(data: u64) -> (usize, RawFd) {
    ((data >> 32) as usize, data as u32 as RawFd)
}

fn not_open(fd: RawFd, error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(libc::EBADF) {
        io::Error::new(error.kind(), format!("descriptor {fd} is not open"))
    } else {
        error
    }
}
