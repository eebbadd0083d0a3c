use super::*;

#[test]
fn windows_fall_into_their_bucket() {
    let mut windows = StaleTimeHistogram::EMPTY;
    for ns in [0, 1, 2, 3, 4, 1 << 46, u64::MAX] {
        windows.record(ns);
    }
    assert_eq!(windows.buckets[..4], [1, 1, 2, 1]);
    assert_eq!(windows.buckets[47], 2);
    assert_eq!((windows.total(), windows.max_ns), (7, u64::MAX));
}

#[test]
fn a_contract_names_the_bound_that_broke() {
    let contract = RiskContract {
        max_stale: Some(4),
        max_age_ns: Some(100),
    };
    let mut windows = StaleTimeHistogram::EMPTY;
    windows.record(110);
    assert_eq!(contract.check(4, &windows, 10), Ok(()));
    let seen_ns = 110;
    let bound_ns = 109;
    assert_eq!(
        contract.check(4, &windows, 9),
        Err(Violation::Age { seen_ns, bound_ns })
    );
    assert_eq!(
        contract.check(5, &windows, 10),
        Err(Violation::Stale { seen: 5, bound: 4 })
    );
    assert_eq!(contract.and(RiskContract::STRICT), contract);
}

#[test]
fn empty_buckets_are_absent_from_debug_output() {
    let mut windows = StaleTimeHistogram::EMPTY;
    assert_eq!(
        format!("{windows:?}"),
        "StaleTimeHistogram { max_ns: 0, buckets: {} }"
    );
    for ns in [0, 1, 5, 6, u64::MAX] {
        windows.record(ns);
    }
    let text = format!("{windows:?}");
    let buckets = format!("{{0..: 1, 1..: 1, 4..: 2, {}..: 1}}", 1_u64 << 46);
    assert!(text.ends_with(&format!("buckets: {buckets} }}")), "{text}");
}
