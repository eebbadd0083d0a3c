//! The control queue of a network device whose frames are moved elsewhere: the number of queue
//! pairs in use, and no more.
//!
//! *Advertised*: CTRL_VQ, MQ. *Not implemented*: everything else that a control queue may have; the
//! other side filters nothing. The other queues are another's: here is none of them.

use guest_mem::KeepAlive;
use serde::{Deserialize, Serialize};

use super::control::{Command, Commanded, serve_command};
use super::net_feature;
use crate::Device;
use crate::body::{Context, DeviceClass, Environment, ServedQueue, Step};
use crate::device::read_space;
use crate::ring::Chain;
use crate::saved::SavedState;

/// A control queue as a device.
pub(crate) type Control = Device<ControlClass>;

/// See the module's head.
pub(crate) struct ControlClass {
    /// Of the whole device.
    offered: u64,
    queue_sizes: Vec<u16>,
    pairs: u16,
    /// Accepted; 0 while there is no driver.
    accepted: u64,
    /// Number of pairs that the driver has chosen, and that has not been taken.
    chosen: Option<u16>,
    /// Reused.
    chain: Chain,
}

/// Part of the saved state that only such queues have: nothing, since the other side keeps the
/// number of pairs that they have chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedControl {}

impl SavedState for SavedControl {
    const TYPE: u16 = ControlClass::TYPE;
    const VERSION: u32 = 1;
}

impl ControlClass {
    /// Of a device that offers `offered`, with a control queue behind `pairs` pairs.
    pub(crate) fn new(offered: u64, queue_sizes: &[u16], pairs: u16) -> Self {
        Self {
            offered,
            queue_sizes: queue_sizes.to_vec(),
            pairs,
            accepted: 0,
            chosen: None,
            chain: Chain::new(),
        }
    }

    /// The control queue's number, for a driver that has accepted `features` (§5.1.2).
    pub(crate) const fn index(&self, features: u64) -> Option<u16> {
        match (
            features & net_feature::CTRL_VQ != 0,
            features & net_feature::MQ != 0,
        ) {
            (true, true) => Some(2 * self.pairs),
            (true, false) => Some(2),
            (false, _) => None,
        }
    }

    /// Takes the number of pairs that the driver has chosen since the last call.
    pub(crate) fn take_chosen(&mut self) -> Option<u16> {
        self.chosen.take()
    }
}

impl Commanded for ControlClass {
    fn accepted(&self) -> u64 {
        // Those whose commands are carried out here.
        self.accepted & (net_feature::CTRL_VQ | net_feature::MQ)
    }

    fn accepts(&self, command: &Command) -> bool {
        matches!(command, Command::Pairs(pairs) if (1..=self.pairs).contains(pairs))
    }

    fn obey(&mut self, command: Command) {
        if let Command::Pairs(pairs) = command {
            self.chosen = Some(pairs);
        }
    }
}

impl DeviceClass for ControlClass {
    const TYPE: u16 = 1;
    type Queue = ();
    type Saved = SavedControl;

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    /// It is the whole device's.
    fn read_config(&self, offset: u64, out: &mut [u8]) {
        read_space(&[], offset, out);
    }

    fn queue(&self, index: u16, features: u64) -> Option<()> {
        (self.index(features) == Some(index)).then_some(())
    }

    fn begin(&mut self, features: u64, _keep: KeepAlive) -> bool {
        self.accepted = features;
        false
    }

    fn reset(&mut self) {
        self.accepted = 0;
        self.chosen = None;
    }

    fn save(&self) -> SavedControl {
        SavedControl {}
    }

    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        let mut chain = std::mem::take(&mut self.chain);
        let step = serve_command(self, &mut chain, queue, cx);
        self.chain = chain;
        step
    }
}
