use super::*;

#[test]
fn a_key_gives_back_its_parts() {
    for (phys, pages, access) in [
        (0, 1, Access::Read),
        (0x7000, 1023, Access::Write),
        (!LOW, 1, Access::ReadWrite),
    ] {
        let key = Key::new(PhysAddr::new(phys), pages, access).unwrap();
        assert_eq!(
            (key.phys().raw(), key.pages(), key.access()),
            (phys, pages, access)
        );
    }
}

#[test]
fn a_key_refuses_what_it_cannot_hold() {
    for (phys, pages) in [(1, 1), (0, 0), (0, 1024), (!LOW, 2), (0, u64::MAX)] {
        assert_eq!(Key::new(PhysAddr::new(phys), pages, Access::Read), None);
    }
}

#[test]
fn a_range_comes_back() {
    for (first, pages) in [(0, 1), (IovaPfn::MAX.raw(), 1), (77, 4095)] {
        let range = IovaRange::new(IovaPfn::new(first), pages).unwrap();
        assert_eq!(PackedRange::new(range).unwrap().range(), range);
    }
    let large = IovaRange::new(IovaPfn::new(0), 4096).unwrap();
    assert_eq!(PackedRange::new(large), None);
}
