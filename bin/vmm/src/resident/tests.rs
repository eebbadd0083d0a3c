use super::testing::{complete, lack};
use super::*;

#[test]
fn a_complete_host_is_neither_refused_nor_warned_about() {
    assert_eq!((complete().refusal(), complete().warning()), (None, None));
}

#[test]
fn each_thing_that_is_lacking_is_named_with_its_remedy() {
    let lacking = || Err(lack("no such thing", "do this"));
    let hosts = [
        |fact| Facts {
            kernel_faults: fact,
            ..complete().kernel
        },
        |fact| Facts {
            shared_memory: Some(fact),
            ..complete().kernel
        },
        |fact| Facts {
            traced_stores: Some(fact),
            ..complete().kernel
        },
        |fact| Facts {
            clean_evidence: Some(fact),
            ..complete().kernel
        },
        |fact| Facts {
            single_pages: fact,
            ..complete().kernel
        },
    ];
    for kernel in hosts {
        let host = Host {
            kernel: kernel(lacking()),
            ..complete()
        };
        assert_eq!(host.refusal().as_deref(), Some("no such thing: do this"));
    }
}

#[test]
fn several_are_one_line() {
    let kernel = Facts {
        kernel_faults: Err(lack("no permission", "ask for it")),
        traced_stores: Some(Err(lack("no trace", "boot another kernel"))),
        ..complete().kernel
    };
    let host = Host {
        kernel,
        ..complete()
    };
    assert_eq!(
        host.refusal().as_deref(),
        Some("no permission: ask for it; no trace: boot another kernel")
    );
}

#[test]
fn words_that_allow_huge_pages_everywhere_are_refused() {
    for (word, is_refused) in [
        ("always", true),
        ("within_size", true),
        ("force", true),
        ("advise", false),
        ("never", false),
        ("deny", false),
        ("", false),
    ] {
        let host = Host {
            shmem_thp: word.into(),
            ..complete()
        };
        let refusal = host.refusal();
        assert_eq!(refusal.is_some(), is_refused, "{word}");
        if let Some(text) = refusal {
            assert!(
                text.contains(word) && text.contains("echo advise"),
                "{text}"
            );
        }
    }
}

#[test]
fn huge_pages_that_have_been_met_are_told_once() {
    let kernel = Facts {
        single_pages: Err(lack("huge", "no more")),
        ..complete().kernel
    };
    let host = Host {
        kernel,
        shmem_thp: "always".into(),
        ..complete()
    };
    assert_eq!(host.refusal().as_deref(), Some("huge: no more"));
}

#[test]
fn swap_space_of_the_host_is_a_warning_unless_it_is_forbidden() {
    let with = |swap_space| Host {
        swap_space,
        ..complete()
    };
    let used = with(SwapSpace::Used { mib: 2048 });
    let said = used.warning().unwrap();
    assert!(
        said.contains("2048 MiB") && said.contains("MemorySwapMax=0"),
        "{said}"
    );
    assert_eq!(used.refusal(), None);
    assert_eq!(with(SwapSpace::Forbidden { mib: 2048 }).warning(), None);
}

#[test]
fn the_chosen_word_is_the_one_in_brackets() {
    assert_eq!(
        chosen("always within_size advise [never] deny force\n"),
        "never"
    );
    assert_eq!(chosen(""), "");
}
