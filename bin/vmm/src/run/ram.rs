//! `--memory`: size of the guest's RAM, and the host's memory behind it.

use anyhow::{Context, Result, bail};
use guest_mem::{Gpa, GuestRam, HugePages};
use platform::layout;

use crate::host_memory;
use crate::values::keys::Keys;
use crate::values::size;

/// Bytes of RAM that a stock kernel and a small initramfs start with.
pub const MIN_MEMORY: u64 = 64 << 20;
/// Guest RAM is made of whole pieces of so many bytes, so that large pages fit.
const STEP: u64 = 2 << 20;

/// The guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamConfig {
    /// Bytes.
    pub bytes: u64,
    /// In a memory file, which other processes can be given, and whose pages can be taken away one
    /// by one; if not, in anonymous memory, as any program's.
    pub is_shared: bool,
    /// The host may back it with transparent huge pages; `None`: unless another option forbids
    /// them.
    pub thp: Option<bool>,
}

impl RamConfig {
    /// Reads `SIZE[,shared=on|off][,thp=on|off]`.
    ///
    /// # Errors
    /// It is not that, or no size that a guest on this host can have.
    pub fn check(text: &str) -> Result<Self> {
        let (size, options) = match text.split_once(',') {
            Some((size, options)) => (size, Some(options)),
            None => (text, None),
        };
        let mut config = Self {
            bytes: bytes(size)?,
            is_shared: true,
            thp: None,
        };
        if let Some(options) = options {
            let mut keys = Keys::parse("--memory", options)?;
            config.is_shared = keys.take_switch("shared", true)?;
            config.thp = keys.take_optional_switch("thp")?;
            keys.finish()?;
        }
        Ok(config)
    }

    /// Refuses anonymous memory to the option `who`, which reaches memory by its file.
    ///
    /// # Errors
    /// It is anonymous.
    pub fn shared_for(&self, who: &str) -> Result<()> {
        if !self.is_shared {
            bail!("--memory …,shared=off does not go with {who}, which reaches memory by its file");
        }
        Ok(())
    }

    /// Has it in pages of 4 KiB for `option`, by which some of them are pinned.
    ///
    /// # Errors
    /// Huge pages are asked for.
    pub fn forbid_huge_pages(&mut self, option: &str) -> Result<()> {
        if self.thp == Some(true) {
            bail!(
                "--memory …,thp=on does not go with {option}: a huge page of which a device has 4 \
                 KiB pinned stays in memory \
                 whole (leave thp=on out)"
            );
        }
        self.thp = Some(false);
        Ok(())
    }

    /// Makes it; `pages_move` if they come and go one by one.
    ///
    /// # Errors
    /// The host refuses.
    pub fn make(&self, pages_move: bool) -> Result<GuestRam> {
        let pages = match self.thp != Some(false) && !pages_move {
            true => HugePages::Advise,
            false => HugePages::Never,
        };
        let regions: Vec<_> = layout::ram_regions(self.bytes)
            .into_iter()
            .map(|(start, len)| (Gpa::new(start), len))
            .collect();
        let ram = match self.is_shared {
            true => GuestRam::with_pages(&regions, pages),
            false => GuestRam::anonymous(&regions, pages),
        };
        ram.with_context(|| format!("{} MiB of guest RAM", self.bytes >> 20))
    }
}

fn bytes(text: &str) -> Result<u64> {
    let bytes = size::bytes(text).context("--memory")?;
    if bytes < MIN_MEMORY {
        bail!(
            "--memory {text}: a guest needs {} MiB at least",
            MIN_MEMORY >> 20
        );
    }
    if bytes % STEP != 0 {
        bail!("--memory {text} is not a multiple of {} MiB", STEP >> 20);
    }
    let host = host_memory::bytes()?;
    if bytes > host {
        bail!(
            "--memory {text} is more than this host has ({} MiB)",
            host >> 20
        );
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_may_be_followed_by_what_it_is_in() {
        let of = |text| {
            let config = RamConfig::check(text).expect(text);
            (config.bytes >> 20, config.is_shared, config.thp)
        };
        assert_eq!(of("128M"), (128, true, None));
        assert_eq!(of("128M,shared=off"), (128, false, None));
        assert_eq!(of("64M,thp=off,shared=on"), (64, true, Some(false)));
        for (text, words) in [
            ("128M,shared=maybe", "on or off"),
            ("128M,share=off", "share"),
            ("128M,", "--memory"),
            ("shared=off", "--memory"),
            ("128M,shared=off,shared=on", "twice"),
        ] {
            let error = format!("{:#}", RamConfig::check(text).expect_err(text));
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn huge_pages_are_off_beside_pins_and_refused_if_they_are_asked_for() {
        for (text, outcome) in [
            ("64M", Ok(Some(false))),
            ("64M,thp=off", Ok(Some(false))),
            ("64M,thp=on", Err(())),
        ] {
            let mut config = RamConfig::check(text).expect(text);
            let done = config.forbid_huge_pages("--device");
            assert_eq!(done.map(|()| config.thp).map_err(drop), outcome, "{text}");
        }
    }

    #[test]
    fn anonymous_memory_has_no_file_and_is_refused_to_whoever_needs_it() {
        for (text, is_shared) in [("64M", true), ("64M,shared=off", false)] {
            let config = RamConfig::check(text).expect(text);
            let ram = config.make(false).expect("memory");
            assert_eq!(ram.memfd().is_some(), is_shared);
            assert_eq!(config.shared_for("--resident").is_ok(), is_shared);
        }
    }
}
