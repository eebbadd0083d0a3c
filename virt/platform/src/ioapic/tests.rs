//! The chip with a guest's accesses, and sinks that record.

use super::*;
use crate::layout;

#[derive(Default)]
struct Recorder {
    messages: Mutex<Vec<(u64, u32)>>,
    routes: Mutex<Vec<Routes>>,
}

impl InterruptSink for Recorder {
    fn send(&self, from: SourceId, message: Message) {
        assert_eq!(from, layout::IOAPIC_SOURCE);
        self.messages
            .lock()
            .unwrap()
            .push((message.address, message.data));
    }
}

impl RouteSink for Recorder {
    fn update(&self, routes: &Routes) {
        self.routes.lock().unwrap().push(*routes);
    }
}

fn chip() -> (Ioapic, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    (
        Ioapic::new(layout::IOAPIC_SOURCE, recorder.clone(), recorder.clone()),
        recorder,
    )
}

fn write(chip: &Ioapic, register: u8, value: u32) {
    chip.write(0, &u32::from(register).to_le_bytes());
    chip.write(0x10, &value.to_le_bytes());
}

fn read(chip: &Ioapic, register: u8) -> u32 {
    chip.write(0, &[register]);
    let mut data = [0; 4];
    chip.read(0x10, &mut data);
    u32::from_le_bytes(data)
}

fn taken(recorder: &Recorder) -> Vec<(u64, u32)> {
    std::mem::take(&mut *recorder.messages.lock().unwrap())
}

#[test]
fn identification_and_reset_values() {
    let (chip, _) = chip();
    assert_eq!(read(&chip, 1), 0x0017_0020);
    write(&chip, 0, 0xff00_0000);
    assert_eq!(read(&chip, 0), 0x0f00_0000);
    for pin in 0..24 {
        assert_eq!(read(&chip, 0x10 + 2 * pin), 0x0001_0000);
        assert_eq!(read(&chip, 0x11 + 2 * pin), 0);
    }
    assert_eq!(read(&chip, 0x40), u32::MAX);
}

#[test]
fn a_rising_edge_sends_the_message_of_its_entry_once() {
    let (chip, recorder) = chip();
    write(&chip, 0x19, 0x0300_0000);
    write(&chip, 0x18, 0x0000_0831);
    chip.pulse(4);
    chip.set_line(4, true);
    chip.set_line(4, true);
    // Destination 3, logical, fixed, vector 0x31, edge.
    assert_eq!(taken(&recorder), [(0xfee0_3004, 0x31); 2]);
}

#[test]
fn a_masked_pin_is_silent_and_an_edge_while_masked_is_lost() {
    let (chip, recorder) = chip();
    assert!(!chip.pulse(4));
    write(&chip, 0x18, 0x31);
    assert_eq!(taken(&recorder), []);
    assert!(chip.pulse(4));
}

#[test]
fn a_level_fires_again_only_after_its_end_of_interrupt_while_high() {
    let (chip, recorder) = chip();
    write(&chip, 0x1a, 0x0000_8041);
    chip.set_line(5, true);
    chip.set_line(5, true);
    assert_eq!(taken(&recorder), [(0xfee0_0000, 0xc041)]);
    assert_eq!(read(&chip, 0x1a), 0x0000_c041);
    chip.end_of_interrupt(0x40);
    assert_eq!(taken(&recorder), []);
    chip.end_of_interrupt(0x41);
    assert_eq!(taken(&recorder).len(), 1);
    chip.set_line(5, false);
    chip.end_of_interrupt(0x41);
    assert_eq!(taken(&recorder), []);
    assert_eq!(read(&chip, 0x1a), 0x0000_8041);
}

#[test]
fn unmasking_a_high_level_fires_it() {
    let (chip, recorder) = chip();
    write(&chip, 0x1a, 0x0001_8041);
    chip.set_line(5, true);
    assert_eq!(taken(&recorder), []);
    write(&chip, 0x1a, 0x0000_8041);
    assert_eq!(taken(&recorder).len(), 1);
}

#[test]
fn the_guest_cannot_write_read_only_bits_and_edge_mode_drops_remote_irr() {
    let (chip, recorder) = chip();
    write(&chip, 0x1a, 0x0000_d041);
    assert_eq!(read(&chip, 0x1a), 0x0000_8041);
    chip.set_line(5, true);
    write(&chip, 0x1a, 0x0001_0041);
    assert_eq!(read(&chip, 0x1a), 0x0001_0041);
    write(&chip, 0x1a, 0x0000_8041);
    assert_eq!(taken(&recorder).len(), 2);
}

#[test]
fn only_unmasked_level_pins_are_routed_and_only_changes_are_sent() {
    let (chip, recorder) = chip();
    write(&chip, 0x1a, 0x0000_8041);
    write(&chip, 0x1a, 0x0000_8041);
    write(&chip, 0x18, 0x31);
    let routes = recorder.routes.lock().unwrap();
    assert_eq!(routes.len(), 2);
    assert_eq!(
        routes[1][5],
        Some(Message {
            address: 0xfee0_0000,
            data: 0xc041
        })
    );
    assert_eq!(routes[1][4], None);
}

#[test]
fn odd_accesses_do_nothing() {
    let (chip, _) = chip();
    chip.write(0, &[0x18]);
    chip.write(0x10, &[0xff]);
    chip.write(0x14, &[0xff; 4]);
    chip.write(0x10, &[0xff; 8]);
    assert_eq!(read(&chip, 0x18), 0x0001_0000);
    let mut data = [0; 8];
    chip.read(0xffc, &mut data);
    assert_eq!(data[..4], [0xff; 4]);
}

#[test]
fn the_eoi_register_ends_an_interrupt_like_a_broadcast() {
    let (chip, _) = chip();
    write(&chip, 0x1a, 0x0000_8041);
    chip.set_line(5, true);
    chip.set_line(5, false);
    assert_eq!(read(&chip, 0x1a), 0x0000_c041);
    chip.write(0x40, &0x41u32.to_le_bytes());
    assert_eq!(read(&chip, 0x1a), 0x0000_8041);
}
