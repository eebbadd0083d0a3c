//! Many mappings ended at once, as a device completes many requests at once.
//!
//! ```text
//! for each: checks, pin, clear entries ─▶ group ─▶ one submission ─┬─ wait ─▶ free each
//!                                                                 ├─ async: into the queue, each with the ticket
//!                                                                 └─ failed: into the queue, counted as stale
//! ```
//! A group has one submission and one ticket, and neighbouring ranges of it one command. That every
//! entry was cleared before the submission is program order, as in [`unmap`](MapperCore::unmap).
//! Each mapping of a group has a place in the queue in reserve, so that a failed invalidation
//! leaves each of them where a single unmap would.
//!
//! Policies that do not invalidate for a single unmap have nothing to group: deferred ones queue
//! each mapping, and optimistic ones keep it and tear down in batches anyway. Groups do not combine
//! with other cores' unmaps: a group is a batch already.

use alloc::vec::Vec;

use iova::{IovaAllocator, IovaRange, Pinned};

use super::MapperCore;
use super::error::{DmaUnmapError, UnmapManyError};
use super::policy::{Reuse, Teardown};
use super::request::Mapping;
use crate::clock::Clock;
use crate::invalidate::{Command, InvalidateError, Invalidator, merge};
use crate::table::IoMap;

/// Most mappings that share a submission; a VT-d queue of one page holds eight times as many.
const GROUP: usize = 32;

/// Mappings whose entries are cleared, before the invalidation that they share.
struct Group {
    members: [Option<(IovaRange, Pinned)>; GROUP],
    len: usize,
}

impl Group {
    const EMPTY: Self = Self {
        members: [const { None }; GROUP],
        len: 0,
    };

    fn push(&mut self, range: IovaRange, pinned: Pinned) {
        self.members[self.len] = Some((range, pinned));
        self.len += 1;
    }

    /// Takes the members out.
    fn drain(&mut self) -> impl Iterator<Item = Pinned> + '_ {
        let len = core::mem::take(&mut self.len);
        let members = self.members[..len].iter_mut();
        members.filter_map(|member| Some(member.take()?.1))
    }
}

/// A refused mapping: its place in the list, and why.
type Refused<E> = (usize, DmaUnmapError<E>);

impl<A: IovaAllocator, T: IoMap, I: Invalidator, C: Clock> MapperCore<A, T, I, C> {
    /// Ends the mappings of a list, in its order, as [`unmap`](Self::unmap) does, but with one
    /// submission for up to 32 of them, and takes those that have ended out of the list. Those that
    /// a policy tears down at once are out of the device's reach when this returns, and not before.
    ///
    /// # Errors
    /// [`UnmapManyError`]; what it names, and whatever comes behind that, is untouched and stays in
    /// the list, which begins with it. Where an invalidation has failed
    /// ([`DmaUnmapError::NotInvalidated`]) it names the first mapping of those that it was for:
    /// they are out of the list, cleared, and wait, counted as stale, as after a single unmap.
    pub fn unmap_many(
        &mut self,
        mappings: &mut Vec<Mapping>,
    ) -> Result<(), UnmapManyError<T::Error>> {
        let (mut ended, mut result) = (0, Ok(()));
        while ended < mappings.len() && result.is_ok() {
            let (count, outcome) = self.unmap_group(&mappings[ended..]);
            result = outcome.map_err(|(at, source)| UnmapManyError {
                index: ended + at,
                source,
            });
            ended += count;
        }
        mappings.drain(..ended);
        result
    }

    /// Ends some of the first mappings, at least one where nothing is refused. Returns their
    /// number, and the refusal of the one that was not ended, or not completely.
    fn unmap_group(&mut self, mappings: &[Mapping]) -> (usize, Result<(), Refused<T::Error>>) {
        let is_grouped = self.is_grouped();
        let (mut group, mut first, mut ended) = (Group::EMPTY, 0, 0);
        let mut refused = None;
        for mapping in mappings {
            // If the invalidation fails each needs a place in the queue; `begin_unmap` ensures that
            // there is one.
            if group.len == GROUP || (group.len > 0 && self.queue.room() <= group.len) {
                break;
            }
            let outcome = match is_grouped {
                true => self.clear_for(mapping, &mut group),
                false => self.unmap_ref(mapping),
            };
            match outcome {
                Ok(()) if group.len == 0 => first = ended + 1,
                Ok(()) => {}
                Err(error @ DmaUnmapError::NotInvalidated { .. }) => {
                    // It has ended, on its own.
                    return (ended + 1, Err((ended, error)));
                }
                Err(error) => {
                    refused = Some((ended, error));
                    break;
                }
            }
            ended += 1;
        }
        if let Err(source) = self.invalidate_group(group) {
            let iova = mappings[first].iova;
            return (
                ended,
                Err((first, DmaUnmapError::NotInvalidated { iova, source })),
            );
        }
        (ended, refused.map_or(Ok(()), Err))
    }

    /// Whether a single unmap would invalidate.
    fn is_grouped(&self) -> bool {
        let policy = &self.shared.policy;
        !matches!(policy.teardown, Teardown::Deferred(_))
            && !matches!(policy.reuse, Reuse::Optimistic(_))
    }

    /// Clears the entries of a mapping and adds it to a group; nothing, where others use it still,
    /// or there is no translation.
    fn clear_for(
        &mut self,
        mapping: &Mapping,
        group: &mut Group,
    ) -> Result<(), DmaUnmapError<T::Error>> {
        let Some((range, pinned)) = self.begin_unmap(mapping)? else {
            return Ok(());
        };
        if let Err(error) = self.shared.table.unmap(range) {
            return self.not_mapped(pinned, error);
        }
        group.push(range, pinned);
        Ok(())
    }

    /// One submission for all of a group, and what follows it for each.
    fn invalidate_group(&mut self, mut group: Group) -> Result<(), InvalidateError> {
        if group.len == 0 {
            return Ok(());
        }
        let mut ranges = [None; GROUP];
        for (range, member) in ranges.iter_mut().zip(&group.members) {
            *range = member.as_ref().map(|(range, _)| *range);
        }
        let mut commands = [Command::Domain; GROUP];
        let commands = merge(&mut ranges[..group.len], &mut commands);
        let commands = match commands.len() >= self.shared.invalidator.whole_domain_from() {
            true => &[Command::Domain],
            false => commands,
        };
        let submitted = self.shared.invalidator.submit(commands);
        if let Teardown::Async(_) = self.shared.policy.teardown {
            return self.queue_submitted(group.drain(), submitted);
        }
        let done = submitted.and_then(|ticket| self.shared.invalidator.wait(ticket));
        self.free_invalidated(group.drain(), done)
    }
}
