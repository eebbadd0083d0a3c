//! Round trip through a file, and refused files; `unit::tests::model` saves in between.

use super::*;

fn endpoints() -> Config {
    Config {
        endpoints: vec![2 << 3..=0xff],
        max_domains: 3,
        max_mappings: 4,
        ..Config::default()
    }
}

/// A unit of the state that another one has, which is at rest.
pub(in crate::unit) fn restored(unit: &PvIommu) -> PvIommu {
    let saved = unit.save().expect("it is at rest");
    let text = serde_json::to_string(&saved).expect("it is plain");
    let read: SavedUnit = serde_json::from_str(&text).expect("as it was written");
    assert_eq!(read, saved);
    let unit = PvIommu::restore(unit.config.clone(), &read).expect("a state of a unit");
    assert_eq!(unit.save(), Some(saved), "saved again");
    unit
}

fn page(first: u64) -> Mapping {
    Mapping {
        first,
        last: first + 0xfff,
        phys: 0x8000,
        can_read: true,
        can_write: false,
    }
}

fn domain(number: u32, endpoints: &[u16], mappings: &[Mapping]) -> SavedDomain {
    SavedDomain {
        number,
        is_bypass: false,
        endpoints: endpoints.to_vec(),
        mappings: mappings.to_vec(),
    }
}

fn refusal(domains: Vec<SavedDomain>) -> String {
    let saved = SavedUnit {
        version: VERSION,
        is_bypass: false,
        domains,
    };
    match PvIommu::restore(endpoints(), &saved) {
        Ok(unit) => format!("taken: {unit:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_state_that_no_requests_lead_to_is_refused() {
    let bypass_with_pages = SavedDomain {
        is_bypass: true,
        ..domain(1, &[0x18], &[page(0x1000)])
    };
    let reversed = Mapping {
        last: 0xfff,
        ..page(0x2000)
    };
    let beyond = Mapping {
        phys: u64::MAX - 0xfff,
        ..page(0x1000)
    };
    let five: Vec<Mapping> = (1..6).map(|at| page(at << 12)).collect();
    let cases = [
        (vec![domain(DOMAIN_LAST + 1, &[0x18], &[])], "number"),
        (
            vec![domain(1, &[0x18], &[]), domain(1, &[0x20], &[])],
            "domain 1 has impossible number",
        ),
        (vec![domain(1, &[], &[])], "impossible endpoints"),
        // No endpoint of this machine, in two domains, and twice in one.
        (vec![domain(1, &[0x8], &[])], "impossible endpoints"),
        (
            vec![domain(1, &[0x18], &[]), domain(2, &[0x18], &[])],
            "domain 2 has impossible endpoints",
        ),
        (vec![domain(1, &[0x18, 0x18], &[])], "impossible endpoints"),
        (vec![bypass_with_pages], "impossible mappings"),
        (
            vec![domain(1, &[0x18], &[page(0x1001)])],
            "impossible mappings",
        ),
        (vec![domain(1, &[0x18], &[reversed])], "impossible mappings"),
        (vec![domain(1, &[0x18], &[beyond])], "impossible mappings"),
        // Where interrupt messages go, and one over another.
        (
            vec![domain(1, &[0x18], &[page(0xfee0_0000)])],
            "impossible mappings",
        ),
        (
            vec![domain(1, &[0x18], &[page(0x1000), page(0x1000)])],
            "impossible mappings",
        ),
        (vec![domain(1, &[0x18], &five)], "more mappings than the 4"),
        (
            vec![
                domain(1, &[0x18], &five[..3]),
                domain(2, &[0x20], &five[..3]),
            ],
            "more mappings than the 4",
        ),
        (
            (0..4_u16)
                .map(|at| domain(at.into(), &[0x18 + 8 * at], &[]))
                .collect(),
            "more domains than the 3",
        ),
    ];
    for (domains, expected) in cases {
        let shown = format!("{domains:?}");
        let refused = refusal(domains);
        assert!(refused.contains(expected), "{refused}: {shown}");
    }
    let other = SavedUnit {
        version: VERSION + 1,
        is_bypass: false,
        domains: Vec::new(),
    };
    let refused = PvIommu::restore(endpoints(), &other).expect_err("another version");
    assert_eq!(refused, RestoreError::Version(VERSION + 1));
}

#[test]
fn bypass_and_its_domains_come_back() {
    let saved = SavedUnit {
        version: VERSION,
        is_bypass: true,
        domains: vec![
            SavedDomain {
                is_bypass: true,
                ..domain(0, &[0x18, 0x20], &[])
            },
            domain(DOMAIN_LAST, &[0x28], &[page(0x1000)]),
        ],
    };
    let unit = PvIommu::restore(endpoints(), &saved).expect("a state of a unit");
    assert_eq!(unit.save(), Some(saved));
    assert_eq!((unit.stats().domains, unit.stats().mappings), (2, 1));
}
