//! Pollers come and go while their core runs.
//!
//! ```text
//! core A, at the end of a sweep, once `may_detach`:       core B:
//!   lock the poller's route (no sender is in between)
//!   empty the mailbox; keep what is for others (stash)
//!   disarm, detaching, remove from epoll
//!   order to B: take on (poller, its undelivered mail)
//!   route = B; unlock                        ─────────▶   attached, mail in order, then what is sent from now on
//! ```
//! Nothing is lost: what was sent before the lock goes along, what is sent after it comes behind the order; the
//! descriptors are level-triggered, so what they say is said again by B's epoll; and B polls a newcomer at once.
//! Orders have a channel of their own, announced like messages, and are looked at before them.

use std::{io, sync::mpsc, time::Duration};

use crate::{
    gate::Sound,
    handle::Route,
    mailbox::Outbox,
    poller::{Activity, Poller},
    run::{Core, Member},
    stats::PollerBoard,
    sync::Arc,
    sys::EventFd,
    wakes::Wakes,
};

/// A poller on its way to a core.
pub(crate) struct Passenger<P: Poller> {
    pub(crate) poller: P,
    pub(crate) route: Arc<Route<P::Message>>,
    pub(crate) board: Arc<PollerBoard>,
    /// Messages that the last core had not delivered.
    pub(crate) mail: Vec<P::Message>,
    /// Cost units that it owes.
    pub(crate) debt: u64,
}

impl<P: Poller> Passenger<P> {
    /// A new poller, for the core to which its route leads.
    pub(crate) fn new(poller: P, route: Arc<Route<P::Message>>) -> Self {
        let board = Arc::new(PollerBoard::new(route.id, poller.name()));
        Passenger {
            poller,
            route,
            board,
            mail: Vec::new(),
            debt: 0,
        }
    }
}

/// What a core is told about pollers.
pub(crate) enum Order<P: Poller> {
    /// A new one: it is given back if it cannot be attached.
    Add(Passenger<P>, mpsc::Sender<Result<(), io::Error>>),
    /// One from another core: it is kept in any case.
    TakeOn(Passenger<P>),
    Leave(Leaving<P>),
    /// The poller with this number is to stay after all, if it is still here.
    Stay(u64),
}

/// A poller that somebody wants elsewhere.
pub(crate) struct Leaving<P: Poller> {
    pub(crate) id: u64,
    pub(crate) to: Destination<P>,
}

pub(crate) enum Destination<P: Poller> {
    /// Another core; is told whether it went.
    Core(Port<P>, mpsc::Sender<bool>),
    /// Its owner. The sender is dropped if there is no such poller.
    Owner(mpsc::Sender<P>),
}

/// How to reach a core.
#[derive(Debug)]
pub(crate) struct Port<P: Poller> {
    pub(crate) outbox: Outbox<P::Message, EventFd>,
    pub(crate) orders: mpsc::Sender<Order<P>>,
}

impl<P: Poller> Clone for Port<P> {
    fn clone(&self) -> Self {
        Port {
            outbox: self.outbox.clone(),
            orders: self.orders.clone(),
        }
    }
}

impl<P: Poller> Port<P> {
    /// Gives the order back when the core has ended.
    pub(crate) fn order(&self, order: Order<P>) -> Result<(), Order<P>> {
        self.orders.send(order).map_err(|refused| refused.0)?;
        self.outbox.gate().published::<Sound>();
        Ok(())
    }
}

/// Tells the core at `port` that the poller `id` is to leave, and waits for that, `limit` long.
pub(crate) fn send_off<P: Poller, R>(
    port: &Port<P>,
    id: u64,
    limit: Duration,
    to: impl FnOnce(mpsc::Sender<R>) -> Destination<P>,
) -> Option<R> {
    let (tx, answer) = mpsc::channel();
    let to = to(tx);
    port.order(Order::Leave(Leaving { id, to })).ok()?;
    match answer.recv_timeout(limit) {
        Ok(result) => Some(result),
        Err(mpsc::RecvTimeoutError::Disconnected) => None,
        Err(mpsc::RecvTimeoutError::Timeout) => {
            // It may go at this moment: the answer says so, or its channel ends.
            port.order(Order::Stay(id)).ok()?;
            answer.recv().ok()
        }
    }
}

impl<P: Poller> Core<P> {
    pub(crate) fn take_orders(&mut self) -> Activity {
        let mut activity = Activity::Idle;
        while let Ok(order) = self.orders.try_recv() {
            self.board.pulse.0.mail_taken.add(1);
            activity = Activity::Busy;
            match order {
                Order::Add(passenger, answer) => {
                    // Nobody may be waiting any more.
                    let _ = answer.send(self.add(passenger));
                }
                Order::TakeOn(passenger) => self.take_on(passenger),
                Order::Leave(leaving) => self.leaving.push(leaving),
                // Who waits for an answer learns by the end of its channel.
                Order::Stay(id) => self.leaving.retain(|leaving| leaving.id != id),
            }
        }
        activity
    }

    /// A new poller; dropped if it cannot be attached.
    pub(crate) fn add(&mut self, mut passenger: Passenger<P>) -> io::Result<()> {
        let at = self.deck.vacancy();
        let mut wakes = Wakes::attached_to(&self.epoll, at as u32);
        if let Err(error) = passenger.poller.attached(&mut wakes) {
            wakes.clear();
            return Err(error);
        }
        self.settle(at, passenger, wakes, true);
        Ok(())
    }

    fn take_on(&mut self, mut passenger: Passenger<P>) {
        let at = self.deck.vacancy();
        let mut wakes = Wakes::attached_to(&self.epoll, at as u32);
        let is_registered = passenger.poller.attached(&mut wakes).is_ok();
        if !is_registered {
            wakes.clear();
        }
        self.settle(at, passenger, wakes, is_registered);
    }

    fn settle(&mut self, at: usize, passenger: Passenger<P>, wakes: Wakes, is_registered: bool) {
        let id = passenger.route.id;
        self.deck.insert(at, passenger.poller, wakes, is_registered);
        self.drr.reset(at);
        self.drr.charge(at, passenger.debt);
        if self.members.len() <= at {
            self.members.resize_with(at + 1, || None);
        }
        self.board.pollers().push(Arc::clone(&passenger.board));
        self.board.core.0.attached.add(1);
        self.members[at] = Some(Member {
            route: passenger.route,
            board: passenger.board,
        });
        self.slots.insert(id, at);
        for message in passenger.mail {
            self.deliver(at, message);
        }
        self.drr.activate(at);
    }

    /// Sees those off that may go. Busy if one could go but for a sender.
    #[cold]
    pub(crate) fn see_off(&mut self) -> Activity {
        let mut activity = Activity::Idle;
        for leaving in std::mem::take(&mut self.leaving) {
            let Some(&at) = self.slots.get(&leaving.id) else {
                // Its answer is dropped with it.
                continue;
            };
            if !self.deck.touch(at).poller.may_detach() {
                self.leaving.push(leaving);
                continue;
            }
            activity = Activity::Busy;
            if let Some(back) = self.depart(at, leaving) {
                self.leaving.push(back);
            }
        }
        activity
    }

    /// Moves a poller out, or gives the wish back: somebody is sending to it right now.
    fn depart(&mut self, at: usize, leaving: Leaving<P>) -> Option<Leaving<P>> {
        let member = self.members[at].as_ref().expect("a slot with a poller");
        let route = Arc::clone(&member.route);
        let mut leaving = Some(leaving);
        route.redirect(|to| {
            let leaving = leaving.take().expect("once");
            let mail = self.collect_mail(leaving.id);
            match leaving.to {
                Destination::Owner(owner) => {
                    *to = None;
                    mail.into_iter()
                        .for_each(|message| self.deliver(at, message));
                    // Who wanted it may be gone: then it is dropped.
                    let _ = owner.send(self.unsettle(at).poller);
                }
                Destination::Core(port, answer) => {
                    let mut passenger = self.unsettle(at);
                    passenger.mail = mail;
                    let has_gone = match port.order(Order::TakeOn(passenger)) {
                        Ok(()) => {
                            *to = Some(port.outbox);
                            true
                        }
                        // That core has ended: stay.
                        Err(Order::TakeOn(passenger)) => {
                            self.take_on(passenger);
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

    /// Empties the mailbox: what is for `id`. The rest is handed out before anything else.
    fn collect_mail(&mut self, id: u64) -> Vec<P::Message> {
        let mut mine = Vec::new();
        let mut others = std::mem::take(&mut self.stash);
        // As in `take_orders`, an order to take on another poller may be behind; its messages are stashed.
        while let Some(envelope) = self.inbox.take() {
            others.push_back(envelope);
        }
        for envelope in others {
            if envelope.poller == id {
                self.board.pulse.0.mail_taken.add(1);
                mine.push(envelope.message);
            } else {
                self.stash.push_back(envelope);
            }
        }
        mine
    }

    fn unsettle(&mut self, at: usize) -> Passenger<P> {
        let debt = u64::try_from(-self.drr.deficit(at)).unwrap_or(0);
        let poller = self.deck.remove(at);
        self.drr.remove(at);
        let member = self.members[at].take().expect("a slot with a poller");
        let id = member.route.id;
        self.slots.remove(&id);
        self.board.pollers().retain(|board| board.id != id);
        self.board.core.0.detached.add(1);
        Passenger {
            poller,
            route: member.route,
            board: member.board,
            mail: Vec::new(),
            debt,
        }
    }
}
