use super::*;

const MESSAGE: Message = Message {
    address: 0xfee0_1000,
    data: 0x41,
};

fn table_with_vector_1(out: &mut Vec<Message>) -> MsixTable {
    let mut table = MsixTable::new(2);
    table.set_bus_master(true, out);
    table.write(16, &MESSAGE.address.to_le_bytes(), out);
    table.write(24, &MESSAGE.data.to_le_bytes(), out);
    table
}

#[test]
fn masked_vector_delivers_once_when_unmasked() {
    let out = &mut Vec::new();
    let mut table = table_with_vector_1(out);
    table.set_control(true, false, out);
    table.raise(1, out);
    table.raise(1, out);
    assert!(out.is_empty());
    let mut pba = [0];
    table.read_pending(0, &mut pba);
    assert_eq!(pba, [0b10]);
    table.write(28, &0_u32.to_le_bytes(), out);
    assert_eq!(*out, [MESSAGE]);
    table.read_pending(0, &mut pba);
    assert_eq!(pba, [0]);
}

#[test]
fn function_mask_holds_all_vectors_back() {
    let out = &mut Vec::new();
    let mut table = table_with_vector_1(out);
    table.write(28, &0_u32.to_le_bytes(), out);
    table.set_control(true, true, out);
    table.raise(1, out);
    assert!(out.is_empty());
    table.set_control(true, false, out);
    assert_eq!(out.len(), 1);
}

#[test]
fn without_bus_master_a_message_waits() {
    let out = &mut Vec::new();
    let mut table = table_with_vector_1(out);
    table.write(28, &0_u32.to_le_bytes(), out);
    table.set_control(true, false, out);
    table.set_bus_master(false, out);
    table.raise(1, out);
    assert!(out.is_empty());
    table.set_bus_master(true, out);
    assert_eq!(*out, [MESSAGE]);
}

#[test]
fn hostile_offsets_and_vectors_change_nothing() {
    let out = &mut Vec::new();
    let mut table = MsixTable::new(1);
    table.set_control(true, false, out);
    table.raise(0xffff, out);
    table.write(u64::MAX - 3, &[0xff; 8], out);
    table.write(3, &[0xff; 4], out);
    let mut data = [0xaa; 4];
    table.read(1 << 40, &mut data);
    assert_eq!(data, [0; 4]);
    table.read_pending(u64::MAX, &mut data);
    assert!(out.is_empty());
}
