//! `pcap=FILE`.

use std::fs;

use spawned::program::until;

use crate::served::{Served, frames, receive, send};

/// Returns the message of a check of this device, which has to be a refusal.
pub fn refused(net: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let ended = spawned::short::run(
        env!("CARGO_BIN_EXE_exitless"),
        folder.path(),
        &["serve", "--check", "--net", net],
    );
    assert_eq!(ended.status, Some(2), "{net}: {ended:?}");
    ended.error
}

#[test]
fn a_capture_has_what_is_sent_and_received_up_to_its_limit() {
    let served = Served::start("sleep", &["a,loop,pcap=FOLDER/a.pcap,pcap-max=4K"]);
    let mut client = served.client("a", 1);
    let mut round = |n: u8| {
        send(&mut client, &([0; 12], vec![n; 1_000]));
        // Of one buffer.
        let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        assert_eq!(receive(&mut client, 0), [(header, vec![n; 1_000])]);
    };
    let path = served.path("a.pcap");
    round(1);
    // With its device still there, once the core sleeps.
    until("both directions", || frames(&path).len() == 2);
    // 24 bytes, and as many frames, with 16 bytes each, as 4,096 have room for.
    (2..=9).for_each(&mut round);
    until("all that fit", || frames(&path).len() == 4);
    let all = frames(&path);
    let all = Vec::from_iter(all.iter().map(|frame| (frame[0], frame.len())));
    assert_eq!(all, [(1, 1_000), (1, 1_000), (2, 1_000), (2, 1_000)]);
    drop(client);
    let (said, _) = served.end();
    assert_eq!(said.matches("full").count(), 1, "{said}");
}

#[test]
fn a_file_that_is_there_is_replaced_only_if_that_is_said_and_a_check_leaves_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("old.pcap");
    let net = |more: &str| {
        let path = path.display();
        format!("id=a,socket=a.sock,sink,pcap={path}{more}")
    };
    let check = |net: &str| {
        let args = ["serve", "--check", "--net", net];
        let program = env!("CARGO_BIN_EXE_exitless");
        spawned::short::run(program, folder.path(), &args)
    };
    assert_eq!(check(&net("")).status, Some(0));
    assert!(!path.exists());
    fs::write(&path, "old").expect("a file");
    let said = refused(&net(""));
    assert!(
        said.contains("is there already: remove it, name another, or say pcap-replace=on"),
        "{said}"
    );
    assert_eq!(check(&net(",pcap-replace=on")).status, Some(0));
    assert_eq!(fs::read_to_string(&path).expect("it is there"), "old");
    let place = format!("a,sink,pcap={},pcap-replace=on", path.display());
    let served = Served::start("sleep", &[&place]);
    served.end();
    assert!(frames(&path).is_empty());
    let missing = format!(
        "id=a,socket=a.sock,sink,pcap={}/none/a.pcap",
        folder.path().display()
    );
    assert!(refused(&missing).contains("none/a.pcap"));
    for (more, says) in [
        (",pcap-max=1K", "pcap-max is 4096 to"),
        (",pcap-max=2T", "pcap-max is 4096 to"),
    ] {
        fs::remove_file(&path).ok();
        assert!(refused(&net(more)).contains(says), "{more}");
    }
    let said = refused("id=a,socket=a.sock,sink,pcap-max=1M");
    assert!(
        said.contains("pcap-max and pcap-replace are for pcap=FILE"),
        "{said}"
    );
}
