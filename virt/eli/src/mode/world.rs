//! A small world around the mode machine: one processor with its local APIC, an I/O APIC's level lines, an 8259, a guest with its
//! interrupt descriptor table and handlers, devices, and a hypervisor that does what [`Core`] says and nothing else.
//!
//! The hardware here is naive and its own: it reads gates by their bits, and keeps a ledger of each interrupt from the moment it is
//! raised until its handler runs. What the machine says is held against that ledger, never against the machine's own model.
//!
//! **Left out.** A guest that breaks its own rules (an EOI without a handler), and unspecific EOIs to the 8259: it would retire
//! the wrong line there, since the host acknowledges on the guest's behalf. Linux names the line.

use std::collections::{BTreeMap, BTreeSet};

use seeded::Random;

use super::*;

/// Devices' vectors with edges; any of them may be assigned.
const EDGES: [Vector; 11] = [
    0x39, 0x41, 0x51, 0x61, 0x62, 0x71, 0xa1, 0xb1, 0xb7, 0xd1, 0xe5,
];
/// Lines of an I/O APIC.
const LEVELS: [Vector; 2] = [0x55, 0x92];
/// The 8259's.
const PIC: Vector = 0x30;
const LINES: u8 = 8;
/// Stacks are finite.
const DEPTH: usize = 24;
/// Exits in a row without an instruction or a handler.
const STUCK: u32 = 300;
const SOURCES: [Source; 2] = [Source::Tick, Source::Message];

/// What is wrong.
pub(super) type Checked = Result<(), String>;

/// A line of the I/O APIC.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    is_up: bool,
    /// It was sent, and no EOI has come back.
    remote: bool,
}

/// The local APIC and what is connected to it.
#[derive(Clone, Debug, Default)]
struct Apic {
    requested: BTreeSet<Vector>,
    in_service: BTreeSet<Vector>,
    level: BTreeSet<Vector>,
    task_priority: u8,
    lines: BTreeMap<Vector, Line>,
    pic_requested: BTreeSet<u8>,
    pic_in_service: BTreeSet<u8>,
}

impl Apic {
    fn edge(&mut self, vector: Vector) -> bool {
        self.level.remove(&vector);
        self.requested.insert(vector)
    }

    fn line(&mut self, vector: Vector, is_up: bool) {
        let line = self.lines.entry(vector).or_default();
        line.is_up = is_up;
        if is_up && !line.remote {
            line.remote = true;
            self.level.insert(vector);
            self.requested.insert(vector);
        }
    }

    /// What the processor would get from it now.
    fn deliverable(&self) -> Option<Vector> {
        let highest = *self.requested.last()?;
        let in_service = self.in_service.last().map_or(0, |vector| vector >> 4);
        (highest >> 4 > in_service.max(self.task_priority >> 4)).then_some(highest)
    }

    /// The 8259's line, of which the lowest has the highest priority.
    fn pic_deliverable(&self) -> Option<u8> {
        let first = *self.pic_requested.first()?;
        self.pic_in_service
            .first()
            .is_none_or(|other| first < *other)
            .then_some(first)
    }

    fn acknowledge(&mut self, prefers_pic: bool) -> Option<(From, Vector)> {
        let (apic, pic) = (self.deliverable(), self.pic_deliverable());
        if let Some(line) = pic.filter(|_| prefers_pic || apic.is_none()) {
            self.pic_requested.remove(&line);
            self.pic_in_service.insert(line);
            return Some((From::Pic, PIC + line));
        }
        let vector = apic?;
        self.requested.remove(&vector);
        self.in_service.insert(vector);
        Some((From::Apic, vector))
    }

    fn eoi(&mut self) -> Option<Vector> {
        let vector = self.in_service.pop_last()?;
        if self.level.contains(&vector) {
            let line = self.lines.entry(vector).or_default();
            line.remote = false;
            let is_up = line.is_up;
            self.line(vector, is_up);
        }
        Some(vector)
    }
}

/// Where an interrupt comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    Apic,
    Pic,
}

/// Why a vector is in service at the real local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// The host took it: it may end at any time.
    Host,
    /// The guest has it, or will have it, and ends it itself.
    Guest { is_over: bool },
}

/// What is on its way through the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// The processor acknowledged it: nobody but it knows.
    Hardware(From),
    /// The host injected what had been acknowledged before.
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
    /// What it has to end.
    serves: Option<(From, Vector)>,
    is_virtual: bool,
    is_over: bool,
    /// RFLAGS.IF before.
    interrupts: bool,
}

/// What happens most at the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Quiet,
    Storm,
    Masked,
    Nested,
    Reprogram,
    /// Nothing new: everything that was begun ends.
    Drain,
}

/// How often it happened.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) direct: u64,
    pub(super) direct_completions: u64,
    pub(super) reflected: u64,
    pub(super) injected: u64,
    pub(super) nested: u64,
    pub(super) nested_virtual_on_real: u64,
    pub(super) external: u64,
    pub(super) level: u64,
    pub(super) sent_again: u64,
    pub(super) late_eois: u64,
    pub(super) software: u64,
    pub(super) software_faults: u64,
    pub(super) own_gates: u64,
    pub(super) relocated: u64,
    pub(super) spurious: u64,
    pub(super) cut_off: u64,
    pub(super) windows_of_several: u64,
    pub(super) hosts: u64,
    pub(super) stepped: u64,
    pub(super) masked_catches: u64,
    pub(super) fallen: u64,
    pub(super) reads: u64,
    pub(super) back_to_direct: u64,
}

impl Seen {
    pub(super) fn all(&self) -> [(&'static str, u64); 23] {
        [
            ("direct deliveries", self.direct),
            ("direct completions", self.direct_completions),
            ("reflected", self.reflected),
            ("injected", self.injected),
            ("nested", self.nested),
            (
                "a virtual one within a real one",
                self.nested_virtual_on_real,
            ),
            ("of 8259s", self.external),
            ("level-triggered", self.level),
            ("lines up after their EOI", self.sent_again),
            ("EOIs that waited for a higher one", self.late_eois),
            ("INT instructions", self.software),
            ("faults of INT instructions", self.software_faults),
            ("own gates", self.own_gates),
            ("relocated", self.relocated),
            ("spurious after that", self.spurious),
            ("cut off", self.cut_off),
            ("windows of several", self.windows_of_several),
            ("the host's", self.hosts),
            ("stepped", self.stepped),
            ("caught while masked", self.masked_catches),
            ("fallen back", self.fallen),
            ("reads", self.reads),
            ("back to direct mode", self.back_to_direct),
        ]
    }
}

pub(super) struct World {
    random: Random,
    pub(super) core: Core,
    ways: Ways,
    apic: Apic,
    // The guest.
    interrupts: bool,
    shadow: bool,
    gates: Vec<Gate>,
    limit: u32,
    handlers: Vec<Handler>,
    task_priority: u8,
    claimed: BTreeSet<Vector>,
    // The hypervisor.
    table: Vec<Gate>,
    is_engaged: bool,
    has_fallen: bool,
    going: Option<Going>,
    /// How the guest runs, if it does.
    running: Option<Plan>,
    steps: bool,
    is_stepping: bool,
    hosts: [Vector; 2],
    // The ledger.
    /// Raised by the host, and nobody has it yet.
    hosts_raised: BTreeMap<Vector, Source>,
    /// Of these, those that were acknowledged.
    hosts_taken: BTreeMap<Vector, Source>,
    /// Acknowledged for the guest, which has not got them.
    taken: BTreeSet<Vector>,
    taken_pic: BTreeSet<Vector>,
    service: BTreeMap<Vector, Service>,
    stuck: u32,
    pub(super) events: u64,
    pub(super) seen: Seen,
    traces: bool,
}

/// What a processor finds in a table: a fault, or nothing wrong. In its order: limit, type, privilege, presence.
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
        let ways = match seed % 5 {
            0 => Ways::default(),
            1 | 2 => Ways {
                delivery: true,
                completion: false,
            },
            _ => Ways {
                delivery: true,
                completion: true,
            },
        };
        let mut gates = vec![Gate::default(); 256];
        for (vector, gate) in (0..).zip(&mut gates) {
            // Those that nobody uses are often empty.
            if vector < 0x38 || EDGES.contains(&(vector as u8)) || random.chance(0.6) {
                *gate = Gate::interrupt(0x1000 + vector, 8, random.below(2) as u8 * 3);
            }
        }
        for vector in LEVELS {
            gates[usize::from(vector)] = Gate::interrupt(1, 8, 0);
        }
        let mut world = Self {
            random,
            core: Core::new(ways),
            ways,
            apic: Apic::default(),
            interrupts: false,
            shadow: false,
            table: gates.clone(),
            gates,
            limit: 0xfff,
            handlers: Vec::new(),
            task_priority: 0,
            claimed: BTreeSet::new(),
            is_engaged: false,
            has_fallen: false,
            going: None,
            running: None,
            steps: false,
            is_stepping: false,
            hosts: [0; 2],
            hosts_raised: BTreeMap::new(),
            hosts_taken: BTreeMap::new(),
            taken: BTreeSet::new(),
            taken_pic: BTreeSet::new(),
            service: BTreeMap::new(),
            stuck: 0,
            events: 0,
            seen: Seen::default(),
            traces: false,
        };
        world.hosts = SOURCES.map(|source| world.core.hosts.of(source));
        world.claimed.extend(EDGES.iter().chain(&LEVELS));
        for vector in world.claimed.clone() {
            let claimed = world.core.claim(vector);
            assert_eq!(claimed, Ok(None), "not the host's");
        }
        world.assign();
        world.load_table();
        world
    }

    /// Prints what happens.
    pub(super) fn trace(&mut self) {
        self.traces = true;
    }

    fn note(&self, what: impl FnOnce() -> String) {
        if self.traces {
            println!("{:6} {}", self.events, what());
        }
    }

    // The ledger.

    fn host_of(&self, vector: Vector) -> Option<Source> {
        let at = self.hosts.iter().position(|own| *own == vector)?;
        Some(SOURCES[at])
    }

    /// What the guest has in service, as its handlers have it.
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

    // The hypervisor.

    fn sync(&mut self, vector: Vector) {
        self.table[usize::from(vector)] = self.core.shadow(vector, self.gates[usize::from(vector)]);
    }

    fn sync_all(&mut self) {
        for vector in 0..=255 {
            self.sync(vector);
        }
    }

    fn load_table(&mut self) {
        self.is_engaged = self.ways.delivery && self.limit == 0xfff && self.random.chance(0.95);
        self.core.load_table(self.limit, self.is_engaged);
        self.sync_all();
    }

    fn assign(&mut self) {
        let part = self.random.part();
        let vectors: Vec<_> = self.claimed.iter().copied().collect();
        let mut some = VectorSet::EMPTY;
        for vector in vectors {
            if self.random.chance(part) {
                some.insert(vector);
            }
        }
        self.core.assign(some);
        self.sync_all();
    }

    fn claim(&mut self, vector: Vector) -> Checked {
        let owner = self.host_of(vector);
        match self.core.claim(vector) {
            Err(Full) => ensure(owner.is_some(), || format!("{vector:#x} was free")),
            Ok(None) => {
                self.claimed.insert(vector);
                ensure(owner.is_none(), || format!("{vector:#x} was the host's"))
            }
            Ok(Some(moved)) => {
                self.claimed.insert(vector);
                self.seen.relocated += 1;
                let is_right = Some(moved.source) == owner
                    && (0xf0..0xff).contains(&moved.to)
                    && !self.claimed.contains(&moved.to)
                    && self.host_of(moved.to).is_none();
                self.hosts = self.hosts.map(|own| match own == vector {
                    true => moved.to,
                    false => own,
                });
                ensure(is_right, || format!("{moved:?}"))
            }
        }
    }

    /// The guest stops.
    fn exit(&mut self, why: &str) -> Checked {
        self.note(|| format!("exit: {why}"));
        self.running = None;
        self.stuck += 1;
        ensure(self.stuck < STUCK, || format!("exits for ever: {why}"))
    }

    fn enter(&mut self) -> Checked {
        let real = set(&self.apic.in_service);
        if let Some(vector) = self.core.audit(real) {
            return Err(format!("{vector:#x} was stolen"));
        }
        self.is_stepping = self.steps && self.going.is_none();
        let cpu = Cpu {
            interrupts: self.interrupts,
            shadow: self.shadow,
            event: self.going.is_some(),
            stepping: self.is_stepping,
        };
        let plan = self.core.plan(cpu, real);
        self.note(|| format!("{cpu:x?} {plan:x?}, in service {real:x?}"));
        self.running = Some(plan);
        for vector in plan.hide.iter() {
            self.sync(vector);
        }
        self.check_plan(&plan)?;
        let Some(injection) = plan.inject else {
            return match self.going.take() {
                Some(going) => {
                    // What goes again was injected, whoever began it.
                    self.deliver(&plan, going, true)
                }
                None => Ok(()),
            };
        };
        let vector = injection.event.vector;
        ensure(
            self.interrupts && !self.shadow && self.going.is_none() && !self.is_stepping,
            || format!("{injection:x?} cannot be taken"),
        )?;
        let from = if self.taken_pic.contains(&vector) {
            let first = self.taken_pic.pop_first();
            ensure(first == Some(vector), || {
                format!("{vector:#x} before {first:x?}")
            })?;
            From::Pic
        } else {
            let last = self.taken.pop_last();
            ensure(last == Some(vector), || {
                format!("{vector:#x} injected where {last:x?} waits")
            })?;
            From::Apic
        };
        if injection.opens {
            self.sync(vector);
        }
        self.seen.injected += 1;
        let going = Going {
            event: injection.event,
            of: Of::Injected(from),
        };
        self.deliver(&plan, going, true)
    }

    fn check_plan(&mut self, plan: &Plan) -> Checked {
        if !plan.direct {
            ensure(plan.eoi_exits && plan.limit == self.limit, || {
                format!("{plan:x?}")
            })?;
            return Ok(());
        }
        ensure(
            self.ways.delivery && self.is_engaged && !self.has_fallen,
            || "direct without a table".into(),
        )?;
        let is_quiet =
            self.taken.is_empty() && self.taken_pic.is_empty() && !self.has_virtual_in_service();
        ensure(is_quiet, || {
            format!(
                "direct with {:x?}, {:x?}, {:x?}",
                self.taken, self.taken_pic, self.handlers
            )
        })?;
        let all_real = self.service.values().all(|it| *it != Service::Host);
        ensure(all_real, || format!("direct with {:x?}", self.service))?;
        for vector in 32..=255 {
            let is_open = look(&self.table, plan.limit, vector, None).is_none();
            ensure(!is_open || self.core.assigned().contains(vector), || {
                format!("direct with an open gate {vector:#x}")
            })?;
            ensure(!is_open || self.host_of(vector).is_none(), || {
                format!("the host's {vector:#x} is the guest's")
            })?;
        }
        Ok(())
    }

    /// An event goes through the table that the processor has.
    fn deliver(&mut self, plan: &Plan, going: Going, was_injected: bool) -> Checked {
        let vector = going.event.vector;
        let field = going.event.field();
        let kind = field >> 8 & 7;
        let is_fault = kind == 3;
        if was_injected {
            ensure((vector < 32) == is_fault, || {
                format!("VMEXIT_INVALID: {field:#x}")
            })?;
        }
        // QEMU's way to say it, or the manual's.
        let is_external = matches!(going.of, Of::Hardware(_) | Of::Injected(_));
        let says = match is_external && self.random.chance(0.5) {
            true => field & !(7 << 8) | 3 << 8,
            false => field,
        };
        // A table's page, or the stack's, has to be looked at for that, which the limit comes before.
        if u32::from(vector) * 16 + 15 <= plan.limit && self.random.chance(0.02) {
            return self.cut_off(going, says, was_injected);
        }
        let privilege = match going.of {
            Of::Software(privilege) => Some(privilege),
            _ => None,
        };
        let table = match self.is_engaged {
            true => &self.table,
            false => &self.gates,
        };
        let fault = look(table, plan.limit, vector, privilege);
        self.note(|| format!("{going:x?}: {fault:x?}"));
        let Some(fault) = fault else {
            return self.arrive(going);
        };
        // The host waits for #NP where it hid a gate that the limit leaves in sight.
        let is_hidden = plan.direct
            && matches!(going.of, Of::Hardware(_))
            && !self.core.assigned().contains(vector)
            && u32::from(vector) * 16 + 15 <= plan.limit;
        ensure(!is_hidden || fault == 11, || {
            format!("the hidden gate {vector:#x} raises {fault}")
        })?;
        let own = self.bare(vector, going.of);
        if !self.is_engaged && self.random.chance(0.5) {
            // Not intercepted, since nothing is hidden.
            let Some(own) = own else {
                return Err(format!("no fault of its own at {vector:#x}"));
            };
            return self.arrive_fault(own, going);
        }
        self.exit("fault")?;
        let code = u32::from(vector) << 3 | 2 | u32::from(is_external && self.random.chance(0.5));
        let reflection = self.core.reflect(Fault {
            fault: Event::exception(fault, Some(code)),
            during: Event::from_field(says),
            gate: self.gates[usize::from(vector)],
            privilege: privilege.unwrap_or(0),
        });
        self.note(|| format!("reflection {reflection:x?}"));
        match (reflection, going.of) {
            (Reflection::Interrupt(of), Of::Hardware(_)) if of == vector => {
                self.seen.reflected += 1;
                self.took(&[vector])
            }
            (Reflection::Guest(event), of) if Some(event) == own => {
                self.going = Some(Going {
                    event,
                    of: Self::reports(vector, of),
                });
                match of {
                    Of::Software(_) => self.seen.software_faults += 1,
                    _ => self.seen.own_gates += 1,
                }
                Ok(())
            }
            (Reflection::Software(injection), Of::Software(_))
                if own.is_none() && injection.event == going.event && !was_injected =>
            {
                if injection.opens {
                    self.sync(vector);
                }
                self.going = Some(Going {
                    event: injection.event,
                    of: going.of,
                });
                Ok(())
            }
            (wrong, _) => Err(format!("{wrong:x?} of {going:x?}, where {own:x?} is due")),
        }
    }

    /// The delivery itself meets another exit.
    fn cut_off(&mut self, going: Going, says: u64, was_injected: bool) -> Checked {
        self.exit("delivery cut off")?;
        self.seen.cut_off += 1;
        let again = self.core.again(Event::from_field(says), was_injected);
        if matches!(going.of, Of::Software(_)) && !was_injected {
            return ensure(again.is_none(), || {
                "an INT instruction would be run twice".into()
            });
        }
        let Some(event) = again else {
            return Err(format!("{going:x?} is lost"));
        };
        self.going = Some(Going { event, ..going });
        // What is assigned may change before it goes again.
        if self.random.chance(0.3) {
            self.assign();
        }
        Ok(())
    }

    fn reports(vector: Vector, of: Of) -> Of {
        Of::Fault(match of {
            Of::Hardware(from) => Some((from, vector, false)),
            Of::Injected(from) => Some((from, vector, true)),
            Of::Software(_) | Of::Fault(_) => None,
        })
    }

    /// What a machine without a host raises.
    fn bare(&self, vector: Vector, of: Of) -> Option<Event> {
        let (privilege, external) = match of {
            Of::Software(privilege) => (Some(privilege), 0),
            _ => (None, 1),
        };
        let fault = look(&self.gates, self.limit, vector, privilege)?;
        let code = u32::from(vector) * 8 + 2 + external;
        Some(Event::exception(fault, Some(code)))
    }

    fn arrive_fault(&mut self, event: Event, going: Going) -> Checked {
        self.arrive(Going {
            event,
            of: Self::reports(going.event.vector, going.of),
        })
    }

    /// A handler of the guest's begins.
    fn arrive(&mut self, going: Going) -> Checked {
        let vector = going.event.vector;
        self.stuck = 0;
        let (serves, is_virtual) = match going.of {
            Of::Hardware(from) => (Some((from, vector)), false),
            Of::Injected(from) => (Some((from, vector)), true),
            Of::Software(_) => {
                self.seen.software += 1;
                (None, false)
            }
            Of::Fault(Some((from, vector, is_virtual))) => (Some((from, vector)), is_virtual),
            Of::Fault(None) => (None, false),
        };
        if !matches!(going.of, Of::Fault(_)) {
            // A fault is the guest's own, or none is due at all.
            let own = self.bare(vector, going.of);
            ensure(own.is_none(), || format!("{going:x?} without {own:x?}"))?;
        }
        if let Some((_, vector)) = serves {
            ensure(self.interrupts && !self.shadow, || {
                format!("{vector:#x} while masked")
            })?;
            ensure(self.host_of(vector).is_none(), || {
                format!("the guest got the host's {vector:#x}")
            })?;
        }
        match serves {
            Some((From::Apic, vector)) => {
                let truth = self.truth();
                let above = truth.last().map_or(0, |vector| vector >> 4);
                ensure(vector >> 4 > above.max(self.task_priority >> 4), || {
                    let priority = self.task_priority;
                    format!("{vector:#x} in {truth:x?}, task priority {priority:#x}")
                })?;
                self.seen.nested += u64::from(!truth.is_empty());
                let real_below = self.handlers.iter().any(|it| {
                    !it.is_virtual && !it.is_over && matches!(it.serves, Some((From::Apic, _)))
                });
                self.seen.nested_virtual_on_real += u64::from(is_virtual && real_below);
                if !is_virtual {
                    self.seen.direct += 1;
                    if self.hosts_taken.remove(&vector).is_some() {
                        self.seen.spurious += 1;
                    }
                }
                self.seen.level += u64::from(LEVELS.contains(&vector));
            }
            Some((From::Pic, _)) => self.seen.external += 1,
            None => {}
        }
        self.handlers.push(Handler {
            serves,
            // Nobody waits for an end of it at a local APIC.
            is_virtual: is_virtual && matches!(serves, Some((From::Apic, _))),
            is_over: serves.is_none(),
            interrupts: self.interrupts,
        });
        self.interrupts = false;
        self.shadow = false;
        Ok(())
    }

    /// The host has these, which were acknowledged in this order.
    fn took(&mut self, vectors: &[Vector]) -> Checked {
        let mut taken = Vec::new();
        for vector in vectors.iter().copied() {
            let one = Taken {
                vector,
                in_service: self.apic.in_service.contains(&vector),
                level: self.apic.level.contains(&vector),
            };
            taken.push(one);
            let service = match one.level && self.host_of(vector).is_none() {
                true => Service::Guest { is_over: false },
                false => Service::Host,
            };
            if one.in_service {
                self.service.insert(vector, service);
            }
        }
        self.seen.windows_of_several += u64::from(taken.len() > 1);
        self.seen.masked_catches += u64::from(!self.interrupts);
        let real = set(&self.apic.in_service);
        let mut heard = Vec::new();
        let mut retired = Vec::new();
        let (core, apic) = (&mut self.core, &mut self.apic);
        core.took(&taken, real, |vector, handed| {
            retired.extend((0..handed.eois).map(|_| apic.eoi()));
            heard.push((vector, handed));
        });
        self.note(|| format!("took {taken:x?}: {heard:x?}, ended {retired:x?}"));
        for vector in retired {
            self.retired(vector)?;
        }
        ensure(heard.len() == taken.len(), || {
            format!("{taken:x?}: {heard:x?}")
        })?;
        for one in &taken {
            let vector = one.vector;
            let Some((_, handed)) = heard.iter().find(|heard| heard.0 == vector) else {
                return Err(format!("{vector:#x} is lost"));
            };
            let is_of = self.host_of(vector);
            ensure(handed.to == is_of, || {
                format!("{vector:#x} goes to {:?}", handed.to)
            })?;
            let raised = match one.in_service {
                true => self.hosts_taken.remove(&vector),
                false => None,
            };
            if is_of.is_some() {
                ensure(raised == is_of, || format!("nobody raised {vector:#x}"))?;
                self.seen.hosts += 1;
                continue;
            }
            // A vector that the host gave up while it was requested: once the guest gets it for nothing.
            self.seen.spurious += u64::from(raised.is_some());
            if one.in_service {
                self.taken.insert(vector);
            } else {
                let is_new = self.taken_pic.insert(vector);
                ensure(is_new, || format!("{vector:#x} taken twice"))?;
            }
        }
        Ok(())
    }

    /// The processor acknowledges what is there.
    fn acknowledge(&mut self) -> Option<(From, Vector)> {
        let prefers_pic = self.random.chance(0.5);
        let acknowledged = self.apic.acknowledge(prefers_pic);
        if let Some((From::Apic, vector)) = acknowledged
            && let Some(source) = self.hosts_raised.remove(&vector)
        {
            self.hosts_taken.insert(vector, source);
        }
        acknowledged
    }

    /// The host opens its window, in which several may come, each within the one before.
    fn window(&mut self, phase: Phase) -> Checked {
        let mut vectors = Vec::new();
        while let Some((_, vector)) = self.acknowledge() {
            vectors.push(vector);
            if self.random.chance(0.2) {
                break;
            }
            if phase != Phase::Drain && self.random.chance(0.4) {
                self.raise();
            }
        }
        self.took(&vectors)
    }

    // Devices.

    fn raise(&mut self) {
        match self.random.percent() {
            0..15 => {
                let at = self.random.below(2) as usize;
                if self.apic.edge(self.hosts[at]) {
                    self.hosts_raised.insert(self.hosts[at], SOURCES[at]);
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
                let vector = LEVELS[self.random.below(2) as usize];
                self.apic.line(vector, true);
            }
            _ => {
                let vector = self.edge();
                self.apic.edge(vector);
            }
        }
    }

    /// An edge-triggered vector of the guest's.
    fn edge(&mut self) -> Vector {
        let claimed: Vec<_> = self
            .claimed
            .iter()
            .filter(|vector| !LEVELS.contains(vector))
            .copied()
            .collect();
        claimed[self.random.below(claimed.len() as u64) as usize]
    }

    // The guest.

    /// One thing happens.
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
            // A guest that does what it has to, soon.
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

    /// At an exit the host may have more to do.
    fn host(&mut self, phase: Phase) -> Checked {
        self.steps = self.random.chance(0.2);
        if self.random.chance(0.1) {
            self.core.suspend();
        }
        if phase == Phase::Reprogram && self.random.chance(0.4) {
            self.assign();
        }
        let holds = self
            .service
            .values()
            .any(|it| *it == Service::Guest { is_over: false });
        if phase == Phase::Nested && holds && !self.has_fallen && self.random.chance(0.05) {
            return self.fall_back();
        }
        Ok(())
    }

    fn fall_back(&mut self) -> Checked {
        self.seen.fallen += 1;
        self.has_fallen = true;
        for handler in &mut self.handlers {
            let is_real = matches!(handler.serves, Some((From::Apic, _))) && !handler.is_over;
            if let Some((_, vector)) = handler.serves
                && is_real
                && !handler.is_virtual
            {
                handler.is_virtual = true;
                self.service.insert(vector, Service::Host);
            }
        }
        let eois = self.core.fall_back(set(&self.apic.in_service));
        for _ in 0..eois {
            let ended = self.apic.eoi();
            self.retired(ended)?;
        }
        Ok(())
    }

    fn instruction(&mut self, phase: Phase, plan: &Plan) -> Checked {
        let sets = match phase {
            Phase::Masked => 4,
            Phase::Nested | Phase::Storm => 25,
            _ => 15,
        };
        match self.random.percent() {
            choice if choice < sets => {
                self.shadow = !self.interrupts;
                self.interrupts = true;
                Ok(())
            }
            25..30 => {
                self.interrupts = false;
                Ok(())
            }
            30..32 => {
                self.shadow = true;
                Ok(())
            }
            32..50 => self.end(plan),
            50..65 => {
                self.leave();
                Ok(())
            }
            65..70 if self.handlers.len() < DEPTH => self.software(plan),
            70..74 => {
                let priority = match self.random.chance(0.7) {
                    true => 0,
                    false => self.random.bits() as u8,
                };
                self.set_task_priority(priority)
            }
            74..77 => {
                self.exit("command")?;
                let vector = self.edge();
                self.apic.edge(vector);
                Ok(())
            }
            77..80 => self.read(),
            80..83 if phase == Phase::Reprogram => self.change_gate(),
            80 => self.change_gate(),
            83..86 if phase == Phase::Reprogram => {
                self.exit("table")?;
                self.limit = match self.random.percent() {
                    0..10 => 0x5ff,
                    10..20 => 0xeff,
                    _ => 0xfff,
                };
                self.load_table();
                Ok(())
            }
            86..88 if phase == Phase::Reprogram => {
                self.exit("claim")?;
                let vector = match self.random.chance(0.5) {
                    true => self.hosts[self.random.below(2) as usize],
                    false => 0xf0 + self.random.below(15) as u8,
                };
                // A good guest has a gate for it.
                self.gates[usize::from(vector)] = Gate::interrupt(2, 8, 0);
                self.sync(vector);
                // The host's own may come at the same moment, and find itself the guest's.
                if let Some(source) = self.host_of(vector)
                    && self.random.chance(0.8)
                    && self.apic.edge(vector)
                {
                    self.hosts_raised.insert(vector, source);
                }
                match self.random.chance(0.8) {
                    true => self.claim(vector),
                    false => Ok(()),
                }
            }
            88..92 => {
                let vector = LEVELS[self.random.below(2) as usize];
                self.apic.line(vector, false);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// What a guest does that only wants to be done with everything.
    fn finish(&mut self, plan: &Plan) -> Checked {
        let Some(handler) = self.handlers.last().copied() else {
            if self.task_priority != 0 {
                return self.set_task_priority(0);
            }
            self.shadow = !self.interrupts;
            self.interrupts = true;
            return Ok(());
        };
        if handler.is_over {
            self.leave();
            return Ok(());
        }
        self.end(plan)
    }

    /// The handler that runs ends its interrupt.
    fn end(&mut self, plan: &Plan) -> Checked {
        let Some(handler) = self.handlers.last_mut().filter(|handler| !handler.is_over) else {
            return Ok(());
        };
        handler.is_over = true;
        let handler = *handler;
        let vector = match handler.serves {
            Some((From::Apic, vector)) => vector,
            Some((From::Pic, vector)) => {
                self.apic.pic_in_service.remove(&(vector - PIC));
                return Ok(());
            }
            None => return Ok(()),
        };
        if let Some(Service::Guest { is_over }) = self.service.get_mut(&vector) {
            *is_over = true;
        }
        // What the device wanted is done, mostly.
        if LEVELS.contains(&vector) && self.random.chance(0.7) {
            self.apic.line(vector, false);
        }
        let was_up = self.apic.lines.get(&vector).is_some_and(|line| line.is_up);
        if !plan.eoi_exits {
            self.seen.direct_completions += 1;
            let ended = self.apic.eoi();
            ensure(ended == Some(vector), || {
                format!("the guest ended {ended:x?}, not {vector:#x}")
            })?;
            self.seen.sent_again += u64::from(was_up);
            return self.retired(ended);
        }
        self.exit("EOI")?;
        let completed = self.core.guest_eoi(set(&self.apic.in_service));
        self.note(|| format!("{completed:x?} of {handler:x?}"));
        let expected = match handler.is_virtual {
            true => Ended::Virtual(vector),
            false => Ended::Real(vector),
        };
        ensure(completed.ended == expected, || {
            format!("{completed:x?}, where {expected:x?} is over")
        })?;
        for _ in 0..completed.eois {
            let ended = self.apic.eoi();
            self.retired(ended)?;
        }
        self.seen.late_eois += u64::from(completed.eois > 1);
        self.seen.sent_again += u64::from(was_up && self.apic.requested.contains(&vector));
        Ok(())
    }

    /// IRET, of a handler that has nothing left to end.
    fn leave(&mut self) {
        if let Some(handler) = self.handlers.pop_if(|handler| handler.is_over) {
            self.interrupts = handler.interrupts;
        }
    }

    fn software(&mut self, plan: &Plan) -> Checked {
        let vector = match self.random.percent() {
            0..40 => 32 + self.random.below(224) as u8,
            40..60 => self.hosts[self.random.below(2) as usize],
            _ => self.edge(),
        };
        let privilege = 3 * self.random.below(2) as u8;
        let going = Going {
            event: Event {
                vector,
                kind: Kind::Software,
                code: None,
            },
            of: Of::Software(privilege),
        };
        self.deliver(plan, going, false)
    }

    fn set_task_priority(&mut self, priority: u8) -> Checked {
        self.exit("task priority")?;
        self.task_priority = priority;
        let real = self.core.set_task_priority(priority);
        self.apic.task_priority = real;
        ensure(real < 0xf0, || "the host's class is blocked".into())
    }

    /// The guest reads what is in service and requested.
    fn read(&mut self) -> Checked {
        self.exit("read")?;
        self.seen.reads += 1;
        let (shown, truth) = (
            self.core.in_service(set(&self.apic.in_service)),
            set(&self.truth()),
        );
        ensure(shown == truth, || {
            format!("{shown:x?} for in service {truth:x?}")
        })?;
        let (shown, truth) = (self.core.requested(), set(&self.taken));
        ensure(shown == truth, || {
            format!("{shown:x?} for requested {truth:x?}")
        })
    }

    fn change_gate(&mut self) -> Checked {
        if self.is_engaged {
            self.exit("gate")?;
        }
        let vector = match self.random.chance(0.2) {
            true => PIC + self.random.below(LINES.into()) as u8,
            false => {
                let levels = LEVELS[self.random.below(2) as usize];
                let edge = self.edge();
                if self.random.chance(0.2) {
                    levels
                } else {
                    edge
                }
            }
        };
        let gate = Gate::interrupt(3, 8, 3 * self.random.below(2) as u8);
        let gate = match self.random.percent() {
            0..15 => gate.hidden(),
            15..20 => Gate::default(),
            // A call gate.
            20..23 => Gate([gate.0[0] & !(0xf << 40) | 0xc << 40, 0]),
            _ => gate,
        };
        self.gates[usize::from(vector)] = gate;
        self.sync(vector);
        Ok(())
    }

    /// Everything that was begun ends, and nothing is left.
    pub(super) fn rest(&mut self) -> Checked {
        // What is on its way gets there first; between that and the next entry no guest could change a thing.
        while self.going.is_some() {
            self.event(Phase::Drain)?;
        }
        if self.running.is_some() {
            self.exit("rest")?;
        }
        self.steps = false;
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
        let may_be = self.ways.delivery && self.is_engaged && !self.has_fallen;
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
