//! Tests of a function event by event: events of the driver, of the owner, and of a device whose
//! requests in flight the test chooses.
//!
//! * [`transitions`]: the effect of each event in each state.
//! * [`holds`]: a device that caches translations, and holds invalidations.
//! * [`flags`]: random events, compared with a model that has one flag for each cause.

mod flags;
mod holds;
mod transitions;

use fake_mem::ArrayMem;
use guest_mem::{Dma, Gpa, NoIommu};
use machine::testing;
use vio::{ActivateError, DeviceStats, QueueConfig};

use super::*;

const SOURCE: SourceId = SourceId::new(0, 3, 0);
const VERSION_1: u64 = 1 << 32;
const WAKE_FD: RawFd = 5;
const OPENS_AT_NS: u64 = 7;

/// Requests that a device has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    None,
    /// They use buffers of the device, not guest memory.
    Bounced,
    /// They access guest memory.
    Direct,
}

/// A call that a device has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Activate,
    Kick,
    Serve(Service),
    Poll(Service),
    Cancel(CancelReason),
    Reset,
    Arm,
    Disarm,
}

/// A device of one queue that records its calls.
#[derive(Default)]
struct Recorder {
    calls: Vec<Call>,
    service: Service,
    flight: Option<Flight>,
    /// Requests that are in flight after the next poll.
    next: Option<Flight>,
    refuses: bool,
}

impl QueueDevice for Recorder {
    fn device_type(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        VERSION_1
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _offset: u64, _out: &mut [u8]) {}

    fn activate(
        &mut self,
        features: u64,
        _queues: &[QueueConfig],
        _keep: KeepAlive,
    ) -> Result<(), ActivateError> {
        self.calls.push(Call::Activate);
        let offered = self.features();
        if self.refuses {
            return Err(ActivateError::Features { features, offered });
        }
        self.service = Service::Full;
        Ok(())
    }

    fn set_service(&mut self, service: Service) {
        self.service = service;
        self.calls.push(Call::Serve(service));
    }

    fn cancel(&mut self, reason: CancelReason) -> u32 {
        self.calls.push(Call::Cancel(reason));
        0
    }

    fn reset(&mut self) {
        assert_eq!(self.in_flight(), 0, "it would write into freed memory");
        self.calls.push(Call::Reset);
        self.service = Service::Full;
    }

    fn poll<D: Dma>(&mut self, _dma: &mut D, _irq: &mut impl Interrupt, _now_ns: u64) -> Activity {
        self.calls.push(Call::Poll(self.service));
        self.flight = self.next;
        Activity::Idle
    }

    fn kick(&mut self, _queue: u16) {
        self.calls.push(Call::Kick);
    }

    fn ticket_done(&mut self, _ticket: Ticket) {}

    fn arm<D: Dma>(&mut self, _dma: &mut D) {
        self.calls.push(Call::Arm);
    }

    fn has_work<D: Dma>(&mut self, _dma: &mut D) -> bool {
        false
    }

    fn disarm<D: Dma>(&mut self, _dma: &mut D) {
        self.calls.push(Call::Disarm);
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![WAKE_FD]
    }

    fn opens_at_ns(&self) -> Option<u64> {
        Some(OPENS_AT_NS)
    }

    fn in_use<D: Dma>(&mut self, _dma: &D, pages: &Pages) -> u32 {
        pages.all()
    }

    fn in_flight(&self) -> u32 {
        u32::from(self.flight.is_some_and(|flight| flight != Flight::None))
    }

    fn touches_memory(&self) -> bool {
        self.flight == Some(Flight::Direct)
    }

    fn needs_reset(&self) -> bool {
        false
    }

    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
}

/// Event that a function handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The driver negotiates and sets DRIVER_OK, and the device starts.
    Start,
    /// As `Start`, but the device refuses.
    Refused,
    MasterOn,
    MasterOff,
    /// The driver writes a status of 0.
    Reset,
    /// The machine ends, or the function is removed.
    End,
    /// The owner polls. These requests are in flight afterwards.
    Poll(Flight),
    /// A stop has reached the drain limit.
    Overdue,
    Ring,
    /// The owner arms and disarms.
    Arm,
}

const EVENTS: [Event; 12] = [
    Event::Start,
    Event::Refused,
    Event::MasterOn,
    Event::MasterOff,
    Event::Reset,
    Event::End,
    Event::Poll(Flight::None),
    Event::Poll(Flight::Bounced),
    Event::Poll(Flight::Direct),
    Event::Overdue,
    Event::Ring,
    Event::Arm,
];

/// State of a function as its owner and its driver can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Observed {
    is_active: bool,
    is_live: bool,
    is_drained: bool,
    is_silent: bool,
    has_ended: bool,
    is_resetting: bool,
    has_work: bool,
    has_deadline: bool,
}

struct World {
    function: VirtioFunction<Recorder>,
    effects: Effects<()>,
    iommu: NoIommu,
    bypass: NoIommu,
    mem: ArrayMem,
}

impl World {
    fn new() -> Self {
        Self {
            function: VirtioFunction::new(SOURCE, Recorder::default()),
            effects: testing::effects(0, SOURCE),
            iommu: NoIommu::new(1),
            bypass: NoIommu::new(1),
            mem: ArrayMem::new(4096),
        }
    }

    fn after(events: &[Event]) -> Self {
        let mut world = Self::new();
        for &event in events {
            world.event(event);
        }
        world
    }

    /// The function, as its owner sees it.
    fn owned(&self) -> &dyn Function<()> {
        &self.function
    }

    fn with<R>(
        &mut self,
        call: impl FnOnce(
            &mut VirtioFunction<Recorder>,
            &mut FunctionContext<'_, NoIommu, ArrayMem, ()>,
        ) -> R,
    ) -> R {
        let mut cx = testing::function_context(
            &mut self.iommu,
            &mut self.bypass,
            &self.mem,
            0,
            &mut self.effects,
        );
        call(&mut self.function, &mut cx)
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let keep = self.mem.keep_alive();
        self.function
            .bar_write(0, offset, data, &keep, &mut self.effects);
    }

    fn start(&mut self) {
        // VERSION_1, ACKNOWLEDGE | DRIVER, FEATURES_OK, the one queue, DRIVER_OK.
        self.write(COMMON + 0x08, &1_u32.to_le_bytes());
        self.write(COMMON + 0x0c, &1_u32.to_le_bytes());
        self.write(COMMON + 0x14, &[0x03]);
        self.write(COMMON + 0x14, &[0x0b]);
        self.write(COMMON + 0x1c, &1_u16.to_le_bytes());
        self.write(COMMON + 0x14, &[0x0f]);
    }

    fn set_master(&mut self, on: bool) {
        let keep = self.mem.keep_alive();
        let command = 2 | u32::from(on) << 2;
        self.function
            .config_write(4, 2, command, &keep, &mut self.effects);
    }

    /// Returns the calls that the device receives because of `event`, and the result of a poll.
    fn event(&mut self, event: Event) -> (Vec<Call>, Option<Progress>) {
        let mut progress = None;
        self.function.device.calls.clear();
        match event {
            Event::Start | Event::Refused => {
                self.function.device.refuses = event == Event::Refused;
                self.start();
            }
            Event::MasterOn => self.set_master(true),
            Event::MasterOff => self.set_master(false),
            Event::Reset => self.write(COMMON + 0x14, &[0]),
            Event::End => Function::<()>::end(&mut self.function),
            Event::Poll(flight) => {
                self.function.device.next = Some(flight);
                progress = Some(self.with(|function, cx| function.poll(cx)));
            }
            // The owner makes this call only while a stop is in progress.
            Event::Overdue if self.owned().is_drained() => {}
            Event::Overdue => Function::<()>::stop_overdue(&mut self.function),
            Event::Ring => Function::<()>::ring(&mut self.function, 0),
            Event::Arm => self.with(|function, cx| {
                function.arm(cx);
                function.disarm(cx);
            }),
        }
        (self.function.device.calls.clone(), progress)
    }

    fn observe(&mut self) -> Observed {
        let pages = Pages::new(&[Gpa::new(0)]).expect("a page");
        let in_use = self.with(|function, cx| function.in_use(cx, &pages));
        assert!(in_use == 0 || in_use == pages.all());
        let has_work = self.with(|function, cx| function.has_work(cx));
        let mut fds = Vec::new();
        self.owned().wake_fds(&mut |fd| fds.push(fd));
        Observed {
            is_active: in_use != 0,
            is_live: fds == [WAKE_FD],
            is_drained: self.owned().is_drained(),
            is_silent: self.owned().is_silent(),
            has_ended: self.owned().has_ended(),
            is_resetting: self.function.common.is_resetting(),
            has_work,
            has_deadline: self.owned().deadline() == Some(OPENS_AT_NS),
        }
    }
}
