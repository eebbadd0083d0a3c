//! Negotiation with a back end: the features it must offer, and the descriptors of its rings.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use guest_mem::Gpa;
use rustix::event::{EventfdFlags, eventfd};
use vhost_user::frontend::{self, BackEndChannel, CallError, Connection, Ring};
use vhost_user::wire::{ProtocolFeatures, Request, VringState, feature as vhost};
use vio::feature;

use crate::config::ImportConfig;
use crate::error::ImportError;
use crate::memory::{Memory, RingPlace, user_addr};

/// Protocol features taken where offered, of any class.
const PROTOCOL: ProtocolFeatures = ProtocolFeatures(
    ProtocolFeatures::MQ.0
        | ProtocolFeatures::REPLY_ACK.0
        | ProtocolFeatures::INFLIGHT_SHMFD.0
        | ProtocolFeatures::CONFIGURE_MEM_SLOTS.0,
);

/// Offer of a back end, as far as it is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Virtio features for the guest.
    pub features: u64,
    /// Those of them that the back end knows: only these may be acknowledged to it.
    pub known: u64,
    /// Features that are acknowledged to the back end whatever the driver has accepted.
    pub forced: u64,
    /// Protocol features, acknowledged.
    pub protocol: ProtocolFeatures,
    /// Configuration space, with the number of queues asked for.
    pub config: Vec<u8>,
}

impl Offer {
    /// The device is behind an IOMMU.
    pub const fn has_iommu(&self) -> bool {
        self.forced & feature::ACCESS_PLATFORM != 0
    }
}

/// Negotiates everything up to memory, which is shared here too. Returns the offer, and the socket
/// for the back end's requests if the device is behind an IOMMU.
pub(crate) fn negotiate(
    connection: &mut Connection,
    memory: &Memory,
    wanted: &ImportConfig,
) -> Result<(Offer, Option<BackEndChannel>), ImportError> {
    let ImportConfig {
        class,
        queues,
        queue_size,
        has_iommu,
        ..
    } = wanted;
    let (queues, queue_size, has_iommu) = (*queues, *queue_size, *has_iommu);
    let asks = match has_iommu {
        true => ProtocolFeatures::BACKEND_REQ,
        false => ProtocolFeatures::NONE,
    };
    let mut offer = connection.negotiate(Some(PROTOCOL | class.protocol() | asks))?;
    if has_iommu {
        // A back end may offer ACCESS_PLATFORM only once it knows that it is asked for by a front
        // end that can answer.
        offer.features = connection.value(Request::GetFeatures)?;
    }
    let missing = |what| Err(ImportError::NotOffered { what });
    if offer.features & feature::VERSION_1 == 0 {
        return missing("VIRTIO_F_VERSION_1");
    }
    if offer.features & vhost::PROTOCOL_FEATURES == 0 {
        return missing("protocol features");
    }
    if has_iommu {
        check_iommu(&offer)?;
    }
    class.check_queues(&offer, queues)?;
    let config = class.config(connection, &offer, queues)?;
    if offer.protocol.contains(ProtocolFeatures::REPLY_ACK) {
        let state = VringState {
            index: 0,
            num: queue_size.into(),
        };
        match connection.call(Request::SetVringNum(state)) {
            Err(CallError::Refused { .. }) => {
                return Err(ImportError::QueueSize { size: queue_size });
            }
            other => other?,
        };
    }
    connection.share_memory(&memory.regions(), memory.file())?;
    class.tell(connection, offer.protocol)?;
    let channel = match has_iommu {
        true => Some(connection.open_channel()?),
        false => None,
    };
    // The device is behind an IOMMU whether or not its driver accepts the feature: a back end
    // without the feature would reach all memory.
    let forced = match has_iommu {
        true => feature::ACCESS_PLATFORM,
        false => 0,
    };
    let own = class.own_features(queues);
    let told = (class.features() | own | forced) & !class.untold_features();
    let offer = Offer {
        features: offer.features & class.features() | own | forced,
        known: offer.features & told,
        forced,
        protocol: offer.protocol,
        config,
    };
    Ok((offer, channel))
}

/// Checks that a back end offers the features which a device behind an IOMMU needs.
fn check_iommu(offer: &frontend::Offer) -> Result<(), ImportError> {
    let what = match offer.protocol {
        protocol if !protocol.contains(ProtocolFeatures::BACKEND_REQ) => {
            "BACKEND_REQ, so it cannot ask where an IOVA goes"
        }
        protocol if !protocol.contains(ProtocolFeatures::REPLY_ACK) => {
            "REPLY_ACK, so nobody knows when it has forgotten a mapping of an IOVA"
        }
        // Last: some offer it only with the two above.
        _ if offer.features & feature::ACCESS_PLATFORM == 0 => {
            "VIRTIO_F_ACCESS_PLATFORM, so it knows of no IOMMU"
        }
        _ => return Ok(()),
    };
    Err(ImportError::NotOffered { what })
}

/// The descriptors of a device's rings, by queue number, and the one for errors. All eventfds that
/// the back end has too: it can fill them and make them blocking ones at any time, so they are
/// signalled by [`ring`] and emptied by [`sidecore::drain_eventfd`].
pub(crate) struct RingFds {
    pub kick: Vec<OwnedFd>,
    pub call: Vec<OwnedFd>,
    pub err: OwnedFd,
}

impl RingFds {
    /// Makes a set of these, one of each kind for each queue.
    ///
    /// # Errors
    /// The host has no descriptor for errors.
    pub fn new(kick: Vec<OwnedFd>, call: Vec<OwnedFd>) -> io::Result<Self> {
        let err = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { kick, call, err })
    }

    /// The owner's own: kicks, to pass on doorbells that reached it, and calls; it has both of a
    /// queue that it serves.
    ///
    /// # Errors
    /// The host has no more descriptors.
    pub fn own(&self) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
        let clones = |fds: &[OwnedFd]| -> io::Result<Vec<OwnedFd>> {
            fds.iter().map(OwnedFd::try_clone).collect()
        };
        Ok((clones(&self.kick)?, clones(&self.call)?))
    }

    /// Returns a ring as it is sent to the back end: at IOVAs behind an IOMMU, else at user
    /// addresses.
    pub fn ring(&self, place: &RingPlace, base: u16, has_iommu: bool) -> Ring<'_> {
        let at = usize::from(place.index);
        let told = |address: u64| match has_iommu {
            true => address,
            false => user_addr(Gpa::new(address)),
        };
        Ring {
            // The device has at most 16 queues.
            index: place.index as u8,
            size: place.size,
            base: base.into(),
            desc: told(place.desc),
            avail: told(place.avail),
            used: told(place.used),
            kick: self.kick[at].as_fd(),
            call: self.call[at].as_fd(),
            err: Some(self.err.as_fd()),
        }
    }
}

/// Signals an eventfd, which the back end may have too. One that is full has been signalled often
/// enough.
pub(crate) fn ring(fd: &OwnedFd) {
    // An error would say that it is no eventfd; all of them are ours.
    let _ = sidecore::signal_eventfd(fd.as_fd());
}
