//! The parts of a visit, and whether there is reason for one. Queues are named by their position.

use guest_mem::{Dma, Stop};

use super::{Context, Core, DeviceClass, Environment, ServedQueue};
use crate::device::{Activity, Interrupt};
use crate::ring::RingStop;

impl<C: DeviceClass> Core<C> {
    pub(super) fn visit<E: Environment>(&mut self, cx: &mut Context<'_, E>) -> Activity {
        self.now_ns = cx.visit.now_ns();
        let count = self.queues.len();
        let mut is_busy = false;
        let may_run = self.activation.may_run();
        if may_run {
            for turn in 0..count {
                is_busy |= self.go_on(self.turn(turn), cx);
            }
            for turn in 0..count {
                is_busy |= self.take(self.turn(turn), cx);
            }
        }
        is_busy |= self.class.complete(&mut self.queues, cx) == Activity::Busy;
        self.collect_failure(cx);
        // Also if it has failed meanwhile: what has ended is the driver's.
        if may_run {
            // The last served first: the driver waits for data that one queue gave to another (a
            // received frame) more than for the return of a buffer, and each publication ends with
            // a barrier.
            for turn in (0..count).rev() {
                let at = self.turn(turn);
                is_busy |= self.queues[at].runs && self.publish(at, cx);
            }
            self.first = match count != 0 && cx.visit.is_over() {
                // A queue that starves because the others come first comes first next time.
                true => self.turn(1),
                // What one queue gives to another, as the port of a network device does, is seen by
                // the same visit.
                false => self.home,
            };
        }
        if self.activation.take_notification() {
            cx.irq.config();
            is_busy = true;
        }
        match is_busy {
            true => Activity::Busy,
            false => Activity::Idle,
        }
    }

    /// Takes up a failure that a hook has reported. To be called behind the hooks, and before what
    /// depends on whether the device may run.
    fn collect_failure<E: Environment>(&mut self, cx: &mut Context<'_, E>) {
        if let Some(violation) = cx.violation.take() {
            self.activation.fail(violation);
        }
        if std::mem::take(&mut cx.is_config_changed) {
            self.activation.config_changed();
        }
    }

    /// The queue whose turn is the `turn`-th, of at least one; `turn` is at most their number, and
    /// `first` below it.
    fn turn(&self, turn: usize) -> usize {
        let at = self.first + turn;
        let count = self.queues.len();
        if at >= count { at - count } else { at }
    }

    /// Runs the first part for queue `at`: publishes what an earlier visit could not, and continues
    /// chains taken then. Returns whether anything was done.
    fn go_on<E: Environment>(&mut self, at: usize, cx: &mut Context<'_, E>) -> bool {
        let queue = &mut self.queues[at];
        queue.ring.retry(cx.visit.now_ns());
        let has_unpublished = queue.has_unpublished() && queue.ring.parked().is_none();
        let mut is_busy = has_unpublished && self.publish(at, cx);
        let queue = &mut self.queues[at];
        let went_on = match queue.ring.parked() {
            None => self.class.go_on(queue, cx),
            Some(_) => Ok(Activity::Idle),
        };
        queue.runs = queue.ring.parked().is_none();
        match went_on {
            Ok(activity) => is_busy |= activity == Activity::Busy,
            Err(stop) => {
                self.record_violation(stop);
                is_busy = true;
            }
        }
        is_busy
    }

    /// Takes chains from queue `at` while the visit lasts. Returns whether any was taken, or is
    /// left.
    fn take<E: Environment>(&mut self, at: usize, cx: &mut Context<'_, E>) -> bool {
        let may_take = self.activation.may_take();
        let queue = &mut self.queues[at];
        if !may_take || !queue.is_enabled {
            return false;
        }
        if !queue.runs {
            self.look_ahead(at, cx);
            return false;
        }
        if !self.class.may_take(queue, cx.dma) {
            return false;
        }
        // Without EVENT_IDX the driver is notified once that its doorbells are not needed.
        if let Err(stop) = queue.ring.disarm(cx.dma) {
            self.record_violation(stop);
            return false;
        }
        let mut is_busy = false;
        while !cx.is_over() && queue.ring.parked().is_none() {
            match self.class.serve(queue, cx) {
                Ok(Activity::Busy) => is_busy = true,
                Ok(Activity::Idle) => return is_busy,
                Err(stop) => {
                    if let RingStop::Access(Stop::Pending(_)) = stop {
                        queue.prefetch.begin();
                        self.look_ahead(at, cx);
                    }
                    self.record_violation(stop);
                    return is_busy;
                }
            }
        }
        // Stopped by the budget: there may be more.
        is_busy || queue.ring.parked().is_none()
    }

    /// Asks for the memory that the chains behind the one that waits will need, while queue `at`
    /// waits.
    fn look_ahead<E: Environment>(&mut self, at: usize, cx: &mut Context<'_, E>) {
        let (class, chain) = (&self.class, &mut self.chain);
        let ServedQueue { prefetch, ring, .. } = &mut self.queues[at];
        if prefetch.has_work() {
            prefetch.look(ring, cx.dma, chain, cx.visit, |dma, chain| {
                class.ask_ahead(dma, chain)
            });
        }
    }

    /// Publishes the chains of queue `at` that have ended, by one store. Returns whether there were
    /// any. A failure that the class reports meanwhile is taken up.
    pub(super) fn publish<E: Environment>(&mut self, at: usize, cx: &mut Context<'_, E>) -> bool {
        let queue = &mut self.queues[at];
        let mut is_busy = false;
        let mut stopped = None;
        let mut left = queue.ring.size();
        while left != 0 && queue.ring.parked().is_none() {
            let staged = queue.stage_answers(cx.dma);
            match staged.and_then(|()| self.class.finish(queue, cx)) {
                Ok(Activity::Busy) => is_busy = true,
                Ok(Activity::Idle) => break,
                Err(stop) => stopped = Some(stop),
            }
            left -= 1;
        }
        if queue.may_publish() {
            match queue.ring.publish(cx.dma) {
                Ok(is_wanted) => {
                    is_busy = true;
                    if is_wanted {
                        cx.stats.interrupts += 1;
                        cx.irq.queue(queue.index());
                    }
                }
                Err(stop) => stopped = stopped.or(Some(stop)),
            }
        }
        self.collect_failure(cx);
        if let Some(stop) = stopped {
            self.record_violation(stop);
        }
        is_busy
    }

    /// Whether a visit would do something. If `is_watched`, the rings' words are left to their
    /// watches: a ring that was empty at the last check counts as empty.
    pub(super) fn has_work<D: Dma>(&mut self, dma: &mut D, is_watched: bool) -> bool {
        if self.activation.has_notification() || self.class.has_completions() {
            return true;
        }
        if !self.activation.may_run() {
            return false;
        }
        let Self {
            class,
            activation,
            queues,
            ..
        } = self;
        queues.iter_mut().any(|queue| {
            let is_taking = activation.may_take() && queue.is_enabled;
            if queue.ring.parked().is_some() {
                return is_taking && queue.prefetch.has_work();
            }
            if queue.has_unpublished() || class.has_taken(queue, dma) {
                return true;
            }
            if !is_taking || !class.may_take(queue, dma) {
                return false;
            }
            if is_watched && queue.ring.is_seen_empty() && class.is_due(queue) {
                return false;
            }
            match class.has_work(queue, dma, self.now_ns) {
                Ok(has_work) => has_work,
                Err(RingStop::Violation(violation)) => {
                    activation.fail(violation);
                    true
                }
                // A visit says when it is tried again.
                Err(RingStop::Access(_)) => queue.ring.is_faulted(),
            }
        })
    }
}
