//! Configuration, stops, resets, saved state.

use super::*;
use crate::Service;
use crate::ring::{RETRY_NS, Ring};

fn config(balloon: &Balloon) -> [u32; 5] {
    let mut bytes = [0xff; 20];
    balloon.read_config(0, &mut bytes);
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|at| u32::from_le_bytes(words[at]))
}

#[test]
fn a_new_target_is_told_once_to_a_driver_that_is_there() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        let generation = guest.balloon.config_generation();
        guest.balloon.set_target(0x120);
        assert!(guest.balloon.has_work(&mut dma));
        guest.poll();
        assert_eq!(guest.irq.config, 1);
        assert_ne!(guest.balloon.config_generation(), generation);
        assert_eq!(config(&guest.balloon), [0x120, 0, 0, 0, 0]);
        // Nothing new.
        guest.balloon.set_target(0x120);
        assert!(!guest.balloon.has_work(&mut dma));
        guest.poll();
        assert_eq!(guest.irq.config, 1);
        // No more than there is.
        guest.balloon.set_target(u32::MAX);
        guest.poll();
        assert_eq!((guest.balloon.target(), guest.irq.config), (0x400, 2));
        // No driver is notified before DRIVER_OK. So the driver that sets it is notified then,
        // since the target may have changed after it read the configuration.
        guest.balloon.reset();
        guest.balloon.set_target(3);
        guest.poll();
        assert_eq!(guest.irq.config, 2);
        let features = guest.balloon.features() & mask;
        let keep = guest.mem.keep_alive();
        guest.balloon.begin(features, keep).unwrap();
        guest.poll();
        assert_eq!((guest.balloon.target(), guest.irq.config), (3, 3));
    });
}

#[test]
fn a_ring_whose_fault_was_repaired_goes_on_without_a_doorbell() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        guest.poll();
        guest.balloon.arm(&mut dma);
        let config = guest.queues[INFLATE].config();
        for table in [config.desc, config.avail] {
            dma.iommu.deny(table.align_down(4096), 4096, Perm::Read);
        }
        let len = guest.put_numbers(DATA, &[5]);
        guest.queues[INFLATE].stage(&[(DATA, len)], &[]);
        assert!(guest.queues[INFLATE].publish(), "a doorbell");
        guest.balloon.kick(INFLATE as u16);
        for _ in 0..3 {
            let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
        }
        guest.balloon.arm(&mut dma);
        assert!(!guest.balloon.has_work(&mut dma), "it sleeps");
        assert_eq!(guest.balloon.stats().ring_faults, 1);
        assert_eq!(guest.balloon.opens_at_ns(), Some(RETRY_NS));
        dma.iommu.allow_all();
        guest.queues[INFLATE].stage(&[(DATA, len)], &[]);
        assert!(!guest.queues[INFLATE].publish(), "no doorbell");
        let _ = guest.balloon.poll(&mut dma, &mut guest.irq, RETRY_NS - 1);
        assert_eq!(guest.used(INFLATE), 0, "too early");
        while guest.balloon.poll(&mut dma, &mut guest.irq, RETRY_NS) == Activity::Busy {}
        assert_eq!(guest.used(INFLATE), 2);
        assert_eq!(guest.balloon.opens_at_ns(), None);
    });
}

#[test]
fn the_driver_writes_actual_and_nothing_else() {
    let mut guest = Guest::new(!0);
    guest.balloon.set_target(0x111);
    guest
        .balloon
        .write_config(4, &0x1234_5678_u32.to_le_bytes());
    assert_eq!(guest.balloon.actual(), 0x1234_5678);
    // Byte by byte, and more than there is.
    for at in 0..20 {
        guest.balloon.write_config(at, &[at as u8]);
    }
    assert_eq!(guest.balloon.actual(), 0x0706_0504);
    guest.balloon.write_config(0, &[0xee; 6]);
    assert_eq!(guest.balloon.actual(), 0x0706_eeee);
    guest.balloon.write_config(u64::MAX, &[1; 9]);
    assert_eq!(config(&guest.balloon), [0x111, 0x0706_eeee, 0, 0, 0]);
    assert_eq!(guest.balloon.config_generation(), 1, "the target's change");
}

#[test]
fn a_reset_forgets_the_driver_and_keeps_the_target() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        guest.balloon.set_target(0x111);
        guest.balloon.write_config(4, &[9, 0, 0, 0]);
        let entry = [&4_u16.to_le_bytes()[..], &8_u64.to_le_bytes()].concat();
        guest.mem.put(Gpa::new(DATA), &entry);
        guest.queues[STATISTICS].add(&[(DATA, 10)], &[]);
        guest.poll();
        guest.balloon.request_statistics();
        guest.balloon.reset();
        assert_eq!(guest.recorder.told(), [BackEndCall::Reset]);
        assert_eq!(config(&guest.balloon), [0x111, 0, 0, 0, 0]);
        assert_eq!(guest.balloon.statistics(), None);
        assert!(!guest.balloon.has_work(&mut guest.dma()));
        // And begins anew: requests of the time before the driver are not repeated to it.
        let features = guest.balloon.features() & mask;
        let base = Gpa::new(0x3_0000);
        let index = STATISTICS as u16;
        let mut driver = AnyDriver::new(guest.mem.clone(), base, index, SIZE, features);
        driver.add(&[(DATA, 10)], &[]);
        guest
            .balloon
            .activate(features, &[driver.config()], guest.mem.keep_alive())
            .unwrap();
        guest.poll();
        assert_eq!(driver.used(), None);
        assert_eq!(guest.balloon.statistics().unwrap().free, Some(8));
    });
}

#[test]
fn a_stopped_device_touches_nothing_and_goes_on_later() {
    both(|mask| {
        for service in [Service::Stopped, Service::Finishing] {
            let mut guest = Guest::new(mask);
            guest.balloon.set_service(service);
            guest.send(INFLATE, &[0x400]);
            guest.queues[REPORT].add(&[], &[(0x40_0000, 0x1000)]);
            guest.poll();
            assert_eq!(guest.recorder.told(), []);
            assert!(!guest.balloon.has_work(&mut guest.dma()));
            guest.balloon.set_service(Service::Full);
            guest.balloon.pause_queue(REPORT as u16, true);
            guest.poll();
            assert_eq!((guest.used(INFLATE), guest.used(REPORT)), (1, 0));
            guest.balloon.pause_queue(REPORT as u16, false);
            guest.poll();
            assert_eq!(guest.used(REPORT), 1);
        }
    });
}

#[test]
fn a_chain_half_worked_off_is_begun_again_by_whoever_goes_on() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let mut dma = guest.dma();
        let numbers: Vec<u32> = (0..100).map(|at| at * 2).collect();
        guest.send(INFLATE, &numbers);
        let _ = guest.balloon.poll(&mut dma, &mut guest.irq, 0);
        assert_eq!(guest.balloon.counts().inflated, MAX_RANGES as u64);
        guest.balloon.set_service(Service::Stopped);
        let saved = guest.balloon.save().expect("nothing is in flight");
        let queue = &saved.queues[INFLATE];
        assert_eq!(queue.next_avail, queue.next_used);
        guest.balloon.set_service(Service::Full);
        let index = INFLATE as u16;
        let stopped = guest.balloon.stop_queue(index, &mut dma, &mut guest.irq);
        assert_eq!(stopped.unwrap().unpublished, 0);
        let features = guest.balloon.features() & mask;
        let config = guest.queues[INFLATE].config();
        let ring = Ring::new(&config, SIZE, features).unwrap();
        guest.balloon.add_queue(ring).unwrap();
        guest.poll();
        assert_eq!(guest.used(INFLATE), 1);
        let all = MAX_RANGES as u64 + 100;
        assert_eq!(guest.balloon.counts().inflated, all);
    });
}

#[test]
fn saved_state_holds_what_the_driver_wrote() {
    both(|mask| {
        let mut guest = Guest::new(mask);
        let features = guest.balloon.features() & mask;
        guest.balloon.write_config(4, &[0x34, 0x12, 0, 0]);
        guest.send(INFLATE, &[1]);
        guest.poll();
        assert_eq!(guest.balloon.save(), None, "it is running");
        guest.balloon.set_service(Service::Stopped);
        let saved = guest.balloon.save().expect("quiet");
        assert_eq!(
            (saved.device_type, saved.features, saved.class.actual),
            (5, features, 0x1234)
        );
        let taken: Vec<_> = saved
            .queues
            .iter()
            .map(|queue| queue.next_used & 0x7fff)
            .collect();
        assert_eq!(taken, [1, 0, 0, 0]);
        let text = serde_json::to_string(&saved).unwrap();
        let read: crate::SavedDevice<SavedBalloon> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, saved);
    });
}
