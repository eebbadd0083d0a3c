//! Faults of what is not there, or does not go with the rest: one line that names the option,
//! status 2, nothing started.

use std::fs;

use spawned::short::run;

use crate::program::LAB;

#[test]
fn a_fault_of_what_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("KERNEL"), spawned::files::kernel()).unwrap();
    fs::write(at("disk"), [0; 4096]).unwrap();
    let machine: &[&str] = &["run", "--kernel", "KERNEL"];
    let daemon: &[&str] = &[
        "serve",
        "--check",
        "--block",
        "id=a,path=ram:1M,socket=a.sock",
    ];
    let disk: &[&str] = &["--disk", "path=disk"];
    let socket: &[&str] = &["--iommu", "none", "--disk", "socket=a.sock"];
    let balloon: &[&str] = &["--balloon", "target=1M"];
    let anonymous: &[&str] = &["--memory", "64M,shared=off"];
    for (args, more, fault, words) in [
        (
            machine,
            &[] as &[&str],
            "disk0:panic",
            "--fault disk0:…: there is no disk",
        ),
        (
            machine,
            disk,
            "disk1:panic",
            "--fault disk1:…: there is disk0 alone",
        ),
        (
            daemon,
            &[],
            "disk1:panic",
            "--fault disk1:…: there is disk0 alone",
        ),
        (
            machine,
            socket,
            "disk0:latency=200",
            "another process serves it",
        ),
        (
            machine,
            balloon,
            "memory:punch",
            "does not go with --balloon",
        ),
        (
            machine,
            &["--device", "vfio=00:04.0"],
            "memory:punch",
            "does not go with --device",
        ),
        (
            machine,
            anonymous,
            "memory:punch",
            "does not go with --memory …,shared=off",
        ),
        (
            machine,
            &[],
            "swap:eio@1",
            "goes with --resident and --swap",
        ),
        (
            machine,
            &[],
            "mapper:stale",
            "goes with --resident and --mapper on",
        ),
        (
            machine,
            &[],
            "disk0:often",
            "--fault \"disk0:often\": disk0 takes one of",
        ),
        (daemon, &[], "memory:punch", "there is no \"memory\""),
    ] {
        let args = [args, more, &["--fault", fault]].concat();
        let ended = run(LAB, folder.path(), &args);
        assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
        assert!(
            ended.error.starts_with("exitless-lab: --fault "),
            "{ended:?}"
        );
        assert!(ended.error.contains(words), "{args:?}: {ended:?}");
        assert_eq!(ended.error.lines().count(), 1, "{ended:?}");
    }
}

#[test]
fn an_option_that_is_a_fault_now_is_refused_with_its_place_here_too() {
    let folder = tempfile::tempdir().unwrap();
    for (args, line) in [
        (
            &["run", "--kernel", "k", "--punch"] as &[&str],
            "--punch is now exitless-lab run --fault memory:punch",
        ),
        (
            &["serve", "--force-panic", "a"],
            "--force-panic is now exitless-lab serve --fault diskN:panic",
        ),
    ] {
        let ended = run(LAB, folder.path(), args);
        assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
        assert_eq!(ended.error, format!("exitless-lab: {line}\n"));
    }
}
