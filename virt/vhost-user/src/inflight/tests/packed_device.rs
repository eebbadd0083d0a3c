//! A packed ring, its driver and its device.

use super::*;
use crate::backend::RingLayout;

const NEXT: u16 = 1;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// The order in which a batch is published and forgotten.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    Right,
    /// The first used descriptor's flags before the others.
    FirstFirst,
    /// Used descriptors before the positions.
    LateAdvance,
    /// Forgotten before it is published.
    CommitFirst,
    /// As right, but a successor does not take back used descriptors.
    NoWithdraw,
}

#[derive(Clone, Copy, Debug, Default)]
struct Desc {
    addr: u64,
    id: u16,
    flags: u16,
}

#[derive(Debug)]
struct Ring {
    countdown: Rc<KillCountdown>,
    descs: Vec<Desc>,
    withdraws: bool,
}

impl PackedRing for Ring {
    fn flags(&self, at: u16) -> u16 {
        self.descs[usize::from(at)].flags
    }

    fn set_flags(&mut self, at: u16, flags: u16) {
        if self.withdraws && self.countdown.store() {
            self.descs[usize::from(at)].flags = flags;
        }
    }
}

#[derive(Debug)]
struct PackedMachine {
    region: SurvivingRegion,
    sizes: PackedSizes,
    order: Order,
    start: PackedPosition,
    account: Account,
    ring: Ring,
    // The driver: requests and chain lengths by buffer id.
    offered: Vec<Option<(usize, u16)>>,
    free: u16,
    avail: PackedPosition,
    used: PackedPosition,
    // The device.
    tracker: Option<Packed<SurvivingRegion>>,
    next_avail: PackedPosition,
    pending: Vec<(Slot, u16, u16)>,
}

const START: PackedPosition = PackedPosition { idx: 0, wrap: true };

const fn flags(position: PackedPosition, is_used: bool) -> u16 {
    match (position.wrap, is_used) {
        (true, false) => AVAIL,
        (false, false) => USED,
        (true, true) => AVAIL | USED,
        (false, true) => 0,
    }
}

impl PackedMachine {
    fn new(ring_size: u16, desc_num: u16, start: PackedPosition, order: Order) -> Self {
        let len = queue_region_len(RingLayout::Packed, desc_num);
        let region = SurvivingRegion::new(len);
        // Each descriptor as the lap before its first one here left it: used.
        let descs = (0..ring_size).map(|idx| Desc {
            flags: flags(
                PackedPosition {
                    idx,
                    wrap: start.wrap == (idx < start.idx),
                },
                true,
            ),
            ..Desc::default()
        });
        let descs = descs.collect();
        Self {
            sizes: PackedSizes {
                desc_num,
                ring_size,
            },
            order,
            account: Account::default(),
            ring: Ring {
                countdown: Rc::clone(&region.countdown),
                descs,
                withdraws: order != Order::NoWithdraw,
            },
            region,
            offered: vec![None; usize::from(ring_size)],
            free: ring_size,
            start,
            avail: start,
            used: start,
            tracker: None,
            next_avail: start,
            pending: Vec::new(),
        }
    }

    fn after(&self, position: PackedPosition, count: u16) -> PackedPosition {
        position.advanced(count, self.sizes.ring_size)
    }

    fn tracker(&mut self) -> &mut Packed<SurvivingRegion> {
        self.tracker.as_mut().expect("started")
    }

    /// Writes used descriptors at `at`: ids, then flags, the first one's last.
    fn publish(&mut self, batch: &[(Slot, u16, u16)], at: PackedPosition) {
        let mut places = Vec::new();
        let mut next = at;
        for &(_, id, num) in batch {
            places.push(next);
            if self.region.countdown.store() {
                self.ring.descs[usize::from(next.idx)].id = id;
            }
            next = self.after(next, num);
        }
        if self.order != Order::FirstFirst {
            places.reverse();
        }
        for place in places {
            if self.region.countdown.store() {
                self.ring.descs[usize::from(place.idx)].flags = flags(place, true);
            }
        }
    }
}

impl Machine for PackedMachine {
    fn countdown(&self) -> &KillCountdown {
        &self.region.countdown
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn submit(&mut self, choices: &mut Choices) {
        let ids: Vec<u16> = (0..self.sizes.ring_size)
            .filter(|&id| self.offered[usize::from(id)].is_none())
            .collect();
        if self.free == 0 || ids.is_empty() {
            return;
        }
        let id = ids[choices.below(ids.len())];
        let num = (1 + choices.below(3) as u16).min(self.free);
        let request = self.account.submit();
        self.offered[usize::from(id)] = Some((request, num));
        self.free -= num;
        for nth in 1..=num {
            let chained = if nth < num { NEXT } else { 0 };
            self.ring.descs[usize::from(self.avail.idx)] = Desc {
                addr: (request as u64) << 8 | u64::from(nth),
                id,
                flags: flags(self.avail, false) | chained,
            };
            self.avail = self.after(self.avail, 1);
        }
    }

    fn take_back(&mut self) -> Verdict {
        loop {
            let desc = self.ring.descs[usize::from(self.used.idx)];
            let is_used = desc.flags & (AVAIL | USED) == flags(self.used, true);
            if !is_used {
                return Ok(());
            }
            let (request, num) = self.offered[usize::from(desc.id)]
                .take()
                .ok_or_else(|| format!("id {} is used without being offered", desc.id))?;
            self.account.take_back(request)?;
            self.used = self.after(self.used, num);
            self.free += num;
        }
    }

    fn start(&mut self) -> Verdict {
        let region = self.region.clone();
        let outcome = Packed::recover(region, self.sizes, self.start, &mut self.ring);
        if self.region.countdown.is_over() {
            return Ok(());
        }
        let (tracker, recovery) = outcome.map_err(|error| error.to_string())?;
        let mut requests = Vec::new();
        self.pending.clear();
        for PackedRequest { slot, descs } in recovery.requests {
            let request = (descs[0].addr >> 8) as usize;
            for (nth, desc) in (1..).zip(&descs) {
                check(desc.addr == (request as u64) << 8 | nth, || {
                    format!("request {request} came back as {descs:?}")
                })?;
            }
            self.account.execute(&self.region.countdown, request);
            requests.push(request);
            let id = descs[descs.len() - 1].id;
            self.pending.push((slot, id, descs.len() as u16));
        }
        check(requests.is_sorted(), || {
            format!("resubmitted as {requests:?}")
        })?;
        check(recovery.used == tracker.used(), || {
            "two used positions".into()
        })?;
        self.next_avail = recovery.avail;
        self.tracker = Some(tracker);
        Ok(())
    }

    fn fetch(&mut self, count: usize) -> Verdict {
        for _ in 0..count {
            let mut descs = Vec::new();
            let mut at = self.next_avail;
            loop {
                let desc = self.ring.descs[usize::from(at.idx)];
                if desc.flags & (AVAIL | USED) != flags(at, false) {
                    break;
                }
                descs.push(PackedDesc {
                    addr: desc.addr,
                    len: 0x200,
                    id: desc.id,
                    flags: desc.flags,
                });
                at = self.after(at, 1);
                if desc.flags & NEXT == 0 {
                    break;
                }
            }
            let Some(desc) = descs.last().copied() else {
                break;
            };
            let begun = self.tracker().begin(&descs);
            let slot = begun.map_err(|error| error.to_string())?;
            self.account
                .execute(&self.region.countdown, (desc.addr >> 8) as usize);
            self.pending.push((slot, desc.id, descs.len() as u16));
            self.next_avail = at;
        }
        Ok(())
    }

    fn complete(&mut self, count: usize, choices: &mut Choices) -> Verdict {
        let mut batch = Vec::new();
        for _ in 0..count.min(self.pending.len()) {
            let which = choices.below(self.pending.len());
            batch.push(self.pending.swap_remove(which));
        }
        for &(slot, ..) in &batch {
            let completed = self.tracker().complete(slot);
            completed.map_err(|error| error.to_string())?;
        }
        let at = self.tracker().used();
        match self.order {
            Order::Right | Order::FirstFirst | Order::NoWithdraw => {
                self.tracker().advance();
                self.publish(&batch, at);
                self.tracker().commit();
            }
            Order::LateAdvance => {
                self.publish(&batch, at);
                self.tracker().advance();
                self.tracker().commit();
            }
            Order::CommitFirst => {
                self.tracker().advance();
                self.tracker().commit();
                self.publish(&batch, at);
            }
        }
        Ok(())
    }
}

#[test]
fn no_request_is_lost_or_returned_twice_wherever_a_packed_device_is_killed() {
    let mut stores = 0;
    for (ring_size, desc_num) in [(1, 1), (2, 4), (3, 3), (5, 8), (8, 8)] {
        for seed in 0..8 {
            let start = PackedPosition {
                idx: seed as u16 % ring_size,
                wrap: seed / 2 % 2 == 0,
            };
            let machine = || PackedMachine::new(ring_size, desc_num, start, Order::Right);
            stores += kill_at_each_store(machine, seed).unwrap();
        }
    }
    assert!(stores > 2000, "only {stores} places to die");
}

#[test]
fn packed_devices_that_store_in_a_wrong_order_are_caught() {
    for order in [
        Order::FirstFirst,
        Order::LateAdvance,
        Order::CommitFirst,
        Order::NoWithdraw,
    ] {
        assert_caught(|| PackedMachine::new(5, 5, START, order));
    }
}

proptest! {
    #[test]
    fn any_packed_run_survives_any_deaths(
        bytes in prop::collection::vec(any::<u8>(), 1..400),
        deaths in deaths(),
        ring_size in 1..10_u16,
        more in 0..3_u16,
        idx: u16,
        wrap: bool,
    ) {
        let start = PackedPosition { idx: idx % ring_size, wrap };
        let mut machine = PackedMachine::new(ring_size, ring_size + more, start, Order::Right);
        let outcome = run(&mut machine, &mut Choices::new(&bytes), &deaths);
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }
}
