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
            &format!(
                "if ! [ -e /dev/loop-control ]; then \
                     while read -r module; do insmod /modules/$module.ko || exit 1; done < /modules/storage; \
                 fi && losetup -f && losetup -f {file}"
            ),
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

/// The last word of what `script` writes.
fn shell(lab: &Lab, script: &str) -> Result<String> {
    let out = lab.exec("/bin/sh", ["-c", script])?;
    ensure!(out.success(), "{script}: {}", out.stderr_text());
    let text = out.stdout_text();
    Ok(text.lines().next_back().unwrap_or_default().to_owned())
}
