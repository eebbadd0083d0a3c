//! Methods of [`sidecore::Poller`] that an enum of pollers forwards to its variant's poller.

/// The methods of [`sidecore::Poller`] that are alike for every variant, by
/// `$each!(self, poller => …)` and, for those that take `&self`, `$each!(&self, poller => …)`.
/// Messages and probes are the enum's own.
macro_rules! forward_poller {
    ($each:ident) => {
        fn attached(&mut self, wakes: &mut sidecore::Wakes) -> std::io::Result<()> {
            $each!(self, poller => poller.attached(wakes))
        }

        fn detaching(&mut self, wakes: &mut sidecore::Wakes) {
            $each!(self, poller => poller.detaching(wakes));
        }

        fn may_detach(&mut self, departure: sidecore::DetachReason) -> bool {
            $each!(self, poller => poller.may_detach(departure))
        }

        fn stays(&mut self) {
            $each!(self, poller => poller.stays());
        }

        fn poll(&mut self, turn: &mut sidecore::PollContext<'_>) -> sidecore::Activity {
            $each!(self, poller => poller.poll(turn))
        }

        fn ready(&mut self, token: u32, turn: &mut sidecore::PollContext<'_>) {
            $each!(self, poller => poller.ready(token, turn));
        }

        fn arm(&mut self, wakes: &mut sidecore::Wakes) -> Result<(), sidecore::ArmError> {
            $each!(self, poller => poller.arm(wakes))
        }

        fn has_work(&mut self) -> bool {
            $each!(self, poller => poller.has_work())
        }

        fn disarm(&mut self) {
            $each!(self, poller => poller.disarm());
        }

        fn deadline(&self) -> Option<sidecore::Nanos> {
            $each!(&self, poller => poller.deadline())
        }

        fn arm_cost(&self) -> u64 {
            $each!(&self, poller => poller.arm_cost())
        }

        fn name(&self) -> &str {
            $each!(&self, poller => poller.name())
        }

        fn weight(&self) -> u32 {
            $each!(&self, poller => poller.weight())
        }
    };
}

pub(super) use forward_poller;
