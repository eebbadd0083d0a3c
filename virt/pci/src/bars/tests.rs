use super::*;

fn bars() -> Bars {
    let mut kinds = [BarKind::Absent; BARS];
    kinds[0] = BarKind::Memory32(0x8000);
    kinds[2] = BarKind::Memory64(0x10_0000);
    kinds[3] = BarKind::Upper;
    Bars::new(kinds)
}

#[test]
fn sizing_reads_back_the_mask_and_the_type() {
    let mut bars = bars();
    for reg in (0x10..0x28).step_by(4) {
        bars.write(reg, 4, u32::MAX);
    }
    assert_eq!(bars.read(0), 0xffff_8000);
    assert_eq!(bars.read(1), 0);
    assert_eq!(bars.read(2), 0xfff0_0004);
    assert_eq!(bars.read(3), 0xffff_ffff);
    assert_eq!(bars.read(4), 0);
}

#[test]
fn a_bar_answers_only_while_memory_decoding_is_on() {
    let mut bars = bars();
    assert!(bars.write(0x10, 4, 0xc001_2345));
    assert_eq!(bars.address(0), Some(0xc001_0000));
    assert_eq!(bars.decoded(0), None);
    bars.write(0x04, 2, 0xffff);
    assert_eq!(bars.command(), COMMAND_WRITABLE);
    assert_eq!(bars.decoded(0), Some(0xc001_0000));
    assert_eq!(bars.decoded(1), None);
    assert_eq!(bars.decoded(3), None);
}

#[test]
fn a_64_bit_bar_joins_two_registers_and_bytes_may_be_written_alone() {
    let mut bars = bars();
    bars.write(0x18, 4, 0x0010_0000);
    bars.write(0x1f, 1, 0x80);
    assert_eq!(bars.address(2), Some(0x8000_0000_0010_0000));
}

#[test]
fn writes_elsewhere_are_not_ours() {
    let mut bars = bars();
    assert!(!bars.write(0x06, 2, 0xffff));
    assert!(!bars.write(0x0c, 4, u32::MAX));
    assert!(!bars.write(0x28, 4, u32::MAX));
    assert!(!bars.write(0xffc, 4, u32::MAX));
    assert!(bars.write(0x04, 4, 0xffff_0002));
    assert_eq!(bars.command(), COMMAND_MEMORY);
}
