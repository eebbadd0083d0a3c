//! Ports that take nothing, or that look at frames after they were sent.

use super::*;
use crate::CancelReason;

/// Port that keeps the frames sent to it until the test releases them.
#[derive(Clone, Default)]
struct Keeper(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    sent: usize,
    done: Collected,
    held: usize,
    is_cancelled: bool,
}

impl NetPort for Keeper {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities {
            keeps_frames: true,
            ..PortCapabilities::PLAIN
        }
    }

    fn send(&mut self, _pair: u16, frames: &[TxFrame<'_>], _keep: &KeepAlive) -> usize {
        let mut kept = self.0.lock().unwrap();
        kept.sent += frames.len();
        kept.held += frames.len();
        0
    }

    fn collect(&mut self, _pair: u16) -> Collected {
        let mut kept = self.0.lock().unwrap();
        if std::mem::take(&mut kept.is_cancelled) {
            kept.done.frames = kept.held;
        }
        kept.held -= kept.done.frames;
        std::mem::take(&mut kept.done)
    }

    fn cancel(&mut self, _pair: u16) {
        self.0.lock().unwrap().is_cancelled = true;
    }

    fn has_frames(&mut self, _pair: u16) -> bool {
        false
    }

    fn receive(&mut self, _pair: u16, _to: &mut dyn FrameReceiver) {}

    fn reset(&mut self) {}
}

#[test]
fn frames_that_are_kept_hold_leases_until_the_port_has_done_with_them() {
    both(|mask| {
        let port = Keeper::default();
        let mut guest = Guest::new(Box::new(port.clone()), mask);
        let mut dma = guest.dma();
        for _ in 0..4 {
            guest.send(&[1; 60]);
        }
        // One that is never sent, between others that are.
        guest.send(&[1; 13]);
        guest.send(&[1; 60]);
        let mut poll = |guest: &mut Guest| {
            while guest.net.poll(&mut dma, &mut guest.irq, 0) == Activity::Busy {}
            dma.iommu.deny(Iova::new(SENT), 4096, Perm::Read);
            let stale = guest_mem::Iommu::leases(&dma.iommu).stale();
            dma.iommu.allow_all();
            stale
        };
        assert!(poll(&mut guest) >= 5, "an unmap would wait");
        assert_eq!(port.0.lock().unwrap().sent, 5);
        assert_eq!(guest.net.in_flight(), 6);
        assert_eq!(guest.tx.used(), None);
        port.0.lock().unwrap().done = Collected {
            frames: 4,
            dropped: 1,
        };
        poll(&mut guest);
        assert_eq!(std::iter::from_fn(|| guest.tx.used()).count(), 5);
        assert_eq!(guest.net.in_flight(), 1);
        assert_eq!(guest.net.cancel(CancelReason::Reset), 0);
        assert_eq!(poll(&mut guest), 0, "all leases are back");
        assert_eq!(guest.net.in_flight(), 0);
        guest.net.reset();
    });
}

#[test]
fn a_port_that_takes_nothing_leaves_frames_where_they_are_and_is_no_work() {
    both(|mask| {
        let wire = Wire::default();
        wire.ends().room = Some(0);
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        guest.give(2, 2048);
        for _ in 0..3 {
            guest.send(&[1; 60]);
        }
        wire.ends().to_guest.push_back(vec![2; 60]);
        guest.poll();
        assert_eq!(guest.tx.used(), None);
        assert_eq!(guest.received().len(), 1, "the other direction goes on");
        let mut dma = guest.dma();
        guest.net.arm(&mut dma);
        assert!(!guest.net.has_work(&mut dma));
        wire.ends().room = Some(2);
        assert!(guest.net.has_work(&mut dma));
        guest.poll();
        assert_eq!(wire.ends().from_guest.len(), 3);
        assert_eq!(std::iter::from_fn(|| guest.tx.used()).count(), 3);
    });
}

#[test]
fn frames_and_bytes_are_limited_in_both_directions_together() {
    both(|mask| {
        let wire = Wire::default();
        let mut guest = Guest::new(Box::new(wire.clone()), mask);
        guest.net.reset();
        let limits = RateLimits {
            operations: Some(crate::Rate {
                per_second: 1000,
                burst: 1,
            }),
            bytes: None,
        };
        let net = Net::new(GUEST_MAC, 256, Box::new(wire.clone())).unwrap();
        guest.net = net.with_packed().with_limits(limits);
        let features = guest.net.features() & mask;
        let queues = [guest.rx.config(), guest.tx.config()];
        let keep = guest.mem.keep_alive();
        guest.net.activate(features, &queues, keep).unwrap();
        guest.give(8, 2048);
        for nth in 0..8 {
            guest.send(&[nth; 60]);
            wire.ends().to_guest.push_back(vec![nth; 60]);
        }
        let mut dma = guest.dma();
        let mut moved = |guest: &mut Guest, now_ns| {
            for _ in 0..10 {
                let _ = guest.net.poll(&mut dma, &mut guest.irq, now_ns);
            }
            guest.net.stats().requests
        };
        // One may overdraw; then one each millisecond.
        let at_once = moved(&mut guest, 1);
        assert!((1..=2).contains(&at_once), "{at_once}");
        let opens = guest.net.opens_at_ns().expect("it waits");
        assert!(opens > 1 && !guest.net.has_work(&mut guest.dma()));
        assert_eq!(moved(&mut guest, opens - 1), at_once);
        assert_eq!(moved(&mut guest, opens), at_once + 1);
        // After a quiet time as many at once as at first.
        assert_eq!(moved(&mut guest, 1_000_000_000), 2 * at_once + 1);
    });
}
