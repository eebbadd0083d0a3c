//! Subcommands, options and keys that are `exitless-lab`'s: each is refused with one line that
//! names its place.

use std::fs;

use crate::program::run;

/// Arguments, and the line behind the program's name.
const MOVED: &[(&[&str], &str)] = &[
    (&["demo"], "exitless demo is now exitless-lab demo"),
    (
        &["demo", "--wide"],
        "exitless demo is now exitless-lab demo",
    ),
    (
        &["eli", "--attacks"],
        "exitless eli is now exitless-lab eli",
    ),
    (
        &["lab", "--", "doctor"],
        "exitless lab is now exitless-lab lab",
    ),
    (&["lab", "--shell"], "exitless lab is now exitless-lab lab"),
    (&["payload"], "exitless payload is now exitless-lab payload"),
    (
        &["selftest", "--list"],
        "exitless selftest is now exitless-lab selftest",
    ),
    (
        &["serve-lab"],
        "exitless serve-lab is now exitless-lab serve-lab",
    ),
    (
        &["swap-lab"],
        "exitless swap-lab is now exitless-lab swap-lab",
    ),
    (
        &["swap-figures"],
        "exitless swap-figures is now exitless-lab swap-figures",
    ),
    (
        &["--log", "info", "demo"],
        "exitless demo is now exitless-lab demo",
    ),
    (&["help", "demo"], "exitless demo is now exitless-lab demo"),
    (&["man", "demo"], "exitless demo is now exitless-lab demo"),
    (
        &["run", "--kernel", "KERNEL", "--punch"],
        "--punch is now exitless-lab run --fault memory:punch",
    ),
    (
        &["run", "--as-resident", "--kernel", "KERNEL"],
        "--as-resident is now exitless-lab run --fault memory:as-resident",
    ),
    (
        &["run", "--kernel", "KERNEL", "--force-sleep", "1"],
        "--force-sleep is now exitless-lab run --fault sidecores:sleep=N",
    ),
    (
        &["run", "--kernel", "KERNEL", "--force-sleep=1"],
        "--force-sleep is now exitless-lab run --fault sidecores:sleep=N",
    ),
    (
        &["serve", "--force-sleep", "1"],
        "--force-sleep is now exitless-lab serve --fault sidecores:sleep=N",
    ),
    (
        &["serve", "--force-panic", "disk0"],
        "--force-panic is now exitless-lab serve --fault diskN:panic",
    ),
    (
        &["run", "--kernel", "KERNEL", "--mapper", "stale"],
        "--mapper stale is now exitless-lab run --fault mapper:stale",
    ),
    (
        &["run", "--kernel", "KERNEL", "--mapper=stale"],
        "--mapper stale is now exitless-lab run --fault mapper:stale",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--disk",
            "path=disk,latency=200",
        ],
        "latency= is now exitless-lab run --fault disk0:latency=200",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--disk",
            "path=disk",
            "--disk",
            "path=other,misbehave=unmapped",
        ],
        "misbehave= is now exitless-lab run --fault disk1:unmapped",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--disk",
            "path=disk,misbehave=panic",
        ],
        "misbehave= is now exitless-lab run --fault disk0:panic",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--iommu",
            "none",
            "--disk",
            "socket=a.sock,latency=200",
        ],
        "latency= is now exitless-lab serve --fault diskN:latency=200",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--disk",
            "path=disk,latency=20K",
        ],
        "latency= is now exitless-lab run --fault disk0:latency=20480",
    ),
    (
        &["run", "--kernel", "KERNEL", "--disk", "path=disk,latency=0"],
        "latency= is now exitless-lab run --fault disk0:latency=US",
    ),
    (
        &[
            "run",
            "--kernel",
            "KERNEL",
            "--resident",
            "64M",
            "--swap",
            "path=swap,misbehave=eio@3",
        ],
        "misbehave= is now exitless-lab run --fault swap:eio@3",
    ),
    (
        &[
            "serve",
            "--block",
            "id=a,path=ram:1M,socket=a.sock,latency=200",
        ],
        "latency= is now exitless-lab serve --fault diskN:latency=200",
    ),
];

#[test]
fn each_moved_name_is_refused_with_its_new_place() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("KERNEL"), spawned::files::kernel()).unwrap();
    for name in ["disk", "other"] {
        fs::write(at(name), [0; 4096]).unwrap();
    }
    for (args, line) in MOVED {
        let ended = run(folder.path(), args);
        assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
        assert_eq!(ended.output, "", "{args:?}");
        let said = ended
            .error
            .strip_prefix("exitless: ")
            .unwrap_or(&ended.error);
        // What stands before it is the option.
        let is_said = said
            .strip_suffix('\n')
            .is_some_and(|said| said.ends_with(line));
        assert!(is_said && said.lines().count() == 1, "{args:?}: {ended:?}");
    }
}

#[test]
fn a_name_that_was_never_there_is_an_ordinary_slip() {
    let folder = tempfile::tempdir().unwrap();
    for (args, words) in [
        (&["demos"] as &[&str], "unrecognized subcommand"),
        (&["run", "--punsh"], "unexpected argument"),
        (&["doctor", "--punch"], "unexpected argument"),
        (&["serve", "--punch"], "unexpected argument"),
        (
            &["run", "--kernel", "k", "--mapper", "fresh"],
            "possible values: on, off",
        ),
        (
            &["run", "--kernel", "k", "--preventer", "stale"],
            "possible values: on, off",
        ),
    ] {
        let ended = run(folder.path(), args);
        assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
        assert!(ended.error.contains(words), "{args:?}: {ended:?}");
        assert!(!ended.error.contains("is now"), "{args:?}: {ended:?}");
    }
}
