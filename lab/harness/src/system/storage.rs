//! Storage of the lab with behaviour set by a test: a device-mapper device over a loop device over
//! a file.
//!
//! | behaviour | by |
//! |---|---|
//! | sectors of 512 or 4096 bytes | the loop device's ([`Make::sector`]) |
//! | encryption | `crypt` below the device ([`Make::is_encrypted`]) |
//! | passes on, is slow, fails writes, fails all | `linear`, `delay`, `flakey`: changed while in use ([`Storage::behave`]) |
//! | holds requests, inside the kernel, where no cancellation reaches them | suspended ([`Storage::hold`]) |
//! | is full | a file system on it ([`super::file_system`]) |
//!
//! Left out: failures of reads alone, which `flakey` has since Linux 6.6; `dust`, `ebs` and
//! `clone`, which Debian's kernel does not have; a FUSE file system, under which `exitless`'s own
//! tests run natively (`tests/held-fs`).

use anyhow::{Result, ensure};
use lab::Lab;

use super::host::Host;

/// Layers of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Make {
    /// Bytes of a sector: 512 or 4096.
    pub sector: u32,
    /// Whether dm-crypt encrypts all data.
    pub is_encrypted: bool,
}

impl Make {
    /// Sectors of 512 bytes, no encryption.
    pub const PLAIN: Self = Self {
        sector: 512,
        is_encrypted: false,
    };
}

/// Behaviour of a device towards requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Passes them on.
    Good,
    /// The same after so many milliseconds.
    Slow(u32),
    /// Fails writes and flushes (EIO).
    FailsWrites,
    /// Fails reads, writes and flushes (EIO).
    FailsAll,
}

impl Behaviour {
    /// Returns the target and its parameters over the device `below`.
    fn table(self, below: &str) -> String {
        // flakey: up for 0 s, then down for an hour, and so on.
        match self {
            Self::Good => format!("linear {below} 0"),
            Self::Slow(ms) => format!("delay {below} 0 {ms}"),
            Self::FailsWrites => format!("flakey {below} 0 0 3600 1 error_writes"),
            Self::FailsAll => format!("flakey {below} 0 0 3600"),
        }
    }
}

/// A block device of the lab. Requests that it holds are released when it is dropped, so that
/// processes that wait for it go on.
pub struct Storage<'a> {
    lab: &'a Lab,
    name: &'static str,
    make: Make,
    /// Length in sectors of 512 bytes, whatever the device's own sector size.
    sectors: usize,
    /// The loop device.
    loop_device: String,
    /// Device that it is mapped to.
    below: String,
    /// The device itself.
    path: String,
    is_held: bool,
}

impl<'a> Storage<'a> {
    /// Creates a device with this content, which can hold requests; none natively, where it would
    /// take privileges. `name` distinguishes it from others.
    pub fn linear(host: &'a Host, name: &'static str, content: &[u8]) -> Result<Option<Self>> {
        let file = file(name);
        let modules = "lab-load storage";
        Self::over(host, name, Make::PLAIN, content.len(), modules, |lab| {
            Ok(lab.push_bytes(content, &file, 0o600)?)
        })
    }

    /// Creates a device of `bytes` zeroes; otherwise as [`linear`](Self::linear).
    pub fn zeroes(
        host: &'a Host,
        name: &'static str,
        make: Make,
        bytes: usize,
    ) -> Result<Option<Self>> {
        let truncate = format!(
            "rm -f {file} && truncate -s {bytes} {file}",
            file = file(name)
        );
        let made = Self::over(host, name, make, bytes, "lab-load faults", |lab| {
            shell(lab, &truncate).map(drop)
        })?;
        if let (Some(storage), true) = (&made, make.is_encrypted) {
            // Zeroes below the encryption are not zeroes above it.
            let blocks = bytes >> 12;
            let zero = format!("dd if=/dev/zero of={} bs=4k count={blocks}", storage.path);
            shell(storage.lab, &zero)?;
        }
        Ok(made)
    }

    fn over(
        host: &'a Host,
        name: &'static str,
        make: Make,
        bytes: usize,
        modules: &str,
        put: impl FnOnce(&Lab) -> Result<()>,
    ) -> Result<Option<Self>> {
        let Host::Lab(lab) = host else {
            return Ok(None);
        };
        put(lab)?;
        let (file, sectors) = (file(name), bytes / 512);
        let loop_device = shell(
            lab,
            &format!("{modules} && losetup -f && losetup -f {file}"),
        )?;
        if make.sector != 512 {
            shell(lab, &format!("lab-dm sector {loop_device} {}", make.sector))?;
        }
        let below = match make.is_encrypted {
            false => loop_device.clone(),
            true => {
                // A key of 512 bits: AES-256 in XTS has two.
                let key = "0123456789abcdef".repeat(8);
                let crypt = format!("crypt aes-xts-plain64 {key} 0 {loop_device} 0");
                shell(
                    lab,
                    &format!("lab-dm create {name}-crypt {sectors} {crypt}"),
                )?
            }
        };
        let table = Behaviour::Good.table(&below);
        let path = shell(lab, &format!("lab-dm create {name} {sectors} {table}"))?;
        Ok(Some(Self {
            lab,
            name,
            make,
            sectors,
            loop_device,
            below,
            path,
            is_held: false,
        }))
    }

    /// Returns the path of the device.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Sets its behaviour from now on. Requests in flight end under the behaviour that they began
    /// with.
    pub fn behave(&self, behaviour: Behaviour) -> Result<()> {
        let (name, sectors) = (self.name, self.sectors);
        let table = behaviour.table(&self.below);
        let script = format!(
            "lab-dm load {name} {sectors} {table} && lab-dm suspend {name} && lab-dm resume {name}"
        );
        shell(self.lab, &script).map(drop)
    }

    /// Finishes the requests in flight, and holds later ones.
    pub fn hold(&mut self) -> Result<()> {
        shell(self.lab, &format!("lab-dm suspend {}", self.name))?;
        self.is_held = true;
        Ok(())
    }

    /// Executes the held requests, and goes on as before.
    pub fn release(&mut self) -> Result<()> {
        shell(self.lab, &format!("lab-dm resume {}", self.name))?;
        self.is_held = false;
        Ok(())
    }

    /// Returns its content. No request may be in flight.
    pub fn content(&self) -> Result<Vec<u8>> {
        let copy = format!("{}.now", file(self.name));
        // Not from the device's page cache: its own content, not what was read before.
        shell(
            self.lab,
            &format!(
                "blockdev --flushbufs {path} && cat {path} > {copy}",
                path = self.path
            ),
        )?;
        Ok(self.lab.pull_bytes(&copy)?)
    }

    /// Returns the number of unfinished operations in the kernel of every `exitless` of the lab:
    /// submitted to their io_urings and not completed (proc(5), fdinfo).
    pub fn operations_in_kernel(&self) -> Result<u32> {
        // A descriptor may be closed meanwhile.
        let script =
            "for pid in $(pidof exitless); do cat /proc/$pid/fdinfo/*; done 2>/dev/null; true";
        Ok(operations_of(&output(self.lab, script)?))
    }

    /// Removes it. It must not be open.
    pub fn remove(self) -> Result<()> {
        let (name, below, file) = (self.name, &self.loop_device, file(self.name));
        let crypt = match self.make.is_encrypted {
            true => format!("lab-dm remove {name}-crypt && "),
            false => String::new(),
        };
        let script = format!(
            "lab-dm remove {name} && {crypt}losetup -d {below} && rm {file} && rm -f {file}.now"
        );
        shell(self.lab, &script).map(drop)
    }
}

impl Drop for Storage<'_> {
    fn drop(&mut self) {
        if self.is_held {
            // After a failed case: the host is restarted if this does not help.
            let _ = self.release();
        }
    }
}

/// Returns the file with the content.
fn file(name: &str) -> String {
    format!("/root/{name}.storage")
}

/// Returns the operations in flight of all io_urings in the text of fdinfo files: each entry taken
/// from a submission queue gives one entry of the completion queue, whose counts run freely.
fn operations_of(fdinfo: &str) -> u32 {
    let count = |key: &str| {
        let values = fdinfo.lines().filter_map(|line| line.strip_prefix(key));
        values
            .filter_map(|value| value.trim().parse::<u32>().ok())
            .fold(0, u32::wrapping_add)
    };
    count("SqHead:").wrapping_sub(count("CqTail:"))
}

/// Returns the output of `script`.
pub(super) fn output(lab: &Lab, script: &str) -> Result<String> {
    let out = lab.exec("/bin/sh", ["-c", script])?;
    ensure!(out.success(), "{script}: {}", out.stderr_text());
    Ok(out.stdout_text())
}

/// Returns the last line of the output of `script`.
pub(super) fn shell(lab: &Lab, script: &str) -> Result<String> {
    let text = output(lab, script)?;
    Ok(text.lines().next_back().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_behaviour_is_a_table_over_the_device_below() {
        let table = |behaviour: Behaviour| behaviour.table("/dev/loop0");
        assert_eq!(table(Behaviour::Slow(50)), "delay /dev/loop0 0 50");
        // Never up, and without features that restrict failures: all requests fail.
        assert_eq!(table(Behaviour::FailsAll), "flakey /dev/loop0 0 0 3600");
    }

    #[test]
    fn operations_in_flight_are_those_taken_and_not_completed() {
        let ring = |taken: u32, completed: u32| {
            format!(
                "pos:\t0\nflags:\t02000002\nSqMask:\t0xff\nSqHead:\t{taken}\nSqTail:\t{taken}\n\
                 CachedSqHead:\t{taken}\nCqMask:\t0x1ff\nCqHead:\t1\nCqTail:\t{completed}\n\
                 CachedCqTail:\t{completed}\nSQEs:\t0\n"
            )
        };
        let other = "pos:\t0\neventfd-count:                0\n";
        assert_eq!(operations_of(other), 0);
        assert_eq!(operations_of(&(ring(7, 4) + other + &ring(9, 9))), 3);
        assert_eq!(operations_of(&ring(1, u32::MAX)), 2);
    }
}
