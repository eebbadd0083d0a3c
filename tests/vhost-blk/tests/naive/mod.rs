//! A block server that is simple and obviously correct, unless it is to misbehave.
//!
//! It sleeps whenever its rings are empty, asks for a kick by event index or flag, executes what it
//! took in reverse order, and returns one request at a time (in ring order and in batches with
//! IN_ORDER).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vhost_blk::loopback::{Guest, Next, Service, kick_fd};
use vhost_blk::memory::Memory;
use vhost_blk::ring::feature;
use vhost_client::naive::{Chain, Device, Part, device};
use vhost_user::backend::{RingBase, RingConfig, RingLayout};
use vhost_user::inflight::{self, queue_region_len};
use vhost_user::wire::Inflight;

pub const SECTORS: u64 = 2048;

/// Misbehaviour: once, at the request or event of this number, or every so many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// One bit of what is read is wrong, every so many reads.
    FlipBit(u32),
    /// A write is acknowledged and not done, every so many.
    DropWrite(u32),
    /// A write goes to the sector behind, every so many.
    Misplace(u32),
    /// A kick is read and nothing done about it.
    IgnoreKick(u32),
    /// A call that was asked for is not made.
    OmitCall(u32),
    /// A request is returned twice.
    ReturnTwice(u32),
    /// A request fails.
    Fail(u32),
    /// The connection ends every so many requests, with some taken and not returned.
    DieEvery(u32),
}

struct Ring {
    index: u8,
    device: Box<dyn Device>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    taken: VecDeque<Chain>,
}

pub struct Naive {
    pub features: u64,
    disk: Vec<u8>,
    fault: Fault,
    rings: Vec<Ring>,
    inflight: Option<(Inflight, Arc<Memory>)>,
    is_asleep: bool,
    reads: u32,
    writes: u32,
    requests: u32,
    kicks: u32,
    calls: u32,
    deaths: Arc<AtomicU32>,
    in_order: bool,
}

impl Naive {
    pub fn new(fault: Fault) -> Self {
        Self {
            features: 0,
            disk: vec![0; SECTORS as usize * 512],
            fault,
            rings: Vec::new(),
            inflight: None,
            is_asleep: false,
            reads: 0,
            writes: 0,
            requests: 0,
            kicks: 0,
            calls: 0,
            deaths: Arc::default(),
            in_order: false,
        }
    }

    pub fn deaths(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.deaths)
    }

    /// Does what a request says; bytes written to its buffers.
    fn execute(&mut self, guest: &Guest, chain: &Chain) -> u32 {
        let mut out = Vec::new();
        for &(addr, len, _) in chain.segments.iter().filter(|segment| !segment.2) {
            let (memory, at) = guest.gpa(addr, len.into()).unwrap();
            let start = out.len();
            out.resize(start + len as usize, 0);
            memory.read(at, &mut out[start..]);
        }
        let ins: Vec<_> = chain.segments.iter().filter(|segment| segment.2).collect();
        let (status, data) = ins.split_last().unwrap();
        let op = u32::from_le_bytes(out[..4].try_into().unwrap());
        let sector = u64::from_le_bytes(out[8..16].try_into().unwrap());
        let mut written = 1;
        self.requests += 1;
        let mut result = 0;
        match op {
            0 => {
                self.reads += 1;
                let mut at = sector as usize * 512;
                for &&(addr, len, _) in data {
                    let mut bytes = self.disk[at..at + len as usize].to_vec();
                    if let Fault::FlipBit(every) = self.fault
                        && self.reads.is_multiple_of(every)
                    {
                        bytes[100] ^= 16;
                    }
                    let (memory, offset) = guest.gpa(addr, len.into()).unwrap();
                    memory.write(offset, &bytes);
                    at += len as usize;
                    written += len;
                }
            }
            1 => {
                self.writes += 1;
                let is_hit = |every: u32| self.writes.is_multiple_of(every);
                let shift = match self.fault {
                    Fault::Misplace(every) if is_hit(every) => 512,
                    _ => 0,
                };
                let is_dropped = matches!(self.fault, Fault::DropWrite(every) if is_hit(every));
                let at = (sector as usize * 512 + shift).min(self.disk.len() - out.len() + 16);
                if !is_dropped {
                    self.disk[at..at + out.len() - 16].copy_from_slice(&out[16..]);
                }
            }
            4 => {}
            8 => {
                let &&(addr, _, _) = data.first().unwrap();
                let (memory, offset) = guest.gpa(addr, 20).unwrap();
                memory.write(offset, b"naive\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
                written += 20;
            }
            11 | 13 => {
                let sector = u64::from_le_bytes(out[16..24].try_into().unwrap()) as usize;
                let count = u32::from_le_bytes(out[24..28].try_into().unwrap()) as usize;
                self.disk[sector * 512..(sector + count) * 512].fill(0);
            }
            _ => result = 2,
        }
        if self.fault == Fault::Fail(self.requests) {
            result = 1;
        }
        let (memory, offset) = guest.gpa(status.0, 1).unwrap();
        memory.store_u8(offset, result, Ordering::Relaxed);
        written
    }

    fn serve(&mut self, guest: &Guest, at: usize) -> Result<bool, ()> {
        let mut ring = self.rings.swap_remove(at);
        while ring.taken.len() < 8 {
            let Some(chain) = ring.device.take(guest) else {
                break;
            };
            ring.taken.push_back(chain);
        }
        let any = !ring.taken.is_empty();
        let mut outcome = Ok(any);
        let (mut descs, mut count) = (0, 0);
        // Out of order where that is allowed: the last first.
        while let Some(chain) = match self.in_order {
            true => ring.taken.pop_front(),
            false => ring.taken.pop_back(),
        } {
            let len = self.execute(guest, &chain);
            if let Fault::DieEvery(every) = self.fault
                && self.requests.is_multiple_of(every)
            {
                // Executed, and not returned.
                self.deaths.fetch_add(1, Ordering::Relaxed);
                outcome = Err(());
                break;
            }
            descs += chain.descs;
            count += 1;
            // Batches of three with IN_ORDER, whose last one speaks for all.
            if self.in_order && count < 3 && !ring.taken.is_empty() {
                continue;
            }
            ring.device.give(guest, &chain, descs, count, len);
            if self.fault == Fault::ReturnTwice(self.requests) {
                ring.device.give(guest, &chain, descs, count, len);
            }
            (descs, count) = (0, 0);
        }
        if any && ring.device.wants_call(guest) {
            self.call(&ring);
        }
        self.rings.push(ring);
        outcome
    }

    fn call(&mut self, ring: &Ring) {
        self.calls += 1;
        if self.fault != Fault::OmitCall(self.calls)
            && let Some(call) = &ring.call
        {
            rustix::io::write(call, &1_u64.to_ne_bytes()).unwrap();
        }
    }
}

fn fd(fd: &Option<Arc<OwnedFd>>) -> Option<OwnedFd> {
    fd.as_ref().map(|fd| fd.try_clone().unwrap())
}

impl Service for Naive {
    fn config(&self) -> [u8; 60] {
        let mut config = [0; 60];
        config[..8].copy_from_slice(&SECTORS.to_le_bytes());
        config[34] = 4;
        config[36..40].copy_from_slice(&(SECTORS as u32).to_le_bytes());
        config[48..52].copy_from_slice(&(SECTORS as u32).to_le_bytes());
        config
    }

    fn features(&mut self, features: u64) {
        self.features = features;
        self.in_order = features & feature::IN_ORDER != 0;
    }

    fn start(&mut self, guest: &Guest, config: &RingConfig) {
        let part = self.inflight.as_ref().map(|(inflight, memory)| {
            let len = queue_region_len(config.layout, inflight.queue_size);
            Part {
                memory: Arc::clone(memory),
                at: len * usize::from(config.index),
                len,
            }
        });
        let features = self.features;
        let mut device = device(guest, config, features, part);
        let taken = device.replay().into();
        let ring = Ring {
            index: config.index,
            device,
            kick: kick_fd(config),
            call: fd(&config.call),
            taken,
        };
        if self.inflight.is_some() {
            // The predecessor may have died between returning and calling.
            self.call(&ring);
        }
        self.rings.push(ring);
        self.is_asleep = false;
    }

    fn stop(&mut self, _: &Guest, index: u8) -> RingBase {
        let at = self
            .rings
            .iter()
            .position(|ring| ring.index == index)
            .unwrap();
        self.rings.swap_remove(at).device.base()
    }

    fn set_call(&mut self, index: u8, call: Option<OwnedFd>) {
        if let Some(ring) = self.rings.iter_mut().find(|ring| ring.index == index) {
            ring.call = call;
        }
    }

    fn make_inflight(&mut self, wanted: Inflight) -> Option<(u64, OwnedFd)> {
        let layout = match self.features & feature::PACKED {
            0 => RingLayout::Split,
            _ => RingLayout::Packed,
        };
        let len = inflight::region_len(layout, wanted.queues, wanted.queue_size).unwrap();
        let memory = Memory::create(len as usize).unwrap();
        Some((len, memory.file().try_clone_to_owned().unwrap()))
    }

    fn set_inflight(&mut self, inflight: Inflight, region: OwnedFd) {
        let len = inflight.mmap_size as usize;
        let memory = Memory::map(region, inflight.mmap_offset, len).unwrap();
        self.inflight = Some((inflight, Arc::new(memory)));
    }

    fn poll(&mut self, guest: &Guest) -> Next {
        let mut kicked = false;
        for ring in &self.rings {
            if let Some(kick) = &ring.kick {
                kicked |= rustix::io::read(kick, &mut [0; 8]).is_ok();
            }
        }
        if kicked && self.is_asleep {
            self.kicks += 1;
            kicked = self.fault != Fault::IgnoreKick(self.kicks);
        }
        if self.is_asleep && !kicked {
            return Next::Sleep;
        }
        self.is_asleep = false;
        let mut any = false;
        for at in (0..self.rings.len()).rev() {
            self.rings[at].device.disarm(guest);
            match self.serve(guest, at) {
                Ok(served) => any |= served,
                Err(()) => return Next::Die,
            }
        }
        if any {
            return Next::Again;
        }
        // Sleeps only if all rings are armed and none has anything.
        let idle: Vec<_> = self
            .rings
            .iter_mut()
            .map(|ring| ring.device.arm(guest))
            .collect();
        self.is_asleep = idle.iter().all(|idle| *idle);
        if self.is_asleep {
            Next::Sleep
        } else {
            Next::Again
        }
    }

    fn kicks(&self) -> Vec<BorrowedFd<'_>> {
        self.rings
            .iter()
            .filter_map(|ring| ring.kick.as_ref())
            .map(AsFd::as_fd)
            .collect()
    }

    fn reset(&mut self) {
        self.rings.clear();
        self.inflight = None;
        self.is_asleep = false;
    }
}
