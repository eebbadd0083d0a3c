//! Runs of the small world ([`world`](super::world)), and single steps of the mode machine: each
//! bug of the notes that is one of its decisions has a test by its number.

use super::world::{EventCounts, World};
use super::*;
use crate::event::{self, NOT_PRESENT, PROTECTION};

/// Events of one world; claims are for good in each.
const ONE_WORLD: u64 = 10_000;

/// Worlds one after another until something is wrong or the events are spent: which seed, after how
/// many events in all.
///
/// `ELI_TRACE=<seed>` prints the events of one.
fn first_wrong(events: u64, seen: &mut EventCounts) -> Option<(u64, u64, String)> {
    let traced = std::env::var("ELI_TRACE").ok();
    let mut done = 0;
    for seed in 1.. {
        if done >= events {
            break;
        }
        let mut world = World::new(seed);
        if traced.as_deref() == Some(&seed.to_string()) {
            world.trace();
        }
        world.seen = *seen;
        let ran = world.run(ONE_WORLD.min(events - done));
        done += world.events;
        *seen = world.seen;
        if let Err(wrong) = ran {
            return Some((seed, done, wrong));
        }
    }
    None
}

#[test]
fn a_million_events_lose_no_interrupt() {
    let events = std::env::var("ELI_EVENTS").map_or(1_000_000, |n| n.parse().expect("a number"));
    let mut seen = EventCounts::default();
    let wrong = first_wrong(events, &mut seen);
    assert_eq!(wrong, None);
    println!("{:?}", seen.all());
    for (what, count) in seen.all() {
        assert!(count > 100, "{what}: {count}");
    }
}

const READY: Cpu = Cpu {
    interrupts: true,
    shadow: false,
    event: false,
    stepping: false,
};
const MASKED: Cpu = Cpu {
    interrupts: false,
    ..READY
};

fn set(vectors: &[Vector]) -> VectorSet {
    vectors.iter().copied().collect()
}

/// A shadow stands; 0x41 and 0x61 are assigned.
fn engaged() -> Core {
    let mut core = Core::new(DirectModes {
        delivery: true,
        completion: true,
    });
    core.assign(set(&[0x41, 0x61]));
    core.load_table(gate::FULL_LIMIT, true);
    core
}

const fn edge(vector: Vector) -> Acknowledged {
    Acknowledged {
        vector,
        in_service: true,
        level: false,
    }
}

const fn level(vector: Vector) -> Acknowledged {
    Acknowledged {
        level: true,
        ..edge(vector)
    }
}

/// An 8259's.
const fn external(vector: Vector) -> Acknowledged {
    Acknowledged {
        in_service: false,
        ..edge(vector)
    }
}

/// Returns the dispositions of `taken`, with those in service that have the bit.
fn acknowledge(core: &mut Core, taken: &[Acknowledged]) -> Vec<(Vector, Disposition)> {
    let real = taken.iter().filter(|one| one.in_service);
    let real = real.map(|one| one.vector).collect();
    let mut heard = Vec::new();
    core.acknowledge(taken, real, |vector, disposition| {
        heard.push((vector, disposition))
    });
    heard
}

const fn guests(eois: u8) -> Disposition {
    Disposition { eois, to: None }
}

fn injected(core: &mut Core, real: &[Vector]) -> Option<Vector> {
    let plan = core.plan(READY, set(real));
    plan.inject.map(|injection| injection.event.vector)
}

const fn ended(eois: u8, ended: EoiOutcome) -> Completed {
    Completed { eois, ended }
}

fn fault(vector: Vector, during: Event, gate: Gate, privilege: u8) -> Fault {
    let code = u32::from(during.vector) << 3 | event::CODE_IDT;
    Fault {
        fault: Event::exception(vector, Some(code)),
        during: Some(during),
        gate,
        privilege,
    }
}

const fn present(privilege: u8) -> Gate {
    Gate::interrupt(0x1000, 8, privilege)
}

#[test]
fn bug_2_an_8259s_interrupt_is_never_in_service_at_the_local_apic() {
    let mut core = engaged();
    assert_eq!(
        acknowledge(&mut core, &[external(0x38)]),
        [(0x38, guests(0))]
    );
    assert_eq!(injected(&mut core, &[]), Some(0x38));
    assert_eq!(core.in_service(set(&[])), set(&[]));
    assert_eq!(core.guest_eoi(set(&[])), ended(0, EoiOutcome::Nothing));
    // A lower class is not blocked.
    acknowledge(&mut core, &[edge(0x21)]);
    assert_eq!(injected(&mut core, &[]), Some(0x21));
    // No task priority blocks it either.
    core.set_task_priority(0xff);
    acknowledge(&mut core, &[external(0x38)]);
    assert_eq!(injected(&mut core, &[]), Some(0x38));
}

#[test]
fn bug_3_the_newest_is_ended_first() {
    let mut core = engaged();
    let heard = acknowledge(&mut core, &[edge(0x41), edge(0x61), edge(0xf1)]);
    let tick = Disposition {
        eois: 1,
        to: Some(Source::Tick),
    };
    assert_eq!(heard, [(0xf1, tick), (0x61, guests(1)), (0x41, guests(1))]);
}

#[test]
fn an_eoi_that_is_due_below_a_level_triggered_one_comes_with_that_ones() {
    let mut core = engaged();
    let heard = acknowledge(&mut core, &[edge(0x41), level(0x92), edge(0xf1)]);
    let eois: Vec<_> = heard.iter().map(|heard| heard.1.eois).collect();
    assert_eq!(eois, [1, 0, 0]);
    assert_eq!(injected(&mut core, &[0x41, 0x92]), Some(0x92));
    let both = ended(2, EoiOutcome::Virtual(0x92));
    assert_eq!(core.guest_eoi(set(&[0x41, 0x92])), both);
    assert_eq!(injected(&mut core, &[]), Some(0x41));
    assert_eq!(
        core.guest_eoi(set(&[])),
        ended(0, EoiOutcome::Virtual(0x41))
    );
}

#[test]
fn bug_5_a_level_triggered_one_is_ended_when_the_guest_ends_it() {
    let mut core = engaged();
    assert_eq!(acknowledge(&mut core, &[level(0x52)]), [(0x52, guests(0))]);
    // Not in direct mode, in which the EOI would not exit.
    assert!(!core.plan(MASKED, set(&[0x52])).direct);
    assert_eq!(injected(&mut core, &[0x52]), Some(0x52));
    let completed = ended(1, EoiOutcome::Virtual(0x52));
    assert_eq!(core.guest_eoi(set(&[0x52])), completed);
    assert!(core.plan(READY, set(&[])).direct);
}

#[test]
fn bug_7_reads_show_what_is_virtual_and_not_what_is_owed() {
    let mut core = engaged();
    acknowledge(&mut core, &[edge(0x71), level(0x92)]);
    let real = set(&[0x71, 0x92]);
    assert_eq!(core.requested(), set(&[0x71, 0x92]));
    assert_eq!(core.in_service(real), set(&[]));
    assert_eq!(injected(&mut core, &[0x71, 0x92]), Some(0x92));
    assert_eq!(core.requested(), set(&[0x71]));
    assert_eq!(core.in_service(real), set(&[0x92]));
    // Beside one that was delivered directly.
    let mut core = engaged();
    acknowledge(&mut core, &[edge(0x71)]);
    assert_eq!(injected(&mut core, &[0x41]), Some(0x71));
    assert_eq!(core.in_service(set(&[0x41])), set(&[0x41, 0x71]));
}

#[test]
fn of_several_8259s_interrupts_in_one_window_the_newest_goes_first() {
    let mut core = engaged();
    acknowledge(&mut core, &[external(0x37)]);
    acknowledge(&mut core, &[external(0x36), edge(0x41), external(0x30)]);
    for vector in [0x30, 0x36, 0x37, 0x41] {
        assert_eq!(injected(&mut core, &[]), Some(vector));
    }
}

#[test]
fn interrupts_behind_one_of_an_8259_get_a_window() {
    // The guest's end of it does not exit. Without a window, the interrupts behind it would wait
    // until the next exit.
    let mut core = engaged();
    acknowledge(&mut core, &[external(0x36), external(0x30), edge(0x41)]);
    for (vector, window) in [(0x30, true), (0x36, true), (0x41, false)] {
        let plan = core.plan(READY, set(&[]));
        assert_eq!(plan.inject.map(|it| it.event.vector), Some(vector));
        assert_eq!(plan.window, window, "{vector:#x}");
    }
    // None for one that the task priority blocks.
    let mut core = engaged();
    core.set_task_priority(0x40);
    acknowledge(&mut core, &[external(0x30), edge(0x41)]);
    assert!(!core.plan(READY, set(&[])).window);
}

#[test]
fn a_vector_of_the_hosts_class_is_never_assigned() {
    // In direct mode the limit would hide it, and the fault look like the guest's own.
    let mut core = engaged();
    assert_eq!(core.claim(0xf4), Ok(0xef));
    core.assign(set(&[0x41, 0xef, 0xf4]));
    assert_eq!(core.assigned(), set(&[0x41]));
    let plan = core.plan(READY, set(&[]));
    assert!(plan.direct && !gate::is_within(plan.limit, 0xf4));
    // Nor may an INT instruction of the guest fault for ever: its entry is not direct.
    let int = Event {
        kind: Kind::Software,
        ..Event::external(0xf4)
    };
    let met = fault(PROTECTION, int, present(0), 0);
    assert!(matches!(core.reflect(met), Reflection::Software(it) if it.opens));
    let again = Cpu {
        event: true,
        ..READY
    };
    assert!(gate::is_within(core.plan(again, set(&[])).limit, 0xf4));
}

#[test]
fn an_interrupt_that_comes_by_an_alias_is_the_guests_by_its_own_vector() {
    let mut core = engaged();
    let alias = core.claim(0xf4).unwrap();
    assert!(alias < CRITICAL);
    // It meets a hidden gate in direct mode, and is acknowledged by the host.
    assert!(core.plan(READY, set(&[])).direct);
    let met = fault(NOT_PRESENT, Event::external(alias), present(0).hidden(), 0);
    assert_eq!(core.reflect(met), Reflection::Interrupt(alias));
    assert_eq!(acknowledge(&mut core, &[edge(alias)]), [(0xf4, guests(1))]);
    assert_eq!(core.shown_requested(set(&[0xf1])), set(&[0xf4]));
    assert_eq!(injected(&mut core, &[]), Some(0xf4));
    assert_eq!(core.in_service(set(&[])), set(&[0xf4]));
    assert_eq!(
        core.guest_eoi(set(&[])),
        ended(0, EoiOutcome::Virtual(0xf4))
    );
    // A level is ended by the guest, and has nothing of the host's class in service meanwhile.
    assert_eq!(acknowledge(&mut core, &[level(alias)]), [(0xf4, guests(0))]);
    assert_eq!(injected(&mut core, &[alias]), Some(0xf4));
    assert_eq!(core.in_service(set(&[alias])), set(&[0xf4]));
    let completed = ended(1, EoiOutcome::Virtual(0xf4));
    assert_eq!(core.guest_eoi(set(&[alias])), completed);
    assert!(core.plan(READY, set(&[])).direct);
    // A vector with an alias is sent to itself virtually; others by the real local APIC.
    assert!(!core.send(0xf1) && core.send(0x41));
    assert_eq!(injected(&mut core, &[]), Some(0xf1));
}

#[test]
fn an_interrupt_that_is_gone_has_the_guests_spurious_vector() {
    let mut core = engaged();
    core.set_spurious(0x7f);
    acknowledge(&mut core, &[external(SPURIOUS)]);
    assert_eq!(injected(&mut core, &[]), Some(0x7f));
}

#[test]
fn an_own_gate_that_is_absent_is_told_to_the_guest() {
    let absent = present(0).hidden();
    let np = |vector: Vector| {
        let code = u32::from(vector) << 3 | event::CODE_IDT | event::CODE_EXTERNAL;
        Reflection::Guest(Event::exception(NOT_PRESENT, Some(code)))
    };
    // Delivered directly; a vector that is not assigned is hidden there, and is an interrupt.
    let mut core = engaged();
    assert!(core.plan(READY, set(&[])).direct);
    let met = |vector| fault(NOT_PRESENT, Event::external(vector), absent, 0);
    assert_eq!(core.reflect(met(0x41)), np(0x41));
    assert_eq!(core.reflect(met(0x51)), Reflection::Interrupt(0x51));
    // Injected.
    acknowledge(&mut core, &[level(0x51)]);
    assert_eq!(injected(&mut core, &[0x51]), Some(0x51));
    assert_eq!(core.reflect(met(0x51)), np(0x51));
}

#[test]
fn an_own_gate_is_met_after_a_delivery_that_was_cut_off() {
    // Taken once more instead, the vector would wait for an end of itself.
    let mut core = engaged();
    acknowledge(&mut core, &[level(0x51)]);
    let event = core.plan(READY, set(&[0x51])).inject.map(|it| it.event);
    assert_eq!(core.again(event, false), event);
    let again = Cpu {
        event: true,
        ..READY
    };
    assert_eq!(core.plan(again, set(&[0x51])).inject, None);
    let met = fault(NOT_PRESENT, Event::external(0x51), present(0).hidden(), 0);
    let code = Some(0x51 << 3 | event::CODE_IDT | event::CODE_EXTERNAL);
    let np = Event::exception(NOT_PRESENT, code);
    assert_eq!(core.reflect(met), Reflection::Guest(np));
    // That was one interrupt: the next of the same vector is the processor's.
    core.plan(again, set(&[0x51]));
    let completed = ended(1, EoiOutcome::Virtual(0x51));
    assert_eq!(core.guest_eoi(set(&[0x51])), completed);
    assert!(core.plan(READY, set(&[])).direct);
    assert_eq!(core.reflect(met), Reflection::Interrupt(0x51));
}

#[test]
fn vector_unassigned_during_its_injection_keeps_its_gate() {
    let mut core = engaged();
    acknowledge(&mut core, &[edge(0x61)]);
    assert_eq!(injected(&mut core, &[]), Some(0x61));
    // Its delivery was cut off, and goes again.
    core.assign(set(&[0x41]));
    let again = Cpu {
        event: true,
        ..READY
    };
    assert!(!core.plan(again, set(&[])).direct);
    assert_eq!(core.shadow(0x61, present(0)), present(0));
    core.guest_eoi(set(&[]));
    let plan = core.plan(READY, set(&[]));
    assert!(plan.direct && plan.hide == set(&[0x61]));
    assert_eq!(core.shadow(0x61, present(0)), present(0).hidden());
}

#[test]
fn an_int_instruction_meets_what_the_guests_own_table_has() {
    let mut core = engaged();
    let int = |vector| Event {
        kind: Kind::Software,
        ..Event::external(vector)
    };
    let own = |vector: Vector, of: Vector| {
        let code = u32::from(of) << 3 | event::CODE_IDT;
        Reflection::Guest(Event::exception(vector, Some(code)))
    };
    let met = |gate, privilege| fault(NOT_PRESENT, int(0x80), gate, privilege);
    let through = Reflection::Software(Injection {
        event: int(0x80),
        opens: true,
    });
    core.plan(READY, set(&[]));
    assert_eq!(core.reflect(met(present(3), 3)), through);
    assert_eq!(core.reflect(met(present(0), 0)), through);
    // In the processor's order: type, privilege, presence.
    let no_gate = Gate::default();
    assert_eq!(core.reflect(met(no_gate, 0)), own(PROTECTION, 0x80));
    assert_eq!(core.reflect(met(present(0), 3)), own(PROTECTION, 0x80));
    let absent = present(0).hidden();
    assert_eq!(core.reflect(met(absent, 3)), own(PROTECTION, 0x80));
    assert_eq!(core.reflect(met(absent, 0)), own(NOT_PRESENT, 0x80));
    // Its entry is not direct, and its gate open, until one that begins with nothing.
    let again = Cpu {
        event: true,
        ..READY
    };
    core.reflect(met(present(0), 0));
    assert!(!core.plan(again, set(&[])).direct);
    assert_eq!(core.shadow(0x80, present(0)), present(0));
    assert_eq!(core.again(Some(int(0x80)), true), Some(int(0x80)));
    assert_eq!(core.again(Some(int(0x80)), false), None);
    let plan = core.plan(READY, set(&[]));
    assert!(plan.direct && plan.hide == set(&[0x80]));
    assert_eq!(core.shadow(0x80, present(0)), present(0).hidden());
    // Limit.
    core.load_table(0x80 * 16 - 1, true);
    let beyond = fault(PROTECTION, int(0x80), present(3), 3);
    assert_eq!(core.reflect(beyond), own(PROTECTION, 0x80));
}

#[test]
fn without_a_shadow_a_fault_of_an_int_instruction_is_the_guests_as_it_is() {
    let mut core = Core::new(DirectModes::default());
    core.load_table(gate::FULL_LIMIT, false);
    let int = Event {
        kind: Kind::Software,
        ..Event::external(0x80)
    };
    for vector in [NOT_PRESENT, PROTECTION] {
        let met = fault(vector, int, present(0).hidden(), 3);
        assert_eq!(core.reflect(met), Reflection::Guest(met.fault));
    }
}

#[test]
fn interrupt_ended_by_force_stays_in_service_for_the_guest() {
    let mut core = engaged();
    core.plan(READY, set(&[]));
    // 0x41 and 0x61 were delivered directly, and are held.
    assert_eq!(core.fall_back(set(&[0x41, 0x61])), 2);
    assert_eq!(core.in_service(set(&[])), set(&[0x41, 0x61]));
    assert!(!core.plan(READY, set(&[])).direct);
    // A lower one waits, a higher one does not, and each EOI ends the intended one.
    acknowledge(&mut core, &[edge(0x51)]);
    assert_eq!(injected(&mut core, &[]), None);
    acknowledge(&mut core, &[edge(0x71)]);
    assert_eq!(injected(&mut core, &[]), Some(0x71));
    for vector in [0x71, 0x61] {
        assert_eq!(
            core.guest_eoi(set(&[])),
            ended(0, EoiOutcome::Virtual(vector))
        );
    }
    assert_eq!(injected(&mut core, &[]), Some(0x51));
    assert_eq!((core.counts().forced, core.counts().returned), (1, 0));
    // Direct again when all of it is over, however often it happens.
    for vector in [0x51, 0x41] {
        assert!(!core.plan(MASKED, set(&[])).direct);
        assert_eq!(
            core.guest_eoi(set(&[])),
            ended(0, EoiOutcome::Virtual(vector))
        );
    }
    for times in 1..10 {
        assert!(core.plan(READY, set(&[])).direct);
        assert_eq!(core.counts().returned, times);
        assert_eq!(core.fall_back(set(&[0x41])), 1);
        assert!(!core.plan(READY, set(&[])).direct);
        assert_eq!(
            core.guest_eoi(set(&[])),
            ended(0, EoiOutcome::Virtual(0x41))
        );
    }
}

#[test]
fn the_hosts_levels_are_not_held_by_the_guest() {
    let mut core = engaged();
    core.plan(READY, set(&[]));
    assert!(core.is_held(set(&[0x41])) && !core.is_held(set(&[])));
    // A level that the host acknowledged waits virtually.
    core.acknowledge(&[level(0x92)], set(&[0x92]), |_, _| ());
    assert!(!core.is_held(set(&[0x92])) && core.is_held(set(&[0x41, 0x92])));
}

#[test]
fn a_suspended_guest_is_injected_to_until_it_is_resumed() {
    let mut core = engaged();
    assert!(core.plan(READY, set(&[])).direct);
    core.suspend();
    // Regardless of its flag.
    for cpu in [READY, MASKED, READY] {
        assert!(!core.plan(cpu, set(&[])).direct && core.is_suspended());
    }
    core.resume();
    assert!(core.plan(MASKED, set(&[])).direct);
    assert_eq!((core.counts().suspended, core.counts().returned), (1, 1));
}

#[test]
fn interrupt_forced_below_a_level_triggered_one_ends_with_it() {
    let mut core = engaged();
    core.plan(READY, set(&[]));
    // 0x41 was delivered directly; within it the host took 0x92.
    core.acknowledge(&[level(0x92)], set(&[0x41, 0x92]), |_, _| ());
    assert_eq!(core.fall_back(set(&[0x41, 0x92])), 0);
    assert_eq!(injected(&mut core, &[0x41, 0x92]), Some(0x92));
    let both = ended(2, EoiOutcome::Virtual(0x92));
    assert_eq!(core.guest_eoi(set(&[0x41, 0x92])), both);
    assert_eq!(core.in_service(set(&[])), set(&[0x41]));
}

#[test]
fn interrupts_of_the_hosts_making_are_injected_and_direct_mode_waits_for_their_end() {
    let mut core = engaged();
    assert!(core.plan(READY, VectorSet::EMPTY).direct);
    core.request(0x51);
    core.request(0x51);
    let plan = core.plan(MASKED, VectorSet::EMPTY);
    assert!(!plan.direct && plan.window && plan.inject.is_none());
    let injection = core.plan(READY, VectorSet::EMPTY).inject;
    assert_eq!(injection.map(|one| one.event.vector), Some(0x51));
    let plan = core.plan(READY, VectorSet::EMPTY);
    assert!(!plan.direct && plan.eoi_exits && plan.inject.is_none());
    let done = core.guest_eoi(VectorSet::EMPTY);
    assert_eq!((done.eois, done.ended), (0, EoiOutcome::Virtual(0x51)));
    assert!(core.plan(READY, VectorSet::EMPTY).direct);
}
