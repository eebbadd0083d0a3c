//! Passing of file descriptors from a disk's owner (the VMM) to its worker process.
//!
//! UNSAFETY: descriptors of the disk's I/O threads are borrowed by their numbers, which the crate
//! `vio` keeps open for as long as the disk exists.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Number of descriptors in the message.
const COUNT: usize = 5;
/// The one byte of data that the message carries.
const BYTE: [u8; 1] = *b"w";

/// Descriptors that a worker receives from its owner.
#[derive(Debug)]
pub(crate) struct Given {
    /// The shared area.
    pub(crate) area: OwnedFd,
    /// The eventfd by which the owner wakes the worker.
    pub(crate) kick: OwnedFd,
    /// The eventfd by which the worker wakes the owner.
    pub(crate) call: OwnedFd,
    /// The eventfd that the worker signals once, when it serves requests or has failed to start. It
    /// is closed afterwards.
    pub(crate) ready: OwnedFd,
    /// The disk's file.
    pub(crate) image: OwnedFd,
}

impl Given {
    /// Returns the numbers of the descriptors.
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

    /// Replaces standard input, output and error by duplicates of the eventfd `call`. The worker
    /// neither reads nor writes there.
    pub(crate) fn replace_standard(&self) -> io::Result<()> {
        rustix::stdio::dup2_stdin(&self.call)?;
        rustix::stdio::dup2_stdout(&self.call)?;
        Ok(rustix::stdio::dup2_stderr(&self.call)?)
    }
}

/// Sends the descriptors to the worker.
///
/// # Errors
/// The kernel's error.
pub(crate) fn send(socket: BorrowedFd<'_>, fds: [BorrowedFd<'_>; COUNT]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let has_room = control.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(has_room, "room for as many descriptors");
    let bytes = [IoSlice::new(&BYTE)];
    sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the descriptors from the owner.
///
/// # Errors
/// Standard input is no socket of an owner, or the message is another one.
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

/// Waits until the owner has signalled `kick` or one of the disk's descriptors is readable. Clears
/// `kick`.
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
    // After EINTR the caller polls its queues again, as after any wake-up.
    let _ = poll(&mut polled, None);
    let _ = rustix::io::read(kick, &mut [0; 8]);
}
