//! A split ring, its driver and its device.

use super::*;
use crate::backend::RingLayout;

/// The order in which a batch is published and forgotten.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    Right,
    /// Forgotten first.
    CommitFirst,
    /// Published before it is listed.
    PublishFirst,
    /// Taken without a trace.
    NoBegin,
}

#[derive(Debug)]
struct SplitMachine {
    region: SurvivingRegion,
    size: u16,
    order: Order,
    account: Account,
    // Guest memory.
    table: Vec<usize>,
    avail: Vec<u16>,
    avail_idx: u16,
    used: Vec<u16>,
    used_idx: u16,
    // The driver.
    offered: Vec<Option<usize>>,
    used_seen: u16,
    // The device.
    tracker: Option<Split<SurvivingRegion>>,
    next_avail: u16,
    pending: Vec<u16>,
}

impl SplitMachine {
    fn new(size: u16, order: Order) -> Self {
        let len = queue_region_len(RingLayout::Split, size);
        // So that the indices wrap soon.
        let start = 65530;
        let entries = usize::from(size);
        Self {
            region: SurvivingRegion::new(len),
            size,
            order,
            account: Account::default(),
            table: vec![0; entries],
            avail: vec![0; entries],
            avail_idx: start,
            used: vec![0; entries],
            used_idx: start,
            offered: vec![None; entries],
            used_seen: start,
            tracker: None,
            next_avail: start,
            pending: Vec::new(),
        }
    }

    fn slot(&self, idx: u16) -> usize {
        usize::from(idx % self.size)
    }

    fn tracker(&mut self) -> &mut Split<SurvivingRegion> {
        self.tracker.as_mut().expect("started")
    }

    fn publish(&mut self, heads: &[u16], used_idx: u16) {
        for (nth, &head) in (0..).zip(heads) {
            if self.region.countdown.store() {
                let slot = self.slot(self.used_idx.wrapping_add(nth));
                self.used[slot] = head;
            }
        }
        if self.region.countdown.store() {
            self.used_idx = used_idx;
        }
    }
}

impl Machine for SplitMachine {
    fn countdown(&self) -> &KillCountdown {
        &self.region.countdown
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn submit(&mut self, choices: &mut Choices) {
        let free: Vec<u16> = (0..self.size)
            .filter(|&head| self.offered[usize::from(head)].is_none())
            .collect();
        if free.is_empty() {
            return;
        }
        let head = free[choices.below(free.len())];
        let request = self.account.submit();
        self.offered[usize::from(head)] = Some(request);
        self.table[usize::from(head)] = request;
        let slot = self.slot(self.avail_idx);
        self.avail[slot] = head;
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    fn take_back(&mut self) -> Verdict {
        check(
            self.used_idx.wrapping_sub(self.used_seen) <= self.size,
            || "used.idx went too far".into(),
        )?;
        while self.used_seen != self.used_idx {
            let head = self.used[self.slot(self.used_seen)];
            self.used_seen = self.used_seen.wrapping_add(1);
            let request = self.offered[usize::from(head)]
                .take()
                .ok_or_else(|| format!("head {head} is used without being offered"))?;
            self.account.take_back(request)?;
        }
        Ok(())
    }

    fn start(&mut self) -> Verdict {
        let region = self.region.clone();
        let outcome = Split::recover(region, self.size, self.used_idx);
        if self.region.countdown.is_over() {
            return Ok(());
        }
        let (tracker, recovery) = outcome.map_err(|error| error.to_string())?;
        let requests: Vec<usize> = recovery
            .heads
            .iter()
            .map(|&head| self.table[usize::from(head)])
            .collect();
        check(requests.is_sorted(), || {
            format!("resubmitted as {requests:?}")
        })?;
        for request in requests {
            self.account.execute(&self.region.countdown, request);
        }
        self.pending = recovery.heads;
        self.next_avail = recovery.next_avail;
        self.tracker = Some(tracker);
        Ok(())
    }

    fn fetch(&mut self, count: usize) -> Verdict {
        for _ in 0..count {
            if self.next_avail == self.avail_idx {
                break;
            }
            let head = self.avail[self.slot(self.next_avail)];
            self.next_avail = self.next_avail.wrapping_add(1);
            if self.order != Order::NoBegin {
                let begun = self.tracker().begin(head);
                begun.map_err(|error| error.to_string())?;
            }
            self.account
                .execute(&self.region.countdown, self.table[usize::from(head)]);
            self.pending.push(head);
        }
        Ok(())
    }

    fn complete(&mut self, count: usize, choices: &mut Choices) -> Verdict {
        let mut heads = Vec::new();
        for _ in 0..count.min(self.pending.len()) {
            let which = choices.below(self.pending.len());
            heads.push(self.pending.swap_remove(which));
        }
        if self.order == Order::NoBegin {
            let used_idx = self.used_idx.wrapping_add(heads.len() as u16);
            self.publish(&heads, used_idx);
            return Ok(());
        }
        if self.order == Order::PublishFirst {
            let used_idx = self.used_idx.wrapping_add(heads.len() as u16);
            self.publish(&heads, used_idx);
        }
        for &head in &heads {
            let completed = self.tracker().complete(head);
            completed.map_err(|error| error.to_string())?;
        }
        let used_idx = self.tracker().used_idx_after();
        match self.order {
            Order::Right => {
                self.publish(&heads, used_idx);
                self.tracker().commit();
            }
            Order::CommitFirst => {
                self.tracker().commit();
                self.publish(&heads, used_idx);
            }
            Order::PublishFirst | Order::NoBegin => self.tracker().commit(),
        }
        Ok(())
    }
}

#[test]
fn no_request_is_lost_or_returned_twice_wherever_a_split_device_is_killed() {
    let mut stores = 0;
    for size in [1, 2, 4, 8] {
        for seed in 0..8 {
            stores += kill_at_each_store(|| SplitMachine::new(size, Order::Right), seed).unwrap();
        }
    }
    assert!(stores > 1000, "only {stores} places to die");
}

#[test]
fn split_devices_that_store_in_a_wrong_order_are_caught() {
    for order in [Order::CommitFirst, Order::PublishFirst, Order::NoBegin] {
        assert_caught(|| SplitMachine::new(4, order));
    }
}

proptest! {
    #[test]
    fn any_split_run_survives_any_deaths(
        bytes in prop::collection::vec(any::<u8>(), 1..400),
        deaths in deaths(),
        size in 0..5_u32,
    ) {
        let mut machine = SplitMachine::new(1 << size, Order::Right);
        let outcome = run(&mut machine, &mut Choices::new(&bytes), &deaths);
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }
}
