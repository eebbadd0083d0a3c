//! Feeds arbitrary bytes, with descriptors at any position, to the receiver and the session of
//! `vhost-user`: the body of a fuzz target, and of the property tests of this crate.
#![forbid(unsafe_code)]

use std::fs::File;

use vhost_user::backend::{
    Answer, Config, Event, MAX_RING_SIZE, Refusal, RingBase, SUPPORTED, Session, Step,
};
use vhost_user::channel::{Assembler, DEFAULT_MAX_PAYLOAD, Sender};
use vhost_user::wire::feature;

/// Feeds `data` to a session that offers all features, and answers its events.
///
/// The first byte selects the events that the daemon refuses. Chunks follow: each is a byte with
/// the number of bytes (lower six bits) and of descriptors that arrive with them (upper two bits),
/// then those bytes.
///
/// # Panics
/// If the input breaks an invariant of the session.
pub fn feed(data: &[u8]) {
    let config = Config {
        features: feature::ACCESS_PLATFORM | feature::RING_PACKED | 0xff,
        protocol: SUPPORTED,
        queues: 3,
        rings_per_queue: 1,
        max_ring_size: MAX_RING_SIZE,
        max_regions: 4,
    };
    let mut session = Session::new(config).expect("the configuration is valid");
    let mut assembler = Assembler::new(DEFAULT_MAX_PAYLOAD);
    let mut sender = Sender::new(64 << 10);
    let Some((&refuse, mut rest)) = data.split_first() else {
        return;
    };
    let mut events = 0_u32;
    while let Some((&control, tail)) = rest.split_first() {
        let (mut chunk, tail) = tail.split_at(usize::from(control & 0x3f).min(tail.len()));
        rest = tail;
        let mut fds = control >> 6;
        while !chunk.is_empty() {
            let space = assembler.space();
            assert!(!space.is_empty() && space.len() <= DEFAULT_MAX_PAYLOAD);
            let len = chunk.len().min(space.len());
            space[..len].copy_from_slice(&chunk[..len]);
            chunk = &chunk[len..];
            let came = (0..std::mem::take(&mut fds))
                .map_while(|_| File::open("/dev/null").ok().map(Into::into));
            let Ok(message) = assembler.filled(len, came) else {
                return;
            };
            let Some(message) = message else { continue };
            let Ok(step) = session.handle(message) else {
                return;
            };
            let reply = match step {
                Step::Done(reply) => reply,
                Step::Refused(error, reply) => {
                    assert!(!error.to_string().is_empty());
                    Some(reply)
                }
                Step::Event(event) => {
                    events = events.wrapping_add(1);
                    let is_refused = refuse & 1 << (events % 8) != 0;
                    let Ok(reply) = session.finish(answer(event, is_refused)) else {
                        return;
                    };
                    reply
                }
            };
            assert!(!session.is_waiting());
            if reply.is_some_and(|reply| sender.push(reply).is_err()) {
                return;
            }
        }
    }
}

/// Checks the session's guarantees about an event, and answers as a daemon would.
fn answer(event: Event, is_refused: bool) -> Result<Answer, Refusal> {
    if is_refused {
        return Err(Refusal("out of luck".into()));
    }
    Ok(match event {
        Event::Memory(regions) => {
            assert!(regions.len() <= 4);
            for pair in regions.windows(2) {
                let (low, high) = (pair[0].place, pair[1].place);
                assert!(low.guest_addr + (low.size - 1) < high.guest_addr);
            }
            Answer::Done
        }
        Event::RingStarted(ring) => {
            assert!(ring.index < 3 && ring.size > 0 && ring.size <= MAX_RING_SIZE);
            assert!(ring.desc.is_multiple_of(16) && ring.desc.checked_add(16).is_some());
            Answer::Done
        }
        Event::RingStopped(_) => Answer::RingStopped(RingBase::Split(7)),
        Event::ConfigRead(access) => Answer::Config(vec![0; access.size as usize]),
        Event::InflightWanted(_) => match File::open("/dev/null") {
            Ok(file) => Answer::Inflight {
                fd: file.into(),
                mmap_size: 4096,
                mmap_offset: 0,
            },
            Err(error) => return Err(Refusal(error.to_string())),
        },
        _ => Answer::Done,
    })
}
