//! One case of the selftest, without what it boots.

use anyhow::Result;
use lab::packages::Version;

use crate::pviommu_lab::spec;
use crate::system::host::{GuestModule, Host, Kernels};

type Run = Box<dyn Fn(&Host) -> Result<String> + Send>;

/// One case: its name says what it shows.
pub struct Case {
    /// Unique; what a soak remembers it by.
    pub name: String,
    /// It measures time: nothing else is to run meanwhile.
    pub is_alone: bool,
    /// It takes several times as long as the others, and is begun before them: the last to end
    /// would leave a processor idle.
    pub is_long: bool,
    /// Kernels that have what it needs, the oldest, if the distribution's have not.
    pub needs: Kernels,
    run: Run,
}

impl Case {
    /// A case of this name.
    pub(super) fn new(
        name: impl Into<String>,
        run: impl Fn(&Host) -> Result<String> + Send + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            is_alone: false,
            is_long: false,
            needs: Kernels::default(),
            run: Box::new(run),
        }
    }

    /// The same, with nothing else beside it.
    pub(super) fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// The same, begun before the others.
    pub(super) fn long(mut self) -> Self {
        self.is_long = true;
        self
    }

    /// The same where the host's kernel is of this series at least.
    pub(super) fn needing(mut self, kernel: Version) -> Self {
        self.needs.both = Some(kernel);
        self
    }

    /// The same where the guests' kernel is of this series at least, if it says one, and has this
    /// workspace's driver for virtio-iommu.
    pub(super) fn with_guests(mut self, kernel: Option<Version>) -> Self {
        self.needs.guest = kernel;
        self.needs.module = Some(GuestModule::Driver);
        self
    }

    /// The same where the guests have `guest/iommu-cases`.
    pub(super) fn with_spec_cases(mut self) -> Self {
        self.needs = spec::KERNELS;
        self
    }

    /// The same on a kernel of this series, by name as well.
    pub(super) fn on(mut self, kernel: Option<Version>) -> Self {
        if let Some(series) = kernel {
            self.name = format!("{} (Linux {series})", self.name);
        }
        self
    }

    /// Kernels to run it with, in a suite whose kernels are of this series, if it says one.
    pub fn kernels(&self, series: Option<Version>) -> Kernels {
        let mut kernels = self.needs;
        if !Host::is_lab() {
            // This machine has the kernel it has.
            kernels.both = None;
        }
        kernels.both = series.max(kernels.both);
        kernels.guest = kernels
            .guest
            .map(|guest| series.unwrap_or(guest).max(guest));
        kernels
    }

    /// Runs it; answers a few words on what was seen.
    pub fn run(&self, host: &Host) -> Result<String> {
        (self.run)(host)
    }
}
