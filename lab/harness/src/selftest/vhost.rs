//! A network card of the host kernel's vhost-net, over a TAP interface of the host.

use anyhow::{Context, Result, ensure};

use super::case::Case;
use super::machine::Machine;
use crate::system::guest::{Guest, Mode, Outcome};
use crate::system::host::Host;

const TAP: &str = "tap0";
const HOST_IP: &str = "192.168.9.1";
/// Ports of the host: it answers data with their checksum, and sends a file.
const TAKES: u16 = 9000;
const GIVES: u16 = 9001;
/// KiB in each direction: under a strict IOMMU each frame costs an invalidation, and the guest an
/// exit.
const KIB: u32 = 512;

/// Returns the cases of `make test`.
pub fn quick() -> Vec<Case> {
    vec![card(Some(Machine::new(Mode::Logged, 2, true)), true)]
}

/// Returns the additional cases of `make soak`.
pub fn soak() -> Vec<Case> {
    vec![
        card(None, true),
        card(Some(Machine::new(Mode::Shared, 1, false)), false),
        card(Some(Machine::new(Mode::Trap, 4, true)), false),
    ]
}

/// The host's side of a network card.
struct Peer {
    /// Checksum of the file that it sends, as `md5sum` prints it.
    sum: String,
}

impl Peer {
    /// Starts it; `None` natively, where a TAP interface and vhost-net are the user's to create.
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

    /// Returns the guest's script: ping, and data in each direction, compared; in frames that are
    /// larger than the network's, as both sides segment for each other.
    fn script(&self) -> String {
        let sum = &self.sum;
        format!(
            "ip link set eth0 up && ip addr add 192.168.9.2/24 dev eth0 && ping -c 5 -s 1400 -W 5 \
             {HOST_IP} && \
             dd if=/dev/urandom of=/tmp/sent bs=1k count={KIB} 2>/dev/null && \
             [ \"$(nc {HOST_IP} {TAKES} </tmp/sent)\" = \"$(md5sum </tmp/sent)\" ] && echo sent ok \
             && \
             [ \"$(nc {HOST_IP} {GIVES} </dev/null | md5sum)\" = \"{sum}\" ] && echo got ok"
        )
    }
}

/// Checks the lines that [`Peer::script`] must leave on the console.
fn check(outcome: &Outcome) -> Result<()> {
    for text in [" 0% packet loss", "sent ok", "got ok"] {
        outcome
            .line(text)
            .with_context(|| format!("no {text:?} on the console\n{}", outcome.tail()))?;
    }
    Ok(())
}

const SKIPPED: &str = "skipped: making a TAP interface takes privileges on this host";

/// Case of a card. Behind an emulated IOMMU, if the machine has one, the kernel translates by the
/// mappings that it receives, and drops those that the guest unmaps. If it `is_deleted`, the
/// interface is deleted in the end.
fn card(machine: Option<Machine>, is_deleted: bool) -> Case {
    let end = if is_deleted {
        ", then its interface deleted"
    } else {
        ""
    };
    let name = format!(
        "a network card of the host kernel's vhost-net, {KIB} KiB each way{end}: {}",
        machine.map_or_else(|| "none, 2 vCPU".to_owned(), Machine::name)
    );
    Case::new(name, move |host| {
        let Some(peer) = Peer::start(host)? else {
            return Ok(SKIPPED.into());
        };
        let mut script = peer.script();
        if is_deleted {
            script.push_str(
                " && echo now delete && \
                 while [ $(cat /sys/class/net/eth0/carrier) = 1 ]; do sleep 0.1; done && echo link \
                 down",
            );
        }
        let mut guest = match machine {
            Some(machine) => machine.guest(&script),
            None => Guest {
                cpus: 2,
                ..Guest::new(Mode::None, script)
            },
        };
        guest.idle = "adaptive";
        guest.nets.push(format!("tap={TAP},vhost=on"));
        let mut guest = guest.spawn(host)?;
        if is_deleted && guest.wait_for_line("now delete").is_ok() {
            host.script(&format!("ip link del {TAP}"))?;
        }
        let outcome = guest.wait()?;
        match machine {
            Some(machine) => machine.check(&outcome)?,
            None => outcome.check()?,
        }
        check(&outcome)?;
        if is_deleted {
            let down = outcome.line("link down");
            down.context("the link stays up")?;
            let text = "its interface has been deleted";
            ensure!(outcome.log.contains(text), "{}", outcome.log);
        }
        let owner = &outcome.ledger["whole"]["owner"];
        let invalidations = owner["invalidations"].as_u64().unwrap_or(0);
        ensure!(
            (invalidations > 0) == machine.is_some(),
            "{invalidations} invalidations: {owner}"
        );
        Ok(format!("{invalidations} invalidations"))
    })
}
