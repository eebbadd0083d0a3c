//! Rings stopped over a connection, with the back end's IOTLB served meanwhile.
//!
//! A request may need a translation to end: its status, or its place in the used ring. So misses
//! are answered while GET_VRING_BASE is not. Their updates are sent behind it, and answered behind
//! it. A back end that takes one message after the other receives them too late, and is stopped as
//! if they were not answered; one that takes updates ahead of others (`vhost-export`) ends its
//! requests.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use vhost_user::chain;
use vhost_user::frontend::Connection;

use super::Link;
use crate::iotlb::IotlbSession;

impl Link {
    /// Stops the rings, and returns the position of each. `None`: the connection is lost.
    pub(super) fn stop_rings(&mut self) -> Option<Vec<u16>> {
        let rings = &self.active.as_ref()?.activation.rings;
        let indices: Vec<u16> = rings.iter().map(|ring| ring.index).collect();
        let mut bases = Vec::with_capacity(indices.len());
        for index in indices {
            // Messages that were sent while the ring before was stopped have to be answered first.
            if !self.settle() {
                return None;
            }
            let connection = self.connection.as_mut()?;
            if let Err(error) = connection.begin_stop(index.into()) {
                self.lose(&chain(&error));
                return None;
            }
            bases.push(self.stopped(index)?);
            if let Some(iotlb) = &mut self.iotlb {
                iotlb.answers_begin();
            }
        }
        self.settle().then_some(bases)
    }

    /// Waits until a ring has stopped.
    fn stopped(&mut self, index: u16) -> Option<u16> {
        loop {
            self.obey_commands();
            self.take_requests();
            let connection = self.connection.as_mut()?;
            match connection.ring_stopped(index.into()) {
                Ok(Some(base)) => {
                    let place = u16::try_from(base).ok();
                    if place.is_none() {
                        self.lose("it says that a ring stands where there is no entry");
                    }
                    return place;
                }
                Ok(None) => self.wait_for_stop(),
                // It has died, or the owner has abandoned the stop: nothing but closing the socket
                // can notify the back end.
                Err(error) => {
                    self.lose(&chain(&error));
                    return None;
                }
            }
        }
    }

    /// Waits until a message of the back end or an order or command of the owner has come, or the
    /// owner has abandoned the stop.
    fn wait_for_stop(&mut self) {
        let Some(connection) = &self.connection else {
            return;
        };
        let mut fds = vec![
            PollFd::new(Connection::socket(connection), PollFlags::IN),
            PollFd::new(&self.shared.cancel, PollFlags::IN),
            PollFd::new(self.shared.orders_fd(), PollFlags::IN),
        ];
        if let Some(requests) = self.iotlb.as_ref().and_then(IotlbSession::requests) {
            fds.push(PollFd::new(requests, PollFlags::IN));
        }
        // An error is looked at again, by what it was waited for.
        let _ = poll(&mut fds, None);
        let is_ready = |at: usize| !fds[at].revents().is_empty();
        let (is_cancelled, is_ordered) = (is_ready(1), is_ready(2));
        drop(fds);
        if is_ordered {
            // Commands are looked at next, and orders when this one has been carried out, whether
            // or not they wake.
            sidecore::drain_eventfd(self.shared.orders_fd().as_fd());
        }
        if is_cancelled {
            self.lose("it is not waited for any more");
        }
    }
}
