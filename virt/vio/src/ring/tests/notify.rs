//! Notifications between driver and device: kicks and interrupts.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::world::PACKED;
use super::*;
use crate::fake_driver::AnyDriver;
use crate::ring::Ring;

/// Runs one chain to its end. Returns whether the driver wants an interrupt.
fn once(pair: &mut Pair) -> bool {
    pair.driver.add(&[(BUFFER, 4)], &[]);
    assert_eq!(split(&mut pair.ring).available(&mut pair.dma), Ok(1));
    pair.serve(0).unwrap();
    let wanted = pair.ring.publish(&mut pair.dma).unwrap();
    assert!(pair.driver.used().is_some());
    wanted
}

#[test]
fn event_index_interrupts_once_per_event() {
    let mut pair = Pair::new(8, ALL);
    pair.driver.put_used_event(3);
    let wanted: Vec<bool> = (0..10).map(|_| once(&mut pair)).collect();
    // The event is the element of index 3: the fourth.
    assert_eq!(wanted.iter().filter(|&&wanted| wanted).count(), 1);
    assert!(wanted[3]);
    // A batch that steps over the event interrupts once; one that ends before it does not.
    pair.driver.put_used_event(12);
    for want in [false, true, false] {
        for _ in 0..2 {
            pair.driver.stage(&[(BUFFER, 4)], &[]);
        }
        pair.driver.publish();
        pair.serve(0).unwrap();
        pair.serve(0).unwrap();
        assert_eq!(pair.ring.publish(&mut pair.dma), Ok(want));
        while pair.driver.used().is_some() {}
    }
}

#[test]
fn event_index_works_across_the_wrap() {
    let mut pair = Pair::new(8, ALL);
    pair.driver.put_used_event(0xffff);
    let wanted: Vec<usize> = (0..0x1_0010).filter(|_| once(&mut pair)).collect();
    assert_eq!(wanted, [0xffff]);
}

#[test]
fn without_event_index_flags_decide() {
    let mut pair = Pair::new(8, feature::VERSION_1);
    assert!(once(&mut pair));
    pair.driver.put_avail_flags(1);
    assert!(!once(&mut pair));
    assert_eq!(pair.driver.used_flags(), 0);
    pair.ring.disarm(&mut pair.dma).unwrap();
    assert_eq!(pair.driver.used_flags(), 1);
    pair.ring.arm(&mut pair.dma).unwrap();
    assert_eq!(pair.driver.used_flags(), 0);
}

#[test]
fn avail_event_stays_behind_while_polling_and_is_exact_when_armed() {
    let mut pair = Pair::new(8, ALL);
    for _ in 0..100 {
        once(&mut pair);
        pair.ring.disarm(&mut pair.dma).unwrap();
    }
    assert_eq!(pair.driver.avail_event(), 0);
    pair.ring.arm(&mut pair.dma).unwrap();
    assert_eq!(pair.driver.avail_event(), 100);
    assert_eq!(pair.driver.used_flags(), 0);
}

#[test]
fn an_event_field_that_cannot_be_read_costs_an_interrupt_not_a_completion() {
    let mut pair = Pair::new(512, ALL);
    // The available ring of 512 entries: 0x12000 to 0x12406. Its event field is on the page denied.
    once(&mut pair);
    pair.driver.put_used_event(0x8000);
    assert!(!once(&mut pair));
    pair.driver.add(&[(BUFFER, 4)], &[]);
    pair.serve(0).unwrap();
    pair.dma
        .iommu
        .deny(Iova::new(RINGS + 0x2000), 0x404, Perm::Read);
    assert_eq!(pair.ring.publish(&mut pair.dma), Ok(true));
    assert_eq!(pair.driver.used_idx(), 3);
}

/// The park protocol on two threads: arm, fence, re-check, sleep. The driver rings only when asked
/// to.
fn no_wakeup_is_lost(features: u64, rounds: u32) {
    let mem = ArrayMem::new(1 << 20);
    let mut driver = AnyDriver::new(mem.clone(), Gpa::new(RINGS), 0, 8, features);
    let config = driver.config();
    let stop = Arc::new(AtomicBool::new(false));
    let (doorbell, sleeper) = mpsc::channel::<()>();
    let device_stop = stop.clone();
    let device = std::thread::spawn(move || {
        let mut ring = Ring::new(&config, 8, features).unwrap();
        let mut dma = FlatDma::new(mem);
        let mut chain = Chain::new();
        let mut sleeps = 0u64;
        while !device_stop.load(Ordering::Acquire) {
            ring.disarm(&mut dma).unwrap();
            while ring.peek(&mut dma, &mut chain).unwrap() {
                let token = ring.advance(&chain);
                ring.stage(&mut dma, token, 0).unwrap();
            }
            ring.publish(&mut dma).unwrap();
            ring.arm(&mut dma).unwrap();
            fence(Ordering::SeqCst);
            if ring.has_available(&mut dma).unwrap() {
                continue;
            }
            sleeps += 1;
            match sleeper.recv_timeout(Duration::from_secs(5)) {
                Ok(()) => while sleeper.try_recv().is_ok() {},
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("a wake-up was lost"),
            }
        }
        sleeps
    });
    for round in 0..rounds {
        driver.stage(&[(BUFFER, 4)], &[]);
        if driver.publish() {
            doorbell.send(()).expect("the device runs");
        }
        let mut spins = 0u64;
        while driver.used().is_none() {
            spins += 1;
            assert!(!device.is_finished(), "the device gave up in round {round}");
            if spins.is_multiple_of(64) {
                std::thread::yield_now();
            }
        }
        // Vary where in the device's loop the next one arrives.
        for _ in 0..(round * 7) % 211 {
            std::hint::spin_loop();
        }
    }
    stop.store(true, Ordering::Release);
    drop(doorbell);
    let sleeps = device.join().expect("the device thread is well");
    assert!(sleeps > 0, "the test never slept");
}

#[test]
fn no_wakeup_is_lost_with_events() {
    no_wakeup_is_lost(ALL, 20_000);
    no_wakeup_is_lost(PACKED, 20_000);
}

#[test]
fn no_wakeup_is_lost_with_flags() {
    let features = ALL & !feature::EVENT_IDX;
    no_wakeup_is_lost(features, 20_000);
    no_wakeup_is_lost(features | feature::RING_PACKED, 20_000);
}
