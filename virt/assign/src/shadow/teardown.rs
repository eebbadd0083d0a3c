//! Ends of mappings: by policy, all of a domain's, and by closing the container.

use dma_map::iova::{IovaPfn, IovaRange};

use super::{HostCall, Pause, Shadow, State, TOGETHER, Task};
use crate::calls::{Call, CallId, Caller, MOST};
use crate::container_mappings::Mapping;
use crate::policy::HostPolicy;

/// Limit on the duration of a call that unmaps, once a hold is overdue, in ns.
const CALL_LIMIT: u64 = 1_000_000_000;

impl<C: Caller> Shadow<C> {
    /// Ends mappings that the guest has unmapped: the first list before the task is done, the
    /// second as the policy prescribes.
    pub(super) fn unmap(
        &mut self,
        at_once: Vec<Mapping>,
        by_policy: Vec<Mapping>,
        task: &mut Task,
    ) {
        let now = self.now;
        let mut waited: Vec<(Mapping, Option<u64>)> = Vec::new();
        let mut unwaited = Vec::new();
        for mapping in at_once {
            waited.extend(self.book.take_live(mapping.first).map(|gone| (gone, None)));
        }
        for mapping in by_policy {
            let Some(gone) = self.book.take_live(mapping.first) else {
                continue;
            };
            match self.policy {
                HostPolicy::Strict => waited.push((gone, None)),
                HostPolicy::Async(window) => {
                    if self.account.now() < window.entries as u64 {
                        self.account.begin();
                        unwaited.push((gone, Some(now)));
                    } else {
                        waited.push((gone, None));
                    }
                }
                HostPolicy::Deferred(window) => {
                    if self.book.stale() < window.entries {
                        self.keep(gone, task);
                    } else {
                        // The window closes, and this one is the last in it.
                        waited.push((gone, None));
                        let stale = self.book.some_stale(usize::MAX);
                        waited.extend(self.take_stale(stale));
                    }
                }
                HostPolicy::Optimistic(bound) => {
                    self.keep(gone, task);
                    while self.book.stale() > bound.quota
                        && let Some((_, oldest)) = self.book.oldest()
                    {
                        waited.extend(self.take_stale(vec![oldest]));
                    }
                }
            }
        }
        let waits = !waited.is_empty();
        // One list: a mapping that has left the book and is in no call yet must not lie between
        // two mappings of a call.
        waited.append(&mut unwaited);
        let last = self.ask_to_unmap(waited);
        if waits {
            task.until = task.until.max(last);
        }
        // Those that are on their way out count as well.
        let stale = self.account.now() + task.kept.len() as u64;
        if stale > self.policy.quota() as u64 && !self.calls.is_empty() {
            task.until = task.until.max(self.calls.back().map(|call| call.id));
        }
    }

    fn keep(&mut self, mapping: Mapping, task: &mut Task) {
        self.book.keep_stale(mapping, self.now);
        task.kept.push(mapping.first);
    }

    /// Takes stale mappings out of the book, with the time since which they are unmapped for the
    /// guest.
    fn take_stale(&mut self, firsts: Vec<u64>) -> Vec<(Mapping, Option<u64>)> {
        let taken = firsts
            .into_iter()
            .filter_map(|first| self.book.take_stale(first));
        taken
            .map(|stale| (stale.mapping, stale.is_counted.then_some(stale.since)))
            .collect()
    }

    /// Tears these stale mappings down; the last call.
    pub(super) fn tear_down_stale(&mut self, firsts: Vec<u64>) -> Option<CallId> {
        let gone = self.take_stale(firsts);
        self.ask_to_unmap(gone)
    }

    /// Tears down mappings that have been stale for the policy's age. A container that is being
    /// closed ends them anyway.
    pub(super) fn expire(&mut self) {
        if self.state != State::Open {
            return;
        }
        let age = self.policy.age_ns();
        let is_due = |since: u64, now: u64| since.saturating_add(age) <= now;
        let Some((since, _)) = self.book.oldest() else {
            return;
        };
        if !is_due(since, self.now) || self.calls.len() >= MOST {
            return;
        }
        if let HostPolicy::Deferred(_) = self.policy {
            // One teardown for all.
            let all = self.book.some_stale(usize::MAX);
            self.tear_down_stale(all);
            return;
        }
        let mut due = Vec::new();
        while let Some((since, first)) = self.book.oldest()
            && is_due(since, self.now)
        {
            due.extend(self.take_stale(vec![first]));
        }
        self.ask_to_unmap(due);
    }

    /// Tears down everything, for a task; a bounded number of mappings in each call.
    pub(super) fn tear_down_all(&mut self, task: &mut Task) -> Result<(), Pause> {
        loop {
            if self.calls.len() >= MOST {
                return Err(Pause::Wait);
            }
            let stale = self.book.some_stale(TOGETHER);
            let live = self.book.some_live(TOGETHER - stale.len().min(TOGETHER));
            if stale.is_empty() && live.is_empty() {
                return Ok(());
            }
            let mut gone = self.take_stale(stale);
            let live = live
                .into_iter()
                .filter_map(|first| self.book.take_live(first));
            gone.extend(live.map(|mapping| (mapping, None)));
            let last = self.ask_to_unmap(gone);
            task.until = task.until.max(last);
        }
    }

    /// Submits the unmapping of mappings that were taken out of the book. Neighbours between which
    /// nothing else is mapped share a call.
    pub(super) fn ask_to_unmap(&mut self, mut gone: Vec<(Mapping, Option<u64>)>) -> Option<CallId> {
        gone.sort_unstable_by_key(|(mapping, _)| mapping.first);
        let mut last = None;
        let mut rest = gone.as_slice();
        while let Some((head, _)) = rest.first() {
            let mut count = 1;
            while count < rest.len().min(TOGETHER) {
                let (end, next) = (rest[count - 1].0.last() + 1, rest[count].0.first);
                if !self.book.is_empty_between(end, next) {
                    break;
                }
                count += 1;
            }
            let (together, others) = rest.split_at(count);
            let end = together[count - 1].0.last();
            let pages = together.iter().map(|(mapping, _)| mapping.pages).sum();
            if let Some(range) = IovaRange::new(IovaPfn::new(head.first), end - head.first + 1) {
                self.counts.unmaps += 1;
                self.counts.unmapped += count as u64;
                let call = Call::Unmap { range, pages };
                last = Some(self.submit(call, HostCall::Unmap(together.to_vec())));
            }
            rest = others;
        }
        last
    }

    /// Returns the time limit of the oldest call that unmaps, in ns, if a hold is overdue.
    pub(super) fn call_limit(&self) -> Option<u64> {
        let mut calls = self.calls.iter();
        let unmap = calls.find(|call| matches!(call.what, HostCall::Unmap(_)));
        let unmap = unmap.filter(|_| self.overdue)?;
        Some(unmap.since.saturating_add(CALL_LIMIT))
    }

    /// Fails if a call that unmaps has passed its time limit.
    pub(super) fn watch_calls(&mut self) {
        let is_open = self.state == State::Open;
        if is_open && self.call_limit().is_some_and(|limit| limit <= self.now) {
            self.fail("the host has not unmapped within a second what the guest has unmapped");
        }
    }

    /// Begins the failure: the device must not reach memory any more, so it is to be cut off, and
    /// then the container closed.
    #[cold]
    pub(super) fn fail(&mut self, why: &str) {
        if self.state == State::Open {
            self.state = State::Failed;
            self.failure = Some(why.to_owned());
        }
    }

    pub(super) fn close(&mut self) {
        if matches!(self.state, State::Open | State::Failed) {
            self.state = State::Closing;
            self.mode = super::Mode::Nothing;
            self.submit(Call::Close, HostCall::Close);
        }
    }

    /// The container is closed: nothing is in reach.
    pub(super) fn closed(&mut self) {
        self.state = State::Closed;
        self.awaited = None;
        let mut gone = std::mem::take(&mut self.unended);
        let stale = self.book.some_stale(usize::MAX);
        gone.extend(self.take_stale(stale));
        for first in self.book.some_live(usize::MAX) {
            gone.extend(self.book.take_live(first).map(|mapping| (mapping, None)));
        }
        self.unmapped(gone);
    }

    /// Mappings are out of the device's reach.
    pub(super) fn unmapped(&mut self, mappings: Vec<(Mapping, Option<u64>)>) {
        for (mapping, since) in mappings {
            self.book.leave(&mapping);
            if let Some(since) = since {
                self.account.end(self.now.saturating_sub(since));
            }
        }
    }
}
