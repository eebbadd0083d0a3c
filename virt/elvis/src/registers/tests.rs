use super::*;

/// A driver, which accesses the structure as a processor does.
#[derive(Default)]
struct Driver(Registers);

impl Driver {
    fn write(&mut self, at: usize, len: usize, value: u64) {
        let mut page = self.0.shown();
        page[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        self.0.written(at, &page);
    }

    fn read(&self, at: usize, len: usize) -> u64 {
        let mut value = [0; 8];
        value[..len].copy_from_slice(&self.0.shown()[at..at + len]);
        u64::from_le_bytes(value)
    }

    /// Negotiates as Linux does (drivers/virtio/virtio_pci_modern.c).
    fn negotiate(&mut self, features: u64) -> bool {
        self.write(DEVICE_STATUS, 1, 0);
        assert_eq!(self.read(DEVICE_STATUS, 1), 0);
        self.write(DEVICE_STATUS, 1, 3);
        for half in [0, 1] {
            self.write(DRIVER_FEATURE_SELECT, 4, half);
            self.write(DRIVER_FEATURE, 4, features >> (32 * half) & 0xffff_ffff);
        }
        self.write(DEVICE_STATUS, 1, 0xb);
        self.read(DEVICE_STATUS, 1) == 0xb
    }

    fn enable(&mut self) {
        self.write(QUEUE_SELECT, 2, 0);
        self.write(QUEUE_SIZE, 2, 64);
        for (at, value) in [
            (QUEUE_DESC, 0x1_0000_1000),
            (QUEUE_DRIVER, 0x2000),
            (QUEUE_DEVICE, 0x3000),
        ] {
            self.write(at, 4, value & 0xffff_ffff);
            self.write(at + 4, 4, value >> 32);
        }
        self.write(QUEUE_VECTOR, 2, 1);
        self.write(QUEUE_ENABLE, 2, 1);
    }
}

#[test]
fn a_driver_starts_the_queue_and_a_reset_takes_it_back() {
    let mut driver = Driver::default();
    let features = [0, 1].map(|half| {
        driver.write(DEVICE_FEATURE_SELECT, 4, half);
        driver.read(4, 4)
    });
    assert_eq!(features[0] | features[1] << 32, OFFERED);
    assert_eq!(driver.read(0x12, 2), 1, "one queue");
    assert!(driver.negotiate(OFFERED));
    assert_eq!(driver.read(QUEUE_SIZE, 2), u64::from(QUEUE_MAX));
    driver.write(CONFIG_VECTOR, 2, 0);
    assert_eq!(driver.read(CONFIG_VECTOR, 2), 0);
    driver.enable();
    assert_eq!(driver.0.queue(), None, "not live yet");
    driver.write(DEVICE_STATUS, 1, 0xf);
    let queue = driver.0.queue().expect("live");
    assert_eq!((queue.size, queue.desc.raw()), (64, 0x1_0000_1000));
    assert_eq!((queue.avail.raw(), queue.used.raw()), (0x2000, 0x3000));
    assert_eq!(
        (driver.0.config_entry(), driver.0.queue_entry()),
        (Some(0), Some(1))
    );
    driver.0.set_needs_reset();
    assert_eq!(driver.read(DEVICE_STATUS, 1), 0x4f);
    let epoch = driver.0.epoch();
    driver.write(DEVICE_STATUS, 1, 0);
    assert_eq!(driver.0.queue(), None);
    assert_eq!(driver.read(DEVICE_STATUS, 1), 0);
    assert_eq!(driver.read(QUEUE_VECTOR, 2), u64::from(NO_VECTOR));
    assert_ne!(driver.0.epoch(), epoch);
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    for features in [
        0,
        OFFERED & !feature::VERSION_1,
        OFFERED | feature::RING_PACKED,
    ] {
        let mut driver = Driver::default();
        assert!(!driver.negotiate(features), "{features:#x}");
        driver.enable();
        driver.write(DEVICE_STATUS, 1, 0xf);
        assert_eq!(driver.0.queue(), None, "{features:#x}");
    }
    let mut driver = Driver::default();
    assert!(driver.negotiate(OFFERED));
    driver.write(DRIVER_FEATURE_SELECT, 4, 1);
    driver.write(DRIVER_FEATURE, 4, 0xffff_ffff);
    assert_eq!(driver.0.features(), OFFERED, "too late");
}

#[test]
fn an_enabled_queue_and_queues_that_are_not_there_are_not_written() {
    let mut driver = Driver::default();
    assert!(driver.negotiate(OFFERED));
    for size in [0, 3, u64::from(QUEUE_MAX) * 2] {
        driver.write(QUEUE_SIZE, 2, size);
        assert_eq!(driver.read(QUEUE_SIZE, 2), u64::from(QUEUE_MAX), "{size}");
    }
    driver.enable();
    driver.write(QUEUE_DESC, 4, 0x7777_0000);
    driver.write(QUEUE_SIZE, 2, 2);
    driver.write(QUEUE_ENABLE, 2, 0);
    assert_eq!(driver.read(QUEUE_DESC, 8), 0x1_0000_1000);
    assert_eq!(
        (driver.read(QUEUE_SIZE, 2), driver.read(QUEUE_ENABLE, 2)),
        (64, 1)
    );
    driver.write(QUEUE_VECTOR, 2, 2);
    assert_eq!(
        driver.read(QUEUE_VECTOR, 2),
        u64::from(NO_VECTOR),
        "no such entry"
    );
    driver.write(QUEUE_SELECT, 2, 1);
    assert_eq!(driver.read(QUEUE_SIZE, 2), 0);
    driver.write(QUEUE_DEVICE, 4, 0x9000);
    driver.write(QUEUE_SELECT, 2, 0);
    assert_eq!(driver.read(QUEUE_DEVICE, 8), 0x3000);
}

/// Bytes that are read-only stay as they are, and a wide access is its fields, in order.
#[test]
fn read_only_fields_stay_and_wide_accesses_are_their_fields() {
    let mut driver = Driver::default();
    driver.write(0x04, 4, 0);
    driver.write(0x12, 2, 7);
    driver.write(0x1e, 2, 7);
    assert_eq!(driver.read(0x12, 2), 1);
    assert!(driver.negotiate(OFFERED));
    driver.write(QUEUE_DESC, 8, 0x1_2345_6000);
    assert_eq!(driver.read(QUEUE_DESC, 8), 0x1_2345_6000);
    // A zero in the status resets, regardless of the rest of the access.
    let epoch = driver.0.epoch();
    driver.write(CONFIG_VECTOR, 8, 0);
    assert_eq!(driver.0.epoch(), epoch.wrapping_add(1));
}
