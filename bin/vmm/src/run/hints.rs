//! `--iommu-hints`: effects of the MAP requests of a paravirtual IOMMU beside their mappings.

use std::sync::Arc;

use anyhow::{Result, bail};
use guest_mem::{Gpa, GuestRam};
use pv_iommu::populate::{PopulateWindows, Populator};

use super::args::{IommuArg, RunArgs};
use crate::messages::say;
use crate::values::keys::Keys;

const OPTION: &str = "--iommu-hints";

/// The request, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HintsConfig {
    /// Absent pages are asked for at a MAP.
    pub gathers: bool,
    /// Windows of memory are populated ahead.
    pub populates: bool,
    /// Where the last window lies on the host is kept.
    pub caches: bool,
}

impl HintsConfig {
    /// Returns the hints that the flags ask for, of a machine whose pages come and go one by one if
    /// `pages_move`.
    ///
    /// # Errors
    /// The machine has no IOMMU that receives the guest's mappings; or a hint does not go with
    /// memory of which pages are absent.
    pub fn check(args: &RunArgs, pages_move: bool) -> Result<Self> {
        let mut config = Self {
            gathers: args.iommu == IommuArg::Virtio && pages_move,
            populates: false,
            caches: !pages_move,
        };
        let Some(text) = &args.iommu_hints else {
            return Ok(config);
        };
        if args.iommu != IommuArg::Virtio {
            bail!(
                "{OPTION} is for --iommu virtio: no other IOMMU is told of mappings before they \
                 are used"
            );
        }
        let mut keys = Keys::parse(OPTION, text)?;
        config.gathers = keys.take_switch("gather", true)? && pages_move;
        let populates = keys.take_optional_switch("populate")?;
        let caches = keys.take_optional_switch("cache")?;
        keys.finish()?;
        for (key, value) in [("populate", populates), ("cache", caches)] {
            if value == Some(true) && pages_move {
                bail!(
                    "{OPTION} {key}=on does not go with --resident: an absent page is the pager's, \
                     who is asked for it (gather=on)"
                );
            }
        }
        config.populates = populates.unwrap_or(config.populates);
        config.caches = caches.unwrap_or(config.caches);
        Ok(config)
    }

    /// Returns the windows of this memory that may be populated, if any are to be.
    pub fn windows(&self, ram: &GuestRam) -> Option<Arc<PopulateWindows>> {
        let regions = ram.regions().iter();
        let pieces = regions.map(|region| (region.gpa, region.len));
        self.populates
            .then(|| Arc::new(PopulateWindows::new(pieces)))
    }
}

/// Starts the thread that populates `windows` of this memory.
///
/// # Errors
/// The host has no more threads.
pub fn populate(windows: &Arc<PopulateWindows>, ram: &GuestRam) -> std::io::Result<Populator> {
    let ram = ram.clone();
    let populate = move |gpa: Gpa, len| ram.populate(gpa, len);
    Populator::start(windows.clone(), populate, |error| {
        say!("{OPTION}: no more memory is populated ahead ({error}); Linux 5.14 or newer can");
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: RunArgs,
    }

    fn check(flags: &str, pages_move: bool) -> Result<(bool, bool, bool)> {
        let words = "run --kernel k".split(' ').chain(flags.split_whitespace());
        let Program { args } = Program::try_parse_from(words).expect("flags");
        let HintsConfig {
            gathers,
            populates,
            caches,
        } = HintsConfig::check(&args, pages_move)?;
        Ok((gathers, populates, caches))
    }

    #[test]
    fn each_hint_is_a_switch() {
        for (flags, pages_move, expected) in [
            ("", false, (false, false, true)),
            ("--iommu virtio", false, (false, false, true)),
            ("--iommu virtio", true, (true, false, false)),
            ("--iommu none", true, (false, false, false)),
            (
                "--iommu virtio --iommu-hints populate=on",
                false,
                (false, true, true),
            ),
            (
                "--iommu virtio --iommu-hints cache=off",
                false,
                (false, false, false),
            ),
            (
                "--iommu virtio --iommu-hints gather=off,populate=off",
                true,
                (false, false, false),
            ),
        ] {
            assert_eq!(check(flags, pages_move).expect(flags), expected, "{flags}");
        }
    }

    #[test]
    fn hints_without_requests_and_to_memory_that_moves_are_refused() {
        for (flags, pages_move, words) in [
            ("--iommu-hints populate=on", false, "--iommu virtio"),
            (
                "--iommu none --iommu-hints cache=on",
                false,
                "--iommu virtio",
            ),
            (
                "--iommu virtio --iommu-hints populate=on",
                true,
                "--resident",
            ),
            ("--iommu virtio --iommu-hints cache=on", true, "--resident"),
            ("--iommu virtio --iommu-hints gather=yes", true, "on or off"),
            ("--iommu virtio --iommu-hints gathers=on", true, "gathers"),
        ] {
            let error = format!("{:#}", check(flags, pages_move).expect_err(flags));
            assert!(error.contains(words), "{flags}: {error}");
        }
    }
}
