use super::clean::Pages;
use super::*;

/// Returns the facts of a kernel that has everything.
fn complete() -> Facts {
    Facts {
        kernel_faults: Ok(()),
        shared_memory: Some(Ok(())),
        traced_stores: Some(Ok(())),
        clean_evidence: Some(Ok(())),
        single_pages: Ok(()),
        pagemap_scan: Some(PagemapScan::Truthful),
    }
}

#[test]
fn lacking_features_are_listed_in_order_and_untested_ones_are_not() {
    assert_eq!(complete().lacks().count(), 0);
    let of = |what: &str| lack(what, "");
    let facts = Facts {
        kernel_faults: Err(of("1")),
        shared_memory: Some(Err(of("2"))),
        traced_stores: Some(Err(of("3"))),
        clean_evidence: Some(Err(of("4"))),
        single_pages: Err(of("5")),
        pagemap_scan: Some(PagemapScan::MissesUnmapped),
    };
    let found: Vec<_> = facts.lacks().map(|lack| lack.what.as_str()).collect();
    assert_eq!(found, ["1", "2", "3", "4", "5"]);
    let none = Facts {
        shared_memory: None,
        traced_stores: None,
        clean_evidence: None,
        pagemap_scan: None,
        ..complete()
    };
    assert_eq!(none.lacks().count(), 0);
}

/// On every kernel each lacking feature has a description and a remedy.
#[test]
fn this_kernel_has_it_all_or_says_what_it_lacks() {
    let facts = Facts::probe();
    let mut lacks = facts.lacks().peekable();
    if lacks.peek().is_none() {
        assert_eq!(facts.shared_memory, Some(Ok(())));
        assert_eq!(facts.traced_stores, Some(Ok(())));
        assert_eq!(facts.clean_evidence, Some(Ok(())));
        return println!("complete; PAGEMAP_SCAN: {:?}", facts.pagemap_scan);
    }
    for lack in lacks {
        assert!(!lack.what.is_empty() && !lack.remedy.is_empty());
        println!("skipped: {lack}");
    }
}

#[test]
fn a_feature_that_no_kernel_has_is_named_with_the_kernel_that_has_it() {
    if let Err(error) = Uffd::open(Source::User, Features(0)) {
        return println!("skipped: {error}");
    }
    let said = features(Features(1 << 62), "second sight").unwrap_err();
    assert_eq!(
        said.to_string(),
        "this kernel has no second sight: boot Linux 6.7 or newer, which has it"
    );
}

/// The probe is part of starting a guest: it must not wait for an answer that never comes.
#[test]
fn a_store_where_a_guest_would_wait_fails() {
    let trial = match Trial::new(Stores::Unseen) {
        Ok(trial) => trial,
        Err(lack) => return println!("skipped: {lack}"),
    };
    for is_in_file in [false, true] {
        if is_in_file {
            trial.fill(Trial::FIRST, 1).unwrap();
        }
        let error = trial.store(Trial::FIRST, 2).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
        assert!(!trial.has_fault().unwrap());
    }
}
