//! A network card of the host kernel's vhost-net, over a TAP interface of the host.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::machine::Machine;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;

const TAP: &str = "tap0";
const HOST_IP: &str = "192.168.9.1";
/// Where the host says what it has got, by its checksum, and where it sends a file.
const TAKES: u16 = 9000;
const GIVES: u16 = 9001;
/// KiB that go each way: under a strict IOMMU each frame costs an invalidation, and the guest an exit.
const KIB: u32 = 512;

/// What `make test` runs.
pub fn quick() -> Vec<Case> {
    vec![deleted(), behind(Machine::new(Mode::Logged, 2, true))]
}

/// What `make soak` runs besides.
pub fn soak() -> Vec<Case> {
    vec![
        behind(Machine::new(Mode::Shared, 1, false)),
        behind(Machine::new(Mode::Trap, 4, true)),
    ]
}

/// The host's side of a network card.
struct Peer {
    /// Checksum of what it sends, as `md5sum` prints it.
    sum: String,
}

impl Peer {
    /// None natively: a TAP interface and vhost-net are the user's to make there.
    fn start(host: &Host) -> Result<Option<Self>> {
        if !host.tap(TAP, HOST_IP)? {
            return Ok(None);
        }
        let listen = |port: u16, program: &str| {
            format!("nc -ll -p {port} -e {program} </dev/null >/dev/null 2>&1 &")
        };
        let sum = host
            .script(&format!(
                "lab-load vhost && [ -e /dev/vhost-net ] || exit 1
                 [ -e /root/given ] || dd if=/dev/urandom of=/root/given bs=1k count={KIB} 2>/dev/null
                 pidof nc >/dev/null || {{ {} {} }}
                 md5sum </root/given",
                listen(TAKES, "/bin/md5sum"),
                listen(GIVES, "/bin/cat /root/given"),
            ))
            .context("vhost-net of the host")?;
        Ok(Some(Self {
            sum: sum.trim().into(),
        }))
    }

    /// Script: ping, and data each way, compared; in frames that are larger than the network's, as both sides segment for each
    /// other.
    fn script(&self) -> String {
        let sum = &self.sum;
        format!(
            "ip link set eth0 up && ip addr add 192.168.9.2/24 dev eth0 && ping -c 5 -s 1400 -W 5 {HOST_IP} && \
             dd if=/dev/urandom of=/tmp/sent bs=1k count={KIB} 2>/dev/null && \
             [ \"$(nc {HOST_IP} {TAKES} </tmp/sent)\" = \"$(md5sum </tmp/sent)\" ] && echo sent ok && \
             [ \"$(nc {HOST_IP} {GIVES} </dev/null | md5sum)\" = \"{sum}\" ] && echo got ok"
        )
    }
}

/// What [`Peer::script`] has to leave on the console.
fn check(outcome: &Outcome) -> Result<()> {
    for text in [" 0% packet loss", "sent ok", "got ok"] {
        outcome
            .line(text)
            .with_context(|| format!("no {text:?} on the console\n{}", outcome.tail()))?;
    }
    Ok(())
}

const SKIPPED: &str = "skipped: making a TAP interface takes privileges on this host";

/// Without an IOMMU; in the end the interface is deleted under it.
fn deleted() -> Case {
    let name = format!(
        "a network card of the host kernel's vhost-net, {KIB} KiB each way, then its interface deleted: none, 2 vCPU"
    );
    Case::new(name, |host| {
        let Some(peer) = Peer::start(host)? else {
            return Ok(SKIPPED.into());
        };
        let script = format!(
            "{} && echo now delete && while [ $(cat /sys/class/net/eth0/carrier) = 1 ]; do sleep 0.1; done && echo link down",
            peer.script()
        );
        let mut guest = Guest::new(Mode::None, script);
        guest.cpus = 2;
        guest.idle = "adaptive";
        guest.nets.push(format!("tap={TAP},vhost=on"));
        let mut guest = guest.spawn(host)?;
        if guest.wait_for_line("now delete").is_ok() {
            host.script(&format!("ip link del {TAP}"))?;
        }
        let outcome = guest.wait()?;
        outcome.check()?;
        check(&outcome)?;
        let down = outcome.line("link down");
        down.context("the link stays up")?;
        ensure!(
            outcome.log.contains("its interface has been deleted"),
            "{}",
            outcome.log
        );
        Ok(String::new())
    })
}

/// Behind the emulated IOMMU: the kernel translates by what it is told, and forgets what the guest unmaps.
fn behind(machine: Machine) -> Case {
    let name = format!(
        "a network card of the host kernel's vhost-net, {KIB} KiB each way: {}",
        machine.name()
    );
    Case::new(name, move |host| {
        let Some(peer) = Peer::start(host)? else {
            return Ok(SKIPPED.into());
        };
        let mut guest = machine.guest(&peer.script());
        guest.idle = "adaptive";
        guest.nets.push(format!("tap={TAP},vhost=on"));
        let outcome = guest.run(host)?;
        machine.check(&outcome)?;
        check(&outcome)?;
        let owner = &outcome.ledger["whole"]["owner"];
        let invalidations = owner["invalidations"].as_u64().unwrap_or(0);
        ensure!(invalidations > 0, "nothing was invalidated: {owner}");
        Ok(format!("{invalidations} invalidations"))
    })
}
