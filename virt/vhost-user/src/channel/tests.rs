//! Over real sockets: pieces, descriptors, closing, peers that do not read.

use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;
use crate::wire::{Head, MAX_FDS, Message, RequestId};

fn message(request: u32, len: usize, fds: usize) -> Message {
    let payload = (0..len).map(|at| (at as u32 ^ request) as u8).collect();
    let fds = (0..fds).map(|_| pipe_end()).collect();
    Message {
        head: Head::request(RequestId(request), false),
        payload,
        fds,
    }
}

/// One end of a pipe whose other end is closed.
fn pipe_end() -> OwnedFd {
    std::io::pipe().unwrap().1.into()
}

fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut control = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut control);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    )
    .unwrap();
}

/// Whether the writing end of this pipe is closed everywhere: a sent and dropped descriptor leaves
/// nothing.
fn all_writers_gone(reader: std::io::PipeReader) -> bool {
    use std::io::Read;
    let mut reader = reader;
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    matches!(reader.read(&mut [0]), Ok(0))
}

#[test]
fn an_empty_socket_gives_none_and_a_message_comes_whole() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut receiver, mut sender) = (Receiver::default(), Sender::default());
    assert!(receiver.receive(&near).unwrap().is_none());
    sender.push(message(5, 40, 2)).unwrap();
    sender.push(message(6, 0, 0)).unwrap();
    assert_eq!(sender.flush(&far).unwrap(), Flushed::All);
    let got = receiver.receive(&near).unwrap().unwrap();
    assert_eq!(
        (got.head.request.0, got.payload.len(), got.fds.len()),
        (5, 40, 2)
    );
    assert_eq!(receiver.receive(&near).unwrap().unwrap().head.request.0, 6);
    assert!(receiver.receive(&near).unwrap().is_none());
}

#[test]
fn descriptors_arrive_close_on_exec() {
    let (near, far) = UnixStream::pair().unwrap();
    send_raw(&far, &message(1, 0, 0).to_bytes(), &[pipe_end()]);
    let got = Receiver::default().receive(&near).unwrap().unwrap();
    let flags = rustix::io::fcntl_getfd(&got.fds[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn more_than_eight_descriptors_end_the_stream_and_are_closed() {
    for count in [9, 10, 64] {
        let (near, far) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let mut fds: Vec<OwnedFd> = vec![writer.into()];
        while fds.len() < count {
            fds.push(fds[0].try_clone().unwrap());
        }
        send_raw(&far, &message(1, 0, 0).to_bytes(), &fds);
        drop(fds);
        let mut receiver = Receiver::default();
        let error = receiver.receive(&near).unwrap_err();
        send_raw(&far, &message(1, 0, 0).to_bytes(), &[pipe_end()]);
        assert!(receiver.receive(&near).is_err(), "the stream stays ended");
        let is_refused = matches!(
            error,
            ReceiveError::AncillaryTruncated | ReceiveError::Frame(FrameError::TooManyFds)
        );
        assert!(is_refused, "{error}");
        assert!(all_writers_gone(reader), "{count} descriptors: one leaked");
    }
}

#[test]
fn descriptors_spread_over_a_message_count_together() {
    let (near, far) = UnixStream::pair().unwrap();
    let bytes = message(1, 8, 0).to_bytes();
    let (reader, writer) = std::io::pipe().unwrap();
    let five: Vec<OwnedFd> = (0..5).map(|_| writer.try_clone().unwrap().into()).collect();
    drop(writer);
    send_raw(&far, &bytes[..3], &five);
    send_raw(&far, &bytes[3..], &five);
    drop(five);
    let mut receiver = Receiver::default();
    let error = receiver.receive(&near).unwrap_err();
    assert!(
        matches!(error, ReceiveError::Frame(FrameError::TooManyFds)),
        "{error}"
    );
    assert!(all_writers_gone(reader), "the first five were kept");
}

#[test]
fn a_payload_above_the_bound_and_another_version_end_the_stream() {
    for (bytes, wanted) in [
        (
            message(1, 33, 0).to_bytes(),
            FrameError::TooLong {
                request: RequestId(1),
                size: 33,
                max: 32,
            },
        ),
        (
            vec![1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            FrameError::Version {
                request: RequestId(1),
                version: 2,
            },
        ),
    ] {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&bytes).unwrap();
        let mut receiver = Receiver::new(32);
        let error = receiver.receive(&near).unwrap_err();
        assert!(
            matches!(&error, ReceiveError::Frame(frame) if *frame == wanted),
            "{error}"
        );
        // It stays ended, whatever comes.
        far.write_all(&message(1, 0, 0).to_bytes()).unwrap();
        assert!(receiver.receive(&near).is_err());
    }
}

#[test]
fn closing_between_and_within_messages_is_told_apart() {
    for (bytes, mid) in [(0, false), (5, true), (12, true), (15, true)] {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&message(1, 8, 0).to_bytes()[..bytes])
            .unwrap();
        drop(far);
        let error = Receiver::default().receive(&near).unwrap_err();
        assert!(
            matches!(error, ReceiveError::Closed { is_mid_message } if is_mid_message == mid),
            "after {bytes} bytes: {error}"
        );
    }
}

#[test]
fn a_peer_that_does_not_read_fills_the_backlog_and_no_more() {
    let (near, far) = UnixStream::pair().unwrap();
    let mut sender = Sender::new(10_000);
    let mut pushed = 0;
    let error = loop {
        match sender.push(message(pushed, 1000, 1)) {
            Ok(()) => pushed += 1,
            Err(error) => break error,
        }
        sender.flush(&far).unwrap();
        assert!(sender.backlog() <= 10_000);
    };
    assert!(matches!(error, SendError::Backlog { .. }), "{error}");
    // Everything accepted arrives once the peer reads, each with its one descriptor.
    let mut receiver = Receiver::default();
    for number in 0..pushed {
        let got = loop {
            match receiver.receive(&near).unwrap() {
                Some(got) => break got,
                None => sender.flush(&far).map(|_| ()).unwrap(),
            }
        };
        assert_eq!((got.head.request.0, got.fds.len()), (number, 1));
        assert_eq!(got.payload, message(number, 1000, 0).payload);
    }
    assert_eq!(sender.backlog(), 0);
    let many = message(0, 0, MAX_FDS + 1);
    assert!(matches!(
        sender.push(many),
        Err(SendError::TooManyFds { fds: 9 })
    ));
}

#[test]
fn a_closed_peer_is_an_error_and_no_signal() {
    let (near, far) = UnixStream::pair().unwrap();
    drop(near);
    let mut sender = Sender::default();
    sender.push(message(1, 0, 0)).unwrap();
    assert!(matches!(sender.flush(&far), Err(SendError::Socket(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Splitting the stream anywhere gives the same messages, descriptors with theirs.
    #[test]
    fn any_split_gives_the_same_messages(
        shapes in prop::collection::vec((0..60_usize, 0..3_usize), 1..6),
        cuts in prop::collection::vec(1..40_usize, 1..200),
    ) {
        let (near, far) = UnixStream::pair().unwrap();
        let mut receiver = Receiver::default();
        let mut got = Vec::new();
        let mut cuts = cuts.iter().cycle();
        for (number, &(len, fds)) in shapes.iter().enumerate() {
            let sent = message(number as u32, len, fds);
            let bytes = sent.to_bytes();
            let mut at = 0;
            while at < bytes.len() {
                let end = (at + cuts.next().unwrap()).min(bytes.len());
                let with = if at == 0 { sent.fds.as_slice() } else { &[] };
                match with.is_empty() {
                    true => (&far).write_all(&bytes[at..end]).unwrap(),
                    false => send_raw(&far, &bytes[at..end], with),
                }
                at = end;
                if end % 2 == 0 {
                    got.extend(receiver.receive(&near).unwrap());
                }
            }
        }
        while let Some(message) = receiver.receive(&near).unwrap() {
            got.push(message);
        }
        prop_assert_eq!(got.len(), shapes.len());
        for (number, (got, (len, fds))) in got.iter().zip(shapes).enumerate() {
            prop_assert_eq!(&got.payload, &message(number as u32, len, 0).payload);
            prop_assert_eq!(got.fds.len(), fds);
        }
    }
}

#[test]
fn the_assembler_keeps_failing_and_holds_nothing() {
    let mut assembler = Assembler::new(16);
    let bytes = message(1, 17, 0).to_bytes();
    assembler.space()[..12].copy_from_slice(&bytes[..12]);
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    assert!(assembler.filled(12, [null()]).is_err());
    assert!(!assembler.is_mid_message());
    assert_eq!(assembler.filled(0, []).unwrap_err(), FrameError::Failed);
}

/// Larger than any socket buffer, so that the first write takes only part of it.
#[test]
fn a_message_sent_in_parts_brings_its_descriptors_once() {
    const LEN: usize = 4 << 20;
    let (near, far) = UnixStream::pair().unwrap();
    let (mut receiver, mut sender) = (Receiver::new(LEN), Sender::new(LEN + 100));
    sender.push(message(1, LEN, MAX_FDS)).unwrap();
    assert_eq!(sender.flush(&far).unwrap(), Flushed::Partly);
    assert!((1..LEN).contains(&sender.backlog()), "part of it went");
    let got = loop {
        match receiver.receive(&near).unwrap() {
            Some(got) => break got,
            None => sender.flush(&far).map(|_| ()).unwrap(),
        }
    };
    assert_eq!((got.payload.len(), got.fds.len()), (LEN, MAX_FDS));
}
