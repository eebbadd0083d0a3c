//! The host's requirements for `run --resident`: `run` refuses to start without them, and `doctor`
//! shows them.
//!
//! [`Host::probe`] collects the facts: what the kernel does ([`uffd::probe`]), whether shared
//! memory may come in huge pages, and whether the host pages by itself. All else is decided from
//! these facts alone, so that tests can have hosts that they do not run on.
//!
//! The open of the swap store finds out whether its file system has direct I/O.

mod swap_space;

use uffd::probe::{Facts, Lack, NO_HUGE_PAGES};

pub use swap_space::{SwapSpace, cgroups};

/// Facts about a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The kernel, tried out.
    pub kernel: Facts,
    /// Transparent huge pages for shared memory: the chosen word, empty where the kernel has none.
    pub shmem_thp: String,
    /// Whether the host swaps.
    pub swap_space: SwapSpace,
}

impl Host {
    /// Probes this host. Changes nothing.
    pub fn probe() -> Self {
        let thp = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let thp = std::fs::read_to_string(thp).unwrap_or_default();
        Self {
            kernel: Facts::probe(),
            shmem_thp: chosen(&thp).to_owned(),
            swap_space: SwapSpace::probe(),
        }
    }

    /// Returns what is lacking, the most fundamental first. Empty: a guest's pages can come and go.
    pub fn lacks(&self) -> Vec<Lack> {
        let mut lacks: Vec<Lack> = self.kernel.lacks().cloned().collect();
        // Under these a page that is written through the memory file may come with 511 others,
        // although its mappings were advised against huge pages. One that has not met any may meet
        // them later.
        let is_huge = matches!(self.shmem_thp.as_str(), "always" | "within_size" | "force");
        if is_huge && self.kernel.single_pages.is_ok() {
            lacks.push(Lack {
                what: format!(
                    "transparent huge pages: shared memory may have them (shmem_enabled is {})",
                    self.shmem_thp
                ),
                remedy: NO_HUGE_PAGES,
            });
        }
        lacks
    }

    /// Returns the reason why no guest can be started so, in one line.
    pub fn refusal(&self) -> Option<String> {
        let lacks: Vec<String> = self.lacks().iter().map(Lack::to_string).collect();
        (!lacks.is_empty()).then(|| lacks.join("; "))
    }

    /// Returns a warning for the user of a guest, in one line.
    pub fn warning(&self) -> Option<String> {
        let SwapSpace::Used { mib } = self.swap_space else {
            return None;
        };
        Some(format!(
            "this host has {mib} MiB of swap space and may put pages there that --resident keeps \
             in memory: {NO_HOST_SWAP}"
        ))
    }
}

/// Advice that keeps the host's swap space from a guest.
pub const NO_HOST_SWAP: &str = "swapoff -a, or start it by systemd-run --scope -p MemorySwapMax=0";

/// Returns the word in brackets: `always [never]` → `never`.
pub fn chosen(text: &str) -> &str {
    let inside = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or("", |(word, _)| word)
}

/// Hosts that tests make up.
#[cfg(test)]
pub mod testing {
    use super::*;
    use uffd::probe::PagemapScan;

    /// Returns a host that has everything.
    pub fn complete() -> Host {
        Host {
            kernel: Facts {
                kernel_faults: Ok(()),
                shared_memory: Some(Ok(())),
                traced_stores: Some(Ok(())),
                clean_evidence: Some(Ok(())),
                single_pages: Ok(()),
                pagemap_scan: Some(PagemapScan::Truthful),
            },
            shmem_thp: "never".into(),
            swap_space: SwapSpace::None,
        }
    }

    /// Returns something that is lacking.
    pub fn lack(what: &str, remedy: &'static str) -> Lack {
        Lack {
            what: what.into(),
            remedy,
        }
    }
}

#[cfg(test)]
mod tests;
