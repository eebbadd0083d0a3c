//! Tests of the device body with a scripted class, including wrong answers of it.

use fake_mem::{ArrayMem, FlatDma, PendingDma};
use guest_mem::{Dma, Gpa, PhysMem};
use serde::{Deserialize, Serialize};

use crate::body::{Context, DeviceClass, Environment, ServedQueue, Step};
use crate::device::CancelReason;
use crate::fake_driver::{AnyDriver, CountIrq};
use crate::poll_budget::PollBudget;
use crate::ring::{Chain, FullJournal, Journal, Ring, RingStart, Violation};
use crate::saved::SavedState;
use crate::{Activity, Device, QueueDevice, feature};

/// Class of two queues that answers every chain as the test specifies.
#[derive(Default)]
struct Scripted {
    /// Bytes by which every answer exceeds the room of its chain.
    excess: u32,
    /// Hook in which the class reports that the device needs a reset, if any.
    fails_in: Option<Hook>,
    /// Calls of `serve`, by queue, in their order.
    served: Vec<u16>,
    chain: Chain,
}

/// Hooks of a class that have a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hook {
    GoOn,
    Serve,
    Complete,
    Finish,
}

const HOOKS: [Hook; 4] = [Hook::GoOn, Hook::Serve, Hook::Complete, Hook::Finish];

impl Scripted {
    fn fail_in<E: Environment>(&self, hook: Hook, cx: &mut Context<'_, E>) {
        if self.fails_in == Some(hook) {
            cx.fail(Violation::NotCancellable);
        }
    }
}

#[derive(Serialize, Deserialize)]
struct SavedScripted;

impl SavedState for SavedScripted {
    const TYPE: u16 = Scripted::TYPE;
    const VERSION: u32 = 1;
}

impl DeviceClass for Scripted {
    const TYPE: u16 = 63;
    type Queue = ();
    type Saved = SavedScripted;

    fn features(&self) -> u64 {
        feature::COMMON | feature::RING_PACKED
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }

    fn read_config(&self, _offset: u64, out: &mut [u8]) {
        out.fill(0);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<()> {
        (index < 2).then_some(())
    }

    fn reset(&mut self) {}

    fn save(&self) -> SavedScripted {
        SavedScripted
    }

    fn go_on<E: Environment>(
        &mut self,
        _queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        self.fail_in(Hook::GoOn, cx);
        Ok(Activity::Idle)
    }

    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        self.served.push(queue.index());
        self.fail_in(Hook::Serve, cx);
        assert_eq!(queue.ring.parked(), None, "served although it is parked");
        if !queue.ring.peek(cx.dma, &mut self.chain)? {
            return Ok(Activity::Idle);
        }
        let room = self.chain.writable().len();
        queue.answer(&self.chain, room + self.excess)?;
        Ok(Activity::Busy)
    }

    fn complete<E: Environment>(
        &mut self,
        _queues: &mut [ServedQueue<()>],
        cx: &mut Context<'_, E>,
    ) -> Activity {
        self.fail_in(Hook::Complete, cx);
        Activity::Idle
    }

    /// Publishes nothing itself: the body does.
    fn finish<E: Environment>(
        &mut self,
        _queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        self.fail_in(Hook::Finish, cx);
        Ok(Activity::Idle)
    }
}

/// Serves two chains, of which the second has no room for an answer.
fn serve(excess: u32, features: u64) -> (Device<Scripted>, AnyDriver<ArrayMem>, CountIrq) {
    let mem = ArrayMem::new(1 << 20);
    let mut device = Device::of(Scripted {
        excess,
        ..Scripted::default()
    });
    let features = device.features() & features;
    let mut driver = AnyDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, 16, features);
    device
        .activate(features, &[driver.config()], mem.keep_alive())
        .expect("a start");
    driver.add(&[], &[(0x4_0000, 8)]);
    driver.add(&[(0x4_1000, 8)], &[]);
    let mut irq = CountIrq::default();
    let mut dma = FlatDma::new(mem);
    while device.poll(&mut dma, &mut irq, 0) == Activity::Busy {}
    (device, driver, irq)
}

#[test]
fn an_answer_as_long_as_its_chain_is_shown() {
    for features in [!feature::RING_PACKED, !0] {
        let (device, mut driver, _) = serve(0, features);
        assert!(!device.needs_reset());
        let used: Vec<_> = std::iter::from_fn(|| driver.used()).collect();
        assert_eq!(used.iter().map(|used| used.1).collect::<Vec<_>>(), [8, 0]);
    }
}

#[cfg(not(debug_assertions))]
#[test]
fn an_answer_longer_than_its_chain_needs_a_reset_and_is_not_shown() {
    for features in [!feature::RING_PACKED, !0] {
        for excess in [1, 4096, u32::MAX - 8] {
            let (mut device, mut driver, irq) = serve(excess, features);
            let len = 8 + excess;
            let violation = Violation::Answer { len, room: 8 };
            assert_eq!(device.violation(), Some(violation));
            assert!(device.needs_reset());
            assert_eq!((driver.used(), irq.total(), irq.config), (None, 0, 1));
            device.reset();
            assert!(!device.needs_reset());
        }
    }
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "9 bytes written into a chain of 8")]
fn an_answer_longer_than_its_chain_is_our_mistake() {
    serve(1, !0);
}

/// Device with queue 0, whose driver has made one chain of 8 bytes available.
struct Guest {
    mem: ArrayMem,
    device: Device<Scripted>,
    driver: AnyDriver<ArrayMem>,
    irq: CountIrq,
}

impl Guest {
    fn new(features: u64, journal: Option<Box<dyn Journal>>) -> Self {
        let mem = ArrayMem::new(1 << 20);
        let mut device = Device::of(Scripted::default());
        let features = device.features() & features;
        let mut driver = AnyDriver::new(mem.clone(), Gpa::new(0x1_0000), 0, 16, features);
        let mut ring = Ring::new(&driver.config(), 16, features).unwrap();
        if let Some(journal) = journal {
            ring.start(RingStart::Fresh).unwrap();
            ring.set_journal(journal);
        }
        device.begin(features, mem.keep_alive()).unwrap();
        device.add_queue(ring).unwrap();
        driver.add(&[], &[(0x4_0000, 8)]);
        Self {
            mem,
            device,
            driver,
            irq: CountIrq::default(),
        }
    }

    fn dma(&self) -> FlatDma {
        FlatDma::new(self.mem.clone())
    }

    fn poll(&mut self, dma: &mut impl Dma) {
        for _ in 0..100 {
            if self.device.poll(dma, &mut self.irq, 0) == Activity::Idle {
                return;
            }
        }
        panic!("it is busy for ever");
    }
}

#[test]
fn a_failure_that_any_hook_reports_needs_a_reset_and_interrupts_once() {
    for features in [!feature::RING_PACKED, !0] {
        for hook in HOOKS {
            let mut guest = Guest::new(features, None);
            guest.device.class_mut().fails_in = Some(hook);
            let mut dma = guest.dma();
            let _ = guest.device.poll(&mut dma, &mut guest.irq, 0);
            let violation = Some(Violation::NotCancellable);
            assert_eq!(guest.device.violation(), violation, "{hook:?}");
            assert_eq!(guest.irq.config, 1, "{hook:?}: in the same visit");
            guest.poll(&mut dma);
            assert_eq!(guest.irq.config, 1, "{hook:?}");
        }
    }
}

#[test]
fn a_failure_reported_while_a_queue_stops_needs_a_reset_and_is_notified_by_the_next_visit() {
    let mut guest = Guest::new(!0, None);
    let mut dma = guest.dma();
    guest.poll(&mut dma);
    guest.device.class_mut().fails_in = Some(Hook::Finish);
    assert!(
        guest
            .device
            .stop_queue(0, &mut dma, &mut guest.irq)
            .is_some()
    );
    assert!(guest.device.needs_reset());
    assert!(guest.device.has_work(&mut dma));
    guest.poll(&mut dma);
    assert_eq!(guest.irq.config, 1);
}

#[test]
fn answers_are_shown_also_of_a_class_whose_finish_stages_nothing() {
    for features in [!feature::RING_PACKED, !0] {
        let mut guest = Guest::new(features, None);
        let mut dma = guest.dma();
        guest.poll(&mut dma);
        assert_eq!(guest.driver.used().map(|used| used.1), Some(8));
        assert!(!guest.device.has_work(&mut dma));
    }
}

#[test]
fn a_chain_that_the_journal_refuses_needs_a_reset_and_its_queue_is_served_no_more() {
    for features in [!feature::RING_PACKED, !0] {
        let mut guest = Guest::new(features, Some(Box::new(FullJournal)));
        let mut dma = guest.dma();
        guest.poll(&mut dma);
        assert_eq!(guest.device.violation(), Some(Violation::Journal));
        assert_eq!(guest.device.class().served, [0]);
        assert_eq!((guest.driver.used(), guest.irq.config), (None, 1));
    }
}

#[test]
fn a_queue_of_which_everything_was_cancelled_stops_and_counts_what_was_not_shown() {
    let mut stopped = 0;
    // One access of the visit meets absent memory, another one in each round.
    for nth in 0..20 {
        let mut guest = Guest::new(!0, None);
        let mut dma = PendingDma::kth(guest.dma(), nth);
        let _ = guest.device.poll(&mut dma, &mut guest.irq, 0);
        if guest.device.ring(0).unwrap().in_flight() == 0 {
            continue;
        }
        stopped += 1;
        guest.device.cancel(CancelReason::End);
        let answer = guest.device.stop_queue(0, &mut dma, &mut guest.irq);
        assert_eq!(answer.map(|own| own.unpublished), Some(1), "access {nth}");
    }
    assert_ne!(stopped, 0, "no access was between taking and publishing");
}

#[test]
fn watch_fires_for_requests_after_a_visit_and_leftovers_need_no_watch() {
    for features in [!feature::RING_PACKED, !0] {
        let mut guest = Guest::new(features, None);
        let mut dma = guest.dma();
        // A visit for one request takes one of two, and has seen the other.
        guest.driver.add(&[], &[(0x4_1000, 8)]);
        let mut visit = PollBudget::new(0, 1);
        let visited = guest.device.visit(&mut dma, &mut guest.irq, &mut visit);
        assert_eq!(visited, Activity::Busy);
        while guest.device.has_left(&mut dma) {
            let mut visit = PollBudget::new(0, 100);
            let _ = guest.device.visit(&mut dma, &mut guest.irq, &mut visit);
        }
        let used = std::iter::from_fn(|| guest.driver.used()).count();
        assert_eq!(used, 2, "the second was left");

        let mut watch = None;
        guest
            .device
            .for_each_due_ring(|ring| ring.watch_in(&mut dma, &mut watch));
        let watch = watch.expect("a word to watch");
        assert!(!watch.fires() && !guest.device.has_left(&mut dma));
        guest.driver.add(&[], &[(0x4_2000, 8)]);
        assert!(!guest.device.has_left(&mut dma), "its word was loaded");
        assert!(watch.fires() && guest.device.has_work(&mut dma));
        assert!(guest.device.has_left(&mut dma), "it has been seen by now");
    }
}
