//! Configuration space, BARs and interrupts, as the guest's driver uses them.

use assign::hardware::{HostEvent, Vectors};
use guest_mem::GuestRam;
use platform::interrupt::Message;

use crate::images::{EXPRESS, MSI, MSIX, PENDING, TABLE, VECTORS};
use crate::world::{DATA, RW, World};

const COMMAND: u16 = 4;
const MSIX_CONTROL: u16 = MSIX + 2;
const ON: u32 = 0x8000;
const MASKED: u32 = 0x4000;
/// Initiate Function Level Reset.
const RESET: u32 = 0x8000;

fn message(vector: u16) -> Message {
    Message {
        address: 0xfee0_1000,
        data: 0x40 + u32::from(vector),
    }
}

/// A device with Memory Space and Bus Master on.
fn started() -> World<GuestRam> {
    let mut world = World::strict();
    world.config_write(0, COMMAND, 2, 6);
    world
}

/// Programs an entry of the MSI-X table and unmasks it.
fn program(world: &mut World<GuestRam>, vector: u16) {
    let (at, message) = (TABLE + u64::from(vector) * 16, message(vector));
    world.bar_write(0, at, 8, message.address);
    world.bar_write(0, at + 8, 4, message.data.into());
    world.bar_write(0, at + 12, 4, 0);
}

fn mask(world: &mut World<GuestRam>, vector: u16, is_masked: bool) {
    let at = TABLE + u64::from(vector) * 16 + 12;
    world.bar_write(0, at, 4, is_masked.into());
}

#[test]
fn the_command_register_reaches_the_device_and_nothing_else_of_it_does() {
    let mut world = World::strict();
    let hardware = world.seats[0].hardware.clone();
    for (written, wanted) in [
        (0, (false, false)),
        (2, (true, false)),
        (6, (true, true)),
        (0xffff, (true, true)),
        (4, (false, true)),
        (0, (false, false)),
    ] {
        world.config_write(0, COMMAND, 2, written);
        assert_eq!(hardware.device().command, wanted, "{written:#x}");
    }
    assert_eq!(world.config_read(0, 0, 4), 0x0010_1b36);
    // Everything that the guest may try to write.
    for reg in (0..256).step_by(4) {
        if reg != EXPRESS + 8 {
            world.config_write(0, reg, 4, 0);
        }
    }
    assert!(hardware.device().accesses.is_empty());
}

/// Vectors are handed over all at once when MSI-X is turned on, and their lines connected in one
/// call.
#[test]
fn msix_lines_are_connected_in_one_call_and_each_change_is_one_more() {
    let mut world = started();
    let (hardware, lines) = (
        world.seats[0].hardware.clone(),
        world.seats[0].lines.clone(),
    );
    // Masked as a whole while they are programmed, as Linux does.
    world.config_write(0, MSIX_CONTROL, 2, ON | MASKED);
    assert_eq!(hardware.device().vectors, Some(Vectors::Msix(VECTORS)));
    for vector in 0..VECTORS {
        program(&mut world, vector);
    }
    assert!(
        lines.state().batches.is_empty(),
        "nothing has a message while all are masked"
    );
    world.config_write(0, MSIX_CONTROL, 2, ON);
    let batches = lines.state().batches.clone();
    assert_eq!(
        batches,
        [vec![0, 1, 2, 3]],
        "lines are connected one by one"
    );
    for vector in 0..VECTORS {
        lines.signal(vector);
        assert_eq!(lines.state().sent.pop(), Some(message(vector)));
    }
    // One changes.
    world.bar_write(0, TABLE + 16 + 8, 4, 0x99);
    assert_eq!(lines.state().batches.last(), Some(&vec![1]));
    lines.signal(1);
    assert_eq!(lines.state().sent.pop().map(|sent| sent.data), Some(0x99));
    assert_eq!(hardware.device().vectors_set, [Vectors::Msix(VECTORS)]);
    // Off: no more of them.
    world.config_write(0, MSIX_CONTROL, 2, 0);
    assert_eq!(hardware.device().vectors, Some(Vectors::Off));
    assert!(lines.state().messages.values().all(Option::is_none));
}

#[test]
fn a_masked_vector_is_kept_its_pending_bit_shows_and_it_is_sent_once() {
    let mut world = started();
    let lines = world.seats[0].lines.clone();
    (0..VECTORS).for_each(|vector| program(&mut world, vector));
    world.config_write(0, MSIX_CONTROL, 2, ON);
    mask(&mut world, 2, true);
    lines.signal(2);
    lines.signal(2);
    assert_eq!(lines.state().sent, []);
    assert_eq!(world.bar_read(0, PENDING, 8), 0b100);
    assert_eq!(world.bar_read(0, PENDING, 1), 0b100);
    mask(&mut world, 2, false);
    assert_eq!(lines.state().sent, [message(2)]);
    assert_eq!(world.bar_read(0, PENDING, 8), 0);
    // The pending bits are no register of the guest's.
    world.bar_write(0, PENDING, 8, u64::MAX);
    assert_eq!(world.bar_read(0, PENDING, 8), 0);
    // All at once.
    world.config_write(0, MSIX_CONTROL, 2, ON | MASKED);
    lines.signal(0);
    lines.signal(3);
    assert_eq!(world.bar_read(0, PENDING, 4), 0b1001);
    world.config_write(0, MSIX_CONTROL, 2, ON);
    assert_eq!(lines.state().sent[1..], [message(0), message(3)]);
}

/// A device that is no bus master sends no messages.
#[test]
fn without_bus_mastering_interrupts_are_kept() {
    let mut world = started();
    let lines = world.seats[0].lines.clone();
    program(&mut world, 0);
    world.config_write(0, MSIX_CONTROL, 2, ON);
    world.config_write(0, COMMAND, 2, 2);
    lines.signal(0);
    assert_eq!(lines.state().sent, []);
    world.config_write(0, COMMAND, 2, 6);
    assert_eq!(lines.state().sent, [message(0)]);
}

#[test]
fn msi_has_as_many_vectors_as_were_allocated_and_masks() {
    let mut world = started();
    let (hardware, lines) = (
        world.seats[0].hardware.clone(),
        world.seats[0].lines.clone(),
    );
    world.config_write(0, MSI + 4, 4, 0xfee0_2000);
    world.config_write(0, MSI + 8, 4, 0);
    world.config_write(0, MSI + 12, 2, 0x40);
    // Two of the four, on.
    world.config_write(0, MSI + 2, 2, 0x0011);
    assert_eq!(hardware.device().vectors, Some(Vectors::Msi(2)));
    lines.signal(1);
    let sent = lines.state().sent.pop();
    assert_eq!(
        sent.map(|sent| (sent.address, sent.data)),
        Some((0xfee0_2000, 0x41))
    );
    // Mask bits, pending bits.
    world.config_write(0, MSI + 16, 4, 0b10);
    lines.signal(1);
    lines.signal(0);
    assert_eq!(world.config_read(0, MSI + 20, 4), 0b10);
    assert_eq!(lines.state().sent.len(), 1);
    world.config_write(0, MSI + 16, 4, 0);
    assert_eq!(lines.state().sent.len(), 2);
    assert_eq!(world.config_read(0, MSI + 20, 4), 0);
    // MSI-X goes before.
    world.config_write(0, MSIX_CONTROL, 2, ON);
    assert_eq!(hardware.device().vectors, Some(Vectors::Msix(VECTORS)));
    world.config_write(0, MSIX_CONTROL, 2, 0);
    assert_eq!(hardware.device().vectors, Some(Vectors::Msi(2)));
}

/// The host does not hand out the vectors: nothing is connected, and the next try is a new one.
#[test]
fn vectors_that_the_host_refuses_are_not_connected() {
    let mut world = started();
    let (hardware, lines) = (
        world.seats[0].hardware.clone(),
        world.seats[0].lines.clone(),
    );
    program(&mut world, 0);
    hardware.device().refuses_vectors = true;
    world.config_write(0, MSIX_CONTROL, 2, ON);
    assert!(lines.state().messages.values().all(Option::is_none));
    hardware.device().refuses_vectors = false;
    world.config_write(0, MSIX_CONTROL, 2, 0);
    world.config_write(0, MSIX_CONTROL, 2, ON);
    lines.signal(0);
    assert_eq!(lines.state().sent, [message(0)]);
}

/// One access may have bytes of registers and of a table: each byte goes where it belongs.
#[test]
fn an_access_across_registers_and_a_table_is_cut_in_two() {
    let mut world = started();
    let hardware = world.seats[0].hardware.clone();
    let table_end = TABLE + u64::from(VECTORS) * 16;
    let pending_end = PENDING + 8;
    for at in [TABLE, table_end, PENDING, pending_end, 0x4000] {
        for offset in at - 7..at + 1 {
            for len in [1, 2, 4, 8] {
                hardware.device().accesses.clear();
                world.bar_write(0, offset, len, u64::MAX);
                world.bar_read(0, offset, len);
                let accesses = hardware.device().accesses.clone();
                for (_, from, bytes, _) in accesses {
                    let end = from + bytes as u64;
                    let is_apart = |start: u64, behind: u64| end <= start || from >= behind;
                    assert!(
                        is_apart(TABLE, table_end) && is_apart(PENDING, pending_end),
                        "the device's own table is reached: {from:#x}+{bytes}"
                    );
                    assert!(end <= 0x4000 && from >= offset);
                }
            }
        }
    }
    // Four bytes of registers, four of the table.
    hardware.device().accesses.clear();
    world.bar_write(0, TABLE - 4, 8, 0xfee0_3000_1234_5678);
    assert_eq!(hardware.device().accesses, [(0, TABLE - 4, 4, true)]);
    assert_eq!(world.bar_read(0, TABLE - 4, 8), 0xfee0_3000_1234_5678);
    assert_eq!(world.bar_read(0, TABLE, 4), 0xfee0_3000);
    // Behind the BAR.
    assert_eq!(world.bar_read(0, 0x3ffc, 8) >> 32, 0xffff_ffff);
    assert_eq!(world.bar_read(0, u64::MAX - 3, 8), u64::MAX);
}

/// FLR: ones while it runs, then registers as after power on; mappings stay.
#[test]
fn a_function_reset_answers_ones_while_it_runs_and_keeps_mappings() {
    let mut world = started();
    let table = world.boot()[0];
    world.map((table, 1), 16, DATA, 1, RW);
    (0..VECTORS).for_each(|vector| program(&mut world, vector));
    world.config_write(0, MSIX_CONTROL, 2, ON);
    mask(&mut world, 1, true);
    let (hardware, lines) = (
        world.seats[0].hardware.clone(),
        world.seats[0].lines.clone(),
    );
    lines.signal(1);
    let resets = world.seats[0].resets.clone();
    // It lasts as long as this is held.
    let lasting = resets.lock().unwrap();
    world.config_write(0, EXPRESS + 8, 2, RESET);
    assert_eq!(hardware.device().command, (true, false), "no bus master");
    assert_eq!(hardware.device().vectors, Some(Vectors::Off));
    world.settle();
    assert_eq!(world.config_read(0, 0, 4), u32::MAX, "while it runs");
    assert_eq!(world.bar_read(0, 0, 4), 0xffff_ffff);
    hardware.device().accesses.clear();
    world.bar_write(0, 0, 4, 1);
    assert!(hardware.device().accesses.is_empty());
    // Asked for again meanwhile.
    world.config_write(0, EXPRESS + 8, 2, RESET);
    drop(lasting);
    world.until("the reset is over", |world| {
        world.config_read(0, 0, 4) == 0x0010_1b36
    });
    assert_eq!(*resets.lock().unwrap(), 1);
    assert_eq!(world.config_read(0, COMMAND, 2), 2);
    assert_eq!(world.config_read(0, MSIX_CONTROL, 2) & ON, 0);
    assert_eq!(
        world.bar_read(0, TABLE, 8),
        0,
        "the table is as after power on"
    );
    assert_eq!(world.bar_read(0, TABLE + 12, 4), 1);
    assert!(lines.state().kept.is_empty(), "what was pending is not");
    assert_eq!(world.pages(0), [(16, DATA)]);
}

#[test]
fn an_error_and_a_request_of_the_host_leave_an_empty_slot() {
    for notice in [HostEvent::Error, HostEvent::Request] {
        let mut world = started();
        let table = world.boot()[0];
        world.map((table, 1), 16, DATA, 1, RW);
        let hardware = world.seats[0].hardware.clone();
        hardware.device().notice = Some(notice);
        // It is looked at once in some thousand turns, since it costs a system call.
        world.until("it is cut off", |world| {
            world.seats[0].hardware.device().is_stopped
        });
        assert_eq!(world.config_read(0, 0, 4), u32::MAX, "{notice:?}");
        assert_eq!(world.bar_read(0, 0, 8), u64::MAX);
        hardware.device().accesses.clear();
        world.bar_write(0, 0, 4, 1);
        world.config_write(0, COMMAND, 2, 6);
        assert!(hardware.device().accesses.is_empty());
        assert!(!hardware.device().command.1);
        world.until("nothing is mapped", |world| world.reach.pages() == 0);
        assert_eq!(world.pages(0), []);
        world.unmap((table, 1), 16, 1);
    }
}
