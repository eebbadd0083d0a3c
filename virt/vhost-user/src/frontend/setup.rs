//! Sequences of messages: negotiation, memory, starting and stopping rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{CallError, Connection, Reply};
use crate::wire::{
    ConfigAccess, ConfigKind, Inflight, MemRegion, ProtocolFeatures, Request, RequestId, VringAddr,
    VringFd, VringState, feature,
};

/// Offer of a back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Virtio features, and bit 30.
    pub features: u64,
    /// Protocol features that were wanted and are acknowledged now.
    pub protocol: ProtocolFeatures,
    /// Queues.
    pub queues: u64,
}

/// The region of requests in flight: as described, and its file.
pub type InflightRegion = (Inflight, OwnedFd);

/// A ring to be served.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    /// Which one.
    pub index: u8,
    /// Entries.
    pub size: u16,
    /// Position at which it goes on.
    pub base: u32,
    /// Descriptors: a user address, as are the two below.
    pub desc: u64,
    /// The driver's part.
    pub avail: u64,
    /// The device's part.
    pub used: u64,
    /// Signalled for the device.
    pub kick: BorrowedFd<'a>,
    /// Signalled for the driver.
    pub call: BorrowedFd<'a>,
    /// Signalled when the ring makes no sense.
    pub err: Option<BorrowedFd<'a>>,
}

impl Connection {
    /// Asks what there is, and acknowledges the protocol features that are offered of `wanted`;
    /// with `None` there is no negotiation of them at all.
    ///
    /// # Errors
    /// [`CallError`], as for all requests.
    pub fn negotiate(&mut self, wanted: Option<ProtocolFeatures>) -> Result<Offer, CallError> {
        self.call(Request::SetOwner)?;
        let features = self.value(Request::GetFeatures)?;
        let mut protocol = ProtocolFeatures::NONE;
        if let Some(wanted) = wanted
            && features & feature::PROTOCOL_FEATURES != 0
        {
            protocol = ProtocolFeatures(self.value(Request::GetProtocolFeatures)?) & wanted;
            self.call(Request::SetProtocolFeatures(protocol))?;
        }
        self.protocol = protocol;
        let queues = match protocol.contains(ProtocolFeatures::MQ) {
            true => self.value(Request::GetQueueNum)?,
            false => 1,
        };
        Ok(Offer {
            features,
            protocol,
            queues,
        })
    }

    /// The first `len` bytes of the configuration space. Back ends refuse to be asked for more than
    /// they have.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn config(&mut self, len: u32) -> Result<Vec<u8>, CallError> {
        let access = ConfigAccess {
            offset: 0,
            size: len,
            kind: ConfigKind::Writable,
        };
        match self.call(Request::GetConfig(access))? {
            Some(Reply::Config(Some(config))) => Ok(config),
            _ => Err(refused(RequestId::GET_CONFIG)),
        }
    }

    /// Shares memory, all of it in one file: region by region where the back end has slots, else as
    /// a table.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn share_memory(
        &mut self,
        regions: &[MemRegion],
        file: BorrowedFd<'_>,
    ) -> Result<(), CallError> {
        /// Regions in one SET_MEM_TABLE.
        const TABLE: u64 = 8;
        let has_slots = self
            .protocol
            .contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS);
        let slots = match has_slots {
            true => self.value(Request::GetMaxMemSlots)?,
            false => TABLE,
        };
        if slots < regions.len() as u64 {
            let regions = regions.len();
            return Err(CallError::Slots { slots, regions });
        }
        let table = regions.iter().map(|region| Ok((*region, copy(file)?)));
        if has_slots {
            for slot in table {
                let (region, file) = slot?;
                self.call(Request::AddMemReg(region, file))?;
            }
        } else {
            let table = table.collect::<Result<_, CallError>>()?;
            self.call(Request::SetMemTable(table))?;
        }
        Ok(())
    }

    /// The driver's features, bit 30 among them where rings are to be enabled apart: they say how
    /// rings look.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn set_features(&mut self, features: u64) -> Result<(), CallError> {
        self.enables_rings = features & feature::PROTOCOL_FEATURES != 0;
        self.call(Request::SetFeatures(features)).map(drop)
    }

    /// A region for rings like these.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn new_inflight(
        &mut self,
        queues: u16,
        queue_size: u16,
    ) -> Result<InflightRegion, CallError> {
        let wanted = Inflight {
            mmap_size: 0,
            mmap_offset: 0,
            queues,
            queue_size,
        };
        match self.call(Request::GetInflightFd(wanted))? {
            // Its numbers are not checked: the back end that made it gets it back, or its
            // successor.
            Some(Reply::Inflight(Some(region))) => Ok(region),
            _ => Err(refused(RequestId::GET_INFLIGHT_FD)),
        }
    }

    /// Gives the region to this back end.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn give_inflight(&mut self, (region, file): &InflightRegion) -> Result<(), CallError> {
        let file = copy(file.as_fd())?;
        self.call(Request::SetInflightFd(*region, file)).map(drop)
    }

    /// Describes rings, starts and enables them. Done when the back end has done it.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn start_rings(&mut self, rings: &[Ring<'_>]) -> Result<(), CallError> {
        self.start_enabled(rings, |_| true)
    }

    /// The same, and enables those that `is_enabled` names alone.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn start_enabled(
        &mut self,
        rings: &[Ring<'_>],
        is_enabled: impl Fn(u8) -> bool,
    ) -> Result<(), CallError> {
        for ring in rings {
            self.describe(ring)?;
            self.call(Request::SetVringKick(fd(ring.index, ring.kick)?))?;
        }
        for ring in rings {
            self.enable(ring.index.into(), is_enabled(ring.index))?;
        }
        // A request with a reply: everything before it has been done, acknowledged or not.
        self.value(Request::GetFeatures).map(drop)
    }

    /// Everything about a ring but its kick descriptor, which starts it.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn describe(&mut self, ring: &Ring<'_>) -> Result<(), CallError> {
        let index = ring.index.into();
        let state = |num| VringState { index, num };
        self.call(Request::SetVringNum(state(ring.size.into())))?;
        self.call(Request::SetVringBase(state(ring.base)))?;
        self.call(Request::SetVringAddr(VringAddr {
            index,
            desc: ring.desc,
            avail: ring.avail,
            used: ring.used,
        }))?;
        if let Some(err) = ring.err {
            self.call(Request::SetVringErr(fd(ring.index, err)?))?;
        }
        let call = fd(ring.index, ring.call)?;
        self.call(Request::SetVringCall(call)).map(drop)
    }

    /// Enables or disables a ring. Without bit 30 rings run as soon as they have a kick descriptor,
    /// and there is nothing to say.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn enable(&mut self, index: u32, enable: bool) -> Result<(), CallError> {
        if self.enables_rings {
            self.call(Request::SetVringEnable { index, enable })?;
        }
        Ok(())
    }

    /// Stops a ring, which ends when its last request has ended. Answers where it stands.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn stop_ring(&mut self, index: u32) -> Result<u32, CallError> {
        self.enable(index, false)?;
        self.ring_base(index)
    }

    /// Begins to stop a ring, and does not wait for its last request:
    /// [`ring_stopped`](Self::ring_stopped) says when it has ended. Until then requests may be
    /// [sent](Connection::send), whose replies come behind that.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn begin_stop(&mut self, index: u32) -> Result<(), CallError> {
        self.enable(index, false)?;
        self.send(Request::GetVringBase { index }).map(drop)
    }

    /// Returns the position of a ring that was [to stop](Self::begin_stop), once it has.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn ring_stopped(&mut self, index: u32) -> Result<Option<u32>, CallError> {
        match self.reply(RequestId::GET_VRING_BASE)? {
            None => Ok(None),
            Some(Reply::RingBase(state)) if state.index == index => Ok(Some(state.num)),
            Some(_) => Err(refused(RequestId::GET_VRING_BASE)),
        }
    }

    /// GET_VRING_BASE alone.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn ring_base(&mut self, index: u32) -> Result<u32, CallError> {
        match self.call(Request::GetVringBase { index })? {
            Some(Reply::RingBase(state)) if state.index == index => Ok(state.num),
            _ => Err(refused(RequestId::GET_VRING_BASE)),
        }
    }
}

fn refused(request: RequestId) -> CallError {
    CallError::Refused { request }
}

fn copy(fd: BorrowedFd<'_>) -> Result<OwnedFd, CallError> {
    fd.try_clone_to_owned().map_err(CallError::Host)
}

fn fd(index: u8, fd: BorrowedFd<'_>) -> Result<VringFd, CallError> {
    Ok(VringFd {
        index,
        fd: Some(copy(fd)?),
    })
}
