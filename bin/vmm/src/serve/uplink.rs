//! A switch's uplink, an interface of the host, as a poller beside the switch's devices.

use std::io;
use std::os::fd::RawFd;

use net_ports::{TapPort, Uplink};
use sidecore::{
    Activity, ArmError, DetachReason, PollContext, Poller, REQUEST_COST, Wakes, bytes_cost,
};
use vhost_export::{Export, ExportMessage, ExportStats, RingProbe};
use vio::Device;
use vio::net::NetClass;

use super::forward::forward_poller;

/// Token of its descriptors: they say that there are frames, or room for some.
const TOKEN: u32 = 0;
/// Frames of one direction in one visit at most: a burst.
const MOST: usize = 32;

/// Member of a switch, on one port.
#[derive(Debug)]
pub enum Member {
    /// A network device.
    Device(Box<Export<NetClass>>),
    /// The host.
    Uplink(Box<UplinkPoller>),
}

/// The uplink of a switch.
#[derive(Debug)]
pub struct UplinkPoller {
    name: String,
    uplink: Uplink<TapPort>,
    /// Registered.
    fds: Vec<RawFd>,
    is_leaving: bool,
}

impl UplinkPoller {
    /// Creates one over an interface, to a switch; `name` is for log and counters.
    pub fn new(name: String, uplink: Uplink<TapPort>) -> Self {
        Self {
            name,
            uplink,
            fds: Vec::new(),
            is_leaving: false,
        }
    }

    fn stats(&self) -> ExportStats {
        let counters = self.uplink.counters();
        let mut stats = ExportStats::default();
        stats.device.requests = counters.from_host + counters.to_host;
        stats.device.written_bytes = counters.to_host_bytes;
        stats.device.read_bytes = counters.from_host_bytes;
        stats.device.errors = counters.dropped;
        stats
    }
}

impl Member {
    /// Returns its name.
    pub fn id(&self) -> &str {
        match self {
            Self::Device(export) => export.id(),
            Self::Uplink(poller) => &poller.name,
        }
    }

    /// Returns its counters.
    pub fn stats(&self) -> ExportStats {
        match self {
            Self::Device(export) => export.stats(),
            Self::Uplink(poller) => poller.stats(),
        }
    }

    /// Ends it, disconnects its front end, and returns its device, if it is one.
    pub fn into_device(self) -> Option<Device<NetClass>> {
        match self {
            Self::Device(export) => Some(export.into_device()),
            Self::Uplink(_) => None,
        }
    }
}

impl Poller for UplinkPoller {
    type Message = ExportMessage;
    type Probe = RingProbe;

    fn attached(&mut self, _wakes: &mut Wakes) -> io::Result<()> {
        self.is_leaving = false;
        // Which there are is known once it is armed.
        self.fds.clear();
        Ok(())
    }

    fn detaching(&mut self, wakes: &mut Wakes) {
        wakes.clear();
        self.uplink.rebind();
    }

    /// Returns whether no frame is kept any more. Its places are ours, and what the switch has not
    /// delivered from them within microseconds is copied.
    fn may_detach(&mut self, _departure: DetachReason) -> bool {
        self.is_leaving = true;
        !self.uplink.has_kept()
    }

    fn stays(&mut self) {
        self.is_leaving = false;
    }

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        let mut activity = Activity::Idle;
        while !turn.is_spent() {
            let most = if self.is_leaving { 0 } else { MOST };
            let (frames, bytes) = self.uplink.visit(most);
            if frames == 0 {
                break;
            }
            turn.charge(frames * REQUEST_COST + bytes_cost(bytes));
            turn.took(frames);
            activity = Activity::Busy;
        }
        match activity {
            Activity::Idle if self.uplink.has_kept() => Activity::Waiting,
            activity => activity,
        }
    }

    fn message(&mut self, message: ExportMessage, _turn: &mut PollContext<'_>) {
        match message {
            ExportMessage::Stats(reply) => reply.send(self.stats()),
            // It waits for no memory.
            ExportMessage::TicketDone(_) => {}
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        self.uplink.arm();
        let mut fds = Vec::new();
        self.uplink.wake_fds(&mut fds);
        let wanted: Vec<(RawFd, u32)> = fds.iter().map(|fd| (*fd, TOKEN)).collect();
        if let Err(error) = wakes.replace(&wanted) {
            self.uplink.disarm();
            return Err(ArmError::new(error));
        }
        self.fds = fds;
        Ok(())
    }

    fn has_work(&mut self) -> bool {
        self.uplink.has_kept() || self.uplink.has_work()
    }

    fn disarm(&mut self) {
        self.uplink.disarm();
    }

    fn name(&self) -> &str {
        &self.name
    }
}

macro_rules! each {
    ($self:ident, $poller:ident => $then:expr) => {
        match $self {
            Member::Device($poller) => $then,
            Member::Uplink($poller) => $then,
        }
    };
    (&$self:ident, $poller:ident => $then:expr) => {
        each!($self, $poller => $then)
    };
}

impl Poller for Member {
    type Message = ExportMessage;
    type Probe = RingProbe;

    forward_poller!(each);

    fn message(&mut self, message: ExportMessage, turn: &mut PollContext<'_>) {
        each!(self, poller => poller.message(message, turn));
    }

    fn probe(&self, slot: &mut Option<RingProbe>) {
        each!(self, poller => poller.probe(slot));
    }
}
