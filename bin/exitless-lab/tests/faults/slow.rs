//! Disks that answer late.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use vhost_blk::Client;
use vhost_blk::client::Options;
use vhost_blk::queue::{Extent, Op, Status};

use crate::program::{Program, place};

#[test]
fn a_slow_disk_of_a_daemon_answers_no_sooner() {
    const LATENCY: Duration = Duration::from_millis(50);
    let place = place();
    let disks = ["path=ram:1M".to_owned(), "path=ram:1M".to_owned()];
    let mut command = place.command(&disks);
    command.args(["--fault", "disk1:latency=50000"]);
    let program = Program::start(command, true);
    program.wait_for("ready");
    let took = |number: usize| {
        let socket = place.path(&format!("d{number}"));
        let mut client = Client::connect(&socket, Options::new(4, 4096)).unwrap();
        let (since, mut block) = (Instant::now(), [0; 4096]);
        let extent = Extent {
            sector: 0,
            bytes: 4096,
        };
        let status = client.request(Op::Read, extent, &mut block).unwrap();
        assert_eq!(status, Some(Status::Ok));
        since.elapsed()
    };
    let (fast, slow) = (took(0), took(1));
    assert!(slow >= LATENCY, "{slow:?}");
    assert!(fast < LATENCY, "{fast:?}");
    program.ends_by(Signal::TERM, 0);
}
