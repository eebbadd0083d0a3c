//! A front end: one disk of one back end, from the first message to running rings, and back again
//! after the back end was killed.
//!
//! Messages and their order are [`vhost_user::frontend`]'s. An inflight region is asked for once
//! and given back on every later connection.
//!
//! **After a crash** ([`Client::reconnect`]): with an inflight region the rings stay as they are
//! and the back end receives their used position; the requests in flight are its task. Without one
//! they are put into fresh rings again, which a real guest could not do but a client that checks
//! its data may.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use vhost_client::link::{self, Link, LinkError, Wanted};
use vhost_user::frontend::{CallError, Connection, InflightRegion, Ring};
use vhost_user::wire::{ProtocolFeatures, Request, feature as vhost_feature};

use crate::layout::Layout;
use crate::memory::Memory;
use crate::queue::{Extent, Op, Queue, Status};
use crate::ring::{RingError, feature as ring_feature};

/// Feature bits of the block device (virtio 1.2 §5.2.3), as masks.
pub use vio::blk::request::feature;

/// Bytes of the block device's configuration that are read.
const CONFIG_LEN: u32 = 60;
/// Descriptors of a request that is not indirect.
const CHAIN: u32 = 3;
/// The least ring that is asked for, as Linux' and QEMU's defaults are.
const MIN_RING: u16 = 256;

/// Options of a client; of features it gets those that the back end offers.
#[derive(Clone, Debug)]
pub struct Options {
    /// Virtio features to take where offered.
    pub features: u64,
    /// Protocol features to take where offered.
    pub protocol: ProtocolFeatures,
    /// Those of both without which it is no use to go on.
    pub required: (u64, ProtocolFeatures),
    /// Queues to use.
    pub queues: u16,
    /// Entries per ring; `None`: 256, or more where the depth needs it.
    pub ring_size: Option<u16>,
    /// Requests outstanding per queue, at most.
    pub depth: u16,
    /// Bytes of the largest read or write.
    pub block: u32,
    /// Whether the memory is announced as two regions.
    pub two_regions: bool,
    /// Time to wait for a listener, and for each reply.
    pub timeout: Duration,
}

impl Options {
    /// Takes these features, and refuses a back end that does not offer them.
    pub fn require(&mut self, features: u64) {
        self.features |= features;
        self.required.0 |= features;
    }

    /// Takes these protocol features, and refuses a back end that does not offer them.
    pub fn require_protocol(&mut self, protocol: ProtocolFeatures) {
        self.protocol = self.protocol | protocol;
        self.required.1 = self.required.1 | protocol;
    }

    /// Everything this client can do, but for packed rings, IN_ORDER and indirect descriptors,
    /// which a caller chooses; and for INFLIGHT_SHMFD, which costs a back end stores on every
    /// request.
    pub fn new(depth: u16, block: u32) -> Self {
        Self {
            features: ring_feature::VERSION_1
                | ring_feature::EVENT_IDX
                | vhost_feature::PROTOCOL_FEATURES
                | feature::SEG_MAX
                | feature::RO
                | feature::BLK_SIZE
                | feature::FLUSH
                | feature::MQ
                | feature::DISCARD
                | feature::WRITE_ZEROES,
            protocol: ProtocolFeatures::MQ
                | ProtocolFeatures::REPLY_ACK
                | ProtocolFeatures::CONFIG
                | ProtocolFeatures::RESET_DEVICE
                | ProtocolFeatures::CONFIGURE_MEM_SLOTS,
            required: (ring_feature::VERSION_1, ProtocolFeatures::NONE),
            queues: 1,
            ring_size: None,
            depth,
            block,
            two_regions: false,
            timeout: Duration::from_secs(5),
        }
    }
}

/// Fields of the device's configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// Sectors of 512 bytes.
    pub capacity: u64,
    /// Queues, 0 where not said.
    pub queues: u16,
    /// The longest discard, in sectors; 0 where there is none.
    pub max_discard_sectors: u32,
    /// The longest write-zeroes, in sectors; 0 where there is none.
    pub max_write_zeroes_sectors: u32,
}

impl BlkConfig {
    /// From the configuration space, little-endian (virtio 1.2 §5.2.4); what is missing of it is 0.
    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| {
            let word = bytes.get(at..at + 4).and_then(|word| word.try_into().ok());
            u32::from_le_bytes(word.unwrap_or_default())
        };
        Self {
            capacity: u64::from(word(0)) | u64::from(word(4)) << 32,
            queues: (word(32) >> 16) as u16,
            max_discard_sectors: word(36),
            max_write_zeroes_sectors: word(48),
        }
    }
}

/// Reason why a client does not work.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ClientError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("cannot make the guest's memory or eventfds")]
    Memory(#[source] io::Error),
    #[error("the back end does not offer {what}")]
    NotOffered { what: &'static str },
    #[error(
        "the back end offers other features than before it was restarted: {now:#x} for {before:#x}"
    )]
    FeaturesChanged { before: u64, now: u64 },
    #[error("ring {queue}")]
    Ring {
        queue: u16,
        #[source]
        source: RingError,
    },
}

/// A disk, connected.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    options: Options,
    connection: Connection,
    /// Features acknowledged.
    features: u64,
    protocol: ProtocolFeatures,
    config: BlkConfig,
    pub(crate) memory: Memory,
    pub(crate) layout: Layout,
    pub(crate) queues: Vec<Queue>,
    inflight: Option<InflightRegion>,
}

/// Result of the negotiation.
struct Negotiated {
    connection: Connection,
    features: u64,
    protocol: ProtocolFeatures,
    config: BlkConfig,
}

impl Client {
    /// Connects, negotiates, shares memory and starts the rings.
    ///
    /// # Errors
    /// There is no listener, or the back end refused or broke off.
    pub fn connect(path: &Path, options: Options) -> Result<Self, ClientError> {
        let Negotiated {
            connection,
            features,
            protocol,
            config,
        } = negotiate(path, &options)?;
        let descs = if features & ring_feature::INDIRECT != 0 {
            1
        } else {
            CHAIN
        };
        let needed = (u32::from(options.depth) * descs).next_power_of_two();
        let auto = u16::try_from(needed).unwrap_or(1 << 15).max(MIN_RING);
        let layout = Layout::new(
            options.queues,
            options.ring_size.unwrap_or(auto),
            options.depth,
            options.block,
            features & ring_feature::PACKED != 0,
            options.two_regions,
        );
        let memory = Memory::create(layout.len()).map_err(ClientError::Memory)?;
        let queues = (0..options.queues)
            .map(|index| Queue::new(index, &layout, features))
            .collect::<Result<_, _>>()
            .map_err(|errno| ClientError::Memory(errno.into()))?;
        let mut client = Self {
            path: path.to_owned(),
            options,
            connection,
            features,
            protocol,
            config,
            memory,
            layout,
            queues,
            inflight: None,
        };
        client.start(false)?;
        Ok(client)
    }

    /// Features acknowledged.
    pub const fn features(&self) -> u64 {
        self.features
    }

    /// Protocol features acknowledged.
    pub const fn protocol(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// The device's configuration.
    pub const fn config(&self) -> BlkConfig {
        self.config
    }

    /// Whether an inflight region is there, so that requests in flight outlive the back end.
    pub const fn tracks_inflight(&self) -> bool {
        self.inflight.is_some()
    }

    /// The path connected to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The control socket: it hangs up when the back end dies.
    pub const fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The guest's memory, where everything lies in it, and the queues: for driving them by hand.
    pub fn parts(&mut self) -> (&Memory, &Layout, &mut [Queue]) {
        (&self.memory, &self.layout, &mut self.queues)
    }

    /// Whether the back end closed the connection.
    pub fn is_hung_up(&self) -> bool {
        link::is_hung_up(&self.connection)
    }

    /// Ends the connection as a VMM that goes: for [`reconnect`](Self::reconnect).
    pub fn hang_up(&self) {
        // Already hung up is as good.
        let _ = rustix::net::shutdown(self.connection.socket(), rustix::net::Shutdown::Both);
    }

    /// Connects again to a back end that was restarted, or that closed the connection. Everything
    /// that came back before must have been popped.
    ///
    /// # Errors
    /// As [`Client::connect`]; also where the new back end offers something else.
    pub fn reconnect(&mut self) -> Result<(), ClientError> {
        let new = negotiate(&self.path, &self.options)?;
        if new.features != self.features {
            return Err(ClientError::FeaturesChanged {
                before: self.features,
                now: new.features,
            });
        }
        self.connection = new.connection;
        self.protocol = new.protocol;
        self.config = new.config;
        let keeps_rings = self.inflight.is_some();
        let mut again = Vec::new();
        if !keeps_rings {
            self.memory.zero(0, self.layout.rings_len());
            for queue in &mut self.queues {
                again.push(queue.reset(&self.layout, self.features));
            }
        }
        self.start(keeps_rings)?;
        for (queue, slots) in self.queues.iter_mut().zip(again) {
            for slot in slots {
                let has_room = queue.submit_again(&self.memory, &self.layout, slot);
                assert!(has_room, "a fresh ring has room for what the old one held");
            }
            queue.publish(&self.memory);
        }
        Ok(())
    }

    /// Makes one request on queue 0, where nothing else is outstanding, and waits for it. `data` is
    /// written from, or read into, at most a block of it.
    ///
    /// # Errors
    /// The device broke the ring's protocol.
    ///
    /// # Panics
    /// If something is outstanding.
    pub fn request(
        &mut self,
        op: Op,
        extent: Extent,
        data: &mut [u8],
    ) -> Result<Option<Status>, ClientError> {
        let (queue, memory, layout) = (&mut self.queues[0], &self.memory, &self.layout);
        assert_eq!(queue.outstanding(), 0, "one at a time");
        let slot = queue
            .take_slot()
            .expect("with nothing outstanding slots are free");
        let at = layout.data(0, slot);
        let len = data.len().min(layout.block as usize);
        if op == Op::Write {
            memory.write(at, &data[..len]);
        }
        queue.submit(memory, layout, slot, op, extent, 0);
        queue.publish(memory);
        let start = Instant::now();
        let done = loop {
            let done = queue.complete(memory, layout);
            let done = done.map_err(|source| ClientError::Ring { queue: 0, source })?;
            if done.is_some() || start.elapsed() > self.options.timeout {
                break done;
            }
            thread::yield_now();
        };
        Ok(done.map(|done| {
            queue.release(done.slot);
            if matches!(op, Op::Read | Op::GetId) {
                memory.read(at, &mut data[..len]);
            }
            done.status
        }))
    }

    /// Stops the rings as a guest that shuts down does, then returns where each stands by the back
    /// end's word and by ours. They differ where requests were lost or made up.
    ///
    /// # Errors
    /// The back end broke off.
    pub fn stop(&mut self) -> Result<Vec<(u32, u32)>, ClientError> {
        let mut bases = Vec::new();
        for (index, queue) in (0..).zip(&self.queues) {
            let base = self.connection.stop_ring(index)?;
            bases.push((base, queue.ring.available_base()));
        }
        Ok(bases)
    }

    /// Starts rings again that were stopped, where they stood: what a VMM does that resumes its
    /// guest.
    ///
    /// # Errors
    /// The back end broke off.
    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.start_rings(true)
    }

    /// RESET_DEVICE, where it is negotiated: rings, features and state are forgotten by the back
    /// end, and started anew here with nothing outstanding.
    ///
    /// # Errors
    /// It is not offered, or the back end broke off.
    pub fn reset_device(&mut self) -> Result<(), ClientError> {
        if !self.protocol.contains(ProtocolFeatures::RESET_DEVICE) {
            let what = "RESET_DEVICE";
            return Err(ClientError::NotOffered { what });
        }
        self.connection.call(Request::ResetDevice)?;
        self.connection.set_features(self.features)?;
        self.memory.zero(0, self.layout.rings_len());
        for queue in &mut self.queues {
            for slot in queue.reset(&self.layout, self.features) {
                queue.release(slot);
            }
        }
        self.inflight = None;
        self.start_rings(false)
    }

    fn start(&mut self, keeps_rings: bool) -> Result<(), ClientError> {
        let (regions, file) = (self.layout.regions(), self.memory.file());
        self.connection.share_memory(&regions, file)?;
        self.start_rings(keeps_rings)
    }

    fn start_rings(&mut self, keeps_rings: bool) -> Result<(), ClientError> {
        if self.protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            let region = match self.inflight.take() {
                Some(region) => region,
                None => {
                    let (queues, size) = (self.options.queues, self.layout.ring_size);
                    self.connection.new_inflight(queues, size)?
                }
            };
            self.connection
                .give_inflight(self.inflight.insert(region))?;
        }
        let rings: Vec<_> = (0..)
            .zip(&self.queues)
            .map(|(index, queue)| {
                let base = match keeps_rings {
                    true => queue.ring.base(&self.memory),
                    false => queue.ring.available_base(),
                };
                ring(&self.layout, index, queue, base)
            })
            .collect();
        self.connection.start_rings(&rings)?;
        if !keeps_rings {
            for queue in &mut self.queues {
                // Some back ends signal once when they get the descriptor; no request ended by
                // that.
                queue.take_calls();
                queue.notifiers.calls = 0;
            }
        }
        Ok(())
    }
}

/// Returns a ring in the form that the back end receives; the back end is to go on at `base`.
pub fn ring<'a>(layout: &Layout, index: u8, queue: &'a Queue, base: u32) -> Ring<'a> {
    layout.areas().described(index, base, &queue.notifiers)
}

fn negotiate(path: &Path, options: &Options) -> Result<Negotiated, ClientError> {
    let wanted = Wanted {
        features: options.features,
        protocol: options.protocol,
        required: options.required,
        timeout: options.timeout,
    };
    let Link {
        mut connection,
        features,
        protocol,
        queues,
    } = Link::open(path, &wanted)?;
    if queues < u64::from(options.queues) {
        let what = "so many queues";
        return Err(ClientError::NotOffered { what });
    }
    let config = match protocol.contains(ProtocolFeatures::CONFIG) {
        true => BlkConfig::of(&connection.config(CONFIG_LEN)?),
        false => BlkConfig::default(),
    };
    connection.set_features(features)?;
    Ok(Negotiated {
        connection,
        features,
        protocol,
        config,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::feature::{IN_ORDER, INDIRECT, PACKED};

    /// The server under test has these names from the same place: here are the numbers of the
    /// specification.
    #[test]
    fn the_features_are_those_of_the_specification() {
        assert_eq!(Options::new(1, 4096).features, 0x1_6000_7264);
        assert_eq!([INDIRECT, PACKED, IN_ORDER], [1 << 28, 1 << 34, 1 << 35]);
    }
}
