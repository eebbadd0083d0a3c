//! Interrupt messages on their way through remapping.
//!
//! A message is resolved after the call that raised it. Where the remapping table is absent it
//! waits here for the ticket; equal messages that wait are one, as in a local APIC's request
//! register.

use std::sync::Arc;

use guest_mem::{Access, PhysMem, SourceId, Stop, Ticket};
use platform::interrupt::{InterruptSink, Message};

use crate::function::ResolveFunction;
use crate::unit::{RemappingUnit, ResolveUnit, UnitVisitor};

/// Limit on the messages that wait. No guest's tables need more vectors at a time; messages beyond
/// the limit are lost and counted as blocked.
const MOST: usize = 4096;

/// Something that waits for a remapping table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// A message.
    Message {
        /// Number of the unit.
        unit: usize,
        /// Its requester.
        source: SourceId,
        /// The message.
        message: Message,
    },
    /// The message of a function's interrupt line.
    Line {
        /// The function's number.
        function: usize,
        /// The line.
        line: u16,
    },
}

/// Path of interrupts from functions to the local APICs.
pub struct Interrupts {
    sink: Arc<dyn InterruptSink>,
    sent: u64,
    blocked: u64,
    pending: Vec<(Ticket, Pending)>,
}

struct Remap<'a, M> {
    mem: &'a M,
    source: SourceId,
    message: Message,
}

impl<C, M: PhysMem> UnitVisitor<C> for Remap<'_, M> {
    type Out = Access<Message>;

    #[inline]
    fn visit<U: RemappingUnit<C>>(self, unit: &mut U) -> Access<Message> {
        unit.remap(self.mem, self.source, self.message)
    }
}

impl Interrupts {
    pub fn new(sink: Arc<dyn InterruptSink>) -> Self {
        Self {
            sink,
            sent: 0,
            blocked: 0,
            pending: Vec::new(),
        }
    }

    pub fn sink(&self) -> &dyn InterruptSink {
        &*self.sink
    }

    /// Messages sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Messages that remapping refused.
    pub fn blocked(&self) -> u64 {
        self.blocked
    }

    /// Sends `message` of `source` through unit number `at`.
    pub fn send<U: ResolveUnit, M: PhysMem>(
        &mut self,
        at: usize,
        unit: &mut U,
        mem: &M,
        source: SourceId,
        message: Message,
    ) {
        match unit.with(Remap {
            mem,
            source,
            message,
        }) {
            Ok(remapped) => {
                self.sent += 1;
                self.sink.send(source, remapped);
            }
            Err(Stop::Pending(ticket)) => self.wait(
                ticket,
                Pending::Message {
                    unit: at,
                    source,
                    message,
                },
            ),
            Err(Stop::Fault(_)) => self.blocked += 1,
        }
    }

    /// Connects each of `lines` of function number `number` to its remapped message. While that is
    /// not known, and where it is refused, signals are kept.
    pub fn connect<U: ResolveUnit, F: ResolveFunction<U::Command>, M: PhysMem>(
        &mut self,
        unit: &mut U,
        mem: &M,
        function: &mut F,
        number: usize,
        lines: &[(u16, Option<Message>)],
    ) {
        let source = function.get().source();
        let mut connected = Vec::with_capacity(lines.len());
        for &(line, message) in lines {
            let remapped = message.map(|message| {
                unit.with(Remap {
                    mem,
                    source,
                    message,
                })
            });
            let message = match remapped {
                None => None,
                Some(Ok(message)) => Some(message),
                Some(Err(Stop::Fault(_))) => {
                    self.blocked += 1;
                    None
                }
                Some(Err(Stop::Pending(ticket))) => {
                    let function = number;
                    self.wait(ticket, Pending::Line { function, line });
                    None
                }
            };
            connected.push((line, message));
        }
        function.get_mut().connect(&connected);
    }

    #[cold]
    fn wait(&mut self, ticket: Ticket, what: Pending) {
        if self.pending.iter().any(|(_, other)| *other == what) {
            return;
        }
        if self.pending.len() == MOST {
            self.blocked += 1;
        } else {
            self.pending.push((ticket, what));
        }
    }

    /// Drops what waits for function number `gone`, whose requester is `source`: the function has
    /// been removed.
    pub fn forget(&mut self, gone: usize, source: SourceId) {
        self.pending.retain(|(_, what)| match what {
            Pending::Message { source: of, .. } => *of != source,
            Pending::Line { function, .. } => *function != gone,
        });
    }

    /// Takes everything that has waited for `ticket`.
    pub fn take_pending(&mut self, ticket: Ticket) -> Vec<Pending> {
        let taken = self.pending.iter().filter(|(waits, _)| *waits == ticket);
        let taken = taken.map(|(_, what)| *what).collect();
        self.pending.retain(|(waits, _)| *waits != ticket);
        taken
    }
}
