//! The driver's rings, started and stopped over a connection.

use vhost_user::frontend::{CallError, Connection, InflightRegion};
use vhost_user::wire::{ProtocolFeatures, feature as vhost};
use vio::feature;
use vio::net::net_feature;

use crate::class::Class;
use crate::error::ImportError;
use crate::handshake::{Offer, RingFds, ring};
use crate::memory::Indices;
use crate::shared::Activation;

/// Failure of a start of the rings.
pub(crate) enum StartError {
    /// The connection has failed; another one may succeed.
    Connection(CallError),
    /// The device cannot go on.
    Broken(ImportError),
}

impl From<CallError> for StartError {
    fn from(error: CallError) -> Self {
        match error.is_of_the_connection() {
            true => Self::Connection(error),
            false => Self::Broken(error.into()),
        }
    }
}

/// Positions at which the rings go on.
#[derive(Debug)]
pub(crate) enum Positions {
    Fresh,
    Known(Vec<u16>),
    ByUsedIndex,
}

/// The driver's rings.
pub(crate) struct Active {
    pub activation: Activation,
    pub positions: Positions,
    /// They are to be served; else they are stopped.
    pub is_wanted: bool,
    pub is_broken: bool,
    pub inflight: Option<InflightRegion>,
    /// Queue pairs that the driver uses, of a network device that has several.
    pub pairs: Option<u16>,
}

impl Active {
    /// Sends the features that the driver has accepted to the back end, before anything about rings
    /// or their addresses.
    pub fn set_features(
        &self,
        connection: &mut Connection,
        offer: &Offer,
    ) -> Result<(), StartError> {
        let features = self.activation.features & offer.known;
        connection.set_features(features | vhost::PROTOCOL_FEATURES | offer.forced)?;
        Ok(())
    }

    /// The driver has accepted several queue pairs, and uses the first one until it says otherwise.
    pub fn first_pairs(features: u64) -> Option<u16> {
        (features & net_feature::MQ != 0).then_some(1)
    }

    /// The driver uses so many queue pairs. `connection`: the one on which its rings are served.
    pub fn set_pairs(
        &mut self,
        pairs: u16,
        connection: Option<&mut Connection>,
    ) -> Result<(), CallError> {
        let before = self.pairs.replace(pairs);
        let Some(connection) = connection else {
            return Ok(());
        };
        for ring in &self.activation.rings {
            let is_enabled = is_used(Some(pairs), ring.index);
            if is_used(before, ring.index) != is_enabled {
                connection.enable(ring.index.into(), is_enabled)?;
            }
        }
        Ok(())
    }

    /// Has the back end serve them. `indices`: where they stand, if that can be read.
    pub fn start(
        &mut self,
        connection: &mut Connection,
        indices: Option<&[Indices]>,
        fds: &RingFds,
        offer: &Offer,
        class: &Class,
    ) -> Result<(), StartError> {
        let rings = &self.activation.rings;
        let is_restart = matches!(self.positions, Positions::ByUsedIndex);
        let indices = match (indices, is_restart) {
            (Some(indices), _) => indices,
            (None, true) => return Err(StartError::Broken(ImportError::Rings)),
            (None, false) => &[],
        };
        if !offer.protocol.contains(ProtocolFeatures::INFLIGHT_SHMFD) {
            self.inflight = None;
        } else if self.inflight.is_none() && (!is_restart || is_quiet(indices)) {
            let queues = rings.iter().map(|ring| ring.index + 1).max().unwrap_or(1);
            let size = rings.iter().map(|ring| ring.size).max().unwrap_or(1);
            self.inflight = Some(connection.new_inflight(queues, size)?);
        }
        let in_order = self.activation.features & feature::IN_ORDER != 0;
        let may_lose = class.loses_nothing() && !in_order;
        if is_restart && self.inflight.is_none() && may_lose && !is_quiet(indices) {
            return Err(StartError::Broken(ImportError::Lost));
        }
        let base = |at: usize| match &self.positions {
            Positions::Fresh => 0,
            Positions::Known(bases) => bases[at],
            Positions::ByUsedIndex => indices[at].used,
        };
        let rings: Vec<_> = rings
            .iter()
            .enumerate()
            .map(|(at, ring)| fds.ring(ring, base(at), offer.has_iommu()))
            .collect();
        // From the first of its messages on the back end may take buffers.
        self.positions = Positions::ByUsedIndex;
        if let Some(region) = &self.inflight {
            connection.give_inflight(region)?;
        }
        let pairs = self.pairs;
        connection.start_enabled(&rings, |index| is_used(pairs, index.into()))?;
        if is_restart {
            // The dead back end may have taken a kick and not looked, or published and not called.
            // Not every back end makes up for it; one signal too many is harmless.
            for at in rings.iter().map(|ring| usize::from(ring.index)) {
                ring(&fds.kick[at]);
                ring(&fds.call[at]);
            }
        }
        Ok(())
    }
}

/// Whether the driver uses the ring of this number.
fn is_used(pairs: Option<u16>, index: u16) -> bool {
    pairs.is_none_or(|pairs| index / 2 < pairs)
}

/// Whether every buffer made available has come back.
fn is_quiet(indices: &[Indices]) -> bool {
    indices.iter().all(|ring| ring.avail == ring.used)
}
