//! Ports of network devices, for `run` and `serve`: a TAP interface opened, and a capture of any
//! port.

use std::collections::HashSet;
use std::path::PathBuf;

use anyhow::{Result, bail};
use net_ports::{
    CaptureError, CaptureOptions, Captured, Existing, TapError, TapOptions, TapQueues,
};
use vio::net::NetPort;

use crate::output;

/// Advice where [`TapError::Open`] says that there is no way to any interface.
const NO_TUN: &str =
    "modprobe tun brings it, a container has to be given it; --net responder needs none";

/// Opens a TAP interface.
///
/// # Errors
/// Names the interface, what the host refused, and what helps.
pub fn open_tap(options: &TapOptions<'_>) -> Result<TapQueues> {
    let name = options.name;
    let error = match TapQueues::open(options) {
        Ok(queues) => return Ok(queues),
        Err(error @ TapError::Name(_)) => return Err(anyhow::Error::new(error).context("--net")),
        Err(error) => error,
    };
    let several = if options.pairs > 1 {
        " multi_queue"
    } else {
        ""
    };
    let hint = match &error {
        TapError::Missing => format!(
            "; make it (ip tuntap add {name} mode tap{several} user …), or say create=on to run \
             --net for one that goes with the \
             machine"
        ),
        TapError::Open(_) => format!(" ({NO_TUN})"),
        TapError::Denied(_) => format!(
            " (make it for this user: ip tuntap add {name} mode tap{several} user …; create=on \
             takes CAP_NET_ADMIN; run --net \
             responder needs neither)"
        ),
        TapError::OneQueue => {
            format!("; ip tuntap add {name} mode tap multi_queue … makes one with more")
        }
        TapError::Mtu { asked, .. } => format!("; ip link set {name} mtu {asked} raises it"),
        _ => String::new(),
    };
    let text = format!("TAP {name}: {error}{hint}");
    Err(match error {
        TapError::Open(source)
        | TapError::Denied(source)
        | TapError::Attach(source)
        | TapError::Setup(source) => anyhow::Error::new(source).context(text),
        _ => anyhow::Error::msg(text),
    })
}

/// `pcap=` of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureConfig {
    /// The file.
    pub path: PathBuf,
    /// Its bytes at most.
    pub limit: u64,
    /// Treatment of a file that is there already.
    pub existing: Existing,
}

impl CaptureConfig {
    /// Checks that the file could be made now; nothing is left of the attempt.
    ///
    /// # Errors
    /// Names it.
    pub fn check(&self) -> Result<()> {
        if self.existing == Existing::Refused && self.path.symlink_metadata().is_ok() {
            bail!("{}", self.exists());
        }
        output::check("pcap", &self.path)
    }

    fn exists(&self) -> String {
        format!(
            "pcap {} is there already: remove it, name another, or say pcap-replace=on",
            self.path.display()
        )
    }

    fn capture<P: NetPort>(&self, port: P) -> Result<Captured<P>> {
        let options = CaptureOptions {
            path: &self.path,
            limit: self.limit,
            existing: self.existing,
        };
        Captured::new(port, &options).map_err(|error| match error {
            CaptureError::Exists => anyhow::Error::msg(self.exists()),
            other => anyhow::Error::new(other).context(format!("pcap {}", self.path.display())),
        })
    }
}

/// Refuses captures that share a file.
///
/// # Errors
/// Names it.
pub fn check_captures<'c>(captures: impl Iterator<Item = &'c CaptureConfig>) -> Result<()> {
    let mut paths = HashSet::new();
    for capture in captures {
        if !paths.insert(&capture.path) {
            let path = capture.path.display();
            bail!("pcap={path} is given twice: each device has a file of its own");
        }
    }
    Ok(())
}

/// Returns a port as a device has it, with a capture if there is to be one. In a check no file is
/// made.
///
/// # Errors
/// The file cannot be made.
pub fn port(
    port: impl NetPort + 'static,
    capture: Option<&CaptureConfig>,
    is_check: bool,
) -> Result<Box<dyn NetPort>> {
    match capture {
        None => Ok(Box::new(port)),
        Some(capture) if is_check => {
            capture.check()?;
            Ok(Box::new(port))
        }
        Some(capture) => Ok(Box::new(capture.capture(port)?)),
    }
}
