use super::*;

#[test]
fn windows_fall_into_their_bucket() {
    let mut stale_times = StaleTimeHistogram::EMPTY;
    for ns in [0, 1, 2, 3, 4, 1 << 46, u64::MAX] {
        stale_times.record(ns);
    }
    assert_eq!(stale_times.buckets[..4], [1, 1, 2, 1]);
    assert_eq!(stale_times.buckets[47], 2);
    assert_eq!((stale_times.total(), stale_times.max_ns), (7, u64::MAX));
}

#[test]
fn a_contract_names_the_bound_that_broke() {
    let contract = RiskContract {
        max_stale: Some(4),
        max_age_ns: Some(100),
    };
    let mut stale_times = StaleTimeHistogram::EMPTY;
    stale_times.record(110);
    assert_eq!(contract.check(4, &stale_times, 10), Ok(()));
    let seen_ns = 110;
    let bound_ns = 109;
    assert_eq!(
        contract.check(4, &stale_times, 9),
        Err(Violation::Age { seen_ns, bound_ns })
    );
    assert_eq!(
        contract.check(5, &stale_times, 10),
        Err(Violation::Stale { seen: 5, bound: 4 })
    );
    assert_eq!(contract.and(RiskContract::STRICT), contract);
}

#[test]
fn empty_buckets_are_absent_from_debug_output() {
    let mut stale_times = StaleTimeHistogram::EMPTY;
    assert_eq!(
        format!("{stale_times:?}"),
        "StaleTimeHistogram { max_ns: 0, buckets: {} }"
    );
    for ns in [0, 1, 5, 6, u64::MAX] {
        stale_times.record(ns);
    }
    let text = format!("{stale_times:?}");
    let buckets = format!("{{0..: 1, 1..: 1, 4..: 2, {}..: 1}}", 1_u64 << 46);
    assert!(text.ends_with(&format!("buckets: {buckets} }}")), "{text}");
}
