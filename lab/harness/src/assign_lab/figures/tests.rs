//! Tests over windows made by hand.

use lab::assigned::FaultLog;

use super::*;

fn case(mode: Mode, unmapping: Unmapping) -> Case {
    let is_it = |case: &&Case| (case.mode, case.unmapping) == (mode, unmapping);
    let case = Case::ALL.iter().find(is_it);
    *case.expect("one of the matrix")
}

/// Returns a window of 100 requests, with these counts: all exits, exits of registers, maps,
/// unmaps, and invalidations of the domain.
fn row(case: Case, policy: HostPolicy, counts: [u64; 5]) -> Row {
    let [total, iommu, maps, unmaps, domains] = counts;
    Row {
        case,
        policy,
        work: Work::Read,
        requests: 100,
        window: json!({
            "duration_ns": 1, "sidecore": { "cpu_ns": 1 }, "histograms": true,
            "owner": { "waits": 0, "interrupts": 0 },
            "exits": { "total": total, "iommu": iommu, "timer": 10, "hlt": 5, "interrupt": 5 },
            "devices": [{
                "address": "0000:00:02.0", "policy": policy.ledger_name(), "maps": maps, "unmaps": unmaps,
                "unmapped": unmaps, "pages_told": maps + unmaps, "domains_told": domains, "others_told": 0,
                "hits": 0, "misses": maps, "pinned": 24, "pinned_peak": 25, "guest_pages": 24, "stale": 0,
                "stale_max": 0, "stale_allowed": 0, "stale_ns_max": 0, "stale_ns_allowed": 0, "longest_call_ns": 0
            }]
        }),
    }
}

fn figures(rows: Vec<Row>) -> Figures {
    Figures {
        object: Object::default(),
        rows,
        table: Vec::new(),
        after_detach_pages: None,
        over_bound_pages: None,
        faults: 0,
        io_under_reclaim: 0,
        failed: Vec::new(),
    }
}

fn boot(rows: Vec<Row>, locked_max_kib: u64) -> Boot {
    Boot {
        rows,
        locked_after_detach_kib: 0,
        locked_max_kib,
        faults: FaultLog::default(),
    }
}

/// Strict: two exits for a map, three for an unmap. Lazy: one of each domain.
#[test]
fn register_exits_of_maps_and_of_unmaps_are_told_apart_by_two_windows() {
    let strict = case(Mode::Trap, Unmapping::Strict);
    let lazy = case(Mode::Trap, Unmapping::Lazy);
    let mut figures = figures(vec![
        row(strict, HostPolicy::Strict, [600, 500, 100, 100, 0]),
        row(lazy, HostPolicy::Strict, [300, 204, 100, 20, 4]),
        // A window of another policy is not counted.
        row(strict, HostPolicy::Deferred, [9000, 9000, 1, 1, 0]),
    ]);
    figures.set_register_exits();
    let get = |key: &str| figures.object.get(key);
    assert_eq!(get("trap_register_exits_per_map_or_unmap"), Some(2.5));
    assert_eq!(get("trap_register_exits_per_map"), Some(2.0));
    assert_eq!(get("trap_register_exits_per_unmap"), Some(3.0));
    assert_eq!(get("shared_register_exits_per_map"), None);
}

#[test]
fn a_difference_to_all_memory_pinned_leaves_out_what_depends_on_time() {
    let mut figures = figures(vec![
        row(
            case(Mode::None, Unmapping::Strict),
            HostPolicy::Off,
            [120, 0, 0, 0, 0],
        ),
        row(
            case(Mode::Shared, Unmapping::Strict),
            HostPolicy::Strict,
            [124, 0, 100, 100, 0],
        ),
    ]);
    figures.set_differences();
    let key = "shared_minus_none_exits_per_io";
    assert_eq!(figures.object.get(key), Some(0.04));
    assert!(
        !figures
            .object
            .keys()
            .contains_key("trap_minus_none_exits_per_io")
    );
}

#[test]
fn a_policy_is_over_its_contract_in_number_or_in_age() {
    let case = case(Mode::Shared, Unmapping::Strict);
    let with = |key: &str, value: u64| {
        let mut row = row(case, HostPolicy::Deferred, [0; 5]);
        row.window["devices"][0]["stale_allowed"] = 250.into();
        row.window["devices"][0]["stale_ns_allowed"] = 10_000_000.into();
        row.window["devices"][0][key] = value.into();
        over_contract(&row).len()
    };
    assert_eq!(with("stale_max", 250), 0);
    assert_eq!(with("stale_max", 251), 1);
    assert_eq!(with("stale_ns_max", 2_000_000_000), 0);
    assert_eq!(with("stale_ns_max", 2_100_000_000), 1);
}

#[test]
fn pages_beyond_the_bound_are_seen_by_the_book_and_by_the_kernel() {
    let case = case(Mode::Shared, Unmapping::Strict);
    let rows = || vec![row(case, HostPolicy::Strict, [0; 5])];
    let most = |boot: &Boot| over_bound(boot).into_iter().fold(f64::MIN, f64::max);
    assert_eq!(most(&boot(rows(), 100)), 0.0);
    assert_eq!(most(&boot(rows(), 108)), 2.0, "locked, and not in the book");
    let mut one_more = rows();
    one_more[0].window["devices"][0]["pinned"] = 25.into();
    assert_eq!(most(&boot(one_more, 100)), 1.0);
}

#[test]
fn hits_are_those_of_the_guest_that_is_judged() {
    assert_eq!(Case::ALL[SHARED], case(Mode::Shared, Unmapping::Strict));
    let with = |at: usize, policy, hits: u64| {
        let mut row = row(Case::ALL[at], policy, [0, 0, 100 - hits, 0, 0]);
        row.window["devices"][0]["hits"] = hits.into();
        row
    };
    let mut figures = figures(vec![
        with(SHARED, HostPolicy::Optimistic(256), 70),
        with(SHARED, HostPolicy::Optimistic(4096), 90),
        with(1, HostPolicy::Optimistic(256), 1),
    ]);
    figures.set_policies();
    let get = |key: &str| figures.object.get(key);
    assert_eq!(get("optimistic_hits_percent"), Some(70.0));
    assert_eq!(get("optimistic_4096_read_hits_percent"), Some(90.0));
    assert_eq!(get("optimistic_4096_write_hits_percent"), None);
}

#[test]
fn a_figure_that_is_missed_is_named() {
    let mut figures = figures(Vec::new());
    for (key, bar) in BARS {
        let good = match bar {
            Bar::AtMost(most) => most,
            Bar::AtLeast(least) => least,
        };
        figures.object.number(key, good);
    }
    assert!(figures.holds());
    figures.object.number("trap_register_exits_per_map", 0.89);
    figures.object.number("shared_register_exits", 1.0);
    let (missed, _) = figures.judge();
    assert_eq!(
        missed,
        ["trap_register_exits_per_map", "shared_register_exits"]
    );
}
