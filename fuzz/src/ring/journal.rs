//! A journal that checks the order of its notifications, and the state that its successor starts
//! with.

use std::sync::{Arc, Mutex, MutexGuard};

use vio::ring::{Journal, JournalError, RawDescriptor, Ring, RingPosition, RingStart};

/// Number of requests in flight above which it refuses.
const ROOM: usize = 24;

/// One request in flight.
#[derive(Clone, Debug)]
struct Entry {
    head: u16,
    slot: u16,
    descs: Vec<RawDescriptor>,
    is_complete: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Requests in flight, in the order of taking.
    entries: Vec<Entry>,
    next_slot: u16,
    refused: bool,
    /// Inside a publish, and how far: completes, the batch closed, forgotten.
    is_publishing: bool,
    completed: u16,
    is_closed: bool,
    is_committed: bool,
}

/// The harness's end.
#[derive(Clone, Debug, Default)]
pub(super) struct Record(Arc<Mutex<State>>);

/// The ring's end.
struct JournalHandle(Record);

impl Record {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("a panic has ended the run")
    }

    /// A journal in which these heads are in flight already.
    pub(super) fn with(heads: &[u16]) -> Self {
        let record = Self::default();
        let mut state = record.state();
        state.entries = heads
            .iter()
            .map(|&head| Entry {
                head,
                slot: 0,
                descs: Vec::new(),
                is_complete: false,
            })
            .collect();
        drop(state);
        record
    }

    pub(super) fn journal(&self) -> Box<dyn Journal> {
        Box::new(JournalHandle(self.clone()))
    }

    /// Whether it has refused a request.
    pub(super) fn is_refusing(&self) -> bool {
        self.state().refused
    }

    /// Whether `head`, just taken, was recorded: unless it refused.
    pub(super) fn knows(&self, head: u16, ring: &Ring) -> bool {
        let state = self.state();
        if state.refused {
            return false;
        }
        let last = state.entries.last().expect("something was taken");
        assert_eq!(last.head, head);
        assert_eq!(last.descs.is_empty(), !ring.is_packed());
        true
    }

    pub(super) fn batch_begins(&self) {
        let mut state = self.state();
        state.is_publishing = true;
        state.completed = 0;
        state.is_closed = false;
        state.is_committed = false;
    }

    /// A publish is over, in which `staged` requests were shown, or none.
    pub(super) fn batch_ended(&self, is_shown: bool, staged: u16) {
        let mut state = self.state();
        state.is_publishing = false;
        let want = if is_shown { staged } else { 0 };
        let told = (state.completed, state.is_closed, state.is_committed);
        assert_eq!(told, (want, is_shown, is_shown));
    }

    /// Returns the state with which a successor starts, and the heads that it must take first.
    pub(super) fn start(&self, position: RingPosition) -> (RingStart, Vec<u16>) {
        let state = self.state();
        let heads = state.entries.iter().map(|entry| entry.head).collect();
        let start = match position {
            RingPosition::Split {
                next_avail,
                next_used,
            } => RingStart::Split {
                next_avail,
                next_used,
                replay: state.entries.iter().map(|entry| entry.head).collect(),
            },
            RingPosition::Packed { avail, used } => RingStart::Packed {
                avail,
                used,
                replay: state
                    .entries
                    .iter()
                    .map(|entry| (entry.slot, entry.descs.clone()))
                    .collect(),
            },
        };
        (start, heads)
    }
}

impl Journal for JournalHandle {
    fn begin(&mut self, head: u16, descs: &[RawDescriptor]) -> Result<u16, JournalError> {
        let mut state = self.0.state();
        assert!(!state.is_publishing && !state.refused, "taken out of turn");
        if state.entries.len() == ROOM {
            state.refused = true;
            return Err(JournalError);
        }
        if let Some(last) = descs.last() {
            assert_eq!(last.next, head, "the buffer id is the last descriptor's");
        }
        let slot = state.next_slot;
        state.next_slot = slot.wrapping_add(1);
        state.entries.push(Entry {
            head,
            slot,
            descs: descs.to_vec(),
            is_complete: false,
        });
        Ok(slot)
    }

    fn complete(&mut self, head: u16, slot: u16) {
        let mut state = self.0.state();
        assert!(state.is_publishing && !state.is_closed);
        let entry = state.entries.iter_mut().find(|entry| {
            // A split ring names a request by its head, of which there is one; a replayed one has
            // no slot.
            let is_slot = entry.slot == slot || entry.descs.is_empty();
            entry.head == head && is_slot && !entry.is_complete
        });
        entry
            .expect("completed once, and what was begun")
            .is_complete = true;
        state.completed += 1;
    }

    fn advance(&mut self) {
        let mut state = self.0.state();
        assert!(state.is_publishing && !state.is_closed);
        state.is_closed = true;
    }

    fn commit(&mut self) {
        let mut state = self.0.state();
        assert!(state.is_closed && !state.is_committed);
        state.is_committed = true;
        state.entries.retain(|entry| !entry.is_complete);
    }
}
