//! The descriptors that an owner sends its worker.
//!
//! UNSAFETY: descriptors of the disk's threads are borrowed by their number, which their crate
//! lends for as long as the disk exists.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Number of descriptors.
const COUNT: usize = 5;
/// The one byte that they come with.
const BYTE: [u8; 1] = *b"w";

/// All that a worker is given.
#[derive(Debug)]
pub(crate) struct Given {
    /// The shared area.
    pub(crate) area: OwnedFd,
    /// The eventfd that wakes the worker.
    pub(crate) kick: OwnedFd,
    /// The one that wakes its owner.
    pub(crate) call: OwnedFd,
    /// The eventfd by which the worker says once that it serves, or why it cannot; closed then.
    pub(crate) ready: OwnedFd,
    /// The disk's file.
    pub(crate) image: OwnedFd,
}

impl Given {
    /// Their numbers.
    pub(crate) fn numbers(&self) -> [RawFd; COUNT] {
        let Self {
            area,
            kick,
            call,
            ready,
            image,
        } = self;
        [area, kick, call, ready, image].map(|fd| fd.as_raw_fd())
    }

    /// Puts the eventfd of the owner in the place of standard input, output and error: a worker
    /// reads and says nothing there.
    pub(crate) fn replace_standard(&self) -> io::Result<()> {
        rustix::stdio::dup2_stdin(&self.call)?;
        rustix::stdio::dup2_stdout(&self.call)?;
        Ok(rustix::stdio::dup2_stderr(&self.call)?)
    }
}

/// Sends them.
///
/// # Errors
/// The kernel's.
pub(crate) fn send(socket: BorrowedFd<'_>, fds: [BorrowedFd<'_>; COUNT]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let has_room = control.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(has_room, "room for as many descriptors");
    let bytes = [IoSlice::new(&BYTE)];
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives them.
///
/// # Errors
/// No owner is at the other end, or it has sent something else.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Given> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut bytes = [IoSliceMut::new(&mut byte)];
    let got = recvmsg(socket, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds: Vec<OwnedFd> = fds.flatten().collect();
    let wrong = || io::Error::other("standard input brings no descriptors of a device's owner");
    if got.bytes != 1 || byte != BYTE {
        return Err(wrong());
    }
    let [area, kick, call, ready, image] =
        <[OwnedFd; COUNT]>::try_from(fds).map_err(|_| wrong())?;
    Ok(Given {
        area,
        kick,
        call,
        ready,
        image,
    })
}

/// Waits until the owner has written `kick`, which is emptied, or one of the disk's descriptors is
/// readable.
pub(crate) fn wait(kick: BorrowedFd<'_>, disk: &[RawFd]) {
    let disk: Vec<BorrowedFd<'_>> = disk
        .iter()
        // SAFETY: the disk has them open, and is not dropped during this call.
        .map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) })
        .collect();
    let mut polled = Vec::with_capacity(1 + disk.len());
    polled.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
    for fd in &disk {
        polled.push(PollFd::from_borrowed_fd(*fd, PollFlags::IN));
    }
    // An interruption is looked into as anything else.
    let _ = poll(&mut polled, None);
    let _ = rustix::io::read(kick, &mut [0; 8]);
}
