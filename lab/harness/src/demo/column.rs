//! The columns of a demo's tables: the IOMMU before a guest's devices, the guest kernel's unmap
//! policy, and the idle policy of its sidecore.

use anyhow::{Context, Result, ensure};

use crate::system::guest::{Guest, Mode, Outcome};

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// No IOMMU; the sidecore polls.
    None,
    /// Strict unmapping, registers trapped; the sidecore polls.
    Trap,
    /// The same, registers logged.
    Logged,
    /// The same, registers shared.
    Shared,
    /// A stock kernel's own unmapping, which is lazy in Debian; registers trapped; the sidecore
    /// polls.
    LazyTrap,
    /// The same, registers shared.
    LazyShared,
    /// `exitless run` without options for registers or sidecore, and a stock kernel's own
    /// unmapping.
    Default,
}

impl Column {
    /// All, in the order of a table.
    pub const ALL: [Self; 7] = [
        Self::None,
        Self::Trap,
        Self::Logged,
        Self::Shared,
        Self::LazyTrap,
        Self::LazyShared,
        Self::Default,
    ];
    /// Columns that differ in registers alone, and the one without an IOMMU.
    pub const STRICT: [Self; 4] = [Self::None, Self::Trap, Self::Logged, Self::Shared];
    /// Columns whose kernels have their default policy.
    pub const STOCK: [Self; 3] = [Self::LazyTrap, Self::LazyShared, Self::Default];

    /// Returns its name in keys and progress.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Trap => "trap",
            Self::Logged => "logged",
            Self::Shared => "shared",
            Self::LazyTrap => "lazy_trap",
            Self::LazyShared => "lazy_shared",
            Self::Default => "default",
        }
    }

    /// Returns the heads above several columns, and above this one. Except in the default column,
    /// sidecores have this `--idle`.
    pub fn heads(self, idle: &str) -> (String, &'static str) {
        let strict = || format!("strict unmapping, --idle {idle}");
        let lazy = || format!("lazy, --idle {idle}");
        match self {
            Self::None => (strict(), "no IOMMU"),
            Self::Trap | Self::Logged | Self::Shared => (strict(), self.name()),
            Self::LazyTrap => (lazy(), "trap"),
            Self::LazyShared => (lazy(), "shared"),
            Self::Default => ("lazy".into(), "no flags"),
        }
    }

    /// Returns a guest of this column that runs `script`, and first prints its kernel's policy.
    pub fn guest(self, script: &str) -> Guest {
        let mode = match self {
            Self::None => Mode::None,
            Self::Trap | Self::LazyTrap => Mode::Trap,
            // The default column uses this mode's name only.
            Self::Logged | Self::Default => Mode::Logged,
            Self::Shared | Self::LazyShared => Mode::Shared,
        };
        // The kernel's log has its command line, and so this script: the pattern must not match
        // itself.
        let script = format!("dmesg | grep 'DM[A] domain TLB'; {script}");
        let mut guest = Guest::new(mode, script);
        guest.is_strict = !Self::STOCK.contains(&self);
        guest.takes_defaults = self == Self::Default;
        guest.name = format!("-{}", self.name());
        guest
    }

    /// Checks that the kernel unmaps as the column says.
    ///
    /// # Errors
    /// It does not, or it printed no policy.
    pub fn check(self, outcome: &Outcome) -> Result<()> {
        if self == Self::None {
            // Without an IOMMU the kernel prints a policy all the same.
            return Ok(());
        }
        let said = outcome.line("DMA domain TLB");
        let said =
            said.with_context(|| format!("the kernel names no policy\n{}", outcome.tail()))?;
        let policy = Guest::policy(!Self::STOCK.contains(&self));
        ensure!(
            said.contains(policy),
            "{}: the kernel says {said:?}",
            self.name()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_column_is_named_and_stands_in_one_place() {
        for (at, column) in Column::ALL.into_iter().enumerate() {
            assert_eq!(column as usize, at);
        }
        let names: std::collections::BTreeSet<_> = Column::ALL.map(Column::name).into();
        assert_eq!(names.len(), Column::ALL.len());
        let parts: Vec<Column> = Column::STRICT.into_iter().chain(Column::STOCK).collect();
        assert_eq!(parts, Column::ALL);
    }

    #[test]
    fn a_kernel_that_unmaps_otherwise_than_its_column_says_is_no_success() {
        let said = |text: &str| Outcome {
            exit: 0,
            script: Some(0),
            console: format!("[    0.1] iommu: DMA domain TLB invalidation policy: {text}\n"),
            log: String::new(),
            ledger: serde_json::Value::Null,
        };
        let (strict, lazy) = (said("strict mode"), said("lazy mode"));
        assert!(Column::Trap.check(&strict).is_ok() && Column::Trap.check(&lazy).is_err());
        assert!(Column::LazyTrap.check(&lazy).is_ok() && Column::LazyTrap.check(&strict).is_err());
        assert!(Column::Default.check(&lazy).is_ok() && Column::Default.check(&strict).is_err());
        assert!(Column::None.check(&lazy).is_ok(), "there is no IOMMU");
        let silent = Outcome {
            console: String::new(),
            ..lazy
        };
        assert!(Column::Shared.check(&silent).is_err());
    }
}
