//! The closed set of devices that a daemon's cores serve, as one type of poller.

use sidecore::{GroupProbe, PollContext, Poller, Probe, Reply, ToChild};
use vhost_export::{Export, ExportMessage, ExportStats, RingProbe};
use vio::Device;
use vio::blk::BlkClass;
use vio::net::NetClass;

use super::forward::forward_poller;
use super::switch::{SwitchStats, Switched};

/// A device of any kind, with its socket; or all devices of a switch.
#[derive(Debug)]
pub enum Served {
    /// A disk.
    Block(Box<Export<BlkClass>>),
    /// A network device.
    Net(Box<Export<NetClass>>),
    /// A switch, with its devices.
    Switch(Box<Switched>),
}

/// Devices that are not served any more, to be dropped.
pub enum Released {
    /// A disk.
    Block(#[expect(dead_code, reason = "closed when it is dropped")] Box<Device<BlkClass>>),
    /// A network device.
    Net(#[expect(dead_code, reason = "closed when it is dropped")] Box<Device<NetClass>>),
    /// Those of a switch.
    Switch(#[expect(dead_code, reason = "closed when it is dropped")] Vec<Device<NetClass>>),
}

/// Message of the daemon to a poller.
pub enum ServedMessage {
    /// A device: of a switch, the one of that number.
    Device(ToChild<ExportMessage>),
    /// A request for the counters of the switch.
    Switch(Reply<SwitchStats>),
}

/// Probe for work of a poller.
pub enum ServedProbe {
    /// For one device.
    One(RingProbe),
    /// For one of a switch's.
    Switch(GroupProbe<RingProbe>),
}

impl Probe for ServedProbe {
    #[inline]
    fn fires(&self) -> bool {
        match self {
            Self::One(probe) => probe.fires(),
            Self::Switch(probe) => probe.fires(),
        }
    }
}

macro_rules! each {
    ($self:ident, $poller:ident => $then:expr) => {
        match $self {
            Served::Block($poller) => $then,
            Served::Net($poller) => $then,
            Served::Switch(switch) => {
                let $poller = &mut switch.group;
                $then
            }
        }
    };
    (&$self:ident, $poller:ident => $then:expr) => {
        match $self {
            Served::Block($poller) => $then,
            Served::Net($poller) => $then,
            Served::Switch(switch) => {
                let $poller = &switch.group;
                $then
            }
        }
    };
}

impl Served {
    /// Returns the name that distinguishes it from other pollers.
    pub fn key(&self) -> String {
        match self {
            Self::Block(export) => export.id().to_owned(),
            Self::Net(export) => export.id().to_owned(),
            Self::Switch(switch) => switch.key(),
        }
    }

    /// Returns the name and counters of its devices, in the order of their numbers.
    pub fn stats(&self) -> Vec<(String, ExportStats)> {
        let own = |id: &str, stats| (id.to_owned(), stats);
        match self {
            Self::Block(export) => vec![own(export.id(), export.stats())],
            Self::Net(export) => vec![own(export.id(), export.stats())],
            Self::Switch(switch) => {
                let devices = switch.device_stats();
                devices.map(|(id, stats)| own(id, stats)).collect()
            }
        }
    }

    /// Returns the name and counters of the switch, if it is one.
    pub fn switch_stats(&self) -> Option<(String, SwitchStats)> {
        match self {
            Self::Block(_) | Self::Net(_) => None,
            Self::Switch(switch) => Some((switch.id().to_owned(), switch.stats())),
        }
    }

    /// Ends it, disconnects its front ends, and returns its devices.
    pub fn into_devices(self) -> Released {
        match self {
            Self::Block(export) => Released::Block(Box::new(export.into_device())),
            Self::Net(export) => Released::Net(Box::new(export.into_device())),
            Self::Switch(switch) => Released::Switch(switch.into_devices()),
        }
    }
}

/// Renews a probe in place.
fn renew<R>(
    slot: &mut Option<ServedProbe>,
    own: Option<R>,
    wrap: impl FnOnce(R) -> ServedProbe,
    renew: impl FnOnce(&mut Option<R>),
) {
    let mut own = own;
    renew(&mut own);
    *slot = own.map(wrap);
}

impl Poller for Served {
    type Message = ServedMessage;
    type Probe = ServedProbe;

    forward_poller!(each);

    fn message(&mut self, message: ServedMessage, turn: &mut PollContext<'_>) {
        match (self, message) {
            (Self::Block(export), ServedMessage::Device(to)) => export.message(to.message, turn),
            (Self::Net(export), ServedMessage::Device(to)) => export.message(to.message, turn),
            (Self::Switch(switch), ServedMessage::Device(to)) => switch.group.message(to, turn),
            (Self::Switch(switch), ServedMessage::Switch(reply)) => reply.send(switch.stats()),
            // No switch: the reply is dropped, so the asker learns that there is no answer.
            (Self::Block(_) | Self::Net(_), ServedMessage::Switch(_)) => {}
        }
    }

    fn probe(&self, slot: &mut Option<ServedProbe>) {
        let (one, switch) = match slot.take() {
            None => (None, None),
            Some(ServedProbe::One(probe)) => (Some(probe), None),
            Some(ServedProbe::Switch(probe)) => (None, Some(probe)),
        };
        match self {
            Self::Block(export) => renew(slot, one, ServedProbe::One, |own| export.probe(own)),
            Self::Net(export) => renew(slot, one, ServedProbe::One, |own| export.probe(own)),
            Self::Switch(served) => {
                renew(slot, switch, ServedProbe::Switch, |own| {
                    served.group.probe(own)
                });
            }
        }
    }
}
