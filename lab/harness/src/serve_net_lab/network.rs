//! The guests' networks: a TAP interface for each guest and card, whose host side has an address,
//! and a peer behind all of them.

use anyhow::{Context, Result, ensure};

use crate::system::host::Host;

/// Port of the peer, TCP and UDP.
const PORT: u16 = 7000;

/// Log in which the peer reports that it has bound its port.
const PEER_LOG: &str = "net-peer.log";

/// One guest's interface, and the TAP interface behind it: a network of its own.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// Number of the guest.
    pub guest: u32,
    /// Number of its interface.
    pub card: u32,
}

impl Link {
    /// Returns the name of the TAP interface.
    pub fn tap(self) -> String {
        format!("tap{}-{}", self.card, self.guest)
    }

    /// Returns its address on the host.
    pub fn host_ip(self) -> String {
        format!("10.{}.{}.1", 100 + self.card, self.guest)
    }

    fn guest_ip(self) -> String {
        format!("10.{}.{}.2", 100 + self.card, self.guest)
    }

    /// Returns the address at which the guest reaches the peer.
    pub fn peer(self) -> String {
        format!("{}:{PORT}", self.host_ip())
    }

    /// Creates the TAP interface.
    ///
    /// # Errors
    /// The host is not the lab.
    pub fn make(self, host: &Host) -> Result<()> {
        let made = host.tap(&self.tap(), &self.host_ip())?;
        ensure!(made, "TAP interfaces are made in the lab alone");
        Ok(())
    }

    /// Returns the guest's step that gives its interface its address.
    pub fn up(self) -> String {
        let (card, ip) = (self.card, self.guest_ip());
        format!("ip link set eth{card} up && ip addr add {ip}/24 dev eth{card}")
    }

    /// Returns the guest's step that waits for an answer of the host: frames are lost while there
    /// is no server.
    pub fn settle(self) -> String {
        let ip = self.host_ip();
        format!(
            "n=0; until ping -c 1 -W 2 {ip} >/dev/null; do n=$((n + 1)); [ $n -lt 60 ] || exit 1; \
             done"
        )
    }

    /// Returns the frames of the TAP interface so far.
    ///
    /// # Errors
    /// There is no such interface.
    pub fn frames(self, host: &Host) -> Result<Frames> {
        let folder = format!("/sys/class/net/{}/statistics", self.tap());
        let script = format!("cat {folder}/rx_packets {folder}/tx_packets");
        let text = host.script(&script)?;
        let numbers = text.split_whitespace().map(str::parse);
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().context(text.clone())?;
        match *numbers {
            [from_guest, to_guest] => Ok(Frames {
                from_guest,
                to_guest,
            }),
            _ => anyhow::bail!("{text:?} is no two counts"),
        }
    }
}

/// Frames that a TAP interface has passed on. A frame that is yet to be segmented counts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frames {
    /// From the guest to the host's kernel.
    pub from_guest: u64,
    /// From the host's kernel to the guest.
    pub to_guest: u64,
}

/// Returns the reason why guests cannot use the kernel's vhost-net here; `None` if they can.
///
/// # Errors
/// The check cannot be run on the host.
pub fn has_vhost(host: &Host) -> Result<Option<String>> {
    let link = Link { guest: 0, card: 1 };
    link.make(host)?;
    let (kernel, initrd) = (host.kernel(), host.initrd());
    let tap = link.tap();
    let script = format!(
        "{{ lab-load vhost && exitless run --check --iommu none --kernel {kernel} --initrd \
         {initrd} --net tap={tap},vhost=on; }} 2>&1 \
         || echo refused"
    );
    let said = host.script(&script)?;
    let is_refused = said.lines().last() == Some("refused");
    let reason = || said.lines().next().unwrap_or_default().to_owned();
    Ok(is_refused.then(reason))
}

/// Starts the peer, if it does not run; it answers all guests for as long as the lab runs.
///
/// # Errors
/// It does not start.
pub fn start_peer(host: &Host) -> Result<()> {
    let log = host.path(PEER_LOG);
    // 20 s, in steps of a tenth.
    let script = format!(
        "grep -qs 'peer ready' {log} || (workload peer {PORT} </dev/null >{log} 2>&1 &); n=0; \
         until grep -q 'peer ready' {log}; do n=$((n + 1)); [ $n -le 200 ] || exit 1; sleep 0.1; \
         done"
    );
    host.script(&script).context("starting the peer").map(drop)
}

/// Returns the peer's error messages: none if every byte was right.
///
/// # Errors
/// Its log does not exist.
pub fn complaints(host: &Host) -> Result<String> {
    let log = host.get(PEER_LOG).context("the peer's log")?;
    let log = String::from_utf8_lossy(&log);
    let lines = log.lines().filter(|line| !line.starts_with("peer ready"));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_has_a_network_of_its_own_and_a_name_that_the_kernel_takes() {
        let links = (0..7).flat_map(|guest| (0..2).map(move |card| Link { guest, card }));
        let mut seen = std::collections::BTreeSet::new();
        for link in links {
            assert!(link.tap().len() < 16, "{}", link.tap());
            assert!(seen.insert(link.tap()) && seen.insert(link.host_ip()));
            let (host, _) = link
                .host_ip()
                .rsplit_once('.')
                .map(|(a, b)| (a.to_owned(), b.to_owned()))
                .unwrap();
            assert!(link.guest_ip().starts_with(&host) && link.guest_ip() != link.host_ip());
        }
    }
}
