use super::*;

const BAR: u32 = 0xfeb0_0000;

fn function() -> Function {
    Function::new(BAR)
}

/// Golden words, from the specifications.
#[test]
fn header_and_capabilities_are_those_of_the_specifications() {
    let function = function();
    for (register, word) in [
        (0x00, 0x1042_1af4),
        (0x04, 0x0010_0000),
        (0x08, 0x0180_0001),
        (0x0c, 0),
        (0x10, BAR),
        (0x14, 0),
        (0x30, 0),
        (0x34, 0x40),
        (0x3c, 0),
        // MSI-X: two entries, table and pending bits in base address 0.
        (0x40, 0x0001_5011),
        (0x44, 0x4000),
        (0x48, 0x5000),
        // Type 1, 16 bytes.
        (0x50, 0x0110_6009),
        (0x54, 0),
        (0x58, 0),
        (0x5c, 0x1000),
        (0x60, 0x0310_7009),
        (0x68, 0x1000),
        (0x70, 0x0410_8009),
        (0x78, 0x2000),
        (0x80, 0x0214_0009),
        (0x88, 0x3000),
        (0x8c, 0x1000),
        (0x90, 0),
        (0xfc, 0),
    ] {
        assert_eq!(function.read(register), word, "{register:#x}");
    }
}

#[test]
fn every_capability_is_met_once_and_the_list_ends() {
    let function = function();
    let (mut at, mut kinds) = (function.read(0x34) as u8, Vec::new());
    while at != 0 {
        assert!(kinds.len() < 16, "a loop");
        kinds.push((function.read(at) as u8, (function.read(at) >> 24) as u8));
        at = (function.read(at) >> 8) as u8;
    }
    assert_eq!(kinds, [(0x11, 0), (9, 1), (9, 3), (9, 4), (9, 2)]);
}

#[test]
fn the_base_address_is_sized_and_does_not_move() {
    let mut function = function();
    assert_eq!(function.write(0x10, u32::MAX, u32::MAX), Written::Nothing);
    assert_eq!(function.read(0x10), 0xffff_8000);
    assert_eq!(function.write(0x10, u32::MAX, BAR), Written::Nothing);
    assert_eq!(function.read(0x10), BAR);
    for (lanes, value) in [(u32::MAX, BAR + BAR_LEN), (u32::MAX, 0), (0xffff, 0)] {
        assert!(matches!(
            function.write(0x10, lanes, value),
            Written::Refused(_)
        ));
        assert_eq!(function.read(0x10), BAR, "{value:#x}");
    }
}

#[test]
fn only_what_may_be_written_is() {
    let mut function = function();
    assert_eq!(function.write(0x04, 0xffff, 0xffff), Written::Changed);
    assert_eq!(function.read(0x04), 0x0010_0406);
    assert!(function.is_master());
    assert_eq!(function.write(0x04, 0xffff, 0x0002), Written::Changed);
    assert!(!function.is_master());
    // Two bytes of the word.
    assert_eq!(
        function.write(0x40, 0xffff_0000, 0xffff_0000),
        Written::Changed
    );
    assert_eq!(function.read(0x40), 0xc001_5011);
    let mut others = (0..=0xfc_u8)
        .step_by(4)
        .filter(|at| !matches!(at, 0x04 | 0x0c | 0x10 | 0x3c | 0x40));
    assert!(others.all(|at| {
        let old = function.read(at);
        function.write(at, u32::MAX, u32::MAX) == Written::Nothing && function.read(at) == old
    }));
}
