//! The body around a class of the test's own, whatever it answers.

use fake_mem::{ArrayMem, FlatDma};
use guest_mem::{Gpa, PhysMem};
use serde::{Deserialize, Serialize};

use crate::class::{Context, DeviceClass, Environment, ServedQueue, Step};
use crate::fake_driver::{AnyDriver, CountIrq};
use crate::ring::{Chain, Violation};
use crate::saved::SavedState;
use crate::{Activity, Device, QueueDevice, feature};

/// Class that says of every chain that so many bytes more are written than it has room for.
struct Liar {
    excess: u32,
    chain: Chain,
}

#[derive(Serialize, Deserialize)]
struct SavedLiar;

impl SavedState for SavedLiar {
    const TYPE: u16 = Liar::TYPE;
    const VERSION: u32 = 1;
}

impl DeviceClass for Liar {
    const TYPE: u16 = 63;
    type Queue = ();
    type Saved = SavedLiar;

    fn features(&self) -> u64 {
        feature::COMMON | feature::RING_PACKED
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }

    fn read_config(&self, _offset: u64, out: &mut [u8]) {
        out.fill(0);
    }

    fn queue(&self, index: u16, _features: u64) -> Option<()> {
        (index == 0).then_some(())
    }

    fn reset(&mut self) {}

    fn save(&self) -> SavedLiar {
        SavedLiar
    }

    fn serve<E: Environment>(
        &mut self,
        queue: &mut ServedQueue<()>,
        cx: &mut Context<'_, E>,
    ) -> Step {
        if !queue.ring.peek(cx.dma, &mut self.chain)? {
            return Ok(Activity::Idle);
        }
        let room = self.chain.writable().len();
        queue.answer(&self.chain, room + self.excess);
        Ok(Activity::Busy)
    }
}

/// Serves two chains, of which the second has room for nothing.
fn serve(excess: u32, features: u64) -> (Device<Liar>, AnyDriver<ArrayMem>, CountIrq) {
    let mem = ArrayMem::new(1 << 20);
    let chain = Chain::new();
    let mut device = Device::of(Liar { excess, chain });
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
