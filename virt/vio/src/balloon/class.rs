//! The hooks of a balloon, which the body of devices calls.

use guest_mem::{Dma, KeepAlive, Ticket};

use super::{BalloonClass, BalloonQueue, Progress, Queue, Role, SavedBalloon, roles};
use crate::body::{Context, DeviceClass, Environment, Step};
use crate::device::read_space;

/// Offset of `actual` in `struct virtio_balloon_config` (§5.5.4), behind `num_pages`.
/// `free_page_hint_cmd_id` and `poison_val` follow, which are zero without their features.
const ACTUAL: usize = 4;

impl BalloonClass {
    /// Whether the next chain is to be looked at. Statistics stay in the ring until new ones are
    /// wanted, and a chain whose pages are being dropped until that is done.
    fn goes_on(&self, queue: &BalloonQueue) -> bool {
        let is_kept = queue.is_read && !self.wants_statistics;
        !is_kept && queue.dropping.is_none()
    }
}

impl DeviceClass for BalloonClass {
    const TYPE: u16 = 5;
    type Queue = BalloonQueue;
    type Saved = SavedBalloon;

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, out: &mut [u8]) {
        let mut space = [0; 8];
        space[..ACTUAL].copy_from_slice(&self.target.to_le_bytes());
        space[ACTUAL..].copy_from_slice(&self.actual.to_le_bytes());
        read_space(&space, offset, out);
    }

    /// Any bytes of `actual`.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let mut actual = self.actual.to_le_bytes();
        for (at, byte) in (0..).zip(data) {
            let own = offset
                .checked_add(at)
                .and_then(|at| at.checked_sub(ACTUAL as u64));
            let own = own.and_then(|own| actual.get_mut(usize::try_from(own).ok()?));
            if let Some(own) = own {
                *own = *byte;
            }
        }
        self.actual = u32::from_le_bytes(actual);
    }

    fn config_generation(&self) -> u8 {
        self.generation
    }

    fn queue(&self, index: u16, features: u64) -> Option<BalloonQueue> {
        let role = roles(features).nth(index.into())?;
        Some(BalloonQueue {
            role,
            progress: Progress::default(),
            is_read: false,
            dropping: None,
        })
    }

    /// The driver may have looked at the target long ago, when there was none to notify of a
    /// change.
    fn begin(&mut self, _features: u64, _keep: KeepAlive) -> bool {
        self.target != 0
    }

    /// The target is the owner's, and stays.
    fn reset(&mut self) {
        self.actual = 0;
        self.statistics = None;
        self.wants_statistics = false;
        self.io.reset();
    }

    fn save(&self) -> SavedBalloon {
        let actual = self.actual;
        SavedBalloon { actual }
    }

    fn may_take<D: Dma>(&self, queue: &Queue, _dma: &D) -> bool {
        self.goes_on(&queue.own)
    }

    fn serve<E: Environment>(&mut self, queue: &mut Queue, cx: &mut Context<'_, E>) -> Step {
        match queue.own.role {
            Role::Statistics => self.take_statistics(queue, cx),
            Role::Inflate | Role::Deflate | Role::Report => self.take_pages(queue, cx),
        }
    }

    fn is_due(&mut self, queue: &Queue) -> bool {
        self.goes_on(&queue.own)
    }

    /// A step whose pages are being dropped.
    fn is_in_flight(&self, queue: &Queue) -> bool {
        queue.own.dropping.is_some()
    }

    fn ticket_done(&mut self, queue: &mut Queue, ticket: Ticket) {
        queue.own.dropping.take_if(|own| *own == ticket);
    }
}
