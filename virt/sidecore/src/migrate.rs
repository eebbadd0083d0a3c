//! Adding, removing and moving pollers while their core runs.
//!
//! ```text
//! core A, at the end of a sweep, once `may_detach`:       core B:
//!   lock the poller's route (no sender is in between)
//!   empty the mailbox; keep what is for others (stash)
//!   disarm, detaching, remove from epoll
//!   order to B: receive (poller, its undelivered mail)
//!   route = B; unlock                        ─────────▶   attached, mail in order, then what is sent from now on
//! ```
//! Nothing is lost. Messages sent before the lock move with the poller; messages sent after it come
//! behind the order. The descriptors are level-triggered, so a pending event is reported again by
//! B's epoll. B polls a new poller at once. Orders have a channel of their own, are announced like
//! messages, and are taken before them.

use std::io;

use crate::{
    poller::{Activity, Poller},
    run::{Core, Member},
    sync::Arc,
    transit::{CoreCommand, Destination, DetachedPoller, Leaving},
    wakes::Wakes,
};

impl<P: Poller> Core<P> {
    pub(crate) fn take_orders(&mut self) -> Activity {
        let mut activity = Activity::Idle;
        while let Ok(command) = self.commands.try_recv() {
            self.shared_stats.heartbeat.0.mail_taken.add(1);
            activity = Activity::Busy;
            match command {
                CoreCommand::Add(moving, answer) => {
                    // The sender of the order may have stopped waiting.
                    let _ = answer.send(self.add(moving));
                }
                CoreCommand::Receive(moving) => self.receive(moving),
                CoreCommand::Leave(leaving) => self.leaving.push(leaving),
                // A caller that waits for an answer is notified by the end of its channel.
                CoreCommand::Stay(id) => {
                    self.leaving.retain(|leaving| leaving.id != id);
                    if let Some(&at) = self.slots.get(&id) {
                        self.pollers.touch(at).poller.stays();
                        self.drr.activate(at);
                    }
                }
            }
        }
        activity
    }

    /// Adds a new poller; drops it if it cannot be attached.
    pub(crate) fn add(&mut self, mut moving: DetachedPoller<P>) -> io::Result<()> {
        let (at, wakes, attached) = self.attach(&mut moving);
        attached?;
        self.put_in(at, moving, wakes, true);
        Ok(())
    }

    fn receive(&mut self, mut moving: DetachedPoller<P>) {
        let (at, wakes, attached) = self.attach(&mut moving);
        self.put_in(at, moving, wakes, attached.is_ok());
    }

    /// Returns its slot, its descriptors (none after an error), and whether they were registered.
    fn attach(&self, moving: &mut DetachedPoller<P>) -> (usize, Wakes, io::Result<()>) {
        let at = self.pollers.vacancy();
        let mut wakes = Wakes::attached_to(&self.epoll, at as u32);
        let attached = moving.poller.attached(&mut wakes);
        if attached.is_err() {
            wakes.clear();
        }
        (at, wakes, attached)
    }

    fn put_in(&mut self, at: usize, moving: DetachedPoller<P>, wakes: Wakes, is_registered: bool) {
        let id = moving.route.id;
        self.pollers.insert(at, moving.poller, wakes, is_registered);
        self.drr.reset(at);
        self.drr.charge(at, moving.debt);
        if self.members.len() <= at {
            self.members.resize_with(at + 1, || None);
        }
        self.shared_stats
            .pollers()
            .push(Arc::clone(&moving.shared_stats));
        self.shared_stats.core.0.attached.add(1);
        self.members[at] = Some(Member {
            route: moving.route,
            shared_stats: moving.shared_stats,
        });
        self.slots.insert(id, at);
        for message in moving.undelivered {
            self.deliver(at, message);
        }
        self.drr.activate(at);
    }

    /// Detaches the pollers that are to leave and may. Busy if only a concurrent sender prevented
    /// one.
    #[cold]
    pub(crate) fn detach_leaving(&mut self) -> Activity {
        let mut activity = Activity::Idle;
        for leaving in std::mem::take(&mut self.leaving) {
            let Some(&at) = self.slots.get(&leaving.id) else {
                // The sender of its answer is dropped with it.
                continue;
            };
            let detach_reason = leaving.to.detach_reason();
            if !self.pollers.touch(at).poller.may_detach(detach_reason) {
                self.leaving.push(leaving);
                continue;
            }
            activity = Activity::Busy;
            if let Some(back) = self.detach(at, leaving) {
                self.leaving.push(back);
            }
        }
        activity
    }

    /// Moves a poller out, or returns the request if a thread is sending to the poller right now.
    fn detach(&mut self, at: usize, leaving: Leaving<P>) -> Option<Leaving<P>> {
        let member = self.members[at].as_ref().expect("a slot with a poller");
        let route = Arc::clone(&member.route);
        let mut leaving = Some(leaving);
        route.redirect(|to| {
            let leaving = leaving.take().expect("once");
            let undelivered = self.collect_undelivered(leaving.id);
            match leaving.to {
                Destination::Owner(owner) => {
                    *to = None;
                    undelivered
                        .into_iter()
                        .for_each(|message| self.deliver(at, message));
                    // The receiver may be gone: then the poller is dropped.
                    let _ = owner.send(self.take_out(at).poller);
                }
                Destination::Core(port, answer) => {
                    let mut moving = self.take_out(at);
                    moving.undelivered = undelivered;
                    let has_gone = match port.command(CoreCommand::Receive(moving)) {
                        Ok(()) => {
                            *to = Some(port.sender);
                            true
                        }
                        // That core has ended: stay.
                        Err(CoreCommand::Receive(moving)) => {
                            self.receive(moving);
                            false
                        }
                        Err(_) => unreachable!("it is the order that was sent"),
                    };
                    let _ = answer.send(has_gone);
                }
            }
        });
        leaving
    }

    /// Empties the mailbox and returns the messages for `id`. The rest is delivered before any
    /// later one.
    fn collect_undelivered(&mut self, id: u64) -> Vec<P::Message> {
        let mut mine = Vec::new();
        let mut others = std::mem::take(&mut self.stash);
        // As in `take_orders`, an order to receive another poller may still be pending; its
        // messages are stashed.
        others.extend(self.receiver.drain());
        for addressed in others {
            if addressed.poller == id {
                self.shared_stats.heartbeat.0.mail_taken.add(1);
                mine.push(addressed.message);
            } else {
                self.stash.push_back(addressed);
            }
        }
        mine
    }

    fn take_out(&mut self, at: usize) -> DetachedPoller<P> {
        let debt = u64::try_from(-self.drr.deficit(at)).unwrap_or(0);
        let poller = self.pollers.remove(at);
        self.drr.remove(at);
        let member = self.members[at].take().expect("a slot with a poller");
        let id = member.route.id;
        self.slots.remove(&id);
        self.shared_stats
            .pollers()
            .retain(|shared_stats| shared_stats.id != id);
        self.shared_stats.core.0.detached.add(1);
        DetachedPoller {
            poller,
            route: member.route,
            shared_stats: member.shared_stats,
            undelivered: Vec::new(),
            debt,
        }
    }
}
