//! Files and values that are no settings, or have a slip in them.

use std::fs;
use std::time::{Duration, Instant};

use spawned::files;

use crate::program::run;

#[test]
fn a_configuration_that_is_something_else_is_refused_within_a_second_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("image"), vec![0; 64 << 20]).unwrap();
    fs::write(at("small-image"), vec![0; 1 << 20]).unwrap();
    fs::write(at("binary"), [0xff; 4096]).unwrap();
    fs::File::create(at("sparse"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("fifo"),
        rustix::fs::FileType::Fifo,
        mode,
        0,
    )
    .unwrap();
    for (file, says) in [
        ("/dev/zero", "/dev/zero is no regular file"),
        ("/dev/full", "/dev/full is no regular file"),
        ("/dev/tty", "/dev/tty"),
        (".", ". is no regular file"),
        (&at("fifo"), "fifo is no regular file"),
        (&at("image"), "image has more than 4 MiB"),
        (&at("sparse"), "sparse has more than 4 MiB"),
        (&at("binary"), "binary is no text: byte 0 is not UTF-8"),
        ("/proc/self/mem", "cannot be read"),
        (&at("absent"), "absent cannot be read: No such file"),
    ] {
        for more in [&["--check"] as &[&str], &[]] {
            let begin = Instant::now();
            let ended = run(
                folder.path(),
                &[&["serve", "--config", file], more].concat(),
            );
            assert!(
                begin.elapsed() < Duration::from_secs(1),
                "{:?}",
                begin.elapsed()
            );
            assert_eq!(ended.status, Some(2), "{file}: {ended:?}");
            assert!(ended.error.contains(says), "{file}: {:.300}", ended.error);
            assert_eq!(
                ended.error.lines().count(),
                1,
                "{file}: {:.300}",
                ended.error
            );
        }
    }
    // A small one is read, and its mistake shown.
    let ended = run(folder.path(), &["serve", "--config", &at("small-image")]);
    assert!(
        ended.error.contains("line 1, column "),
        "{:.300}",
        ended.error
    );
    assert!(ended.error.len() < 1000, "{} bytes", ended.error.len());
}

#[test]
fn no_argument_makes_an_error_long() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(100_000);
    for args in [
        &["serve", "--block", &long] as &[&str],
        &["serve", "--block", &format!("id={long},path=a,socket=b")],
        &["serve", "--block", &format!("id=a,path={long},socket=b")],
        &["serve", "--block", &format!("id=a,path=b,socket={long}")],
        &["serve", "--config", &long],
        &[
            "serve",
            "--stats",
            &long,
            "--block",
            "id=a,path=ram:1M,socket=a",
        ],
        &["run", "--kernel", &long],
        &["run", "--kernel", "/bin/sh", "--memory", &long],
    ] {
        let ended = run(folder.path(), args);
        assert_eq!(ended.status, Some(2), "{:.300}", ended.error);
        assert!(ended.error.len() < 10_000, "{:.300}", ended.error);
        assert_eq!(ended.error.lines().count(), 1, "{:.300}", ended.error);
    }
}

/// Every list of keys, and what it takes.
const LISTS: [(&[&str], &str); 9] = [
    (
        &["serve", "--check", "--block"],
        "id socket mode group path format readonly direct backing locking barriers block queues \
         queue-size packed weight iops \
         iops-burst bps bps-burst",
    ),
    (
        &["run", "--kernel", "KERNEL", "--disk"],
        "path format readonly block direct queues queue-size id locking backing barriers",
    ),
    (
        &["run", "--kernel", "KERNEL", "--iommu", "none", "--disk"],
        "socket queues queue-size id",
    ),
    (
        &["run", "--kernel", "KERNEL", "--net"],
        "responder tap switch socket ip mac create pairs mtu queue-size pcap pcap-max pcap-replace \
         id",
    ),
    (
        &["serve", "--check", "--net"],
        "id socket mode group tap sink source frame loop mtu pairs queue-size packed weight fps \
         fps-burst bps bps-burst pcap pcap-max \
         pcap-replace",
    ),
    (
        &["run", "--kernel", "KERNEL", "--memory", "64M,"],
        "shared thp",
    ),
    (
        &["run", "--kernel", "KERNEL", "--balloon"],
        "target file deflate-on-oom reporting",
    ),
    (
        &["run", "--kernel", "KERNEL", "--resident", "64M", "--swap"],
        "path size file discard",
    ),
    (
        &["run", "--kernel", "KERNEL", "--device"],
        "vfio policy window age require-dma-domains dma-before-te policy-file",
    ),
];

/// Keys of a block device that one command has and another has not: the message names the command
/// that has them.
#[test]
fn a_key_of_a_block_device_that_is_another_commands_names_that_command() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("KERNEL"), files::kernel()).unwrap();
    let (serve, rest) = LISTS.split_first().unwrap();
    let [of_file, of_socket] = [rest[0], rest[1]];
    let keys = |list: (&[&str], &'static str)| list.1.split(' ').collect::<Vec<_>>();
    let all: std::collections::BTreeSet<_> = [*serve, of_file, of_socket]
        .into_iter()
        .flat_map(keys)
        .collect();
    for (list, needs, theirs) in [
        (
            *serve,
            "id=a,socket=a.sock,path=ram:1M",
            "exitless run --disk ",
        ),
        (of_file, "path=a.raw", "exitless serve --block "),
        (of_socket, "socket=a.sock", "exitless serve --block "),
    ] {
        for key in &all {
            // That a disk is in a file and behind a socket is another fault.
            if keys(list).contains(key) || matches!(*key, "path" | "socket") {
                continue;
            }
            let mut args = list.0.to_vec();
            let text = format!("{needs},{key}=1");
            args.push(&text);
            let ended = run(folder.path(), &args);
            assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
            let names = format!("{theirs}{key}");
            assert!(ended.error.contains(&names), "{args:?}: {}", ended.error);
        }
    }
}

/// The same words pin threads and count cores, whichever command has them.
#[test]
fn cores_and_pins_have_the_same_names_in_both_commands() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("KERNEL"), files::kernel()).unwrap();
    let serve = [
        "serve",
        "--check",
        "--block",
        "id=a,path=ram:1M,socket=a.sock",
    ];
    for (more, says) in [
        (&["--pin", "1023"][..], "cannot pin a core to cpu 1023"),
        (&["--cpu", "1023"], "cannot pin a core to cpu 1023"),
        (&["--cores", "0"], "core"),
        (&["--sidecores", "0"], "core"),
    ] {
        let ended = run(folder.path(), &[&serve[..], more].concat());
        assert_eq!(ended.status, Some(2), "{more:?}: {ended:?}");
        assert!(ended.error.contains(says), "{more:?}: {}", ended.error);
        assert!(
            !ended.error.contains("unexpected argument"),
            "{more:?}: {}",
            ended.error
        );
    }
    let machine = ["run", "--kernel", "KERNEL"];
    for name in ["--cores", "--sidecores"] {
        let ended = run(folder.path(), &[&machine[..], &[name, "0"]].concat());
        assert_eq!(ended.status, Some(2), "{name}: {ended:?}");
        assert!(
            !ended.error.contains("unexpected argument"),
            "{name}: {}",
            ended.error
        );
    }
}

/// A name with a slip: a letter doubled.
fn with_a_slip(key: &str) -> String {
    format!("{}{}", &key[..1], key)
}

#[test]
fn each_list_of_keys_names_the_nearest_and_all_it_takes() {
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("KERNEL");
    fs::write(kernel, files::kernel()).unwrap();
    for (args, keys) in LISTS {
        let keys: Vec<&str> = keys.split(' ').collect();
        for key in &keys {
            let slip = with_a_slip(key);
            let mut args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
            let text = match args.last().unwrap().strip_suffix(',') {
                Some(size) => format!("{size}, {slip}=on"),
                None if keys[0] == "socket" => format!("socket=a.sock, {slip}=1"),
                None => format!("{slip}=1"),
            };
            if args.last().unwrap().ends_with(',') {
                args.pop();
            }
            args.push(text);
            if keys[0] == "socket" && *key == "socket" {
                continue;
            }
            let ended = run(folder.path(), &args);
            assert_eq!(ended.status, Some(2), "{args:?}: {ended:?}");
            let names = format!("unknown key {slip:?}; did you mean {key:?}?");
            assert!(ended.error.contains(&names), "{args:?}: {ended:?}");
            let (_, list) = ended.error.split_once("(it takes ").unwrap();
            let list = list.split(')').next().unwrap();
            let list: Vec<&str> = list.split(", ").collect();
            for key in &keys {
                assert!(list.contains(key), "{args:?} {key}: {ended:?}");
            }
        }
    }
}

#[test]
fn a_slip_in_a_file_names_the_nearest_and_all_it_may_say() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serve.toml");
    let path = path.to_str().unwrap();
    for (content, names) in [
        (
            "[[block]]\nread-only = true\n",
            "`read-only`, expected one of `id`, `socket`",
        ),
        (
            "[[blok]]\n",
            "`blok`, expected one of `cores`, `block`, `net`, `switch`, `stats`; did you mean \
             \"block\"?",
        ),
        ("[cores]\ncpu = \"3\"\n", "did you mean \"cpus\"?"),
        (
            "[[block]]\nqueue_size = 3\n",
            "did you mean \"queue-size\"?",
        ),
    ] {
        fs::write(path, content).unwrap();
        let ended = run(folder.path(), &["serve", "--config", path]);
        assert!(ended.error.contains(names), "{content}: {}", ended.error);
    }
}

/// Numbers are written alike wherever they stand: as digits, or with a unit, a power of 1024.
#[test]
fn a_number_has_the_same_units_in_every_key_on_the_command_line_and_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("serve.toml");
    let path = file.to_str().unwrap();
    let keys = [
        "iops",
        "iops-burst",
        "bps",
        "bps-burst",
        "queue-size",
        "weight",
    ];
    for key in keys {
        for (value, is_good) in [
            ("1K", true),
            ("1k", true),
            ("1KB", true),
            ("1KiB", true),
            ("512", true),
            ("1X", false),
            ("1.5K", false),
            ("-1", false),
            ("+1", false),
            ("", false),
            ("K", false),
            ("99999999999T", false),
        ] {
            let needs = match key {
                "iops-burst" => ",iops=5",
                "bps-burst" => ",bps=5",
                _ => "",
            };
            // The largest weight is 1000.
            let is_good = is_good && (key != "weight" || value == "512");
            let block = format!("id=a,path=ram:1M,socket=a.sock,{key}={value}{needs}");
            let flag = run(folder.path(), &["serve", "--check", "--block", &block]);
            let needs = needs.replace(',', "\n");
            let content = format!(
                "[[block]]\nid = \"a\"\npath = \"ram:1M\"\nsocket = \"a.sock\"\n\
                 {key} = \"{value}\"{needs}\n"
            );
            fs::write(&file, content).unwrap();
            let toml = run(folder.path(), &["serve", "--check", "--config", path]);
            let expected = if is_good { Some(0) } else { Some(2) };
            for ended in [flag, toml] {
                assert_eq!(ended.status, expected, "{key}={value}: {ended:?}");
                let says_units = ended.error.contains("K, M, G or T (powers of 1024)");
                let is_range = ended.error.contains("weight is") || value.starts_with('9');
                assert!(
                    is_good || says_units || is_range,
                    "{key}={value}: {ended:?}"
                );
            }
        }
    }
    for (size, mib) in [
        ("1048576", 1),
        ("1M", 1),
        ("1mib", 1),
        ("2MB", 2),
        ("1G", 1024),
    ] {
        // The message about a size that is none names it in MiB.
        let block = format!("id=a,path=ram:{size},socket=a.sock");
        let ended = run(folder.path(), &["serve", "--check", "--block", &block]);
        assert_eq!(ended.status, Some(0), "{size} is {mib} MiB: {ended:?}");
    }
}
