//! One session's IOTLB, seen by the link thread: messages that the back end has not answered, and
//! its own requests.
//!
//! Messages are sent without waiting for the answers of those before, at most [`AWAITED`] at a
//! time: the answer to an invalidation takes as long as the back end's requests in its range.
//! Answers come in order. A miss is answered when its entry is in place, misses in their order.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use vhost_user::chain;
use vhost_user::frontend::{BackEndChannel, CallError, ChannelError, Connection, Reply};
use vhost_user::wire::{BackendRequest, IotlbMessage, IotlbRange, Request, RequestId};

use crate::exchange::{Command, Exchange, Invalidation, MISSES, Question};
use crate::memory::user_addr;

/// Messages without an answer from which on no further command is taken.
const AWAITED: usize = 64;

/// Reason why a session ends.
pub(crate) enum SessionError {
    /// The connection has failed; another one may succeed.
    Connection(String),
    /// The back end may go on using an entry that was invalidated: the device cannot go on.
    Unforgotten(String),
}

impl From<CallError> for SessionError {
    fn from(error: CallError) -> Self {
        Self::Connection(chain(&error))
    }
}

impl From<ChannelError> for SessionError {
    fn from(error: ChannelError) -> Self {
        Self::Connection(chain(&error))
    }
}

/// A message that has not been answered.
#[derive(Debug)]
enum Awaited {
    Update {
        miss: Option<u64>,
    },
    /// An invalidation, with the hold that ends with its answer.
    Invalidate {
        range: IotlbRange,
        hold: Option<u64>,
    },
}

/// A miss that has not been answered, or whose answer waits for those before.
#[derive(Debug)]
struct Miss {
    number: u64,
    request: BackendRequest,
    needs_answer: bool,
    outcome: Option<bool>,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct IotlbSession {
    channel: BackEndChannel,
    awaited: VecDeque<Awaited>,
    /// Since when the first of them is waited for.
    since: Instant,
    misses: VecDeque<Miss>,
    next_miss: u64,
}

impl IotlbSession {
    pub fn new(channel: BackEndChannel) -> Self {
        Self {
            channel,
            awaited: VecDeque::new(),
            since: Instant::now(),
            misses: VecDeque::new(),
            next_miss: 1,
        }
    }

    /// Whether another command may be carried out.
    pub fn has_room(&self) -> bool {
        self.awaited.len() < AWAITED
    }

    /// Whether every message sent to it has been answered.
    pub fn is_settled(&self) -> bool {
        self.awaited.is_empty()
    }

    /// The channel's socket, if a request from it would be taken.
    pub fn requests(&self) -> Option<&OwnedFd> {
        (self.misses.len() < MISSES).then(|| self.channel.socket())
    }

    /// Restarts the time limit of answers: until now the back end could not answer.
    pub fn answers_begin(&mut self) {
        self.since = Instant::now();
    }

    /// Returns the time at which the first answer is overdue.
    pub fn deadline(&self, limit: Duration) -> Option<Instant> {
        (!self.is_settled()).then(|| self.since + limit)
    }

    /// The first answer is overdue.
    pub fn overdue(&self) -> SessionError {
        match self.awaited.front() {
            Some(Awaited::Invalidate { range, .. }) => {
                SessionError::Unforgotten(unforgotten(*range, "does not say that it has forgotten"))
            }
            _ => SessionError::Connection("it does not answer an entry of its IOTLB".into()),
        }
    }

    fn send(
        &mut self,
        connection: &mut Connection,
        message: IotlbMessage,
        awaited: Awaited,
    ) -> Result<(), SessionError> {
        if self.is_settled() {
            self.since = Instant::now();
        }
        connection.send(Request::Iotlb(message))?;
        self.awaited.push_back(awaited);
        Ok(())
    }

    /// Carries out a command that is the IOTLB's.
    pub fn obey(
        &mut self,
        connection: &mut Connection,
        command: Command,
    ) -> Result<(), SessionError> {
        match command {
            Command::Update { miss, entry } => {
                let message = IotlbMessage::Update {
                    range: entry.range,
                    user_addr: user_addr(entry.gpa),
                    access: entry.access,
                };
                self.send(connection, message, Awaited::Update { miss })
            }
            Command::Invalidate(Invalidation { ranges, hold }) => {
                let last = ranges.len() - 1;
                for (at, range) in ranges.into_iter().enumerate() {
                    // Answers come in order, so the last is the last.
                    let hold = hold.filter(|_| at == last);
                    let awaited = Awaited::Invalidate { range, hold };
                    self.send(connection, IotlbMessage::Invalidate { range }, awaited)?;
                }
                Ok(())
            }
            Command::Refuse { miss } => self.resolve(miss, false),
            Command::Rings { .. } => unreachable!("the link's own"),
        }
    }

    /// Takes the answers that have come. Whether holds have ended.
    pub fn take_answers(
        &mut self,
        connection: &mut Connection,
        exchange: &Exchange,
    ) -> Result<bool, SessionError> {
        let mut has_released = false;
        while !self.is_settled() {
            let Some(reply) = connection.reply(RequestId::IOTLB_MSG)? else {
                return Ok(has_released);
            };
            let is_ok = matches!(reply, Reply::Ack { is_ok: true });
            if let Some(&Awaited::Invalidate { range, .. }) = self.awaited.front()
                && !is_ok
            {
                let why = unforgotten(range, "says that it has not forgotten");
                return Err(SessionError::Unforgotten(why));
            }
            self.since = Instant::now();
            match self.awaited.pop_front() {
                Some(Awaited::Update { miss: Some(miss) }) => self.resolve(miss, is_ok)?,
                Some(Awaited::Invalidate {
                    hold: Some(hold), ..
                }) => {
                    exchange.release(hold);
                    has_released = true;
                }
                // One that was not asked for, and that it does not want.
                Some(Awaited::Update { miss: None } | Awaited::Invalidate { .. }) | None => {}
            }
        }
        Ok(has_released)
    }

    /// Takes requests of the back end, a bounded number. Returns whether the owner is asked.
    pub fn take_requests(&mut self, exchange: &Exchange) -> Result<bool, SessionError> {
        let mut has_asked = false;
        while self.requests().is_some()
            && let Some((request, needs_answer)) = self.channel.receive()?
        {
            let number = self.next_miss;
            self.next_miss += 1;
            let outcome = match request {
                BackendRequest::Iotlb(IotlbMessage::Miss { iova, access }) => {
                    exchange.ask(Question::Miss {
                        number,
                        iova,
                        access,
                    });
                    has_asked = true;
                    None
                }
                // It reports an access that it has not made.
                BackendRequest::Iotlb(_) => Some(true),
                // Not negotiated.
                BackendRequest::ConfigChange => Some(false),
            };
            self.misses.push_back(Miss {
                number,
                request,
                needs_answer,
                outcome,
            });
            self.answer()?;
        }
        Ok(has_asked)
    }

    fn resolve(&mut self, number: u64, is_done: bool) -> Result<(), SessionError> {
        if let Some(miss) = self.misses.iter_mut().find(|miss| miss.number == number) {
            miss.outcome = Some(is_done);
        }
        self.answer()
    }

    /// Answers requests in order, as far as their answers are known.
    fn answer(&mut self) -> Result<(), SessionError> {
        while let Some(outcome) = self.misses.front().and_then(|miss| miss.outcome) {
            let miss = self.misses.pop_front().expect("it was looked at");
            if miss.needs_answer {
                self.channel.answer(&miss.request, outcome)?;
            }
        }
        Ok(())
    }

    /// Ends the session, and with it the holds of unanswered invalidations: its entries are gone.
    pub fn end(self, exchange: &Exchange) {
        for awaited in self.awaited {
            if let Awaited::Invalidate {
                hold: Some(hold), ..
            } = awaited
            {
                exchange.release(hold);
            }
        }
    }
}

fn unforgotten(range: IotlbRange, what: &str) -> String {
    let IotlbRange { first, last } = range;
    format!("it {what} its mappings of {first:#x} to {last:#x}")
}
