//! Storage of the lab that does what a test says: a device-mapper device over a loop device over a file.
//!
//! What the device does with requests is its target: `linear` passes them on; another (`delay`, `flakey`, `crypt`)
//! is one more constructor here and one more module in the lab's image. Suspended, any of them holds what comes
//! until it is resumed, inside the kernel, where no cancellation reaches it.

use anyhow::{Result, ensure};
use lab::Lab;

use super::host::Host;

/// A block device of the lab. What it holds is released when it is dropped, so that whoever waits for it goes on.
pub struct Storage<'a> {
    lab: &'a Lab,
    name: &'static str,
    /// The loop device.
    below: String,
    /// The device itself.
    path: String,
    is_held: bool,
}

impl<'a> Storage<'a> {
    /// A device with this content, that can hold requests; none natively, where it would take privileges and may
    /// not be ours to make. `name` tells it from others.
    pub fn linear(host: &'a Host, name: &'static str, content: &[u8]) -> Result<Option<Self>> {
        let Host::Lab(lab) = host else {
            return Ok(None);
        };
        let file = file(name);
        lab.push_bytes(content, &file, 0o600)?;
        let below = shell(
            lab,
            &format!("lab-load storage && losetup -f && losetup -f {file}"),
        )?;
        let sectors = content.len() / 512;
        let path = shell(
            lab,
            &format!("lab-dm create {name} {sectors} linear {below} 0"),
        )?;
        Ok(Some(Self {
            lab,
            name,
            below,
            path,
            is_held: false,
        }))
    }

    /// Path of the device.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Finishes what is in flight, and holds what comes.
    pub fn hold(&mut self) -> Result<()> {
        shell(self.lab, &format!("lab-dm suspend {}", self.name))?;
        self.is_held = true;
        Ok(())
    }

    /// Does what has been held, and goes on as before.
    pub fn release(&mut self) -> Result<()> {
        shell(self.lab, &format!("lab-dm resume {}", self.name))?;
        self.is_held = false;
        Ok(())
    }

    /// What is on it. Nothing is to be in flight.
    pub fn content(&self) -> Result<Vec<u8>> {
        let copy = format!("{}.now", file(self.name));
        // Past the page cache of the device: its own content, not what a reader saw before.
        shell(
            self.lab,
            &format!(
                "blockdev --flushbufs {path} && cat {path} > {copy}",
                path = self.path
            ),
        )?;
        Ok(self.lab.pull_bytes(&copy)?)
    }

    /// Operations that the kernel has been given by every `exitless` of the lab and has not finished: submitted to their
    /// io_urings and not completed (proc(5), fdinfo).
    pub fn operations_in_kernel(&self) -> Result<u32> {
        // A descriptor may be closed meanwhile.
        let script =
            "for pid in $(pidof exitless); do cat /proc/$pid/fdinfo/*; done 2>/dev/null; true";
        Ok(operations_of(&output(self.lab, script)?))
    }

    /// Takes it apart. Nobody is to have it open.
    pub fn remove(self) -> Result<()> {
        let (name, below, file) = (self.name, &self.below, file(self.name));
        let script =
            format!("lab-dm remove {name} && losetup -d {below} && rm {file} && rm -f {file}.now");
        shell(self.lab, &script).map(drop)
    }
}

impl Drop for Storage<'_> {
    fn drop(&mut self) {
        if self.is_held {
            // A case that failed: the host is started anew if this does not help.
            let _ = self.release();
        }
    }
}

/// Where the content lies.
fn file(name: &str) -> String {
    format!("/root/{name}.storage")
}

/// Operations in flight of all io_urings in the text of fdinfo files: each entry taken from a submission queue gives
/// one entry of the completion queue, whose counts run freely.
fn operations_of(fdinfo: &str) -> u32 {
    let count = |key: &str| {
        let values = fdinfo.lines().filter_map(|line| line.strip_prefix(key));
        values
            .filter_map(|value| value.trim().parse::<u32>().ok())
            .fold(0, u32::wrapping_add)
    };
    count("SqHead:").wrapping_sub(count("CqTail:"))
}

/// What `script` writes.
fn output(lab: &Lab, script: &str) -> Result<String> {
    let out = lab.exec("/bin/sh", ["-c", script])?;
    ensure!(out.success(), "{script}: {}", out.stderr_text());
    Ok(out.stdout_text())
}

/// The last line of what `script` writes.
fn shell(lab: &Lab, script: &str) -> Result<String> {
    let text = output(lab, script)?;
    Ok(text.lines().next_back().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

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
