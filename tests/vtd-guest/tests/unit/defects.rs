//! Every applicable defect seen in other implementations, and every classic mistake, as a test that
//! is named after it.

use fake_mem::ArrayMem;
use guest_mem::{DmaFault, Gpa, Iommu, Iova, Leases, Perm, PhysMem, SourceId, Stop};
use vtd::saved_state::RestoreError;
use vtd::spec::registers as reg;
use vtd::{AccessLen, AddressWidth, Config, Event, LargePages, Parked, Progress, Unit};
use vtd_guest::*;

fn blocked(answer: Result<guest_mem::Run, Stop>) -> bool {
    matches!(answer, Err(Stop::Fault(DmaFault::Blocked { .. })))
}

/// The disk through a 48-bit table with domain 1, and one page mapped.
fn mapped(iova: u64, pte: u64) -> (Guest, u64, Machine<ArrayMem>) {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    guest.map(table, 4, iova, pte);
    let mut machine = Machine::trap(guest.mem.clone());
    machine.boot();
    (guest, table, machine)
}

#[test]
fn aw_39_does_not_alias_upper_bits() {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 1);
    guest.map(table, 3, 0x1000, 0x5000 | RW);
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
    // The same page with bit 39 set, walked and, the entry now cached, looked up.
    let alias = 0x1000 | 1 << 39;
    assert!(blocked(m.translate(DISK, alias, Perm::Read)));
    assert_record(&mut m, 0, DISK, alias, 4, Perm::Read);
}

#[test]
fn address_beyond_mgaw_is_refused_in_a_48_bit_context() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    for iova in [1 << 48 | 0x1000, u64::MAX] {
        assert!(blocked(m.translate(DISK, iova, Perm::Write)));
    }
    assert_record(&mut m, 0, DISK, 1 << 48 | 0x1000, 4, Perm::Write);
}

#[test]
fn a_39_bit_unit_refuses_48_bit_contexts() {
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    let config = Config {
        width: AddressWidth::Bits39,
        ..Config::default()
    };
    let mut m = Machine::new(Mode::Trap, config, guest.mem.clone());
    m.boot();
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    assert_record(&mut m, 0, DISK, 0x1000, 3, Perm::Read);
}

#[test]
fn iqt_past_queue_end_raises_iqe_and_terminates() {
    let guest = Guest::new();
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    m.write4(reg::FEADDR, 0xfee0_0000);
    m.write4(reg::FEDATA, 0x31);
    m.write4(reg::FECTL, 0);
    let head = m.read8(reg::IQH);
    // The queue has one page; 0x1000 is its end. All of it holds valid descriptors.
    for slot in 0..256 {
        guest.put(QUEUE + slot * 16, cc_global());
    }
    for tail in [0x1000, 0x7_fff0] {
        m.write4(reg::IQT, tail);
        m.poll(reg::FSTS, 0x10, 0x10);
        assert_eq!(m.read8(reg::IQH), head);
        assert_eq!(m.out.messages, [(0xfee0_0000, 0x31)]);
        m.out.messages.clear();
        m.write4(reg::IQT, head as u32);
        m.write4(reg::FSTS, 0x10);
        m.poll(reg::FSTS, !0, 0);
    }
}

#[test]
fn wbf_never_sticks() {
    let mut m = Machine::trap(Guest::new().mem);
    m.write4(reg::GCMD, 0x0800_0000);
    m.poll(reg::GSTS, !0, 0);
}

#[test]
fn commands_that_are_not_offered_show_no_status() {
    let mut m = Machine::trap(Guest::new().mem);
    // SFL, EAFL, IRE, SIRTP, CFI and all reserved bits.
    m.write4(reg::GCMD, 0x3380_0000 | 0x007f_ffff);
    m.poll(reg::GSTS, !0, 0);
}

#[test]
fn wait_with_if_and_sw_both_set_does_both() {
    let guest = Guest::new();
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    m.write4(reg::IEADDR, 0xfee0_1000);
    m.write4(reg::IEDATA, 0x42);
    m.write4(reg::IECTL, 0);
    m.submit(&[wait_status(STATUS, 7) | wait_interrupt()]);
    assert_eq!(guest.mem.get_u32(Gpa::new(STATUS)), 7);
    assert_eq!(m.read4(reg::ICS), 1);
    assert_eq!(m.out.messages, [(0xfee0_1000, 0x42)]);
    // IWC still set: another completion raises nothing until it is cleared.
    m.submit(&[wait_interrupt()]);
    assert_eq!(m.out.messages.len(), 1);
    m.write4(reg::ICS, 1);
    assert_eq!(m.read4(reg::ICS), 0);
    m.submit(&[wait_interrupt()]);
    assert_eq!(m.out.messages.len(), 2);
}

#[test]
fn masked_completion_event_waits_for_the_unmask() {
    let mut m = Machine::trap(Guest::new().mem);
    m.boot();
    m.submit(&[wait_interrupt()]);
    assert!(m.out.messages.is_empty());
    assert_eq!(m.read4(reg::IECTL), 0xc000_0000);
    m.write4(reg::IECTL, 0);
    assert_eq!(m.out.messages.len(), 1);
    assert_eq!(m.read4(reg::IECTL), 0);
}

#[test]
fn an_unmap_revokes_a_translation_made_earlier() {
    let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    let before = m.unit.generation(DISK);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
    guest.map(table, 4, 0x1000, 0);
    m.submit_wait(&[iotlb_pages(1, 0x1000, 0)]);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    assert_ne!(
        m.unit.generation(DISK),
        before,
        "cached pointers stay usable"
    );
}

#[test]
fn read_only_mappings_are_not_writable() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | R);
    assert_run(m.translate(DISK, 0x1234, Perm::Read), 0x5234, 0xdcc);
    // Both from a walk and from a cached entry.
    for _ in 0..2 {
        assert!(blocked(m.translate(DISK, 0x1234, Perm::Write)));
    }
    assert_record(&mut m, 0, DISK, 0x1234, 5, Perm::Write);
}

#[test]
fn write_only_mappings_are_not_readable() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | W);
    assert_run(m.translate(DISK, 0x1000, Perm::Write), 0x5000, 0x1000);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    assert_record(&mut m, 0, DISK, 0x1000, 6, Perm::Read);
}

#[test]
fn permissions_are_anded_across_levels() {
    for level in 2..=4 {
        let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
        let entry = Gpa::new(guest.entry(table, 4, 0x1000, level));
        let pte = guest.mem.get_u64(entry);
        guest.mem.put_u64(entry, pte & !W);
        assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
        assert!(
            blocked(m.translate(DISK, 0x1000, Perm::Write)),
            "level {level}"
        );
        guest.mem.put_u64(entry, pte & !RW);
        m.submit_wait(&[iotlb_global()]);
        assert!(
            blocked(m.translate(DISK, 0x1000, Perm::Read)),
            "level {level}"
        );
    }
}

#[test]
fn a_wait_does_not_complete_with_a_changed_access_in_flight() {
    let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    guest.map(table, 4, 0x2000, 0x6000 | RW);
    let lease = m.lease(DISK, 0x1000, 512, Perm::Write);
    guest.map(table, 4, 0x1000, 0);
    m.submit(&[iotlb_pages(1, 0x1000, 0), wait_status(STATUS, 2)]);
    assert_eq!(m.settle(), Progress::Parked(Parked::Drain));
    assert_eq!(m.status(), 0);
    // The unit goes on translating meanwhile, by the new tables.
    assert_run(m.translate(DISK, 0x2000, Perm::Read), 0x6000, 0x1000);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Write)));
    m.unit.leases_mut().end(lease);
    assert!(m.unit.needs_step());
    assert_eq!(m.settle(), Progress::Idle);
    assert_eq!(m.status(), 2);
    assert_eq!(m.unit.stats().waits_parked, 1);
}

#[test]
fn a_domain_flush_over_unchanged_leases_completes_at_once() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    let lease = m.lease(DISK, 0x1000, 4096, Perm::Read);
    for flush in [
        iotlb_domain(1),
        iotlb_global(),
        iotlb_pages(1, 0x1000, 0),
        cc_global(),
    ] {
        m.submit_wait(&[flush]);
    }
    assert_eq!(m.unit.leases().stale(), 0);
    m.unit.leases_mut().end(lease);
}

#[test]
fn a_lost_permission_makes_a_lease_stale() {
    let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    m.begin(DISK, 0x1000, 512, Perm::Read);
    m.begin(DISK, 0x1000, 512, Perm::Write);
    guest.map(table, 4, 0x1000, 0x5000 | R);
    m.submit(&[iotlb_domain(1), wait_status(STATUS, 2)]);
    // Only the writer has to go.
    assert_eq!(m.unit.leases().stale(), 1);
    m.end_first();
    assert_eq!(m.status(), 0);
    m.end_first();
    m.settle();
    assert_eq!(m.status(), 2);
}

#[test]
fn a_drain_that_never_ends_is_reported_once_and_never_completes() {
    let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    m.begin(DISK, 0x1000, 512, Perm::Write);
    guest.map(table, 4, 0x1000, 0);
    m.submit(&[iotlb_global(), wait_status(STATUS, 2)]);
    assert_eq!(m.unit.deadline(), Some(1_000_000_000));
    m.now = 999_999_999;
    m.settle();
    assert!(m.out.events.is_empty());
    for now in [1_000_000_000, 60_000_000_000] {
        m.now = now;
        assert_eq!(m.settle(), Progress::Parked(Parked::Drain));
        let sources = vec![DISK];
        assert_eq!(m.out.events, [Event::DrainLimit { sources }]);
        assert_eq!(m.status(), 0);
    }
    m.end_first();
    m.settle();
    assert_eq!(m.status(), 2);
}

#[test]
fn register_invalidations_wait_for_leases_too() {
    let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    m.begin(DISK, 0x1000, 512, Perm::Write);
    guest.map(table, 4, 0x1000, 0);
    m.write8(IOTLB, 1 << 63 | 2 << 60 | 1 << 32);
    assert_eq!(m.read8(IOTLB) >> 63, 1);
    m.write8(reg::CCMD, 1 << 63 | 1 << 61);
    assert_eq!(m.read8(reg::CCMD) >> 63, 1);
    m.end_first();
    m.settle();
    // IVT clear, IAIG 2 (domain); ICC clear, CAIG 1 (global).
    assert_eq!(m.read8(IOTLB), 2 << 60 | 2 << 57 | 1 << 32);
    assert_eq!(m.read8(reg::CCMD), 1 << 61 | 1 << 59);
}

#[test]
fn register_invalidations_of_reserved_granularity_report_zero() {
    let mut m = Machine::trap(Guest::new().mem);
    m.write8(IOTLB, 1 << 63);
    assert_eq!(m.read8(IOTLB), 0);
    m.write8(reg::CCMD, 1 << 63);
    assert_eq!(m.read8(reg::CCMD), 0);
    // A mask past MAMV is refused as well.
    m.write8(IVA, 19);
    m.write8(IOTLB, 1 << 63 | 3 << 60);
    assert_eq!(m.read8(IOTLB), 3 << 60);
}

#[test]
fn turning_translation_off_waits_for_translated_accesses() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    m.begin(DISK, 0x1000, 512, Perm::Write);
    m.write4(reg::GCMD, 0x0400_0000);
    m.poll(reg::GSTS, 0x8000_0000, 0x8000_0000);
    assert_run(m.translate(DISK, 0x1000, Perm::Write), 0x1000, 0x1000);
    m.end_first();
    m.poll(reg::GSTS, 0x8000_0000, 0);
}

#[test]
fn a_moved_context_makes_its_leases_stale() {
    let (mut guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    m.begin(DISK, 0x1000, 512, Perm::Write);
    let other = guest.page();
    guest.map(other, 4, 0x1000, 0x9000 | RW);
    guest.context(DISK, other, 2, 2);
    m.submit(&[
        cc_device(1, DISK, 0),
        iotlb_domain(1),
        wait_status(STATUS, 2),
    ]);
    assert_eq!(m.status(), 0);
    m.end_first();
    m.settle();
    assert_eq!(m.status(), 2);
    assert_run(m.translate(DISK, 0x1000, Perm::Write), 0x9000, 0x1000);
}

#[test]
fn not_present_entries_are_not_cached_at_cm_0() {
    let mut guest = Guest::new();
    let table = guest.page();
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    // No context, then a context without a mapping, then the mapping: no invalidation anywhere.
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    guest.context(DISK, table, 1, 2);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    guest.map(table, 4, 0x1000, 0x5000 | RW);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
}

#[test]
fn a_walk_that_pended_across_an_invalidation_starts_again() {
    use fake_mem::PendingMem;
    let mut guest = Guest::new();
    let table = guest.page();
    guest.context(DISK, table, 1, 2);
    guest.map(table, 4, 0x1000, 0x5000 | RW);
    let mem = PendingMem::every(guest.mem.clone());
    let mut m = Machine::new(Mode::Trap, Config::default(), mem);
    m.boot();
    m.mem.forget();
    let ask = |m: &mut Machine<_>| {
        m.unit
            .translate(&m.mem, DISK, Iova::new(0x1000), Perm::Read)
    };
    // Root and context (2 words each) and three levels are read; the leaf is being brought in.
    for _ in 0..7 {
        assert!(matches!(ask(&mut m), Err(Stop::Pending(_))));
    }
    let other = guest.page();
    guest.map(other, 4, 0x1000, 0x9000 | RW);
    guest.context(DISK, other, 2, 2);
    m.submit_wait(&[cc_global(), iotlb_global()]);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x9000, 0x1000);
}

#[test]
fn iqe_raises_the_fault_event_and_does_not_skip_the_bad_descriptor() {
    let guest = Guest::new();
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    m.write4(reg::FEADDR, 0xfee0_0000);
    m.write4(reg::FEDATA, 0x31);
    m.write4(reg::FECTL, 0);
    let head = m.read8(reg::IQH);
    m.submit(&[0xf, wait_status(STATUS, 9)]);
    assert_eq!(m.read4(reg::FSTS), 0x10);
    assert_eq!(m.out.messages, [(0xfee0_0000, 0x31)]);
    assert_eq!(m.read8(reg::IQH), head);
    assert_ne!(m.status(), 9);
    // More submissions do not start it again.
    m.submit(&[cc_global()]);
    assert_eq!(m.read8(reg::IQH), head);
    // Cleared but not mended: the same again.
    m.write4(reg::FSTS, 0x10);
    assert_eq!(m.read4(reg::FSTS), 0x10);
    assert_eq!(m.out.messages.len(), 2);
    // Mended.
    guest.put(QUEUE + head, cc_global());
    m.write4(reg::FSTS, 0x10);
    assert_eq!(m.read4(reg::FSTS), 0);
    assert_eq!(m.status(), 9);
}

#[test]
fn a_queue_or_status_word_outside_memory_is_iqe() {
    let guest = Guest::new();
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    let head = m.read8(reg::IQH);
    m.submit(&[wait_status(RAM + 0x1000, 1)]);
    assert_eq!(m.read4(reg::FSTS), 0x10);
    assert_eq!(m.read8(reg::IQH), head);
    m.write4(reg::GCMD, 0x8000_0000);
    m.write8(reg::IQT, 0);
    m.write8(reg::IQA, 0xf_ffff_ffff_f000);
    m.write4(reg::FSTS, 0x10);
    m.write4(reg::GCMD, 0x8400_0000);
    assert_eq!(m.read4(reg::FSTS), 0);
    m.write4(reg::IQT, 0x10);
    assert_eq!(m.read4(reg::FSTS), 0x10);
    assert_eq!(m.read8(reg::IQH), 0);
}

#[test]
fn a_tail_set_before_the_queue_is_on_is_processed_when_it_comes_on() {
    let guest = Guest::new();
    let mut m = Machine::trap(guest.mem.clone());
    guest.put(QUEUE, wait_status(STATUS, 3));
    m.write8(reg::IQA, QUEUE);
    m.write4(reg::IQT, 0x10);
    m.write4(reg::GCMD, 0x0400_0000);
    assert_eq!(m.status(), 3);
    assert_eq!(m.read8(reg::IQH), 0x10);
    m.write4(reg::GCMD, 0);
    assert_eq!(m.read8(reg::IQH), 0);
}

#[test]
fn status_bits_clear_by_writing_one_and_ppf_is_derived() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    assert!(blocked(m.translate(DISK, 0x7000, Perm::Read)));
    m.submit(&[0xf]);
    assert_eq!(m.read4(reg::FSTS), 0x12);
    // A 0 clears nothing, and PPF does not go by writing it.
    m.write4(reg::FSTS, 0x02);
    assert_eq!(m.read4(reg::FSTS), 0x12);
    // Only a 1 to F does that; other bits and dwords of the record are read-only.
    m.write4(FRCD + 12, 0x7fff_ffff);
    m.write4(FRCD, 0);
    assert_record(&mut m, 0, DISK, 0x7000, 6, Perm::Read);
    m.write4(FRCD + 12, 0x8000_0000);
    assert_eq!(m.read4(reg::FSTS), 0x10);
}

#[test]
fn fault_event_is_masked_after_reset() {
    let mut m = Machine::trap(Guest::new().mem);
    assert_eq!(m.read4(reg::FECTL), 0x8000_0000);
    assert_eq!(m.read4(reg::IECTL), 0x8000_0000);
    m.boot();
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    m.settle();
    assert!(m.out.messages.is_empty(), "vector 0 to CPU 0");
    assert_eq!(m.read4(reg::FECTL), 0xc000_0000);
}

#[test]
fn a_pending_message_goes_out_at_the_unmask_or_not_at_all_if_all_was_cleared() {
    let mut m = Machine::trap(Guest::new().mem);
    m.boot();
    m.write4(reg::FEADDR, 0xfee0_0000);
    m.write4(reg::FEDATA, 0x31);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    m.write4(FRCD + 12, 0x8000_0000);
    m.write4(reg::FECTL, 0);
    assert!(m.out.messages.is_empty());
    m.write4(reg::FECTL, 0x8000_0000);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    m.write4(reg::FECTL, 0);
    assert_eq!(m.out.messages, [(0xfee0_0000, 0x31)]);
}

#[test]
fn the_units_own_interrupt_is_sent_as_programmed() {
    let mut m = Machine::trap(Guest::new().mem);
    // Xen writes FEADDR and FEUADDR in one go.
    m.write8(reg::FEADDR, 0xfee1_2000);
    m.write4(reg::FEDATA, 0x1234_0041);
    m.write4(reg::FECTL, 0);
    m.boot();
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)));
    m.settle();
    assert_eq!(m.out.messages, [(0xfee1_2000, 0x41)]);
}

#[test]
fn capabilities_promise_only_what_is_done() {
    let mut m = Machine::trap(Guest::new().mem);
    // ND 6, SAGAW 39+48, MGAW 47, ZLR, FRO 0x22, SLLPS 3, PSI, NFR 15, MAMV 18, DWD, DRD.
    assert_eq!(m.read8(reg::CAP), 0x00d2_0f8c_226f_0606);
    // C, QI, PT, SC, IRO 0xf, MHMV 15; not DT, IR, EIM, SMTS.
    assert_eq!(m.read8(reg::ECAP), 0x00f0_0fc3);
    assert_eq!(m.read4(reg::VER), 0x10);
    let config = Config {
        width: AddressWidth::Bits39,
        caching_mode: true,
        fault_records: 8,
        ..Config::default()
    };
    let unit = Unit::new(config);
    assert_eq!(unit.read(reg::CAP, AccessLen::B8), 0x00d2_078c_2266_0286);
    // A unit for assigned devices: 39 bits, CM, SLLPS 1; no SC.
    let config = Config {
        width: AddressWidth::Bits39,
        caching_mode: true,
        fault_records: 8,
        large_pages: LargePages::TwoM,
        snoop_control: false,
        ..Config::default()
    };
    let unit = Unit::new(config.clone());
    assert_eq!(unit.read(reg::CAP, AccessLen::B8), 0x00d2_0784_2266_0286);
    assert_eq!(unit.read(reg::ECAP, AccessLen::B8), 0x00f0_0f43);
    let config = Config {
        large_pages: LargePages::None,
        snoop_control: true,
        ..config
    };
    let unit = Unit::new(config);
    assert_eq!(unit.read(reg::CAP, AccessLen::B8), 0x00d2_0780_2266_0286);
    assert_eq!(unit.read(reg::ECAP, AccessLen::B8), 0x00f0_0fc3);
}

#[test]
fn faults_have_many_records_collapse_and_overflow_with_one_left_empty() {
    let mut m = Machine::trap(Guest::new().mem);
    m.boot();
    for fault in 0..100_000 {
        assert!(blocked(m.translate(DISK, 0x1000, Perm::Read)), "{fault}");
    }
    assert_eq!(m.unit.stats().faults_recorded, 1);
    assert_eq!(m.read4(reg::FSTS), 0x2);
    // 15 of 16 fit, then PFO.
    for page in 2..=15 {
        assert!(blocked(m.translate(DISK, page << 12, Perm::Read)));
    }
    assert_eq!(m.read4(reg::FSTS), 0x2);
    assert!(blocked(m.translate(DISK, 16 << 12, Perm::Read)));
    assert_eq!(m.read4(reg::FSTS), 0x3);
    assert_eq!(record(&mut m, 15)[3], 0, "a driver's loop meets a clear F");
    // Nothing is recorded until PFO is cleared, even with room.
    m.write4(FRCD + 12, 0x8000_0000);
    assert!(blocked(m.translate(DISK, 17 << 12, Perm::Read)));
    assert_eq!(record(&mut m, 15)[3], 0);
    m.write4(reg::FSTS, 1);
    assert!(blocked(m.translate(DISK, 17 << 12, Perm::Read)));
    assert_record(&mut m, 15, DISK, 17 << 12, 2, Perm::Read);
    // FRI is the oldest that waits.
    assert_eq!(m.read4(reg::FSTS), 0x102);
    for index in 0..16 {
        m.write4(FRCD + index * 16 + 12, 0x8000_0000);
    }
    assert_eq!(m.read4(reg::FSTS), 0);
    assert!(blocked(m.translate(DISK, 18 << 12, Perm::Read)));
    assert_eq!(m.read4(reg::FSTS), 0x2);
    assert_record(&mut m, 0, DISK, 18 << 12, 2, Perm::Read);
}

#[test]
fn fpd_silences_a_devices_faults_and_still_refuses() {
    let (guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
    guest.raw_context(DISK, table | 3, 0x102);
    guest.raw_context(NET, 2, 0); // not present, FPD
    m.submit_wait(&[cc_global()]);
    assert!(blocked(m.translate(DISK, 0x9000, Perm::Read)));
    assert!(blocked(m.translate(NET, 0x9000, Perm::Read)));
    assert_eq!(m.read4(reg::FSTS), 0);
    assert_eq!(m.unit.stats().faults_silent, 2);
}

#[test]
fn reserved_bits_and_bad_contexts_fault_with_their_reasons() {
    let table = 0x20_0000;
    let contexts = [
        (table | 1 | 0x10, 0x102, 0xb),    // reserved bit 4
        (table | 1, 0x102 | 0x80, 0xb),    // reserved bit 71
        (table | 1, 0x102 | 1 << 24, 0xb), // reserved bit 88
        (1 << 48 | 1, 0x102, 0xb),         // table beyond the host's width
        (table | 1, 0x100, 3),             // AW 0
        (table | 1, 0x103, 3),             // AW 3: 57 bits
        (table | 1, 0x107, 3),             // AW 7
        (table | 1 | 0x4, 0x102, 3),       // ATS without DT
        (table | 1 | 0xc, 0x102, 3),       // reserved type
        (1 | 0x8, 0x101, 3),               // pass-through with less than the largest AW
        (RAM << 1 | 1, 0x102, 7),          // second-level table outside memory
        (table, 0x102, 2),                 // not present
    ];
    for (lo, hi, reason) in contexts {
        let guest = Guest::new();
        guest.raw_context(DISK, lo, hi);
        let mut m = Machine::trap(guest.mem.clone());
        m.boot();
        assert!(
            blocked(m.translate(DISK, 0x1000, Perm::Read)),
            "{lo:#x} {hi:#x}"
        );
        assert_record(&mut m, 0, DISK, 0x1000, reason, Perm::Read);
    }
    let roots: [(u128, u32); 5] = [
        (0, 1),
        (u128::from(CONTEXTS) | 0x801, 0xa),
        (1 << 64 | u128::from(CONTEXTS) | 1, 0xa),
        (1 << 48 | 1, 0xa),
        (u128::from(RAM) << 1 | 1, 9),
    ];
    for (root, reason) in roots {
        let guest = Guest::new();
        guest.put(ROOT, root);
        let mut m = Machine::trap(guest.mem.clone());
        m.boot();
        assert!(blocked(m.translate(DISK, 0x1000, Perm::Write)), "{root:#x}");
        assert_record(&mut m, 0, DISK, 0x1000, reason, Perm::Write);
    }
    // The root table itself outside memory.
    let mut m = Machine::trap(Guest::new().mem);
    m.boot();
    m.write8(reg::RTADDR, RAM << 4);
    m.write4(reg::GCMD, 0xc400_0000);
    assert!(blocked(m.translate(DISK, 0x1000, Perm::Write)));
    assert_record(&mut m, 0, DISK, 0x1000, 8, Perm::Write);
}

#[test]
fn reserved_bits_of_second_level_entries_fault() {
    let cases = [
        (1, 1 << 62, true),                // TM without DT
        (1, 1 << 48, true),                // beyond the host's width
        (1, 1 << 11, false),               // SNP in a leaf, with SC
        (2, 1 << 11, true),                // SNP in a table entry
        (4, PS, true),                     // no pages of 512 GiB
        (1, PS, false),                    // ignored in a 4 KiB leaf
        (1, 0x3ff0_0000_0000_077c, false), // software's bits
        (1, 1 << 63, false),
    ];
    for (level, bits, is_fault) in cases {
        let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
        let entry = Gpa::new(guest.entry(table, 4, 0x1000, level));
        guest.mem.put_u64(entry, guest.mem.get_u64(entry) | bits);
        let answer = m.translate(DISK, 0x1000, Perm::Read);
        assert_eq!(blocked(answer), is_fault, "level {level} bits {bits:#x}");
        if is_fault {
            assert_record(&mut m, 0, DISK, 0x1000, 0xc, Perm::Read);
        }
    }
    // A large page whose address is not aligned to it.
    for (level, pte) in [(2, 0x1000 | RW), (3, 0x20_0000 | RW)] {
        let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
        guest.map_large(table, 4, 1 << 40, level, pte);
        assert!(blocked(m.translate(DISK, 1 << 40, Perm::Read)));
        assert_record(&mut m, 0, DISK, 1 << 40, 0xc, Perm::Read);
    }
}

#[test]
fn large_pages_translate_to_their_end_and_flush_by_any_page_in_them() {
    for (level, size) in [(2u32, 1u64 << 21), (3, 1 << 30)] {
        let iova = 1 << 40;
        let (mut guest, table, mut m) = mapped(0x1000, 0x5000 | RW);
        guest.map_large(table, 4, iova, level, 0x4000_0000 | RW);
        for _ in 0..2 {
            let answer = m.translate(DISK, iova + 0x12_3456, Perm::Write);
            assert_run(answer, 0x4012_3456, size - 0x12_3456);
        }
        assert_eq!(m.unit.stats().iotlb_hits, 1);
        let entry = guest.entry(table, 4, iova, level);
        guest.mem.put_u64(Gpa::new(entry), 0);
        m.submit_wait(&[iotlb_pages(1, iova + size - 0x1000, 0)]);
        assert!(blocked(m.translate(DISK, iova, Perm::Write)));
    }
}

#[test]
fn the_interrupt_range_is_neither_a_source_nor_a_target_of_data() {
    let (mut guest, table, mut m) = mapped(0xfee0_0000, 0x5000 | RW);
    guest.map(table, 4, 0x2000, 0xfee0_1000 | RW);
    guest.map_large(table, 4, 0x4000_0000, 2, 0xfee0_0000 | RW);
    guest.map_large(table, 4, 0xfec0_0000, 2, 0x80_0000 | RW);
    assert!(blocked(m.translate(DISK, 0xfee0_0123, Perm::Write)));
    assert_record(&mut m, 0, DISK, 0xfee0_0123, 5, Perm::Write);
    assert!(blocked(m.translate(DISK, 0x2000, Perm::Read)));
    assert_record(&mut m, 1, DISK, 0x2000, 0xe, Perm::Read);
    // Beside it in one large page: allowed, but not past its page, and the range stays closed.
    assert_run(
        m.translate(DISK, 0x4010_0000, Perm::Read),
        0xfef0_0000,
        0x1000,
    );
    assert!(blocked(m.translate(DISK, 0x4000_0000, Perm::Read)));
    // 0xfec0_0000 to 0xfedf_ffff does not touch it.
    assert_run(
        m.translate(DISK, 0xfedf_f000, Perm::Read),
        0x9f_f000,
        0x1000,
    );
}

#[test]
fn pass_through_translates_to_itself_within_the_host_width() {
    let guest = Guest::new();
    guest.raw_context(DISK, 1 | 0x8, 0x102);
    let mut m = Machine::trap(guest.mem.clone());
    m.boot();
    assert_run(m.translate(DISK, 0x1234, Perm::Write), 0x1234, 0xdcc);
    assert!(blocked(m.translate(DISK, 1 << 48, Perm::Read)));
    assert!(blocked(m.translate(DISK, 0xfee0_0000, Perm::Read)));
}

#[test]
fn translation_off_is_identity_for_everyone() {
    let mut unit = Unit::new(Config::default());
    let mem = ArrayMem::new(0x1000);
    let answer = unit.translate(
        &mem,
        SourceId(0xffff),
        Iova::new(0x1_2345_6789),
        Perm::Write,
    );
    assert_run(answer, 0x1_2345_6789, 0x877);
}

#[test]
fn domains_with_the_same_addresses_do_not_mix() {
    let (mut guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    let other = guest.page();
    guest.context(NET, other, 2, 1);
    guest.map(other, 3, 0x1000, 0x9000 | R);
    for _ in 0..2 {
        assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
        assert_run(m.translate(NET, 0x1000, Perm::Read), 0x9000, 0x1000);
    }
    // Flushing one leaves the other's entry: its change shows only after its own flush.
    guest.map(other, 3, 0x1000, 0xa000 | R);
    m.submit_wait(&[iotlb_domain(1)]);
    assert_run(m.translate(NET, 0x1000, Perm::Read), 0x9000, 0x1000);
    m.submit_wait(&[iotlb_pages(2, 0x1000, 0)]);
    assert_run(m.translate(NET, 0x1000, Perm::Read), 0xa000, 0x1000);
}

#[test]
fn function_masks_of_context_invalidations_cover_the_functions_they_name() {
    // FM 0 names one function, 1 ignores bit 2, 2 bits 2:1, 3 all three.
    for (fm, covered) in [(0u8, 0x01u8), (1, 0x11), (2, 0x55), (3, 0xff)] {
        let mut guest = Guest::new();
        let (old, new) = (guest.page(), guest.page());
        guest.map(old, 4, 0x1000, 0x5000 | RW);
        guest.map(new, 4, 0x1000, 0x9000 | RW);
        let mut m = Machine::trap(guest.mem.clone());
        m.boot();
        let function = |number| SourceId::new(0, 3, number);
        for number in 0..8 {
            guest.context(function(number), old, 1, 2);
            assert!(m.translate(function(number), 0x1000, Perm::Read).is_ok());
            guest.context(function(number), new, 2, 2);
        }
        m.submit_wait(&[cc_device(1, function(0), fm)]);
        for number in 0..8 {
            let gpa = if covered >> number & 1 == 1 {
                0x9000
            } else {
                0x5000
            };
            assert_run(
                m.translate(function(number), 0x1000, Perm::Read),
                gpa,
                0x1000,
            );
        }
    }
}

#[test]
fn saved_state_keeps_pending_bits_latches_and_what_no_register_shows() {
    let (guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    assert!(blocked(m.translate(DISK, 0x7000, Perm::Read)));
    m.submit(&[wait_interrupt()]);
    m.write8(reg::RTADDR, 0x7000); // written, not latched
    let saved = m.unit.save();
    let json = serde_json::to_string(&saved).expect("plain data");
    let read = serde_json::from_str(&json).expect("what was written");
    let restored = Unit::restore(Config::default(), &read).expect("good state");
    assert_eq!(restored.save(), saved);
    for offset in (0..0x1000).step_by(8) {
        let expected = m.unit.read(offset, AccessLen::B8);
        assert_eq!(
            restored.read(offset, AccessLen::B8),
            expected,
            "{offset:#x}"
        );
    }
    // IP and IWC survived: unmasking sends both.
    m.unit = restored;
    m.write4(reg::FECTL, 0);
    m.write4(reg::IECTL, 0);
    assert_eq!(m.out.messages.len(), 2);
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x5000, 0x1000);
    let mut wrong = saved.clone();
    wrong.iqh = 0x1000;
    assert!(Unit::restore(Config::default(), &wrong).is_err());
    wrong = saved.clone();
    wrong.version += 1;
    assert!(Unit::restore(Config::default(), &wrong).is_err());
    wrong = saved;
    wrong.next_record = 16;
    assert!(Unit::restore(Config::default(), &wrong).is_err());
    drop(guest);
}

#[test]
fn saved_state_of_a_unit_with_other_capabilities_is_refused() {
    let saved = Unit::new(Config::default()).save();
    let others: [fn(&mut Config); 6] = [
        |config| config.width = AddressWidth::Bits39,
        |config| config.caching_mode = true,
        |config| config.fault_records = 8,
        |config| config.large_pages = LargePages::TwoM,
        |config| config.large_pages = LargePages::None,
        |config| config.snoop_control = false,
    ];
    for other in others {
        let mut config = Config::default();
        other(&mut config);
        let refused = Unit::restore(config.clone(), &saved).err();
        assert_eq!(refused, Some(RestoreError::Capabilities), "{config:?}");
        let own = Unit::new(config.clone()).save();
        assert!(Unit::restore(config, &own).is_ok());
    }
}

#[test]
fn reset_is_power_on() {
    let (_guest, _, mut m) = mapped(0x1000, 0x5000 | RW);
    assert!(m.translate(DISK, 0x1000, Perm::Read).is_ok());
    assert!(blocked(m.translate(DISK, 0x7000, Perm::Read)));
    let before = m.unit.generation(DISK);
    m.unit.reset();
    assert_ne!(m.unit.generation(DISK), before);
    let fresh = Unit::new(Config::default());
    assert_eq!(m.unit.save(), fresh.save());
    assert_run(m.translate(DISK, 0x1000, Perm::Read), 0x1000, 0x1000);
}

#[test]
fn odd_accesses_read_zero_and_write_nothing() {
    let mut unit = Unit::new(Config::default());
    let before = unit.save();
    for (offset, len) in [
        (reg::GCMD + 1, AccessLen::B4),
        (reg::FSTS, AccessLen::B8),
        (0x0ffe, AccessLen::B4),
        (0x1000, AccessLen::B4),
        (0xffff, AccessLen::B8),
    ] {
        unit.write(offset, len, u64::MAX);
        assert_eq!(unit.read(offset, len), 0);
    }
    assert_eq!(unit.save(), before);
    let mem = ArrayMem::new(0x1000);
    assert!(mem.read_u64(Gpa::new(0)).is_ok());
}
