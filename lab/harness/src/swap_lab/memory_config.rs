//! Ways to give a guest less memory than it is configured with. Where the host's kernel swaps,
//! memory is anonymous, as is usual there.

/// MiB of guest memory that may be resident on the host.
pub const LIMIT: u64 = 55;
/// MiB of memory that the guest is configured with ([`Guest`](crate::system::guest::Guest)'s).
pub const MEMORY: u64 = 256;

/// Way to limit a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum MemoryConfig {
    /// The host's kernel swaps, below a memory cgroup's limit, with asynchronous page faults.
    Baseline,
    /// The guest gives memory up; the cgroup's limit is the same.
    Balloon,
    /// The pager, with pages that stand for blocks.
    Mapper,
    /// And with pages that are overwritten found.
    Both,
    /// And a balloon.
    BalloonBoth,
    /// The pager without either, which reads what is about to be overwritten as a host's kernel
    /// does, and a guest that does not zero what it allocates: how many stale reads there are to be
    /// avoided.
    Stale,
}

impl MemoryConfig {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Baseline,
        Self::Balloon,
        Self::Mapper,
        Self::Both,
        Self::BalloonBoth,
        Self::Stale,
    ];

    /// Returns its name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::Balloon => "balloon",
            Self::Mapper => "mapper",
            Self::Both => "mapper+preventer",
            Self::BalloonBoth => "balloon+both",
            Self::Stale => "stale control",
        }
    }

    /// Returns the number of its rounds, out of `all`: one is enough for a control.
    pub fn rounds(self, all: u32) -> u32 {
        match self {
            Self::Stale => 1,
            _ => all,
        }
    }

    /// Returns whether our pager moves pages, and not the host's kernel.
    pub fn has_pager(self) -> bool {
        !matches!(self, Self::Baseline | Self::Balloon)
    }

    pub fn has_balloon(self) -> bool {
        matches!(self, Self::Balloon | Self::BalloonBoth)
    }

    /// Returns the values of `--fault`.
    pub fn faults(self) -> Vec<String> {
        match self {
            Self::Stale => vec!["mapper:stale".into()],
            _ => Vec::new(),
        }
    }

    /// Returns additional flags of `run`; a balloon has the value `balloon`.
    pub fn flags(self, balloon: &str) -> Vec<String> {
        let mut flags: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| flags.extend(words.iter().map(|word| word.to_string()));
        match self {
            Self::Mapper | Self::Stale => add(&["--preventer", "off"]),
            Self::Baseline | Self::Balloon | Self::Both | Self::BalloonBoth => {}
        }
        if self.has_balloon() {
            add(&["--balloon", balloon]);
        }
        flags
    }

    /// Returns the guest's `--memory`, all of [`MEMORY`]: in small pages, for all the same.
    pub fn memory(self) -> &'static str {
        match self.has_pager() {
            true => "256M",
            false => "256M,shared=off,thp=off",
        }
    }

    /// Returns additional words of the guest's kernel command line.
    pub fn kernel_options(self) -> &'static str {
        match self {
            Self::Stale => "init_on_alloc=0",
            _ => "",
        }
    }
}
