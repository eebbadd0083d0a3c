use super::*;

fn leaf(function: u32) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 {
        function,
        eax: u32::MAX,
        ebx: u32::MAX,
        ecx: u32::MAX,
        edx: u32::MAX,
        ..Default::default()
    }
}

fn guest(apic_id: u8, cpus: u8) -> Vec<kvm_cpuid_entry2> {
    let mut all: Vec<_> = [
        1,
        4,
        0xa,
        0xb,
        0x4000_0001,
        0x8000_0001,
        0x8000_0008,
        0x8000_001e,
    ]
    .map(leaf)
    .to_vec();
    all.push(kvm_cpuid_entry2 {
        eax: 0xd,
        ..Default::default()
    });
    for_vcpu(&CpuId::from_entries(&all).unwrap(), apic_id, cpus)
        .as_slice()
        .to_vec()
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
    *entries
        .iter()
        .find(|e| e.function == function && e.index == index)
        .unwrap()
}

#[test]
fn every_topology_leaf_tells_the_same_apic_id_and_width() {
    let entries = guest(5, 6);
    assert_eq!(find(&entries, 1, 0).ebx >> 16, 0x0508);
    assert_eq!(find(&entries, 4, 0).eax >> 26, 7);
    let core = find(&entries, 0xb, 1);
    assert_eq!((core.eax, core.ebx, core.ecx, core.edx), (3, 6, 0x201, 5));
    let end = find(&entries, 0xb, 2);
    assert_eq!((end.ebx, end.ecx), (0, 2));
    assert_eq!(find(&entries, 0x8000_0008, 0).ecx, 0x3005);
    assert_eq!(find(&entries, 0x8000_001e, 0).eax, 5);
    assert!(
        entries.iter().all(|e| e.function != 0x1f),
        "beyond the highest leaf"
    );
}

#[test]
fn nested_virtualization_and_counters_are_gone_and_timers_are_there() {
    let entries = guest(0, 1);
    let one = find(&entries, 1, 0);
    assert_eq!(one.ecx & (1 << 5), 0);
    assert_eq!(
        one.ecx & (1 << 21 | 1 << 24 | 1 << 31),
        1 << 21 | 1 << 24 | 1 << 31
    );
    assert_eq!(one.edx & (1 << 28), 0, "one logical processor");
    assert_eq!(find(&entries, 0xa, 0).eax, 0);
    assert_eq!(find(&entries, 0x8000_0001, 0).ecx & (1 << 2), 0);
    assert_eq!(find(&entries, 0x4000_0001, 0).eax & 1 << 15, 0);
}

#[test]
fn a_guest_has_the_addresses_that_both_processor_and_host_have() {
    let cases = [
        (None, 36),
        (Some(0x0000_3027), 39),
        (Some(0x0000_3030), 48),
        // Bits 23:16: AMD with nested paging of 48 bits under a processor of 52.
        (Some(0x0030_3934), 48),
        (Some(0x0034_3930), 48),
    ];
    for (eax, bits) in cases {
        let entries: Vec<_> = eax
            .map(|eax| kvm_cpuid_entry2 {
                function: 0x8000_0008,
                eax,
                ..Default::default()
            })
            .into_iter()
            .collect();
        let cpuid = CpuId::from_entries(&entries).unwrap();
        assert_eq!(physical_address_bits(&cpuid), bits, "{eax:x?}");
    }
}
