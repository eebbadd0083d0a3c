//! Configurations that are accepted, and messages for those that are not.

mod switched;

use std::io::Write;

use clap::Parser;

use super::args::ServeArgs;
use super::config::{Config, Source};
use super::disk::{self, ImagesInUse};
use super::net::Behind;
use super::purpose::Purpose;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
}

fn load(args: &[&str]) -> anyhow::Result<Config> {
    let args = std::iter::once("serve").chain(args.iter().copied());
    Config::load(&Cli::try_parse_from(args)?.serve)
}

fn refused(args: &[&str]) -> String {
    format!(
        "{:#}",
        load(args).expect_err("a configuration that cannot be served")
    )
}

#[test]
fn a_flag_says_all_there_is_to_say() {
    let config = load(&[
        "--block",
        "id=a,path=a.raw,socket=/tmp/a.sock,mode=0620,group=7,readonly=on,queues=4,weight=3,iops=100,bps=1M,bps-burst=2M",
        "--block",
        "id=b,path=ram:64M,socket=/tmp/b.sock",
        "--cpu",
        "2-3",
        "--idle",
        "spin:50",
        "--coalesce",
        "0",
    ])
    .expect("a good configuration");
    assert_eq!(config.blocks.len(), 2);
    let block = &config.blocks[0];
    assert_eq!(block.source, Source::Raw("a.raw".into()));
    assert_eq!((block.queues, block.weight, block.read_only), (4, 3, true));
    assert_eq!(
        (block.access.mode, block.access.group),
        (Some(0o620), Some(7))
    );
    assert_eq!(
        block.limits.operations.map(|rate| rate.per_second),
        Some(100)
    );
    let bytes = block.limits.bytes.expect("a limit of bytes");
    assert_eq!((bytes.per_second, bytes.burst), (1 << 20, 2 << 20));
    assert_eq!(config.blocks[1].source, Source::Ram(64 << 20));
    assert_eq!((config.cores.count, config.cores.cpus), (2, vec![2, 3]));
    assert_eq!(config.cores.call_delay_ns, 0);
}

#[test]
fn a_file_says_the_same_and_flags_are_added_to_it() {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    write!(
        file,
        r#"
            [cores]
            cpus = "1"
            idle = "adaptive:2.5"
            coalesce-us = 5

            [[block]]
            id = "a"
            path = "a.qcow2"
            format = "qcow2"
            backing = true
            locking = false
            barriers = false
            socket = "a.sock"
            mode = "0600"
            bps = "10M"
            queue-size = 128
        "#
    )
    .expect("it is written");
    let path = file.path().to_str().expect("a plain path").to_owned();
    let config = load(&[
        "--config",
        &path,
        "--block",
        "id=b,path=null:1G,socket=b.sock",
        "--cpu",
        "0",
    ])
    .expect("a good configuration");
    assert_eq!(config.blocks.len(), 2);
    let block = &config.blocks[0];
    assert_eq!(block.source, Source::Qcow2("a.qcow2".into()));
    assert!(block.backing && !block.locking && !block.barriers);
    assert!(
        config.blocks[1].locking && config.blocks[1].barriers,
        "the defaults"
    );
    assert_eq!(block.queue_size, 128);
    assert_eq!((block.access.mode, block.access.group), (Some(0o600), None));
    assert_eq!(
        block.limits.bytes.map(|rate| rate.per_second),
        Some(10 << 20)
    );
    // The flag takes precedence.
    assert_eq!(config.cores.cpus, [0]);
    assert_eq!(config.cores.call_delay_ns, 5_000);
}

#[test]
fn mistakes_are_named_with_the_field_and_the_fix() {
    let long = format!("id=a,path=a,socket=/tmp/{}", "x".repeat(110));
    for (block, says) in [
        ("path=a,socket=b", "it has no id"),
        ("id=a,path=a", "it has no socket"),
        (
            "id=a,socket=b",
            "it has no path (a file, ram:SIZE or null:SIZE)",
        ),
        (
            "id=a,path=a,socket=b,queues=17",
            "queues is 1 to 16, not 17",
        ),
        ("id=a,path=a,socket=b,queue-size=100", "a power of two"),
        ("id=a,path=a,socket=b,format=vmdk", "format is raw or qcow2"),
        ("id=a,path=ram:64M,socket=b,format=raw", "no format"),
        ("id=a,path=ram:1,socket=b", "a multiple of 4096"),
        (
            "id=a,path=a,socket=b,iops-burst=5",
            "iops-burst without iops",
        ),
        ("id=a,path=a,socket=b,iops=0", "iops is at least 1"),
        ("id=a,path=a,socket=b,weight=x", "no number"),
        ("id=a,path=a,socket=b,direct=maybe", "on or off"),
        ("id=a,path=a,socket=b,backing=on", "backing is for qcow2"),
        (
            "id=a,path=ram:4K,socket=b,locking=off",
            "locking is for files",
        ),
        ("id=a,path=a,socket=b,barriers=off", "barriers is for qcow2"),
        ("id=a,path=a,socket=b,mode=0440", "lets nobody connect"),
        (
            "id=a,path=a,socket=b,group=no-such",
            "there is no group \"no-such\" here",
        ),
        ("id=a,path=a,socket=b,colour=red", "unknown key \"colour\""),
        ("id=a,id=b,path=a,socket=b", "given twice"),
        (&long, "a socket's path has 1 to 107"),
    ] {
        let error = refused(&["--block", block]);
        assert!(error.contains(says), "{block}: {error}");
        assert!(error.contains("--block"), "{error}");
    }
    assert!(refused(&[]).contains("no device to serve"));
    let twice = [
        "--block",
        "id=a,path=a,socket=s",
        "--block",
        "id=b,path=b,socket=s",
    ];
    assert!(refused(&twice).contains("two devices have the socket s"));
    let one = ["--block", "id=a,path=a,socket=s"];
    for (flag, value, says) in [
        ("--idle", "doze", "idle is poll, sleep"),
        ("--idle", "adaptive:0", "0.01 to 100"),
        ("--idle", "spin:", "no number of microseconds"),
        ("--cores", "0", "1 to 64 cores"),
        ("--cpu", "0-2,9999", "CPU 9999"),
        ("--coalesce", "20000", "0 to 10000 microseconds"),
    ] {
        let mut args = one.to_vec();
        args.extend([flag, value]);
        let error = refused(&args);
        assert!(error.contains(says), "{flag} {value}: {error}");
    }
    assert!(refused(&["--config", "/nonexistent/serve.toml"]).contains("/nonexistent/serve.toml"));
}

#[test]
fn an_image_has_one_writer_or_several_readers() {
    let image = tempfile::NamedTempFile::new().expect("a temporary file");
    image.as_file().set_len(1 << 20).expect("it grows");
    let path = image.path().to_str().expect("a plain path");
    let open = |options: &str| {
        let block = format!("id=a,path={path},socket=s{options}");
        let config = load(&["--block", &block]).expect("a good configuration");
        disk::open(
            &config.blocks[0],
            Ok,
            Purpose::Start,
            &mut ImagesInUse::default(),
        )
    };
    let writer = open("").expect("nobody else has it");
    let Err(error) = open("") else {
        panic!("a second writer was let in");
    };
    let error = format!("{error:#}");
    assert!(error.contains("in use: this process"), "{error}");
    assert!(error.contains("readonly=on"), "{error}");
    assert!(open(",readonly=on").is_err());
    drop(writer);
    let readers = [open(",readonly=on"), open(",readonly=on")];
    assert!(readers.iter().all(Result::is_ok));
    assert!(open("").is_err());
}

#[test]
fn a_file_with_an_unknown_field_is_refused_with_its_place() {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    write!(file, "[[block]]\nid = \"a\"\ncolor = 1\n").expect("it is written");
    let path = file.path().to_str().expect("a plain path").to_owned();
    let error = refused(&["--config", &path]);
    assert!(
        error.contains(&path) && error.contains("color") && error.contains("line 3"),
        "{error}"
    );
}

#[test]
fn an_unknown_key_is_named_with_its_device_once() {
    let text = refused(&["--block", "id=a,path=ram:1M,socket=a.sock,colour=red"]);
    assert!(text.contains("unknown key \"colour\""), "{text}");
    assert_eq!(text.matches("--block").count(), 1, "{text}");
}

#[test]
fn an_image_of_which_nobody_said_so_is_not_served_as_raw_blocks() {
    let mut file = tempfile::NamedTempFile::new_in(".").expect("a file on a disk");
    let mut content = vec![0; 65536];
    content[..4].copy_from_slice(b"QFI\xfb");
    file.write_all(&content).expect("its content");
    let path = file.path().display();
    let open = |options: &str| {
        let block = format!("id=a,path={path},socket=s{options}");
        let config = load(&["--block", &block]).expect("a good configuration");
        disk::open(
            &config.blocks[0],
            Ok,
            Purpose::Start,
            &mut ImagesInUse::default(),
        )
        .map(drop)
    };
    for options in ["", ",readonly=on", ",direct=on", ",locking=off"] {
        let error = open(options).expect_err("nobody said what it is");
        let text = format!("{error:#}");
        assert!(text.contains("format=qcow2, or format=raw"), "{text}");
    }
    open(",format=raw").expect("it was said");
    // Not at its beginning.
    content.rotate_right(1);
    std::fs::write(file.path(), content).expect("its content");
    open("").expect("a raw disk");
}

#[test]
fn a_network_device_stands_beside_disks() {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    let text = "[[net]]\nid = \"n\"\nsocket = \"n.sock\"\nsource = true\nframe = 64\npairs = 4\n";
    file.write_all(text.as_bytes()).expect("it is written");
    let path = file.path().to_str().expect("a plain path").to_owned();
    let config = load(&[
        "--config",
        &path,
        "--block",
        "id=b,path=null:1G,socket=b.sock",
        "--net",
        "id=m,socket=m.sock,sink,pcap=m.pcap,weight=3,fps=1K,bps=1M,packed=off,queue-size=256",
    ])
    .expect("a good configuration");
    assert_eq!((config.blocks.len(), config.nets.len()), (1, 2));
    assert_eq!(config.nets[0].behind, Behind::Source(64));
    assert_eq!(config.nets[0].pairs, 4);
    let net = &config.nets[1];
    let capture = net.capture.as_ref().expect("a capture");
    assert_eq!(capture.limit, 64 << 20);
    assert_eq!(net.behind, Behind::Sink);
    assert_eq!((net.weight, net.packed, net.queue_size), (3, false, 256));
    assert_eq!(
        net.limits.operations.map(|rate| rate.per_second),
        Some(1024)
    );
    assert!(config.extent().starts_with("3 devices"));
    let sockets: Vec<_> = config.sockets().map(|(id, ..)| id).collect();
    assert_eq!(sockets, ["b", "n", "m"]);
}

#[test]
fn mistakes_of_a_network_device_are_named() {
    for (net, says) in [
        ("socket=s,sink", "it has no id"),
        ("id=a,sink", "it has no socket"),
        (
            "id=a,socket=s",
            "one of tap=NAME, switch=NAME, sink, source and loop",
        ),
        (
            "id=a,socket=s,sink,loop",
            "one of tap=NAME, switch=NAME, sink, source and loop",
        ),
        ("id=a,socket=s,sink=1", "sink takes no value"),
        ("id=a,socket=s,sink,frame=64", "frame is for source"),
        ("id=a,socket=s,source,frame=59", "frame is 60 to 1518"),
        ("id=a,socket=s,loop,pairs=2", "loop has one pair"),
        ("id=a,socket=s,sink,pairs=65", "pairs is 1 to 64"),
        ("id=a,socket=s,tap=t,mtu=67", "mtu is 68 to 65535"),
        ("id=a,socket=s,sink,mtu=1500", "mtu is for tap=NAME"),
        ("id=a,socket=s,sink,pcap=", "pcap is empty"),
        ("id=a,socket=s,sink,pcap-max=1M", "are for pcap=FILE"),
        ("id=a,socket=s,sink,queue-size=100", "a power of two"),
        ("id=a,socket=s,sink,fps-burst=3", "fps-burst without fps"),
        ("id=a,socket=s,sink,iops=3", "unknown key \"iops\""),
    ] {
        let error = refused(&["--net", net]);
        assert!(error.contains(says), "{net}: {error}");
        assert!(error.contains("--net"), "{error}");
    }
    let twice = [
        "--block",
        "id=a,path=null:4K,socket=s",
        "--net",
        "id=a,socket=t,sink",
    ];
    assert!(refused(&twice).contains("two devices have the id"));
    let twice = [
        "--net",
        "id=a,socket=s,sink,pcap=f",
        "--net",
        "id=b,socket=t,loop,pcap=f",
    ];
    assert!(refused(&twice).contains("pcap=f is given twice"));
}
