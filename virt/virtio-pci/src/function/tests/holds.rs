//! A device that keeps translations: the invalidations of its unit that it receives, and the end of
//! its holds.

use guest_mem::{Iova, Ticket};
use vio::Revoked;

use super::*;

/// Device that serves no queues and holds every invalidation that it receives.
#[derive(Default)]
struct Keeper {
    heard: Vec<(Revoked, u64)>,
    released: Vec<u64>,
    overdue: Vec<u64>,
    /// Holds that a reset releases.
    held: Vec<u64>,
}

impl QueueDevice for Keeper {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        VERSION_1
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _: u64, _: &mut [u8]) {}

    fn activate(&mut self, _: u64, _: &[QueueConfig], _: KeepAlive) -> Result<(), ActivateError> {
        Ok(())
    }

    fn set_service(&mut self, _: Service) {}

    fn cancel(&mut self, _: CancelReason) -> u32 {
        0
    }

    fn reset(&mut self) {
        self.released.append(&mut self.held);
    }

    fn poll<D: Dma>(&mut self, _: &mut D, _: &mut impl Interrupt, _: u64) -> Activity {
        Activity::Idle
    }

    fn kick(&mut self, _: u16) {}

    fn ticket_done(&mut self, _: Ticket) {}

    fn arm<D: Dma>(&mut self, _: &mut D) {}

    fn has_work<D: Dma>(&mut self, _: &mut D) -> bool {
        false
    }

    fn disarm<D: Dma>(&mut self, _: &mut D) {}

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![WAKE_FD]
    }

    fn in_use<D: Dma>(&mut self, _: &D, pages: &Pages) -> u32 {
        pages.all()
    }

    fn hears_invalidations(&self) -> bool {
        true
    }

    fn invalidated(&mut self, what: Revoked, hold: u64) -> bool {
        self.heard.push((what, hold));
        self.held.push(hold);
        true
    }

    fn hold_overdue(&mut self, hold: u64) {
        self.overdue.push(hold);
        self.released.append(&mut self.held);
    }

    fn take_released(&mut self) -> Option<u64> {
        self.released.pop()
    }

    fn in_flight(&self) -> u32 {
        0
    }

    fn needs_reset(&self) -> bool {
        false
    }

    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}

struct Scene {
    function: VirtioFunction<Keeper>,
    effects: Effects<()>,
    mem: ArrayMem,
}

impl Scene {
    /// Its driver has started it.
    fn new() -> Self {
        let mut scene = Self {
            function: VirtioFunction::new(SOURCE, Keeper::default()),
            effects: testing::effects(0, SOURCE),
            mem: ArrayMem::new(4096),
        };
        scene.set_command(6);
        for (offset, data) in [
            (0x08, &1_u32.to_le_bytes()[..]),
            (0x0c, &1_u32.to_le_bytes()),
            (0x14, &[0x03]),
            (0x14, &[0x0b]),
            (0x1c, &1_u16.to_le_bytes()),
            (0x14, &[0x0f]),
        ] {
            scene.write(offset, data);
        }
        scene
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let keep = self.mem.keep_alive();
        self.function
            .bar_write(0, COMMON + offset, data, &keep, &mut self.effects);
    }

    fn set_command(&mut self, command: u32) {
        let keep = self.mem.keep_alive();
        self.function
            .config_write(4, 2, command, &keep, &mut self.effects);
    }

    fn poll(&mut self) {
        let (mut iommu, mut bypass) = (NoIommu::new(1), NoIommu::new(1));
        let mut cx =
            testing::function_context(&mut iommu, &mut bypass, &self.mem, 0, &mut self.effects);
        let _ = self.function.poll(&mut cx);
    }

    fn owned(&mut self) -> &mut dyn Function<()> {
        &mut self.function
    }

    fn tell(&mut self, scope: Scope, hold: u64) -> Hold {
        self.owned()
            .invalidated(&Invalidation { scope }, HoldId(hold))
    }

    fn released(&mut self) -> Vec<u64> {
        let released = testing::take_released(&mut self.effects);
        released.into_iter().map(|HoldId(hold)| hold).collect()
    }

    fn wakes(&mut self) -> bool {
        let mut wakes = false;
        self.owned().wake_fds(&mut |fd| wakes |= fd == WAKE_FD);
        wakes
    }
}

#[test]
fn device_receives_invalidations_that_may_concern_it() {
    let mut scene = Scene::new();
    assert!(scene.owned().shape().hears_invalidations);
    let (domain, iova, len) = (3, Iova::new(0x5000), 0x2000);
    let other = SourceId::new(0, 4, 0);
    let near = SourceId::new(0, 3, 6);
    assert_eq!(scene.tell(Scope::Interrupts, 1), Hold::No);
    assert_eq!(scene.tell(Scope::Source(other, 7), 2), Hold::No);
    assert_eq!(scene.tell(Scope::Source(near, 3), 3), Hold::No);
    assert_eq!(scene.tell(Scope::Source(near, 7), 4), Hold::Yes);
    assert_eq!(scene.tell(Scope::Source(SOURCE, 0), 5), Hold::Yes);
    assert_eq!(scene.tell(Scope::All, 6), Hold::Yes);
    assert_eq!(scene.tell(Scope::Domain(3), 7), Hold::Yes);
    let range = Scope::Range { domain, iova, len };
    assert_eq!(scene.tell(range, 8), Hold::Yes);
    let pages = Revoked::Pages {
        domain,
        first: iova,
        last: Iova::new(0x6fff),
    };
    let heard = [
        (Revoked::Everything, 4),
        (Revoked::Everything, 5),
        (Revoked::Everything, 6),
        (Revoked::Domain(3), 7),
        (pages, 8),
    ];
    assert_eq!(scene.function.device().heard, heard);
}

#[test]
fn a_hold_ends_when_the_device_says_so_whether_it_runs_or_is_paused() {
    let mut scene = Scene::new();
    for command in [6, 2] {
        scene.set_command(command);
        scene.poll();
        assert_eq!(scene.tell(Scope::All, 1), Hold::Yes);
        scene.poll();
        assert!(scene.released().is_empty());
        // It says so by its descriptor.
        assert!(scene.wakes());
        scene.function.device_mut().released.push(1);
        scene.poll();
        assert_eq!(scene.released(), [1]);
    }
}

#[test]
fn holds_end_with_a_reset_and_when_they_are_overdue() {
    let mut scene = Scene::new();
    assert_eq!(scene.tell(Scope::All, 1), Hold::Yes);
    scene.write(0x14, &[0]);
    scene.poll();
    assert_eq!(scene.released(), [1]);
    assert!(!scene.wakes(), "nothing is to be said any more");
    let mut scene = Scene::new();
    assert_eq!(scene.tell(Scope::All, 2), Hold::Yes);
    let Scene {
        function, effects, ..
    } = &mut scene;
    Function::<()>::hold_overdue(function, HoldId(2), effects);
    assert_eq!(scene.released(), [2]);
    assert_eq!(scene.function.device().overdue, [2]);
}
