use super::super::assignment::Assignment;
use super::super::facts::{Memory, Userfaultfd};
use super::*;
use crate::resident::testing;

fn flags(names: &[&str]) -> std::collections::BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// A Debian 13 machine with everything.
fn complete() -> Facts {
    Facts {
        cpu_flags: flags(&["svm", "mwaitx"]),
        cpus: 8,
        kernel: Release(6, 12),
        kvm: Kvm::Usable { lacks: vec![] },
        nested_paging: Some(true),
        posted_interrupts: Some(true),
        assignment: Assignment::complete(),
        userfaultfd: Userfaultfd {
            present: true,
            device: true,
            privileged: true,
        },
        resident: Some(testing::complete()),
        memory: Memory {
            available_mib: 8000,
            huge_pages: 8,
            shmem_thp: "never".into(),
        },
        io_uring: Some(Ok(())),
        tun: Some(Ok(())),
        net_admin: true,
    }
}

/// A host beside this one, which can be had or not.
fn other(state: State) -> OtherHost {
    OtherHost {
        finding: Finding {
            key: "beside",
            name: "a host beside this one",
            state,
            value: String::new(),
            why: "",
            next: "",
        },
        is_this: None,
        remedy: "Go there.",
        no_remedy: "There is no way.",
    }
}

/// Judges the facts of a machine that can have another host.
fn assess(facts: &Facts) -> Report {
    super::assess(facts, Some(&other(State::Good)))
}

fn state(report: &Report, key: &str) -> State {
    report
        .findings
        .iter()
        .find(|finding| finding.key == key)
        .unwrap()
        .state
}

#[test]
fn a_complete_host_runs_natively_with_nothing_to_wish_for() {
    let report = assess(&complete());
    assert_eq!(report.verdict, Verdict::Native);
    assert!(
        report.findings.iter().all(|f| f.state == State::Good),
        "{report:#?}"
    );
}

#[test]
fn software_kvm_is_told_from_the_real_one() {
    let facts = Facts {
        cpu_flags: flags(&["hypervisor"]),
        ..complete()
    };
    let report = assess(&facts);
    assert_eq!(report.verdict, Verdict::Other);
    assert_eq!(state(&report, "kvm"), State::Limited);
    assert!(
        report.summary.contains("software KVM"),
        "{}",
        report.summary
    );
    assert!(report.summary.contains("Go there."), "{}", report.summary);
}

#[test]
fn no_permission_or_no_device_leads_to_the_other_host() {
    let refused = Facts {
        kvm: Kvm::Refused("Permission denied".into()),
        ..complete()
    };
    let report = assess(&refused);
    assert_eq!(report.verdict, Verdict::Other);
    assert!(report.summary.contains("Permission denied"));
    let kvm = report.findings.iter().find(|f| f.key == "kvm").unwrap();
    assert!(kvm.next.contains("group"));
    assert_eq!(
        assess(&Facts {
            kvm: Kvm::Absent,
            ..complete()
        })
        .verdict,
        Verdict::Other
    );
}

#[test]
fn a_missing_capability_is_named() {
    let facts = Facts {
        kvm: Kvm::Usable {
            lacks: vec!["X2APIC_API"],
        },
        ..complete()
    };
    let report = assess(&facts);
    assert_eq!(report.verdict, Verdict::Other);
    assert!(report.summary.contains("X2APIC_API"));
}

#[test]
fn neither_where_the_other_host_cannot_be_had() {
    let no_kvm = Facts {
        kvm: Kvm::Absent,
        ..complete()
    };
    for (there, words) in [
        (Some(other(State::Missing)), "There is no way."),
        (None, "exitless-lab lab -- run"),
    ] {
        let report = super::assess(&no_kvm, there.as_ref());
        assert_eq!(report.verdict, Verdict::Neither);
        assert!(report.summary.contains(words), "{}", report.summary);
        let listed = report.findings.iter().any(|f| f.key == "beside");
        assert_eq!(listed, there.is_some());
    }
}

#[test]
fn on_the_other_host_run_is_native() {
    let there = OtherHost {
        is_this: Some("This is the other host"),
        ..other(State::Limited)
    };
    let report = super::assess(&complete(), Some(&there));
    assert_eq!(report.verdict, Verdict::Native);
    assert!(report.summary.starts_with("This is the other host"));
    assert_eq!(state(&report, "beside"), State::Limited);
}

#[test]
fn userfaultfd_needs_a_kernel_and_a_way_in() {
    let with = |kernel, device, privileged| {
        let userfaultfd = Userfaultfd {
            present: true,
            device,
            privileged,
        };
        state(
            &assess(&Facts {
                kernel,
                userfaultfd,
                ..complete()
            }),
            "userfaultfd",
        )
    };
    assert_eq!(with(Release(6, 1), true, false), State::Good);
    assert_eq!(with(Release(6, 1), false, true), State::Good);
    assert_eq!(with(Release(6, 1), false, false), State::Limited);
    assert_eq!(with(Release(5, 10), true, true), State::Limited);
}

#[test]
fn advice_names_no_module_that_cannot_load() {
    for (flag, can_load) in [("vmx", true), ("svm", true), ("hypervisor", false)] {
        let report = assess(&Facts {
            cpu_flags: flags(&[flag]),
            kvm: Kvm::Absent,
            nested_paging: None,
            posted_interrupts: None,
            ..complete()
        });
        for key in ["kvm", "nested_paging", "posted_interrupts"] {
            let found = report.findings.iter().find(|f| f.key == key).unwrap();
            let advises = ["modprobe", "load the module"]
                .iter()
                .any(|words| found.next.contains(words));
            assert_eq!(advises, can_load, "{flag}, {key}: {}", found.next);
        }
    }
}

fn finding(resident: Option<Host>, key: &str) -> Finding {
    let facts = Facts {
        resident,
        ..complete()
    };
    let report = assess(&facts);
    // A guest that has all its memory starts.
    assert_eq!(report.verdict, Verdict::Native);
    let mut found = report.findings.into_iter();
    found.find(|finding| finding.key == key).unwrap()
}

#[test]
fn a_host_that_cannot_page_says_why_and_the_first_thing_to_do() {
    let mut host = testing::complete();
    host.kernel.kernel_faults = Err(testing::lack("no permission", "ask for it"));
    host.kernel.traced_stores = Some(Err(testing::lack("no trace", "boot another")));
    let found = finding(Some(host), "resident");
    assert_eq!(found.state, State::Missing);
    assert_eq!(found.value, "no permission; no trace");
    assert_eq!(found.next, "ask for it");
    assert_eq!(finding(None, "resident").state, State::Missing);
}

#[test]
fn huge_pages_of_shared_memory_are_good_but_not_for_paging() {
    let mut host = testing::complete();
    host.shmem_thp = "always".into();
    let found = finding(Some(host), "resident");
    assert_eq!(found.state, State::Missing);
    assert!(found.next.contains("echo advise"), "{}", found.next);
}

#[test]
fn answer_of_pagemap_scan_leaves_the_state_good() {
    for (scan, words) in [
        (Some(PagemapScan::Truthful), "agrees"),
        (Some(PagemapScan::MissesUnmapped), "misses what"),
        (None, "does not answer"),
    ] {
        let mut host = testing::complete();
        host.kernel.pagemap_scan = scan;
        let found = finding(Some(host), "resident");
        assert_eq!(found.state, State::Good);
        assert!(found.value.contains(words), "{}", found.value);
    }
}

#[test]
fn swap_space_of_the_host_is_a_restriction_unless_it_is_forbidden() {
    for (swap_space, state, words) in [
        (SwapSpace::None, State::Good, "none"),
        (
            SwapSpace::Forbidden { mib: 9 },
            State::Good,
            "memory.swap.max is 0",
        ),
        (SwapSpace::Used { mib: 9 }, State::Limited, "9 MiB"),
    ] {
        let mut host = testing::complete();
        host.swap_space = swap_space;
        let found = finding(Some(host.clone()), "host_swap");
        assert_eq!(found.state, state);
        assert!(found.value.contains(words), "{}", found.value);
        assert_eq!(finding(Some(host), "resident").state, State::Good);
    }
}
