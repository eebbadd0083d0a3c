use super::*;

#[test]
fn structures_are_found_by_walking_the_list() {
    let (config, _) = space(2, 3);
    assert_eq!(config.read(0, 4), 0x1042_1af4);
    let mut at = config.read(0x34, 1) as u16;
    let mut found = Vec::new();
    while at != 0 {
        if config.read(at, 1) == u32::from(CAPABILITY_VENDOR) {
            found.push((
                config.read(at + 3, 1),
                config.read(at + 8, 4),
                config.read(at + 2, 1),
            ));
        }
        at = config.read(at + 1, 1) as u16;
    }
    assert_eq!(
        found,
        [
            (1, 0, 16),
            (3, 0x1000, 16),
            (4, 0x2000, 16),
            (2, 0x3000, 20),
            (5, 0, 20)
        ]
    );
}

#[test]
fn a_device_is_known_by_its_type() {
    for (device_type, id, class) in [
        (1, 0x1041_1af4, 0x02_00_00),
        (2, 0x1042_1af4, 0x01_80_00),
        (5, 0x1045_1af4, 0xff_00_00),
    ] {
        let (config, _) = space(device_type, 3);
        assert_eq!(config.read(0, 4), id);
        assert_eq!(config.read(8, 4) >> 8, class);
    }
}

#[test]
fn the_access_window_refuses_what_lies_outside() {
    let (mut config, access) = space(2, 3);
    assert_eq!(access_target(&config, access), None);
    config.write(access + ACCESS_LENGTH, 4, 4);
    config.write(access + ACCESS_OFFSET, 4, 0x14);
    assert_eq!(access_target(&config, access), Some((0x14, 4)));
    config.write(access + ACCESS_OFFSET, 4, 0x7ffd);
    assert_eq!(access_target(&config, access), None);
    config.write(access + ACCESS_OFFSET, 4, u32::MAX);
    assert_eq!(access_target(&config, access), None);
}
