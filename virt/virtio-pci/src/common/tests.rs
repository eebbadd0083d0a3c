use super::*;

const OFFERED: u64 = 1 << 32 | 1 << 33 | 1 << 9;

fn config() -> CommonConfig {
    CommonConfig::new(OFFERED, &[256, 128], 3)
}

fn read_u32(config: &CommonConfig, offset: u64) -> u32 {
    let mut data = [0; 4];
    config.read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn negotiate(config: &mut CommonConfig, features: u64) -> Effect {
    for (select, half) in [(0_u32, features as u32), (1, (features >> 32) as u32)] {
        config.write(0x08, &select.to_le_bytes());
        config.write(0x0c, &half.to_le_bytes());
    }
    config.write(0x14, &[3]);
    config.write(0x14, &[3 | 8]);
    config.write(0x14, &[3 | 8 | 4])
}

#[test]
fn negotiation_ends_in_start() {
    let mut config = config();
    assert_eq!(negotiate(&mut config, OFFERED), Effect::Start);
    assert_ne!(config.status() & status::DRIVER_OK, 0);
    // Writing the same status again starts nothing twice.
    assert_eq!(config.write(0x14, &[15]), Effect::None);
}

#[test]
fn features_not_offered_leave_features_ok_clear() {
    let mut config = config();
    assert_eq!(negotiate(&mut config, OFFERED | 1 << 28), Effect::None);
    assert_eq!(
        config.status() & (status::FEATURES_OK | status::DRIVER_OK),
        0
    );
}

#[test]
fn the_generation_is_the_devices() {
    let mut config = config();
    config.set_generation(0x5a);
    let mut byte = [0];
    config.read(0x15, &mut byte);
    assert_eq!(byte, [0x5a]);
}

#[test]
fn status_reads_nonzero_until_the_drain_is_over() {
    let mut config = config();
    negotiate(&mut config, OFFERED);
    assert_eq!(config.write(0x14, &[0]), Effect::Reset);
    assert_ne!(read_u32(&config, 0x14) as u8, 0);
    assert!(config.is_resetting());
    config.reset();
    assert_eq!(read_u32(&config, 0x14) as u8, 0);
}

#[test]
fn queue_addresses_take_halves_and_freeze_when_enabled() {
    let mut config = config();
    config.write(0x16, &1_u16.to_le_bytes());
    config.write(0x20, &0x5678_9000_u32.to_le_bytes());
    config.write(0x24, &0x1234_u32.to_le_bytes());
    config.write(0x18, &64_u16.to_le_bytes());
    config.write(0x1c, &1_u16.to_le_bytes());
    config.write(0x20, &0_u32.to_le_bytes());
    let queues = config.queue_configs();
    assert_eq!(queues.len(), 1);
    assert_eq!((queues[0].index, queues[0].size), (1, 64));
    assert_eq!(queues[0].desc, Iova::new(0x1234_5678_9000));
}

#[test]
fn vectors_out_of_range_read_back_as_none() {
    let mut config = config();
    config.write(0x10, &3_u16.to_le_bytes());
    assert_eq!(config.config_vector(), NO_VECTOR);
    config.write(0x10, &2_u16.to_le_bytes());
    assert_eq!(config.config_vector(), 2);
}

#[test]
fn hostile_selects_and_sizes_are_ignored() {
    let mut config = config();
    config.write(0x16, &500_u16.to_le_bytes());
    config.write(0x1c, &1_u16.to_le_bytes());
    assert_eq!(read_u32(&config, 0x18), 0);
    config.write(0x16, &0_u16.to_le_bytes());
    for size in [0_u16, 3, 512] {
        config.write(0x18, &size.to_le_bytes());
        assert_eq!(read_u32(&config, 0x18) as u16, 256);
    }
    config.write(u64::MAX, &[1, 2, 3]);
    let mut data = [1; 8];
    config.read(u64::MAX - 3, &mut data);
    assert_eq!(data, [0; 8]);
}
