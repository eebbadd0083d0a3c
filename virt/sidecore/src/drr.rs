//! Deficit round robin over the active pollers of one core: the order of the visits, and the budget
//! of each.
//!
//! After Shreedhar and Varghese, "Efficient Fair Queueing Using Deficit Round Robin" (SIGCOMM
//! 1995), with costs that are known only after the work:
//!
//! ```text
//! round:  each flow in the ring: deficit += quantum × weight
//!                                deficit > 0:  visit it with that budget;  deficit −= its charges
//! ```
//! - A visit may overdraw its budget by its last piece of work. The **debt** stays, and the flow is
//!   passed over until later rounds have repaid it. Debts outlive idleness: rounds that pass
//!   meanwhile count as repayment.
//! - The rest of a budget is kept while the flow stays backlogged (at most [`KEPT_QUANTA`] quanta);
//!   idleness forfeits it.
//! - When all backlogged flows are in debt, the rounds in which none could be served are skipped at
//!   once.
//! - A waiting flow (nothing to do, but visited each round) is visited with one quantum, whatever
//!   its debt, if no flow is backlogged.
//! - A flow that becomes active again is visited **before** those in the ring, also in the middle
//!   of a round, within its quantum of this round: the rest that it left when it became idle stays
//!   its own until the round ends. Once that is used up, it is the first of the next round, not the
//!   last: a flow that has used its share waits for the others' turns of this round, but not for
//!   their next ones. So a flow that asks for little is served at once, and one that alternates
//!   between idle and active gets no more than one that stays active. (MacGregor and Shi, "Deficits
//!   for Bursty Latency-Critical Flows: DRR++", ICON 2000; the new flows of FQ-CoDel, RFC 8290.)
//! - A visit that is **cut short** for such a flow continues after it, in the same round, with the
//!   rest of its budget.
//!
//! Over any time in which two flows stay backlogged, their service differs, per weight, by no more
//! than two quanta and the largest pieces of work, up to [`MAX_DEBT`].
//!
//! Pure: costs are in cost units (nanoseconds) as the caller measures or estimates them, and there
//! is no clock. Owned by the loop in `run.rs`.

/// Share of a flow of weight 1 per round, in cost units: 32 small requests, or a burst of frames
/// there and back. A flow with little to do does not wait for it: see above.
pub(crate) const QUANTUM: u64 = 6_400;
/// Quanta that a backlogged flow may save.
const KEPT_QUANTA: i64 = 2;
/// Largest debt: 10 ms of the core, or 100 MB moved in one visit.
const MAX_DEBT: i64 = 10_000_000;
/// Largest weight; with the largest quantum (1 s) and all factors, far from overflow.
const MAX_WEIGHT: u32 = 10_000;

use std::collections::VecDeque;

/// A flow's number.
pub(crate) type FlowId = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not in the ring.
    Away,
    /// In the ring, with work.
    Backlogged,
    /// In the ring, without.
    Waiting,
}

#[derive(Clone, Debug)]
struct Flow {
    deficit: i64,
    weight: u32,
    state: State,
    /// Round in which it became idle.
    left: u64,
    /// Last round that gave it a quantum.
    granted: u64,
}

/// A visit to a flow, and its budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) flow: FlowId,
    /// Cost units, at least 1.
    pub(crate) budget: u64,
}

/// A flow, and the reason for its visit.
#[derive(Clone, Copy, Debug, Default)]
struct QueuedFlow {
    flow: FlowId,
    /// It has become active again, and is not in the ring.
    is_woken: bool,
    /// It has become active again in the middle of a round, before others.
    is_interruption: bool,
}

/// The scheduler of one core.
#[derive(Clone, Debug)]
pub(crate) struct Drr {
    quantum: i64,
    flows: Vec<Flow>,
    /// Flows that are not away, in the order of visits; `..kept` are those of this round that stay.
    ring: Vec<FlowId>,
    kept: usize,
    cursor: usize,
    /// Flows that have become active again and have budget left in this round: visited before those
    /// of the ring, and not in it.
    woken: VecDeque<FlowId>,
    /// Flows that have become active again and have no budget left in this round: the first of the
    /// ring in the next one.
    first: Vec<FlowId>,
    /// Flows of `woken` that were visited while others had work, and have more to do: visited after
    /// those that become active meanwhile, and before the flow that was interrupted.
    again: VecDeque<QueuedFlow>,
    /// Flows whose visits were cut short, each for the one behind it. One that belongs to the ring
    /// has not been kept yet.
    cut: Vec<QueuedFlow>,
    /// Deficit of the flow being visited, before the visit.
    budget: i64,
    /// The flow being visited.
    place: QueuedFlow,
    is_in_round: bool,
    round: u64,
    /// Number of backlogged flows: counted during a round for the next one.
    backlogged: usize,
    /// Number of backlogged flows of this round: at its beginning, and those that have come since.
    contenders: usize,
    /// Number of rounds granted at once in this round.
    grants: i64,
    /// A backlogged flow was visited in this round.
    has_served: bool,
}

impl Drr {
    pub(crate) fn new(quantum: u64) -> Self {
        Drr {
            quantum: quantum.clamp(1, 1_000_000_000) as i64,
            flows: Vec::new(),
            ring: Vec::new(),
            kept: 0,
            cursor: 0,
            woken: VecDeque::new(),
            first: Vec::new(),
            again: VecDeque::new(),
            cut: Vec::new(),
            budget: 0,
            place: QueuedFlow::default(),
            is_in_round: false,
            round: 0,
            backlogged: 0,
            contenders: 0,
            grants: 1,
            has_served: true,
        }
    }

    /// Adds flow `flow`, away and without debt.
    pub(crate) fn reset(&mut self, flow: FlowId) {
        self.remove(flow);
        while self.flows.len() <= flow {
            self.flows.push(Flow {
                deficit: 0,
                weight: 1,
                state: State::Away,
                left: 0,
                granted: 0,
            });
        }
        self.flows[flow].deficit = 0;
    }

    /// Removes a flow, between rounds.
    pub(crate) fn remove(&mut self, flow: FlowId) {
        let Some(of) = self.flows.get_mut(flow) else {
            return;
        };
        self.backlogged -= usize::from(of.state == State::Backlogged);
        if of.state != State::Away {
            self.ring.retain(|&at| at != flow);
            self.woken.retain(|&at| at != flow);
            self.first.retain(|&at| at != flow);
        }
        of.state = State::Away;
        of.left = self.round;
    }

    /// Returns whether a flow has work.
    pub(crate) fn has_backlogged(&self) -> bool {
        self.backlogged > 0
    }

    /// Returns the sum of the weights of the flows that have work.
    pub(crate) fn hungry_weight(&self) -> u32 {
        let backlogged = self.flows.iter().filter(|of| of.state == State::Backlogged);
        backlogged.fold(0, |sum, of| sum.saturating_add(of.weight))
    }

    /// Returns whether a flow other than this one, which is being visited, has had work since
    /// before the visit.
    pub(crate) fn is_contended(&self, flow: FlowId) -> bool {
        self.contenders > usize::from(self.flows[flow].state == State::Backlogged)
    }

    /// Returns whether a visit is to be cut short for this flow, should it have work.
    #[inline]
    pub(crate) fn may_interrupt(&self, flow: FlowId) -> bool {
        let of = &self.flows[flow];
        of.state == State::Away
            && match of.granted == self.round {
                true => of.deficit > 0,
                false => self.repaid(of) > -self.quantum * i64::from(of.weight),
            }
    }

    /// Returns whether the flow that is being visited has become active in the middle of this
    /// round, before others.
    pub(crate) fn is_interruption(&self) -> bool {
        self.place.is_interruption
    }

    /// Returns the deficit of a flow that is away: positive for budget, negative for debt. A
    /// quantum that it is yet to get in a round under way does not count.
    fn repaid(&self, of: &Flow) -> i64 {
        if self.is_in_round && of.left == self.round {
            // Left over from the quantum of this round.
            return of.deficit;
        }
        let passed = self.round - of.left - u64::from(self.is_in_round);
        let rounds = i64::try_from(passed).unwrap_or(i64::MAX);
        let repaid = rounds.saturating_mul(self.quantum * i64::from(of.weight));
        of.deficit.saturating_add(repaid).min(0)
    }

    /// Returns its remaining budget (negative: its debt), in cost units.
    pub(crate) fn deficit(&self, flow: FlowId) -> i64 {
        self.flows[flow].deficit
    }

    pub(crate) fn set_weight(&mut self, flow: FlowId, weight: u32) {
        self.flows[flow].weight = weight.clamp(1, MAX_WEIGHT);
    }

    /// Handles that a flow has got work. In a round: only a flow that was away.
    pub(crate) fn activate(&mut self, flow: FlowId) {
        let of = &self.flows[flow];
        if of.state == State::Backlogged {
            return;
        }
        if of.state == State::Away {
            self.flows[flow].deficit = self.repaid(of);
            self.woken.push_back(flow);
        }
        self.flows[flow].state = State::Backlogged;
        match self.is_in_round {
            true => {
                // It is counted for the next round when it is visited.
                self.contenders += 1;
                self.grant(flow, 1);
            }
            false => self.backlogged += 1,
        }
    }

    /// Calls `activate`, unless the flow is in the ring already.
    #[inline]
    pub(crate) fn wake(&mut self, flow: FlowId) {
        if self.flows[flow].state == State::Away {
            self.activate(flow);
        }
    }

    /// Takes `cost` off its account, in or between visits.
    pub(crate) fn charge(&mut self, flow: FlowId, cost: u64) {
        let of = &mut self.flows[flow];
        if of.state == State::Away && !self.is_in_round {
            // Idleness has forfeited the rest of its budget.
            of.deficit = of.deficit.min(0);
        }
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        of.deficit = of.deficit.saturating_sub(cost).max(-MAX_DEBT);
    }

    /// Begins a round. A sweep of a core without backlogged flows is a round too, which repays
    /// debts.
    pub(crate) fn begin_round(&mut self) {
        self.round += 1;
        self.is_in_round = true;
        self.contenders = self.backlogged;
        self.grants = match self.backlogged {
            // Without backlogged flows no flow waits for a debt to be repaid: as many rounds as the
            // largest debt takes, and one whose quantum may be used.
            0 => MAX_DEBT / self.quantum + 2,
            _ => 1,
        };
        if self.backlogged > 0 && !self.has_served {
            self.skip_rounds();
        }
        self.has_served = false;
        self.backlogged = 0;
        (self.kept, self.cursor) = (0, 0);
        if !self.first.is_empty() {
            self.ring.splice(..0, self.first.drain(..));
        }
    }

    /// Skips the rounds in which all backlogged flows are in debt: as many as it takes until one is
    /// not.
    #[cold]
    fn skip_rounds(&mut self) {
        let needed = self
            .first
            .iter()
            .chain(&self.woken)
            .chain(&self.ring)
            .map(|&flow| &self.flows[flow])
            .filter(|of| of.state == State::Backlogged)
            .map(|of| -of.deficit / (self.quantum * i64::from(of.weight)) + 1)
            .min();
        self.grants = needed.unwrap_or(1).max(self.grants);
    }

    /// Returns the next flow to visit in this round. The caller must [`finish`](Self::finish) the
    /// visit, or [`cut`](Self::cut) it short, before the next call.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Grant> {
        // Most sweeps of an idle core end here.
        let is_over = self.woken.is_empty() && self.again.is_empty() && self.cut.is_empty();
        if is_over && self.ring.is_empty() {
            self.is_in_round = false;
            return None;
        }
        self.next_of_some()
    }

    fn next_of_some(&mut self) -> Option<Grant> {
        while let Some(flow) = self.woken.pop_front() {
            self.place = QueuedFlow {
                flow,
                is_woken: true,
                is_interruption: !self.grant(flow, self.grants),
            };
            if let Some(visit) = self.visit(flow) {
                return Some(visit);
            }
            self.begins_next(flow);
        }
        while let Some(place) = self.again.pop_front().or_else(|| self.cut.pop()) {
            self.place = place;
            if let Some(visit) = self.visit(place.flow) {
                return Some(visit);
            }
            match place.is_woken {
                true => self.begins_next(place.flow),
                false => self.keep(place.flow),
            }
        }
        while let Some(&flow) = self.ring.get(self.cursor) {
            self.cursor += 1;
            self.place = QueuedFlow {
                flow,
                ..QueuedFlow::default()
            };
            if self.grant(flow, self.grants)
                && let Some(visit) = self.visit(flow)
            {
                return Some(visit);
            }
            self.keep(flow);
        }
        if self.kept < self.ring.len() {
            self.ring.truncate(self.kept);
        }
        self.is_in_round = false;
        None
    }

    /// Gives `flow` the quanta of this round, unless it has had them; returns whether it gave them.
    fn grant(&mut self, flow: FlowId, quanta: i64) -> bool {
        let of = &mut self.flows[flow];
        if of.granted == self.round {
            return false;
        }
        of.granted = self.round;
        let quantum = self.quantum * i64::from(of.weight);
        let most = match of.state {
            State::Backlogged => quantum * KEPT_QUANTA.max(quanta),
            _ => quantum,
        };
        of.deficit = (of.deficit + quantum.saturating_mul(quanta)).min(most);
        true
    }

    /// Returns a visit to `flow`; `None` if it is in debt.
    fn visit(&mut self, flow: FlowId) -> Option<Grant> {
        let of = &self.flows[flow];
        if of.deficit <= 0 {
            return None;
        }
        self.has_served |= of.state == State::Backlogged;
        self.budget = of.deficit;
        Some(Grant {
            flow,
            budget: of.deficit as u64,
        })
    }

    /// Ends the visit with the flow's new state.
    pub(crate) fn finish(&mut self, flow: FlowId, state: State) {
        let of = &mut self.flows[flow];
        of.state = state;
        match state {
            State::Backlogged => {}
            State::Waiting => of.deficit = of.deficit.min(0),
            State::Away => {
                of.left = self.round;
                return;
            }
        }
        // A flow that was charged nothing would be visited for ever.
        let has_more = (1..self.budget).contains(&of.deficit);
        match self.place.is_woken {
            false => self.keep(flow),
            // Kept when the round comes to it, where it was visited already.
            true if state == State::Waiting => self.ring.push(flow),
            // If it is the only one, the round ends, so that the core polls its other sources.
            true if has_more && self.is_contended(flow) => self.again.push_back(self.place),
            true => self.begins_next(flow),
        }
    }

    /// Cuts the visit short for a flow that [may interrupt it](Self::may_interrupt), and is
    /// activated next: `flow` has more to do, and continues after it.
    pub(crate) fn cut(&mut self, flow: FlowId) {
        let of = &mut self.flows[flow];
        if of.state != State::Backlogged {
            of.state = State::Backlogged;
            self.contenders += 1;
        }
        self.cut.push(self.place);
    }

    /// Puts `flow`, of `woken`, into the ring, before those that are there.
    fn begins_next(&mut self, flow: FlowId) {
        self.backlogged += usize::from(self.flows[flow].state == State::Backlogged);
        self.first.push(flow);
    }

    /// Keeps `flow` in the ring.
    fn keep(&mut self, flow: FlowId) {
        self.backlogged += usize::from(self.flows[flow].state == State::Backlogged);
        self.ring[self.kept] = flow;
        self.kept += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
