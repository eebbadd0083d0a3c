use std::sync::Mutex;

use super::*;

#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

impl BusDevice for Recorder {
    fn read(&self, offset: u64, data: &mut [u8]) -> AccessCause {
        data.fill(offset as u8);
        AccessCause::Register
    }

    fn write(&self, offset: u64, data: &[u8]) -> AccessCause {
        self.0.lock().unwrap().push((offset, data.to_vec()));
        AccessCause::Register
    }
}

fn two_devices() -> (Bus, Arc<Recorder>) {
    let device = Arc::new(Recorder::default());
    let mut bus = Bus::new();
    bus.add(0x2000, 0x10, device.clone()).unwrap();
    bus.add(0x1000, 0x10, Arc::new(Recorder::default()))
        .unwrap();
    (bus, device)
}

#[test]
fn the_device_whose_range_holds_the_access_answers_with_its_offset() {
    let (bus, device) = two_devices();
    assert_eq!(bus.write(0x2008, &[1, 2]), AccessCause::Register);
    assert_eq!(*device.0.lock().unwrap(), [(8, vec![1, 2])]);
    let mut data = [0; 4];
    bus.read(0x100c, &mut data);
    assert_eq!(data, [0xc; 4]);
}

#[test]
fn access_outside_or_across_an_edge_is_unclaimed() {
    let (bus, device) = two_devices();
    let mut data = [0; 4];
    for address in [0xfff, 0x1010, 0x200d, u64::MAX] {
        assert_eq!(
            bus.read(address, &mut data),
            AccessCause::Unclaimed,
            "{address:#x}"
        );
        assert_eq!(data, [0xff; 4]);
    }
    assert_eq!(bus.write(0x200e, &[0; 4]), AccessCause::Unclaimed);
    assert!(device.0.lock().unwrap().is_empty());
}

#[test]
fn overlapping_ranges_are_refused() {
    let (mut bus, device) = two_devices();
    for (base, len) in [(0x200f, 1), (0xfff, 2), (0, 0x10000), (0x1004, 2)] {
        assert!(
            bus.add(base, len, device.clone()).is_err(),
            "{base:#x}+{len:#x}"
        );
    }
    bus.add(0x2010, 1, device).unwrap();
}
