//! A network server that is simple and obviously correct, unless it is to misbehave: it sends each
//! frame back over the pair it came by, in their order, buffer by buffer.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use vhost_client::loopback::{Guest, Next, Service, kick_fd};
use vhost_client::naive::{Chain, Device, device};
use vhost_user::backend::{RingBase, RingConfig};

/// Misbehaviour: every so many frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// A frame is dropped.
    Drop(u64),
    /// One bit of a frame is wrong: of its last byte.
    FlipBit(u64),
    /// A frame is sent twice.
    Twice(u64),
    /// A frame is sent behind the next one.
    Swap(u64),
    /// A frame ends too early, by so many bytes.
    Truncate(u64, usize),
    /// The number of a frame is one that was never sent.
    Forge(u64),
    /// The number of a frame's queue is one that does not exist.
    ForgeQueue(u64),
    /// The used length is this.
    Length(u64, u32),
    /// The header says so many buffers.
    Buffers(u64, u16),
    /// A receive buffer is returned twice.
    ReturnTwice(u64),
    /// A frame of another protocol is put before one.
    Foreign(u64),
    /// Frames are taken and none is sent.
    Silence,
}

impl Fault {
    fn hits(self, number: u64) -> bool {
        match self {
            Self::None => false,
            Self::Silence => true,
            Self::Drop(every)
            | Self::FlipBit(every)
            | Self::Twice(every)
            | Self::Swap(every)
            | Self::Truncate(every, _)
            | Self::Forge(every)
            | Self::ForgeQueue(every)
            | Self::Length(every, _)
            | Self::Buffers(every, _)
            | Self::ReturnTwice(every)
            | Self::Foreign(every) => number.is_multiple_of(every),
        }
    }
}

struct Ring {
    device: Box<dyn Device>,
    kick: Option<OwnedFd>,
    /// Receive buffers taken for a frame that found too few.
    taken: VecDeque<Chain>,
}

pub struct Naive {
    fault: Fault,
    features: u64,
    rings: Vec<Option<Ring>>,
    frames: u64,
    held: Option<Vec<u8>>,
}

impl Naive {
    pub fn new(fault: Fault) -> Self {
        Self {
            fault,
            features: 0,
            rings: Vec::new(),
            frames: 0,
            held: None,
        }
    }

    /// Bytes that a transmitted chain holds.
    fn read(guest: &Guest, chain: &Chain) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(addr, len, is_writable) in &chain.segments {
            assert!(!is_writable, "a driver sends what the device reads");
            let (memory, at) = guest.gpa(addr, len.into()).unwrap();
            let start = bytes.len();
            bytes.resize(start + len as usize, 0);
            memory.read(at, &mut bytes[start..]);
        }
        assert!(bytes[..12].iter().all(|byte| *byte == 0), "no offloads");
        bytes
    }

    /// Writes header and frame into as many receive buffers as they take; drops them where there
    /// are too few.
    fn write(&self, guest: &Guest, ring: &mut Ring, bytes: &[u8]) {
        let Ring { device, taken, .. } = ring;
        let room = |taken: &VecDeque<Chain>| {
            let lens = taken.iter().flat_map(|chain| &chain.segments);
            lens.map(|segment| segment.1 as usize).sum::<usize>()
        };
        while room(taken) < bytes.len() {
            let Some(chain) = device.take(guest) else {
                return;
            };
            taken.push_back(chain);
        }
        // A frame before this one, which found too few, may have been longer.
        let mut chains = Vec::new();
        let mut len = 0;
        while len < bytes.len() {
            let chain = taken.pop_front().unwrap();
            len += chain.segments[0].1 as usize;
            chains.push(chain);
        }
        let mut bytes = bytes.to_vec();
        let hits = self.fault.hits(self.frames);
        let buffers = match self.fault {
            Fault::Buffers(_, buffers) if hits => buffers,
            _ => chains.len() as u16,
        };
        bytes[10..12].copy_from_slice(&buffers.to_le_bytes());
        let mut rest = bytes.as_slice();
        for chain in &chains {
            let &[(addr, len, is_writable)] = chain.segments.as_slice() else {
                panic!("receive buffers are single descriptors");
            };
            assert!(is_writable);
            let (piece, tail) = rest.split_at(rest.len().min(len as usize));
            let (memory, at) = guest.gpa(addr, len.into()).unwrap();
            memory.write(at, piece);
            rest = tail;
            let len = match self.fault {
                Fault::Length(_, len) if hits => len,
                _ => piece.len() as u32,
            };
            device.give(guest, chain, chain.descs, 1, len);
            if hits && matches!(self.fault, Fault::ReturnTwice(_)) {
                device.give(guest, chain, chain.descs, 1, len);
            }
        }
    }

    fn forward(&mut self, guest: &Guest, receive: &mut Ring, mut bytes: Vec<u8>) {
        self.frames += 1;
        if !self.fault.hits(self.frames) {
            self.write(guest, receive, &bytes);
            if let Some(held) = self.held.take() {
                self.write(guest, receive, &held);
            }
            return;
        }
        match self.fault {
            Fault::Drop(_) | Fault::Silence => return,
            Fault::Swap(_) => {
                self.held = Some(bytes);
                return;
            }
            Fault::FlipBit(_) => *bytes.last_mut().unwrap() ^= 1,
            Fault::Truncate(_, by) => bytes.truncate(bytes.len() - by),
            Fault::Forge(_) => bytes[12 + 23] = 0x7f,
            Fault::ForgeQueue(_) => bytes[12 + 15] = 0x7f,
            Fault::Twice(_) => self.write(guest, receive, &bytes),
            Fault::Foreign(_) => {
                let mut foreign = bytes.clone();
                foreign[12 + 12..12 + 14].copy_from_slice(&[0x08, 0x06]);
                self.write(guest, receive, &foreign);
            }
            _ => {}
        }
        self.write(guest, receive, &bytes);
    }
}

impl Service for Naive {
    fn features(&mut self, features: u64) {
        self.features = features;
    }

    fn start(&mut self, guest: &Guest, config: &RingConfig) {
        let index = usize::from(config.index);
        let len = self.rings.len().max(index + 1).next_multiple_of(2);
        self.rings.resize_with(len, || None);
        self.rings[index] = Some(Ring {
            device: device(guest, config, self.features, None),
            kick: kick_fd(config),
            taken: VecDeque::new(),
        });
    }

    fn stop(&mut self, _: &Guest, index: u8) -> RingBase {
        let ring = self.rings[usize::from(index)].take();
        ring.unwrap().device.base()
    }

    fn poll(&mut self, guest: &Guest) -> Next {
        let mut rings = std::mem::take(&mut self.rings);
        let mut has_any = false;
        for pair in rings.chunks_exact_mut(2) {
            let [Some(receive), Some(transmit)] = pair else {
                continue;
            };
            for ring in [&*receive, &*transmit] {
                if let Some(kick) = &ring.kick {
                    // An error is EAGAIN: it was not kicked.
                    let _ = rustix::io::read(kick, &mut [0; 8]);
                }
            }
            transmit.device.disarm(guest);
            while let Some(chain) = transmit.device.take(guest) {
                has_any = true;
                let bytes = Self::read(guest, &chain);
                transmit.device.give(guest, &chain, chain.descs, 1, 0);
                self.forward(guest, receive, bytes);
            }
            // The client polls.
            assert!(!transmit.device.wants_call(guest) && !receive.device.wants_call(guest));
        }
        let is_idle = |pair: &mut [Option<Ring>]| match pair {
            [Some(_), Some(transmit)] => transmit.device.arm(guest),
            _ => true,
        };
        // All are armed, whichever has something.
        let idle: Vec<_> = rings.chunks_exact_mut(2).map(is_idle).collect();
        self.rings = rings;
        match has_any || idle.contains(&false) {
            true => Next::Again,
            false => Next::Sleep,
        }
    }

    fn kicks(&self) -> Vec<BorrowedFd<'_>> {
        let rings = self.rings.iter().flatten();
        rings
            .filter_map(|ring| ring.kick.as_ref())
            .map(AsFd::as_fd)
            .collect()
    }

    fn reset(&mut self) {
        self.rings.clear();
        self.held = None;
    }
}
