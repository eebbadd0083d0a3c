use proptest::prelude::*;

use super::*;

const REGISTERS: MsiRegisters = MsiRegisters {
    is_enabled: true,
    allocated_log2: 2,
    address: 0xfee0_1000,
    data: 0x4321,
    mask: 0,
};

fn on(layout: MsiLayout) -> Msi {
    let out = &mut Vec::new();
    let mut msi = Msi::new(layout);
    msi.set_bus_master(true, out);
    msi.set_registers(&REGISTERS, out);
    msi
}

#[test]
fn low_data_bits_are_the_vector() {
    let msi = on(MsiLayout::new(5, true, true));
    let data: Vec<_> = (0..5).map(|v| msi.message(v).map(|m| m.data)).collect();
    let expected = [Some(0x4320), Some(0x4321), Some(0x4322), Some(0x4323), None];
    assert_eq!(data, expected);
}

#[test]
fn one_vector_has_the_data_unchanged() {
    let msi = on(MsiLayout::new(0, false, false));
    assert_eq!(msi.message(0).map(|m| m.data), Some(0x4321));
    assert_eq!(msi.message(1), None);
}

#[test]
fn masked_vector_is_delivered_once_when_unmasked() {
    let out = &mut Vec::new();
    let mut msi = on(MsiLayout::new(2, true, true));
    let mask = 0b10;
    msi.set_registers(&MsiRegisters { mask, ..REGISTERS }, out);
    msi.raise(1, out);
    msi.raise(1, out);
    assert!(out.is_empty());
    assert_eq!(msi.pending(), 0b10);
    msi.set_registers(&REGISTERS, out);
    let (address, data) = (0xfee0_1000, 0x4321);
    assert_eq!(*out, [Message { address, data }]);
    assert_eq!((msi.pending(), msi.sent()), (0, 1));
}

#[test]
fn without_mask_bits_a_mask_masks_nothing() {
    let out = &mut Vec::new();
    let mut msi = on(MsiLayout::new(2, true, false));
    let mask = u32::MAX;
    msi.set_registers(&MsiRegisters { mask, ..REGISTERS }, out);
    msi.raise(3, out);
    assert_eq!(out.len(), 1);
}

#[test]
fn lengths_and_offsets_are_the_specification_s() {
    let of = |is_wide, has_masks| MsiLayout::new(3, is_wide, has_masks);
    // §6.8.1, figures 6-9.
    let lengths = [
        (false, false, 10),
        (true, false, 14),
        (false, true, 20),
        (true, true, 24),
    ];
    for (is_wide, has_masks, len) in lengths {
        assert_eq!(of(is_wide, has_masks).len(), len);
    }
    assert_eq!(of(false, true).pending(), 16);
    assert_eq!(of(true, true).pending(), 20);
    assert_eq!(of(true, true).body()[..2], [0x86, 0x01]);
    assert_eq!(MsiLayout::of_control(0xffff), MsiLayout::new(5, true, true));
    assert_eq!(MsiLayout::of_control(0x000e).vectors(), 32);
    assert_eq!(MsiLayout::new(5, true, true).vector_bits(), u32::MAX);
    assert_eq!(MsiLayout::new(0, true, true).vector_bits(), 1);
}

#[derive(Clone, Debug)]
enum Step {
    Registers(MsiRegisters),
    Master(bool),
    Raise(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let registers = (
        prop::bool::weighted(0.8),
        0_u8..8,
        any::<u64>(),
        any::<u16>(),
        any::<u32>(),
        any::<u32>(),
    )
        .prop_map(|(is_enabled, allocated_log2, address, data, a, b)| {
            let mask = a & b;
            Step::Registers(MsiRegisters {
                is_enabled,
                allocated_log2,
                address,
                data,
                mask,
            })
        });
    prop_oneof![
        2 => registers,
        1 => any::<bool>().prop_map(Step::Master),
        6 => (0_u8..40).prop_map(Step::Raise),
    ]
}

/// Model of the specification's text, vector by vector: flags in a list instead of bits in a word,
/// and no early returns.
struct Model {
    vectors: usize,
    has_masks: bool,
    registers: MsiRegisters,
    is_master: bool,
    pending: Vec<bool>,
}

impl Model {
    fn allocated(&self) -> usize {
        let mut number = 1;
        for _ in 0..self.registers.allocated_log2 {
            number = (number * 2).min(self.vectors);
        }
        number
    }

    fn sends(&mut self) -> Vec<Message> {
        let allocated = self.allocated();
        let mut sent = Vec::new();
        for vector in 0..32 {
            if vector >= allocated {
                self.pending[vector] = false;
            }
            let is_masked = self.has_masks && (self.registers.mask >> vector) % 2 == 1;
            if self.pending[vector] && !is_masked && self.is_master && self.registers.is_enabled {
                self.pending[vector] = false;
                let data = usize::from(self.registers.data);
                sent.push(Message {
                    address: self.registers.address / 4 * 4,
                    data: (data / allocated * allocated + vector) as u32,
                });
            }
        }
        sent
    }
}

proptest! {
    #[test]
    fn agrees_with_the_model(
        log2 in 0_u8..6,
        is_wide: bool,
        has_masks: bool,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let layout = MsiLayout::new(log2, is_wide, has_masks);
        let mut msi = Msi::new(layout);
        let mut model = Model {
            vectors: usize::from(layout.vectors()),
            has_masks,
            registers: MsiRegisters::default(),
            is_master: false,
            pending: vec![false; 32],
        };
        let mut total = 0;
        for step in steps {
            let out = &mut Vec::new();
            match step {
                Step::Registers(registers) => {
                    model.registers = registers;
                    msi.set_registers(&registers, out);
                }
                Step::Master(on) => {
                    model.is_master = on;
                    msi.set_bus_master(on, out);
                }
                Step::Raise(vector) => {
                    let at = usize::from(vector);
                    if model.registers.is_enabled && at < model.allocated() {
                        model.pending[at] = true;
                    }
                    msi.raise(vector, out);
                }
            }
            let sent = model.sends();
            total += sent.len() as u64;
            prop_assert_eq!(&*out, &sent);
            for vector in 0..32 {
                let is_pending = msi.pending() >> vector & 1 == 1;
                prop_assert_eq!(is_pending, model.pending[vector as usize]);
            }
            prop_assert_eq!(usize::from(msi.allocated()), model.allocated());
            prop_assert_eq!(msi.sent(), total);
        }
    }
}
