use std::io::Read;

use super::*;

/// A sink into a pipe that holds one page, and the pipe's other end.
fn narrow() -> (Sink, io::PipeReader) {
    let (reader, writer) = io::pipe().unwrap();
    // SAFETY: an open descriptor and a size.
    let size = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(size, 4096);
    (Sink::start("sink", writer).unwrap(), reader)
}

#[test]
fn who_waits_for_room_goes_on_when_the_reader_does_and_nothing_is_lost() {
    let (sink, mut reader) = narrow();
    let total = 3 * Sink::CAPACITY;
    let writer = std::thread::spawn({
        let sink = sink.clone();
        move || {
            for at in 0..total {
                sink.wait_for_room();
                sink.add(&[at as u8]);
            }
        }
    });
    let mut bytes = vec![0; total];
    reader.read_exact(&mut bytes).unwrap();
    writer.join().unwrap();
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == at as u8));
    assert!(sink.flush(Duration::from_secs(10)));
}

#[test]
fn an_end_lets_those_go_who_wait_for_room_and_what_was_accepted_is_still_written() {
    let (sink, mut reader) = narrow();
    sink.add(&[b'a'; Sink::CAPACITY]);
    let writer = std::thread::spawn({
        let sink = sink.clone();
        move || {
            sink.wait_for_room();
            sink.add(b"too late");
        }
    });
    assert!(!sink.flush(Duration::from_millis(20)), "nobody reads");
    sink.let_go();
    writer.join().unwrap();
    let mut bytes = vec![0; Sink::CAPACITY];
    reader.read_exact(&mut bytes).unwrap();
    assert!(sink.flush(Duration::from_secs(10)));
    assert!(bytes.iter().all(|byte| *byte == b'a'));
}

#[test]
fn an_offer_is_taken_as_a_whole_or_not_at_all() {
    let (sink, _reader) = narrow();
    assert!(sink.offer(&[0; 2 * Sink::CAPACITY]), "into an empty one");
    assert!(!sink.offer(b"more"));
    assert!(Sink::nowhere().offer(b"anything"));
}

#[test]
fn a_reader_that_has_gone_holds_nobody_up() {
    let (sink, reader) = narrow();
    drop(reader);
    for _ in 0..3 {
        sink.wait_for_room();
        sink.add(&[0; Sink::CAPACITY]);
    }
    assert!(sink.flush(Duration::from_secs(10)));
}

#[test]
fn a_descriptor_that_somebody_made_non_blocking_loses_nothing() {
    let (reader, writer) = io::pipe().unwrap();
    // SAFETY: an open descriptor and flags.
    unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    let sink = Sink::start("sink", writer).unwrap();
    sink.add(&[b'a'; 4 * Sink::CAPACITY]);
    let mut bytes = vec![0; 4 * Sink::CAPACITY];
    { reader }.read_exact(&mut bytes).unwrap();
    assert!(sink.flush(Duration::from_secs(10)));
}
