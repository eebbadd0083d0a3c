//! Simulated world around the mode machine: one processor with its local APIC, an I/O APIC's level
//! lines, an 8259, a guest with its interrupt descriptor table and handlers, devices, and a
//! hypervisor that only carries out the decisions of [`Core`].
//!
//! The hardware here is naive and independent: it reads gates by their bits, and keeps a ledger of
//! each interrupt from the moment it is raised until its handler runs. The decisions of the machine
//! are checked against that ledger, never against the machine's own model.
//!
//! **Left out.** A guest that breaks its own rules (an EOI without a handler), and unspecific EOIs
//! to the 8259: it would retire the wrong line there, since the host acknowledges on the guest's
//! behalf. Linux names the line.

mod apic;
mod guest;
mod host;
mod seen;

pub(super) use seen::EventCounts;

use std::collections::{BTreeMap, BTreeSet};

use seeded::Random;

use super::*;
use apic::Apic;

/// Devices' vectors with edges; any of them may be assigned.
const EDGES: [Vector; 11] = [
    0x39, 0x41, 0x51, 0x61, 0x62, 0x71, 0xa1, 0xb1, 0xb7, 0xd1, 0xe5,
];
/// Lines of an I/O APIC; the last has a vector of the host's class.
const LEVELS: [Vector; 3] = [0x55, 0x92, 0xf8];
/// The 8259's.
const PIC: Vector = 0x30;
const LINES: u8 = 8;
/// Stacks are finite.
const DEPTH: usize = 24;
/// Exits in a row without an instruction or a handler.
const STUCK: u32 = 300;
/// The host's vectors.
const HOSTS: [(Vector, Source); 2] = [(0xf1, Source::Tick), (0xf2, Source::Message)];

/// Result of a check; the error describes the defect.
pub(super) type Checked = Result<(), String>;

/// Controller that an interrupt comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Apic,
    Pic,
}

/// Party for which a vector is in service at the real local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// The host took it: it may end at any time.
    Host,
    /// The guest has it, or will have it, and ends it itself.
    Guest { is_over: bool },
}

/// Origin of an event on its way through the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// The processor acknowledged it: the hypervisor does not know of it yet.
    Hardware(From),
    /// The host injected an interrupt that had been acknowledged before.
    Injected(From),
    /// An INT instruction of this privilege.
    Software(u8),
    /// An exception, and the interrupt that it reports: whether that is virtual.
    Fault(Option<(From, Vector, bool)>),
}

#[derive(Clone, Copy, Debug)]
struct Going {
    event: Event,
    of: Of,
}

/// A handler that runs, or was interrupted.
#[derive(Clone, Copy, Debug)]
struct Handler {
    /// Interrupt that it has to end.
    serves: Option<(From, Vector)>,
    is_virtual: bool,
    is_over: bool,
    /// RFLAGS.IF before.
    interrupts: bool,
}

/// Phase of a run: the kind of step that prevails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Quiet,
    Storm,
    Masked,
    Nested,
    Reprogram,
    /// No new events: everything that was begun ends.
    Drain,
}

pub(super) struct World {
    random: Random,
    pub(super) core: Core,
    direct_modes: DirectModes,
    apic: Apic,
    // The guest.
    interrupts: bool,
    shadow: bool,
    gates: Vec<Gate>,
    limit: u32,
    handlers: Vec<Handler>,
    task_priority: u8,
    /// Map from the guest's vectors to those at the local APIC.
    claimed: BTreeMap<Vector, Vector>,
    // The hypervisor.
    table: Vec<Gate>,
    is_engaged: bool,
    is_suspended: bool,
    going: Option<Going>,
    /// How the guest runs, if it does.
    running: Option<EntryControls>,
    steps: bool,
    is_stepping: bool,
    // The ledger.
    /// Raised by the host, and not acknowledged yet.
    hosts_raised: BTreeMap<Vector, Source>,
    /// Of these, those that were acknowledged.
    hosts_taken: BTreeMap<Vector, Source>,
    /// Acknowledged for the guest, which has not got them.
    taken: BTreeSet<Vector>,
    taken_pic: BTreeSet<Vector>,
    service: BTreeMap<Vector, Service>,
    stuck: u32,
    pub(super) events: u64,
    pub(super) seen: EventCounts,
    traces: bool,
}

/// Returns the fault that a processor raises for `vector` in a table, if any. Checks in the
/// processor's order: limit, type, privilege, presence.
fn look(table: &[Gate], limit: u32, vector: Vector, privilege: Option<u8>) -> Option<Vector> {
    let low = table[usize::from(vector)].0[0];
    let (kind, system, least, present) =
        (low >> 40 & 0xf, low >> 44 & 1, low >> 45 & 3, low >> 47 & 1);
    let is_short = u32::from(vector) * 16 + 15 > limit;
    let is_no_gate = system != 0 || kind != 0xe && kind != 0xf;
    if is_short || is_no_gate || privilege.is_some_and(|privilege| least < u64::from(privilege)) {
        Some(13)
    } else if present == 0 {
        Some(11)
    } else {
        None
    }
}

fn set(vectors: &BTreeSet<Vector>) -> VectorSet {
    vectors.iter().copied().collect()
}

fn ensure(is_right: bool, wrong: impl FnOnce() -> String) -> Checked {
    if is_right { Ok(()) } else { Err(wrong()) }
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let direct_modes = match seed % 5 {
            0 => DirectModes::default(),
            1 | 2 => DirectModes {
                delivery: true,
                completion: false,
            },
            _ => DirectModes {
                delivery: true,
                completion: true,
            },
        };
        let mut gates = vec![Gate::default(); 256];
        for (vector, gate) in (0..).zip(&mut gates) {
            // Those that are not used are often empty.
            if vector < 0x38 || EDGES.contains(&(vector as u8)) || random.chance(0.6) {
                *gate = Gate::interrupt(0x1000 + vector, 8, random.below(2) as u8 * 3);
            }
        }
        for vector in LEVELS {
            gates[usize::from(vector)] = Gate::interrupt(1, 8, 0);
        }
        let mut world = Self {
            random,
            core: Core::new(direct_modes),
            direct_modes,
            apic: Apic::default(),
            interrupts: false,
            shadow: false,
            table: gates.clone(),
            gates,
            limit: 0xfff,
            handlers: Vec::new(),
            task_priority: 0,
            claimed: BTreeMap::new(),
            is_engaged: false,
            is_suspended: false,
            going: None,
            running: None,
            steps: false,
            is_stepping: false,
            hosts_raised: BTreeMap::new(),
            hosts_taken: BTreeMap::new(),
            taken: BTreeSet::new(),
            taken_pic: BTreeSet::new(),
            service: BTreeMap::new(),
            stuck: 0,
            events: 0,
            seen: EventCounts::default(),
            traces: false,
        };
        for vector in EDGES.into_iter().chain(LEVELS) {
            let claimed = world.claim(vector);
            assert_eq!(claimed, Ok(()), "{vector:#x}");
        }
        world.assign();
        world.load_table();
        world
    }

    /// Turns on printing of events.
    pub(super) fn trace(&mut self) {
        self.traces = true;
    }

    fn note(&self, what: impl FnOnce() -> String) {
        if self.traces {
            println!("{:6} {}", self.events, what());
        }
    }

    // The ledger.

    /// Returns the host's source of a vector at the local APIC, if it is the host's.
    fn host_of(&self, real: Vector) -> Option<Source> {
        let own = HOSTS.into_iter().find(|own| own.0 == real)?;
        Some(own.1)
    }

    /// The guest's `vector` as it is at the local APIC.
    fn real(&self, vector: Vector) -> Vector {
        self.claimed.get(&vector).copied().unwrap_or(vector)
    }

    /// Returns the guest's vector for an interrupt that arrived as `real`.
    fn guests(&self, real: Vector) -> Vector {
        let own = self.claimed.iter().find(|(_, its)| **its == real);
        own.map_or(real, |(vector, _)| *vector)
    }

    /// Returns the vectors that the guest has in service, according to its handlers.
    fn truth(&self) -> BTreeSet<Vector> {
        self.handlers
            .iter()
            .filter(|handler| !handler.is_over)
            .filter_map(|handler| match handler.serves {
                Some((From::Apic, vector)) => Some(vector),
                _ => None,
            })
            .collect()
    }

    fn has_virtual_in_service(&self) -> bool {
        self.handlers
            .iter()
            .any(|handler| handler.is_virtual && !handler.is_over)
    }

    /// The real local APIC ended something.
    fn retired(&mut self, vector: Option<Vector>) -> Checked {
        let Some(vector) = vector else {
            return Err("an EOI with nothing in service".into());
        };
        match self.service.remove(&vector) {
            Some(Service::Host | Service::Guest { is_over: true }) => Ok(()),
            other => Err(format!("an EOI ended {vector:#x}, which is {other:?}")),
        }
    }

    // Devices.

    fn raise(&mut self) {
        match self.random.percent() {
            0..15 => {
                let at = self.random.below(2) as usize;
                let (vector, source) = HOSTS[at];
                if self.apic.edge(vector) {
                    self.hosts_raised.insert(vector, source);
                }
            }
            15..20 => {
                let line = self.random.below(LINES.into()) as u8;
                // One that is in service is raised again when it is over.
                if !self.apic.pic_in_service.contains(&line) {
                    self.apic.pic_requested.insert(line);
                }
            }
            20..28 => {
                let vector = self.level();
                self.apic.line(self.real(vector), true);
            }
            _ => {
                let vector = self.edge();
                self.apic.edge(self.real(vector));
            }
        }
    }

    /// A level-triggered vector of the guest's.
    fn level(&mut self) -> Vector {
        LEVELS[self.random.below(LEVELS.len() as u64) as usize]
    }

    /// An edge-triggered vector of the guest's.
    fn edge(&mut self) -> Vector {
        let claimed: Vec<_> = self
            .claimed
            .keys()
            .filter(|vector| !LEVELS.contains(vector))
            .copied()
            .collect();
        claimed[self.random.below(claimed.len() as u64) as usize]
    }

    // The guest.

    /// Runs one event.
    pub(super) fn event(&mut self, phase: Phase) -> Checked {
        self.events += 1;
        let often = match phase {
            Phase::Quiet => 0.04,
            Phase::Storm => 0.5,
            Phase::Masked => 0.1,
            Phase::Nested => 0.2,
            Phase::Reprogram => 0.06,
            Phase::Drain => 0.0,
        };
        if self.random.chance(often) {
            self.raise();
        }
        let Some(plan) = self.running else {
            return self.enter();
        };
        let takes = self.interrupts && !self.shadow && !self.is_stepping;
        if plan.direct {
            if takes && let Some((from, vector)) = self.acknowledge() {
                if from == From::Apic {
                    self.service
                        .insert(vector, Service::Guest { is_over: false });
                }
                let going = Going {
                    event: Event::external(vector),
                    of: Of::Hardware(from),
                };
                return self.deliver(&plan, going, false);
            }
        } else if self.apic.deliverable().is_some() || self.apic.pic_deliverable().is_some() {
            self.exit("interrupt")?;
            return self.window(phase);
        }
        if plan.window && takes {
            return self.exit("window");
        }
        if phase != Phase::Drain && self.random.chance(0.03) {
            self.exit("other")?;
            return self.host(phase);
        }
        self.shadow = false;
        self.stuck = 0;
        match phase {
            Phase::Drain => self.finish(&plan)?,
            // A guest that finishes its work soon.
            Phase::Quiet | Phase::Reprogram if self.random.chance(0.5) => self.finish(&plan)?,
            _ => self.instruction(phase, &plan)?,
        }
        if self.is_stepping && self.running.is_some() {
            self.seen.stepped += 1;
            self.steps = false;
            self.exit("step")?;
        }
        Ok(())
    }

    /// Everything that was begun ends, and nothing is left.
    pub(super) fn rest(&mut self) -> Checked {
        // An event on its way is delivered first; between that and the next entry no guest
        // could change anything.
        while self.going.is_some() {
            self.event(Phase::Drain)?;
        }
        if self.running.is_some() {
            self.exit("rest")?;
        }
        self.steps = false;
        self.resume();
        // All gates are there again.
        self.limit = 0xfff;
        for vector in 32..=255_u8 {
            self.gates[usize::from(vector)] = Gate::interrupt(4, 8, 0);
        }
        self.load_table();
        for _ in 0..5_000 {
            if self.is_at_rest() {
                break;
            }
            self.event(Phase::Drain)?;
        }
        ensure(self.is_at_rest(), || {
            format!(
                "left for ever: {:x?}, taken {:x?} {:x?}, {:x?}, host's {:x?}, {:x?}",
                self.apic,
                self.taken,
                self.taken_pic,
                self.service,
                self.hosts_raised,
                self.handlers
            )
        })?;
        ensure(
            self.service.is_empty() && self.hosts_raised.is_empty() && self.hosts_taken.is_empty(),
            || format!("{:x?} {:x?}", self.service, self.hosts_raised),
        )?;
        // With the next exit it is direct again.
        if self.running.is_some() {
            self.exit("rested")?;
        }
        self.enter()?;
        let is_direct = self.running.is_some_and(|plan| plan.direct);
        let may_be = self.direct_modes.delivery && self.is_engaged;
        self.seen.back_to_direct += u64::from(is_direct);
        ensure(is_direct == may_be, || "no direct mode any more".into())
    }

    fn is_at_rest(&self) -> bool {
        let apic = &self.apic;
        apic.requested.is_empty()
            && apic.in_service.is_empty()
            && apic.pic_requested.is_empty()
            && apic.pic_in_service.is_empty()
            && self.taken.is_empty()
            && self.taken_pic.is_empty()
            && self.going.is_none()
            && self.handlers.is_empty()
            && self.task_priority == 0
            && self.interrupts
            && !self.shadow
    }

    /// The phases, one after another, and a rest now and then.
    pub(super) fn run(&mut self, events: u64) -> Checked {
        let phases = [
            Phase::Quiet,
            Phase::Storm,
            Phase::Quiet,
            Phase::Nested,
            Phase::Masked,
            Phase::Quiet,
            Phase::Reprogram,
        ];
        while self.events < events {
            let phase = phases[(self.events / 400 % 7) as usize];
            self.event(phase)?;
            if self.random.below(1_000) == 0 {
                self.rest()?;
            }
        }
        self.rest()
    }
}
