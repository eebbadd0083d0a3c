//! Who may do how much: deficit round robin over the active pollers of one core.
//!
//! After Shreedhar and Varghese, "Efficient Fair Queueing Using Deficit Round Robin" (SIGCOMM 1995), with costs that are
//! known only after the work:
//!
//! ```text
//! round:  each flow in the ring: deficit += quantum × weight
//!                                deficit > 0:  visit it with that budget;  deficit −= what it charged
//! ```
//! - A visit may overdraw its budget by its last piece of work; the **debt** stays, and the flow is passed over until later
//!   rounds have repaid it. Debts outlive idleness: rounds that pass meanwhile count as repayment.
//! - What is left of a budget is kept while the flow stays hungry (at most [`KEPT_QUANTA`] quanta); idleness forfeits it.
//! - A flow hungry alone gets [`LONE_QUANTA`] quanta per round: nobody waits, and fewer rounds cost less.
//! - When all hungry flows are in debt, the rounds in which nobody could be served are skipped at once.
//! - A waiting flow (nothing to do, to be visited each round all the same) is visited with one quantum, whatever it owes if no flow is
//!   hungry.
//!
//! Over any time in which flows stay hungry, what two of them were served differs, per weight, by no more than two quanta and the
//! largest pieces of work, up to [`MAX_DEBT`].
//!
//! Pure: costs in cost units (nanoseconds) as others measure or estimate them, no clock. Owned by the loop in `run.rs`.

/// The share of a flow of weight 1 per round, in cost units: eight small requests.
pub(crate) const QUANTUM: u64 = 1_600;
/// Quanta for a flow that is hungry alone.
const LONE_QUANTA: u64 = 4;
/// Quanta that a hungry flow may save.
const KEPT_QUANTA: i64 = 4;
/// Largest debt: 10 ms of the core, or 100 MB moved in one visit.
const MAX_DEBT: i64 = 10_000_000;
/// Largest weight; with the largest quantum (1 s) and all factors, far from overflow.
const MAX_WEIGHT: u32 = 10_000;

/// A flow's number.
pub(crate) type FlowId = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not in the ring.
    Away,
    /// In the ring, with work.
    Hungry,
    /// In the ring, without.
    Waiting,
}

#[derive(Clone, Debug)]
struct Flow {
    deficit: i64,
    weight: u32,
    state: State,
    /// The round in which it went away.
    left: u64,
}

/// One turn to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Visit {
    pub(crate) flow: FlowId,
    /// Cost units, at least 1.
    pub(crate) budget: u64,
}

/// The scheduler of one core.
#[derive(Clone, Debug)]
pub(crate) struct Drr {
    quantum: i64,
    flows: Vec<Flow>,
    /// Those not away, in the order of visits; `..kept` are those of this round that stay.
    ring: Vec<FlowId>,
    kept: usize,
    cursor: usize,
    round: u64,
    /// Hungry flows: counted during a round for the next one.
    hungry: usize,
    /// Those of this round, as it began.
    contenders: usize,
    /// Rounds granted at once in this round.
    grants: i64,
    /// A hungry flow was visited in this round.
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
            round: 0,
            hungry: 0,
            contenders: 0,
            grants: 1,
            has_served: true,
        }
    }

    /// Makes room for flow `flow`, away and without debt.
    pub(crate) fn reset(&mut self, flow: FlowId) {
        self.remove(flow);
        while self.flows.len() <= flow {
            self.flows.push(Flow {
                deficit: 0,
                weight: 1,
                state: State::Away,
                left: 0,
            });
        }
        self.flows[flow].deficit = 0;
    }

    /// Takes a flow out, between rounds.
    pub(crate) fn remove(&mut self, flow: FlowId) {
        let Some(of) = self.flows.get_mut(flow) else {
            return;
        };
        self.hungry -= usize::from(of.state == State::Hungry);
        if of.state != State::Away {
            self.ring.retain(|&at| at != flow);
        }
        of.state = State::Away;
        of.left = self.round;
    }

    /// Whether a flow has work.
    pub(crate) fn has_hungry(&self) -> bool {
        self.hungry > 0
    }

    /// Sum of the weights of the flows that have work.
    pub(crate) fn hungry_weight(&self) -> u32 {
        let hungry = self.flows.iter().filter(|of| of.state == State::Hungry);
        hungry.fold(0, |sum, of| sum.saturating_add(of.weight))
    }

    /// Whether another flow than this one, which is being visited, had work when the round began: it has waited since.
    pub(crate) fn is_contended(&self, flow: FlowId) -> bool {
        self.contenders > usize::from(self.flows[flow].state == State::Hungry)
    }

    /// What it may still do (negative: what it owes), in cost units.
    pub(crate) fn deficit(&self, flow: FlowId) -> i64 {
        self.flows[flow].deficit
    }

    pub(crate) fn set_weight(&mut self, flow: FlowId, weight: u32) {
        self.flows[flow].weight = weight.clamp(1, MAX_WEIGHT);
    }

    /// A flow has got work, between rounds.
    pub(crate) fn activate(&mut self, flow: FlowId) {
        let of = &mut self.flows[flow];
        if of.state == State::Hungry {
            return;
        }
        if of.state == State::Away {
            let rounds = i64::try_from(self.round - of.left).unwrap_or(i64::MAX);
            let repaid = rounds.saturating_mul(self.quantum * i64::from(of.weight));
            of.deficit = of.deficit.saturating_add(repaid).min(0);
            self.ring.push(flow);
        }
        of.state = State::Hungry;
        self.hungry += 1;
    }

    /// `activate`, unless it is in the ring already.
    #[inline]
    pub(crate) fn wake(&mut self, flow: FlowId) {
        if self.flows[flow].state == State::Away {
            self.activate(flow);
        }
    }

    /// Takes `cost` off its account, in or between visits.
    pub(crate) fn charge(&mut self, flow: FlowId, cost: u64) {
        let of = &mut self.flows[flow];
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        of.deficit = of.deficit.saturating_sub(cost).max(-MAX_DEBT);
    }

    /// A core without hungry flows has swept: a round like any other, for debts.
    pub(crate) fn begin_round(&mut self) {
        self.round += 1;
        self.contenders = self.hungry;
        self.grants = match self.hungry {
            // Nobody waits for a debt to be repaid: as many as the largest takes.
            0 => MAX_DEBT / self.quantum + 1,
            1 => LONE_QUANTA as i64,
            _ => 1,
        };
        if self.hungry > 0 && !self.has_served {
            self.skip_rounds();
        }
        self.has_served = false;
        self.hungry = 0;
        (self.kept, self.cursor) = (0, 0);
    }

    /// Everybody who is hungry owes: as many rounds at once as it takes until one does not.
    #[cold]
    fn skip_rounds(&mut self) {
        let needed = self
            .ring
            .iter()
            .map(|&flow| &self.flows[flow])
            .filter(|of| of.state == State::Hungry)
            .map(|of| -of.deficit / (self.quantum * i64::from(of.weight)) + 1)
            .min();
        self.grants = needed.unwrap_or(1).max(self.grants);
    }

    /// The next to visit in this round; [`finish`](Self::finish) it before asking again.
    pub(crate) fn next(&mut self) -> Option<Visit> {
        while let Some(&flow) = self.ring.get(self.cursor) {
            self.cursor += 1;
            let of = &mut self.flows[flow];
            let quantum = self.quantum * i64::from(of.weight);
            let most = match of.state {
                State::Hungry => quantum * KEPT_QUANTA.max(self.grants),
                _ => quantum,
            };
            of.deficit = (of.deficit + quantum.saturating_mul(self.grants)).min(most);
            if of.deficit > 0 {
                self.has_served |= of.state == State::Hungry;
                return Some(Visit {
                    flow,
                    budget: of.deficit as u64,
                });
            }
            self.hungry += usize::from(of.state == State::Hungry);
            self.keep(flow);
        }
        self.ring.truncate(self.kept);
        None
    }

    /// The visit is over: how the flow goes on.
    pub(crate) fn finish(&mut self, flow: FlowId, state: State) {
        let of = &mut self.flows[flow];
        of.state = state;
        match state {
            State::Hungry => self.hungry += 1,
            State::Waiting => of.deficit = of.deficit.min(0),
            State::Away => {
                of.deficit = of.deficit.min(0);
                of.left = self.round;
                return;
            }
        }
        self.keep(flow);
    }

    fn keep(&mut self, flow: FlowId) {
        self.ring[self.kept] = flow;
        self.kept += 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
