//! The closed set of devices that a daemon's cores serve, as one type of poller.

use std::io;

use sidecore::{Activity, ArmError, Departure, Nanos, Poller, Turn, Wakes};
use vhost_export::{Export, ExportMessage, ExportStats, RingProbe};
use vio::Device;
use vio::blk::BlkClass;
use vio::net::NetClass;

/// A device of any kind, with its socket.
#[derive(Debug)]
pub enum Served {
    /// A disk.
    Block(Export<BlkClass>),
    /// A network device.
    Net(Export<NetClass>),
}

/// A device that is served no more, to be dropped.
pub enum Released {
    /// A disk.
    Block(#[expect(dead_code, reason = "closed when it is dropped")] Device<BlkClass>),
    /// A network device.
    Net(#[expect(dead_code, reason = "closed when it is dropped")] Device<NetClass>),
}

macro_rules! each {
    ($self:ident, $export:ident => $then:expr) => {
        match $self {
            Served::Block($export) => $then,
            Served::Net($export) => $then,
        }
    };
}

impl Served {
    /// Its name.
    pub fn id(&self) -> &str {
        each!(self, export => export.id())
    }

    /// Its counters.
    pub fn stats(&self) -> ExportStats {
        each!(self, export => export.stats())
    }

    /// The end: the front end is hung up on.
    pub fn into_device(self) -> Released {
        match self {
            Self::Block(export) => Released::Block(export.into_device()),
            Self::Net(export) => Released::Net(export.into_device()),
        }
    }
}

impl Poller for Served {
    type Message = ExportMessage;
    type Probe = RingProbe;

    fn attached(&mut self, wakes: &mut Wakes) -> io::Result<()> {
        each!(self, export => export.attached(wakes))
    }

    fn detaching(&mut self, wakes: &mut Wakes) {
        each!(self, export => export.detaching(wakes));
    }

    fn may_detach(&mut self, departure: Departure) -> bool {
        each!(self, export => export.may_detach(departure))
    }

    fn stays(&mut self) {
        each!(self, export => export.stays());
    }

    fn poll(&mut self, turn: &mut Turn<'_>) -> Activity {
        each!(self, export => export.poll(turn))
    }

    fn message(&mut self, message: ExportMessage, turn: &mut Turn<'_>) {
        each!(self, export => export.message(message, turn));
    }

    fn ready(&mut self, token: u32, turn: &mut Turn<'_>) {
        each!(self, export => export.ready(token, turn));
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        each!(self, export => export.arm(wakes))
    }

    fn has_work(&mut self) -> bool {
        each!(self, export => export.has_work())
    }

    fn disarm(&mut self) {
        each!(self, export => export.disarm());
    }

    fn probe(&self, slot: &mut Option<RingProbe>) {
        each!(self, export => export.probe(slot));
    }

    fn deadline(&self) -> Option<Nanos> {
        each!(self, export => export.deadline())
    }

    fn arm_cost(&self) -> u64 {
        each!(self, export => export.arm_cost())
    }

    fn name(&self) -> &str {
        each!(self, export => Poller::name(export))
    }

    fn weight(&self) -> u32 {
        each!(self, export => export.weight())
    }
}
